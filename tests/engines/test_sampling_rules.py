"""Drawing tokens: distributions under temperature, top-k and top-p, random streams, stop rules, prompt scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.sampling.prompt_scores import PromptScores
from engines.sampling.sampling_rules import DrawRule, _draw_filtered, draw, stream, tempered_logprobs
from engines.sampling.stops import StopStrings, stop_rule
from schemas.errors import InvalidRequest
from schemas.operations import Sample, SamplingParams

DRAWS = 20_000


def frequencies(logits: Tensor, rule: DrawRule) -> np.ndarray:
    """How often each token is drawn from one row of logits."""
    rows = logits.expand(500, -1)
    numbers = stream(7, "test")
    counts = np.zeros(logits.shape[-1])
    for _ in range(DRAWS // 500):
        logprobs = tempered_logprobs(rows, [rule.temperature] * 500)
        np.add.at(counts, draw(logprobs, [rule] * 500, numbers.random(500).tolist()), 1)
    return counts


def reference(logits: Tensor, rule: DrawRule) -> np.ndarray:
    """The textbook distribution: temperature, then top-k, then the smallest prefix that holds top_p of the rest."""
    p = torch.softmax(logits[0].double() / rule.temperature, -1).numpy()
    order = np.argsort(-p, kind="stable")
    kept = order[: rule.top_k] if rule.top_k > 0 else order
    mass = p[kept] / p[kept].sum()
    count = int(np.searchsorted(np.cumsum(mass), rule.top_p - 1e-12)) + 1
    result = np.zeros_like(p)
    result[kept[:count]] = p[kept[:count]] / p[kept[:count]].sum()
    return result


@pytest.mark.parametrize(
    "rule",
    [
        DrawRule(1.0, -1, 1.0),
        DrawRule(0.5, 0, 1.0),
        DrawRule(1.7, -1, 1.0),
        DrawRule(1.0, 5, 1.0),
        DrawRule(0.8, -1, 0.7),
        DrawRule(1.3, 7, 0.8),
        DrawRule(1.0, 1, 1.0),
        DrawRule(1.0, -1, 0.01),
    ],
)
def test_drawn_tokens_follow_the_distribution(rule: DrawRule) -> None:
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = reference(logits, rule) * DRAWS
    counts = frequencies(logits, rule)
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    chi_square = (((counts - expected) ** 2)[live] / expected[live]).sum()
    freedom = int(live.sum()) - 1
    # Mean n and deviation sqrt(2n): five deviations are a chance of far less than one in ten thousand.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9


def test_a_nucleus_wider_than_the_candidates_is_drawn_whole() -> None:
    flat = torch.zeros(1, 5000)
    rows = tempered_logprobs(flat.expand(64, -1), [1.0] * 64)
    tokens = draw(rows, [DrawRule(1.0, -1, 0.9)] * 64, np.linspace(0, 0.999, 64).tolist())
    assert len(set(tokens)) == 64  # the first candidates hold a hundredth of the mass; the nucleus needs 4500 tokens


@pytest.mark.parametrize("levels", [3, 40, 10**6])
def test_a_draw_does_not_depend_on_how_many_candidates_are_looked_at(levels: int) -> None:
    """Few levels: many tokens are equally likely, and the border of top-k or of the nucleus lies among them."""
    rules = [DrawRule(1.0, top_k, top_p) for top_k in (-1, 1, 7, 64, 65, 500, 2900) for top_p in (1.0, 0.95, 0.5, 0.01)]
    rules = [rule for rule in rules if rule.filtered]
    logits = torch.randn(len(rules), 3000, generator=torch.Generator().manual_seed(levels)) * 3
    logprobs = torch.log_softmax((logits * levels / 20).round() / levels * 20, -1)
    for uniform in (0.0, 0.37, 0.81, np.nextafter(1.0, 0.0)):
        position = torch.full((len(rules),), float(uniform), dtype=torch.float64)
        whole = _draw_filtered(logprobs, rules, position, 3000).tolist()
        assert whole == [_by_hand(row, rule, uniform) for row, rule in zip(logprobs, rules, strict=True)]
        for candidates in (1, 5, 64, 1024):
            assert _draw_filtered(logprobs, rules, position, candidates).tolist() == whole


def _by_hand(logprobs: Tensor, rule: DrawRule, uniform: float) -> int:
    """Over the whole vocabulary in numpy; among equals the lower token comes first."""
    order = np.argsort(-logprobs.numpy(), kind="stable")
    order = order[: rule.top_k] if rule.top_k > 0 else order
    mass = logprobs.double().exp().numpy()[order]
    total = mass.cumsum()[-1] if rule.top_k > 0 else 1.0
    mass = mass[mass.cumsum() - mass < rule.top_p * total]
    place = int(np.searchsorted(mass.cumsum(), uniform * mass.cumsum()[-1], side="right"))
    return int(order[min(place, len(mass) - 1)])


def test_rows_with_different_rules_do_not_influence_each_other() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    rules = [DrawRule(0.0, -1, 1.0), DrawRule(1.0, 3, 1.0), DrawRule(0.7, -1, 0.5), DrawRule(2.0, -1, 1.0)]
    uniforms = [0.3, 0.9, 0.4, 0.8]
    temperatures = [rule.temperature for rule in rules]
    together = draw(tempered_logprobs(logits, temperatures), rules, uniforms)
    alone = [
        draw(tempered_logprobs(logits[i : i + 1], [temperatures[i]]), [rules[i]], [uniforms[i]])[0] for i in range(4)
    ]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_drawn_at_the_ends_of_the_range(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    for rule in (DrawRule(1.0, -1, 1.0), DrawRule(1.0, 3, 1.0), DrawRule(1.0, -1, 0.99)):
        assert draw(tempered_logprobs(logits, [1.0]), [rule], [float(uniform)])[0] in (1, 2)


def test_streams_are_distinct_and_repeat() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64, 2**64 + 1, 10**40]
    first = {(seed, i): stream(seed, i).random() for seed in seeds for i in range(4)}
    assert len(set(first.values())) == len(first)
    assert all(stream(seed, i).random() == value for (seed, i), value in first.items())


class WordTokenizer:
    """Tokens are pieces of bytes; decoding joins them, as byte-level tokenizers do."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: object) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("pieces", "stop", "ends_at"),
    [
        ([b"Hel", b"lo\n", b"\nUs", b"er: x", b"y"], "\n\nUser:", 4),
        ([b"na\xc3", b"\xafv", b"e", b"!"], "ïve", 3),
        ([b"\xf0\x9f", b"\x98", b"\x80", b"."], "\U0001f600", 3),
        ([b"a", b"b", b"a", b"b", b"c"], "abc", 5),
        ([b"abc", b"x"], "b", 1),
        ([b"x"] * 50 + [b"EN", b"D"], "END", 52),
    ],
)
def test_stop_strings_are_found_across_token_borders(pieces: list[bytes], stop: str, ends_at: int) -> None:
    tokenizer = WordTokenizer([*pieces, b"\xc3"])  # the prompt ends inside a character
    rule = StopStrings([stop, "never there"], tokenizer, last_prompt_token=len(pieces))
    tokens = list(range(len(pieces)))
    assert next(n for n in range(1, len(tokens) + 1) if rule.reached(tokens[:n])) == ends_at


