"""What is measured: each case is work and the rows of a table, every row a way to do that work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.settings import Settings
from benchmarks.training.texts import Texts
from benchmarks.training.work import Dtype, Example, Kind, Layout, SideSpec, Work

CASES = ("equal", "ragged", "tenants", "clients", "overhead", "durability", "memory")
Batches = Sequence[tuple[Example, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to do the work of a case. The others of the table are compared with each baseline."""

    label: str
    spec: SideSpec
    layout: Layout = "padded"
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """`alone`: each row runs one step in a new process, one after the other, and its memory is what is asked for."""

    name: str
    title: str
    work: Work
    rows: tuple[Row, ...]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    folder: Path
    cases: Sequence[str]
    dtypes: Sequence[Dtype]
    unembed: Literal["no", "yes", "both"]
    repeats: int
    threads: int
    device: str
    rank: int
    batch: int
    length: int
    long: int
    ragged: tuple[int, int]
    tenants: Sequence[int]
    tenant_length: int
    clients: Sequence[int]
    profile: bool

    @classmethod
    def of(cls, given: argparse.Namespace, folder: Path) -> Options:
        """From parsed arguments; `--quick` makes what was left to its default small."""
        sizes: dict[str, Any] = {
            "repeats": 3,
            "batch": 8,
            "length": 256,
            "long": 1024,
            "ragged": (32, 512),
            "tenants": (4, 8, 16),
            "tenant_length": 128,
            "clients": (4, 8),
        }
        if given.quick:
            sizes.update(repeats=2, batch=2, length=64, long=128, ragged=(8, 64))
            sizes.update(tenants=(2, 4), tenant_length=32, clients=(2,))
        chosen = {name: getattr(given, name) or value for name, value in sizes.items()}
        rest = ("cases", "dtypes", "unembed", "threads", "device", "rank", "profile")
        return cls(folder=folder, **chosen, **{name: getattr(given, name) for name in rest})

    def side(self, kind: Kind, dtype: Dtype, *, clients: int = 1, unembed: bool = False) -> SideSpec:
        """A side with the common settings."""
        return SideSpec(kind, str(self.folder), dtype, self.device, self.threads, self.rank, clients, unembed)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    add("--unembed", choices=["no", "yes", "both"], default="both", help="adapters on the head, in equal and ragged")
    add("--repeats", type=int, help="rounds that count, after one that does not (3)")
    add("--threads", type=int, default=1, help="compute threads of every side")
    add("--device", default="cpu", help="cpu or cuda")
    add("--rank", type=int, default=32)
    add("--batch", type=int, help="sequences of one client's batch (8)")
    add("--length", type=int, help="tokens of a sequence (256)")
    add("--long", type=int, help="tokens of a sequence in the second memory case (1024)")
    add("--ragged", type=int, nargs=2, metavar=("SHORTEST", "LONGEST"), help="tokens (32 512)")
    add("--tenants", type=int, nargs="+", help="numbers of tenants with one short sequence each (4 8 16)")
    add("--tenant-length", type=int, help="tokens of a tenant's sequence (128)")
    add("--clients", type=int, nargs="+", help="numbers of clients that keep a server busy (4 8)")
    add("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    add("--profile", action="store_true", help="one more step of every row under torch's profiler")
    add("--data-dir", type=Path, help="where the converted default model is kept (the server's default data folder)")
    add("--model", type=Path, help="folder of another base model")
    add("--json", type=Path, help="write the JSON here instead of after the tables")


def build(options: Options) -> Iterator[Case]:
    """The chosen cases in their order."""
    texts = Texts(options.folder)
    makers: dict[str, Callable[[Options, Texts], Iterator[Case]]] = {
        "equal": _equal,
        "ragged": _ragged,
        "tenants": _tenants,
        "clients": _clients,
        "overhead": _overhead,
        "durability": _durability,
        "memory": _memory,
    }
    for name in options.cases:
        yield from makers[name](options, texts)


def _flags(options: Options) -> list[bool]:
    return {"no": [False], "yes": [True], "both": [False, True]}[options.unembed]


def _with_head(unembed: bool) -> str:
    return "7 projections and the head" if unembed else "7 projections"


def _equal(options: Options, texts: Texts) -> Iterator[Case]:
    batch = texts.equal(options.batch, options.length)
    for unembed in _flags(options):
        yield Case(
            f"equal{'-unembed' * unembed}",
            f"one client, {options.batch} x {options.length} tokens, rank {options.rank} on {_with_head(unembed)}",
            Work((batch,)),
            (*_peft(options, ["padded", "each"], unembed=unembed), *_engines(options, unembed=unembed)),
        )


def _ragged(options: Options, texts: Texts) -> Iterator[Case]:
    shortest, longest = options.ragged
    batch = texts.ragged(options.batch, shortest, longest)
    real, most = sum(len(e.tokens) for e in batch), max(len(e.tokens) for e in batch)
    for unembed in _flags(options):
        yield Case(
            f"ragged{'-unembed' * unembed}",
            f"one client, {options.batch} sequences of {shortest} to {longest} tokens ({real}, padded "
            f"{len(batch) * most}), rank {options.rank} on {_with_head(unembed)}",
            Work((batch,)),
            (*_peft(options, ["padded", "each"], unembed=unembed), *_engines(options, unembed=unembed)),
        )


def _tenants(options: Options, texts: Texts) -> Iterator[Case]:
    for count in options.tenants:
        yield Case(
            f"tenants-{count}",
            f"{count} tenants, 1 x {options.tenant_length} tokens and an optimizer step each",
            Work(_one_each(options, texts, count)),
            (*_peft(options, ["padded"], clients=count), *_engines(options, clients=count)),
        )


def _clients(options: Options, texts: Texts) -> Iterator[Case]:
    for count in options.clients:
        yield Case(
            f"clients-{count}",
            f"{count} clients of one server, each with 2 steps of 1 x {options.tenant_length} tokens on their way",
            Work(_one_each(options, texts, count), steps=2),
            (
                *_peft(options, ["padded"], clients=count),
                *_engines(options, clients=count),
                *(Row(f"server {d}", options.side("server", d, clients=count)) for d in options.dtypes),
            ),
        )


def _overhead(options: Options, texts: Texts) -> Iterator[Case]:
    batch = texts.equal(options.batch, options.length)
    for dtype in options.dtypes:
        yield Case(
            f"overhead-{dtype}",
            f"one client, {options.batch} x {options.length} tokens, through SDK and HTTP and without",
            Work((batch,)),
            (
                Row(f"engine {dtype}", options.side("engine", dtype), baseline=True),
                Row(f"server {dtype}", options.side("server", dtype)),
            ),
        )


def _durability(options: Options, texts: Texts) -> Iterator[Case]:
    """So many steps a round that the default settings take a snapshot in each: two operations a step."""
    steps = Settings.model_fields["snapshot_operations"].default // 2
    for dtype in options.dtypes:
        server = options.side("server", dtype)
        yield Case(
            f"durability-{dtype}",
            f"{steps} steps of 2 x {options.tenant_length} tokens: bare engine, with the log, with log and snapshots",
            Work((texts.equal(2, options.tenant_length),), steps=steps),
            (
                Row(f"engine {dtype}", options.side("engine", dtype), baseline=True),
                Row(f"server {dtype}, log only", replace(server, snapshots=False), baseline=True),
                Row(f"server {dtype}", server),
            ),
        )


def _memory(options: Options, texts: Texts) -> Iterator[Case]:
    for length, checkpointing in ((options.length, False), (options.long, True)):
        batch = texts.equal(options.batch, length)
        peft, engines = list(_peft(options, ["padded"])), list(_engines(options))
        if checkpointing:
            peft = [_checkpointed(row) for row in peft]
            engines += [_checkpointed(row) for row in engines]
        yield Case(
            f"memory-{length}",
            f"peak memory of one step of {options.batch} x {length} tokens, each row a process of its own",
            Work((batch,)),
            (*peft, *engines),
            alone=True,
        )


def _checkpointed(row: Row) -> Row:
    return replace(row, label=f"{row.label}, checkpointing", spec=replace(row.spec, checkpointing=True))


def _one_each(options: Options, texts: Texts, count: int) -> tuple[tuple[Example, ...], ...]:
    return tuple((example,) for example in texts.equal(count, options.tenant_length))


def _peft(options: Options, layouts: Sequence[Layout], *, clients: int = 1, unembed: bool = False) -> Iterator[Row]:
    for dtype in options.dtypes:
        for layout in layouts:
            words = {"padded": "", "each": ", one by one"}[layout]
            words = ", padded" if len(layouts) > 1 and layout == "padded" else words
            words = ", in turn" if clients > 1 else words
            side = options.side("peft", dtype, clients=clients, unembed=unembed)
            yield Row(f"peft {dtype}{words}", side, layout, baseline=True)


def _engines(options: Options, *, clients: int = 1, unembed: bool = False) -> Iterator[Row]:
    for dtype in options.dtypes:
        yield Row(f"engine {dtype}", options.side("engine", dtype, clients=clients, unembed=unembed))
