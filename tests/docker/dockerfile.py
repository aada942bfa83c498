"""Reads a Dockerfile as far as ours goes: its stages, and what each does in order."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One stage: its parent's name and its own instructions (`RUN`, what comes behind it)."""

    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """What the last instruction of a kind says."""
        return [text for kind, text in self.steps if kind == instruction][-1]


def stages(file: Path, **arguments: str) -> dict[str, Stage]:
    """The stages by name; `arguments` are build arguments, over the defaults of the file."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    known, found = dict[str, str](), dict[str, Stage]()
    current: Stage | None = None
    for line in filter(str.strip, text.splitlines()):
        kind, _, rest = line.strip().partition(" ")
        rest = re.sub(r"\$\{(\w+)\}", lambda match: known.get(match[1], match[0]), rest.strip())
        if kind == "ARG" and current is None:
            name, _, default = rest.partition("=")
            known[name] = arguments.get(name, default)
        elif kind == "FROM":
            parent, _, name = rest.partition(" AS ")
            current = found[name] = Stage(parent)
        else:
            assert current is not None, line
            current.steps.append((kind, rest))
    return found


def lineage(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage behind its ancestors in the file."""
    stage = found[name]
    return [*(lineage(found, stage.parent) if stage.parent in found else []), stage]


def environment(line: list[Stage]) -> dict[str, str]:
    """What `ENV` sets along a line of stages."""
    pairs = (
        word.partition("=")
        for stage in line
        for kind, text in stage.steps
        if kind == "ENV"
        for word in shlex.split(text)
    )
    return {name: value for name, _, value in pairs}


def words(text: str) -> list[str]:
    """The exec form of an instruction."""
    parsed = json.loads(text)
    assert isinstance(parsed, list)
    return [str(word) for word in parsed]