def test_a_stop_string_begun_in_the_prompt_does_not_count() -> None:
    rule = StopStrings(["ab"], WordTokenizer([b"a", b"b", b"ab"]), last_prompt_token=0)
    assert not rule.reached([1])
    assert rule.reached([1, 2])


def test_stop_rules_of_every_kind() -> None:
    common = {"eos_token_ids": (2, 5), "vocab_size": 8, "tokenizer": WordTokenizer([b"a"] * 8), "last_prompt_token": 0}
    assert [stop_rule(None, **common).reached([t]) for t in (2, 5, 3)] == [True, True, False]
    assert not any(stop_rule((), **common).reached([t]) for t in range(8))
    assert [stop_rule((3,), **common).reached([t]) for t in (3, 2)] == [True, False]
    assert stop_rule(("aa",), **common).reached([1, 1])
    for bad in (("",), (8,), (-1,), ("a", 3)):
        with pytest.raises(InvalidRequest) as caught:
            stop_rule(bad, **common)  # type: ignore[arg-type]
        assert caught.value.field == "sampling_params.stop"


def test_prompt_scores_by_hand() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    plain = torch.log_softmax(logits, -1).numpy()
    prompt = np.array([3, 1, 4, 1, 5])
    targets = np.array([[0, -1], [2, 3], [-1, -1], [10, 0]])
    request = Sample(
        prompt,
        SamplingParams(temperature=0.5),
        topk_prompt_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=3,
        prompt_logprobs_last_n=2,
        prompt_logprobs=True,
    )
    scores = PromptScores(request, stream(0, "alternatives"))
    assert scores.first_row == 0
    for block in ((0, 1), (1, 4), (4, 5)):  # the borders must not matter
        scores.add(block[0], logits[block[0] : block[1]])
    assert scores.logprobs is not None
    assert np.isnan(scores.logprobs[:3]).all()
    np.testing.assert_allclose(scores.logprobs[3:], [plain[2, 1], plain[3, 5]], rtol=1e-6)
    assert scores.topk is not None
    assert np.isnan(scores.topk.logprobs[:3]).all()
    assert (scores.topk.ids[:3] == 0).all()
    np.testing.assert_array_equal(scores.topk.ids[4], np.argsort(-plain[3])[:2])
    assert scores.targets is not None
    np.testing.assert_allclose(
        scores.targets, [[plain[0, 0], 0], [plain[1, 2], plain[1, 3]], [0, 0], [plain[3, 10], plain[3, 0]]], rtol=1e-6
    )
    assert scores.alternatives is not None
    tempered = torch.log_softmax(logits / 0.5, -1).numpy()
    for row in range(4):
        ids = scores.alternatives.ids[row]
        np.testing.assert_allclose(scores.alternatives.logprobs[row], tempered[row, ids], rtol=1e-5)


def test_alternative_draws_follow_the_request_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    request = Sample(np.array([0, 1]), SamplingParams(temperature=0.5), prompt_alt_tokens_k=DRAWS)
    scores = PromptScores(request, stream(1, "alternatives"))
    scores.add(0, logits)
    assert scores.alternatives is not None
    share = np.bincount(scores.alternatives.ids[0], minlength=3) / DRAWS
    np.testing.assert_allclose(share, torch.softmax(logits[0] / 0.5, -1).numpy(), atol=0.02)
