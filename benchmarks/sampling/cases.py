"""What is measured: each case is work and the sides that do it, the baseline first."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.sampling.work import Ask, SampleWork
from benchmarks.training.texts import Texts
from benchmarks.training.work import Kind, SideSpec

CASES = ("batch", "adapters", "ragged", "samples", "rl")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of all cases, in tokens and numbers of requests."""

    prompt: int = 128
    new: int = 64
    batches: tuple[int, ...] = (1, 8, 32)
    adapters: tuple[int, ...] = (1, 4, 16)
    mix: int = 16
    ragged: tuple[int, int] = (16, 512)
    shared_prompt: int = 256
    shared_samples: int = 16
    rl_prompts: int = 64
    rl_samples: int = 8
    rl_new: tuple[int, int] = (16, 128)


QUICK = Sizes(32, 12, (1, 4), (1, 4), 4, (8, 64), 64, 4, 6, 4, (4, 24))


@dataclass(frozen=True, slots=True)
class Row:
    """One way to do the work; the first of a case is what the others are compared with."""

    label: str
    spec: SideSpec


@dataclass(frozen=True, slots=True)
class SampleCase:
    """`equal`: greedy, so that all sides must draw the same tokens."""

    name: str
    title: str
    work: SampleWork
    rows: tuple[Row, ...]
    equal: bool


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--repeats", type=int, help="rounds that count, after one that does not (3; 1 with --quick)")
    add("--threads", type=int, default=1, help="compute threads of every side")
    add("--device", default="cpu", help="cpu or cuda")
    add("--rank", type=int, default=32)
    add("--batches", type=int, nargs="+", help="sizes of the batch cases (1 8 32)")
    add("--adapters", type=int, nargs="+", help="adapters in the mix (1 4 16)")
    add("--new", type=int, help="tokens that a request draws (64); with rl a quarter to twice as many")
    add("--no-paged", action="store_true", help="leave out generate_batch of transformers")
    add("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    add("--profile", action="store_true", help="one more round of every row under torch's profiler")
    add("--data-dir", type=Path, help="where the converted default model is kept (the server's default data folder)")
    add("--model", type=Path, help="folder of another base model")
    add("--json", type=Path, help="write the JSON here instead of after the tables")


def sizes(given: argparse.Namespace) -> Sizes:
    """The defaults, or the quick ones, with what was given."""
    found = QUICK if given.quick else Sizes()
    found = replace(
        found, batches=tuple(given.batches or found.batches), adapters=tuple(given.adapters or found.adapters)
    )
    new: int | None = given.new
    return replace(found, new=new, rl_new=(max(1, new // 4), 2 * new)) if new else found


def build(given: argparse.Namespace, folder: Path) -> Iterator[SampleCase]:
    """The chosen cases in their order."""
    maker = _Maker(given, folder)
    makers = {
        "batch": maker.batch,
        "adapters": maker.adapters,
        "ragged": maker.ragged,
        "samples": maker.samples,
        "rl": maker.rl,
    }
    for name in given.cases:
        yield from makers[name]()


class _Maker:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._sizes, self._texts = sizes(given), Texts(folder)

    def _rows(self, adapters: int, *, paged: bool = True) -> tuple[Row, ...]:
        given = self._given

        def side(kind: Kind) -> SideSpec:
            return SideSpec(
                kind, str(self._folder), given.dtype, given.device, given.threads, given.rank, clients=adapters
            )

        generate = "generate" if adapters == 0 else "generate + peft" + (", in turn" if adapters > 1 else "")
        rows = [Row(generate, side("generate"))]
        if paged and not given.no_paged:
            rows.append(Row("generate_batch" + (" + peft" if adapters else ""), side("paged")))
        return (*rows, Row("sampler", side("sampler")))

    def _prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        return [tuple(example.tokens.tolist()) for example in self._texts.equal(count, length)]

    def batch(self) -> Iterator[SampleCase]:
        s = self._sizes
        for count in s.batches:
            for adapters in (0, 1):
                asks = [Ask(p, s.new, adapter=0 if adapters else None) for p in self._prompts(count, s.prompt)]
                what = "one adapter" if adapters else "base model"
                yield SampleCase(
                    f"batch-{count}{'-adapter' * adapters}",
                    f"{count} requests, {what}: {s.prompt} tokens of prompt, {s.new} new",
                    SampleWork(tuple(asks)),
                    self._rows(adapters),
                    equal=True,
                )

    def adapters(self) -> Iterator[SampleCase]:
        s = self._sizes
        for adapters in s.adapters:
            asks = [Ask(p, s.new, adapter=i % adapters) for i, p in enumerate(self._prompts(s.mix, s.prompt))]
            yield SampleCase(
                f"adapters-{adapters}",
                f"{s.mix} requests of {adapters} adapter(s): {s.prompt} tokens of prompt, {s.new} new",
                SampleWork(tuple(asks)),
                self._rows(adapters, paged=False),
                equal=True,
            )

    def ragged(self) -> Iterator[SampleCase]:
        s = self._sizes
        prompts = [tuple(e.tokens.tolist()) for e in self._texts.ragged(s.mix, *s.ragged)]
        yield SampleCase(
            "ragged",
            f"{s.mix} requests with prompts of {s.ragged[0]} to {s.ragged[1]} tokens, {s.new} new",
            SampleWork(tuple(Ask(prompt, s.new) for prompt in prompts)),
            self._rows(0),
            equal=True,
        )

    def samples(self) -> Iterator[SampleCase]:
        s = self._sizes
        (prompt,) = self._prompts(1, s.shared_prompt)
        yield SampleCase(
            "samples",
            f"{s.shared_samples} samples of one prompt of {s.shared_prompt} tokens, {s.new} new",
            SampleWork((Ask(prompt, s.new, s.shared_samples, temperature=1.0),)),
            self._rows(0, paged=False),
            equal=False,
        )

    def rl(self) -> Iterator[SampleCase]:
        s = self._sizes
        draw = random.Random(0)
        asks = [
            Ask(p, draw.randint(*s.rl_new), s.rl_samples, adapter=0, temperature=1.0)
            for p in self._prompts(s.rl_prompts, s.prompt)
        ]
        yield SampleCase(
            "rl",
            f"{s.rl_prompts} prompts of {s.prompt} tokens x {s.rl_samples} samples of {s.rl_new[0]} to {s.rl_new[1]} "
            "new tokens, one adapter",
            SampleWork(tuple(asks)),
            self._rows(1, paged=False),
            equal=False,
        )


def same_tokens(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """The share of sequences that are equal."""
    pairs = list(zip(one, other, strict=True))
    return sum(list(a) == list(b) for a, b in pairs) / len(pairs)
