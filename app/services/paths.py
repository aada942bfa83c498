"""Names of things on the wire: `tinker://` paths, run ids, sampler ids.

Responsible for making them and taking them apart. Not responsible for their grammar (`schemas/http/base.py`) or for
whether what they name exists (`checkpoints.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import InvalidRequest
from schemas.http.base import Segment, parse_tinker_path
from store.records import CheckpointKind

_KIND_OF: dict[Segment, CheckpointKind] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_SEGMENT_OF: dict[CheckpointKind, Segment] = {kind: segment for segment, kind in _KIND_OF.items()}


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A well-formed `tinker://{model_id}/{segment}/{name}`."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """The part behind the run, which is the checkpoint's id on the wire: `weights/{name}`."""
        return f"{_SEGMENT_OF[self.kind]}/{self.name}"


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a training run; the SDK computes the same by itself."""
    return f"{session_id}:train:{model_seq_id}"


def sampler_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def sequence_id_of(scope: str, seq_id: int | None, index: int) -> str:
    """The id of one sampled sequence: the `index`-th of request `seq_id` in a sampler's scope of the log."""
    return f"{scope.partition(':')[2]}:{seq_id}:{index}"


DIRECT = "direct"
"""The kind of scope of samples that belong to a project and to no session."""


def direct_scope(project_id: str) -> str:
    """The scope of a project's samples without a session in the operation log."""
    return f"{DIRECT}:{project_id}"


def is_direct(scope: str) -> bool:
    """Whether a scope is one of samples without a session."""
    return scope.startswith(f"{DIRECT}:")


def session_of(object_id: str) -> str:
    """The session that a run id or a sampler id belongs to."""
    return object_id.rsplit(":", 2)[0]


def parse_path(path: str, *, field: str) -> CheckpointPath:
    """Parse a tinker path. Raises `InvalidRequest` naming `field` for any other text."""
    try:
        parts = parse_tinker_path(path)
    except ValueError as error:
        raise InvalidRequest(f"{field} {path[:300]!r}: {error}", field=field, code="invalid_path") from None
    return CheckpointPath(parts.training_run_id, _KIND_OF[parts.segment], parts.name)


def parse_checkpoint_id(run_id: str, checkpoint_id: str) -> CheckpointPath:
    """Parse the `weights/{name}` of a REST route, below its run."""
    return parse_path(f"tinker://{run_id}/{checkpoint_id}", field="checkpoint_id")
