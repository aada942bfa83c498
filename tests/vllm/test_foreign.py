"""What becomes of another program's news, whatever program it is: these tests need none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from engines.sampling.foreign import ForeignRow, ForeignSampler, PromptNews, RowNews
from schemas.errors import EngineFailure, InvalidRequest
from schemas.operations import SamplingParams, TopK
from tests.vllm.conftest import GREEDY, PROMPT, World, sample

ASKED = replace(GREEDY, max_tokens=3)


class Script(ForeignSampler):
    """Another program whose news is written down in advance: a list per step."""

    name: ClassVar[str] = "script"

    def __init__(self, world: World, steps: Sequence[Sequence[RowNews] | EngineFailure] = ()) -> None:
        super().__init__(world.info, world.tokenizer, max_rows=2, entropy=lambda: 7)
        self.steps = list(steps)
        self.rows: list[ForeignRow] = []
        self.aborted: list[str] = []
        self.arrived: list[RowNews] = []

    @classmethod
    def check(cls) -> None:
        """Nothing is needed."""

    def _begin(self, rows: Sequence[ForeignRow]) -> None:
        self.rows += rows

    def _abort(self, keys: Iterable[str]) -> None:
        self.aborted += keys

    def _arrived(self) -> Sequence[RowNews]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def _advance(self) -> Sequence[RowNews]:
        news = self.steps.pop(0)
        if isinstance(news, EngineFailure):
            raise news
        return news


def drew(key: str, *tokens: int, finished: bool = False, **more: object) -> RowNews:
    return RowNews(key, tokens, [-0.5] * len(tokens), finished=finished, **more)  # type: ignore[arg-type]


def test_a_row_that_stops_here_is_aborted_there_and_later_news_of_it_is_dropped(world: World) -> None:
    engine = Script(world, [[drew("row-1", 5)], [drew("row-1", 6, 7, 8)], [drew("row-1", 9), drew("row-2", 5, 5, 5)]])
    engine.add("x", sample(PROMPT, replace(ASKED, max_tokens=9, stop=(7,)), stream=True))
    engine.add("y", sample(PROMPT, ASKED))
    assert not engine.step().ended
    second = engine.step()
    result = second.ended["x"]
    assert not isinstance(result, Exception)
    assert result.sequences[0].tokens.tolist() == [5, 6, 7]
    assert result.sequences[0].stop_reason == "stop"
    assert [delta.tokens.tolist() for delta in second.deltas["x"]] == [[6, 7]]
    assert engine.aborted == ["row-1"]
    assert list(engine.step().ended) == ["y"]
    assert engine.load.active == 0
    stats = engine.take_stats()
    assert (stats.drawn_tokens, stats.steps, stats.prompt_tokens) == (6, 3, 12)
    assert engine.take_stats().steps == 0


def test_seeds_are_one_per_sample_and_do_not_depend_on_how_many(world: World) -> None:
    engine = Script(world)
    engine.add("x", sample(PROMPT, replace(ASKED, seed=4), num_samples=3))
    engine.add("y", sample(PROMPT, replace(ASKED, seed=4), num_samples=1))
    engine.add("z", sample(PROMPT, ASKED))
    seeds = [row.seed for row in engine.rows]
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("news", "words"),
    [
        (RowNews("row-1", (5,), (float("nan"),)), "not finite"),
        (drew("row-1", 5, finished=True), "too early"),
        (RowNews("row-1", error=EngineFailure("its own words")), "its own words"),
    ],
)
def test_a_request_that_fails_there_fails_alone(world: World, news: RowNews, words: str) -> None:
    engine = Script(world, [[news, drew("row-3", 1, 2, 3, finished=True)]])
    engine.add("bad", sample(PROMPT, ASKED, num_samples=2))
    engine.add("good", sample(PROMPT, ASKED))
    ended = engine.step().ended
    assert isinstance(ended["bad"], EngineFailure)
    assert words in ended["bad"].message
    assert not isinstance(ended["good"], Exception)
    assert "row-2" in engine.aborted
    assert engine.load.rows == 0


def test_all_requests_are_forgotten_with_a_program_that_is_lost(world: World) -> None:
    engine = Script(world, [EngineFailure("lost"), [drew("row-3", 1, 2, 3)]])
    engine.add("x", sample(PROMPT, ASKED))
    engine.add("y", sample(PROMPT, ASKED))
    with pytest.raises(EngineFailure, match="lost"):
        engine.step()
    assert engine.load.active == 0
    engine.add("x", sample(PROMPT, ASKED))
    assert list(engine.step().ended) == ["x"]


def test_prompt_scores_end_a_request_only_when_they_have_come(world: World) -> None:
    scores = np.array([np.nan, -1, -2, -3, -4, -5], np.float32)
    topk = TopK(np.arange(12, dtype=np.int32).reshape(6, 2), np.full((6, 2), -1, np.float32))
    engine = Script(
        world, [[drew("row-1", 1, 2, 3, finished=True)], [RowNews("row-1", prompt=PromptNews(scores, topk))]]
    )
    engine.add("x", sample(PROMPT, ASKED, topk_prompt_logprobs=2, prompt_logprobs_last_n=2))
    assert engine.rows[0].scores
    assert not engine.step().ended
    result = engine.step().ended["x"]
    assert not isinstance(result, Exception)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    np.testing.assert_array_equal(result.prompt_logprobs, [np.nan] * 4 + [-4, -5])
    assert result.topk_prompt_logprobs.ids[4:].tolist() == [[8, 9], [10, 11]]
    assert np.isnan(result.topk_prompt_logprobs.logprobs[:4]).all()


def test_more_rows_than_the_other_program_takes_count_as_waiting(world: World) -> None:
    engine = Script(world, [[drew("row-1", 1)]])
    for name in "abc":
        engine.add(name, sample(PROMPT, ASKED))
    engine.step()
    load = engine.load
    assert (load.active, load.waiting, load.rows, load.max_rows) == (3, 2, 2, 2)
    assert load.tokens == 3 * len(PROMPT) + 1
    for name in "abc":
        engine.cancel(name)
    assert engine.load.active == 0
    assert sorted(engine.aborted) == ["row-1", "row-2", "row-3"]


def test_what_a_cancelled_request_took_is_told_as_far_as_it_can_be_seen(world: World) -> None:
    news = [[drew("row-1", 5, 6), drew("row-2", 7, cached_tokens=4)], []]
    engine = Script(world, news)
    for name in ("drew", "also", "no room"):
        engine.add(name, sample(PROMPT, replace(ASKED, max_tokens=9)))
    unseen = engine.cancel("no room")
    assert unseen is not None
    assert (unseen.prompt_tokens, unseen.drawn_tokens) == (0, 0)
    engine.add("no room", sample(PROMPT, ASKED))
    engine.step()
    engine.arrived = [drew("row-1", 8), drew("row-2", 8)]
    took = {name: engine.cancel(name) for name in ("drew", "also", "no room", "unknown")}
    assert took.pop("unknown") is None
    counts = {name: (one.prompt_tokens, one.cached_tokens, one.drawn_tokens) for name, one in took.items() if one}
    length = len(PROMPT)
    assert counts == {"drew": (length, 0, 3), "also": (length, 4, 2), "no room": (0, 0, 0)}
    assert engine.take_stats().drawn_tokens == 5
    engine.add("reads", sample(PROMPT, ASKED))
    engine.step()
    reads = engine.cancel("reads")
    assert reads is not None
    assert (reads.prompt_tokens, reads.drawn_tokens) == (length, 0), "it had room, and says nothing of its prompt"


@pytest.mark.parametrize("temperature", [0.001, 0.0099])
def test_temperatures_that_would_be_changed_silently_are_refused(world: World, temperature: float) -> None:
    engine = Script(world)
    with pytest.raises(InvalidRequest, match="temperature"):
        engine.add("x", sample(PROMPT, SamplingParams(temperature=temperature, max_tokens=1)))
    assert engine.rows == []
