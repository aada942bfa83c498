"""The error tree: everything that can go wrong and that a client may be told about.

One error carries everything its JSON answer needs (status, category, stable code, the field at fault, a hint), so
raising is all that any layer has to do. Not responsible for rendering: `app/errors.py` turns these into responses.
Errors cross process borders (worker -> server), so they pickle by their plain attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Category = Literal["user", "server"]


class TinsmithError(Exception):
    """Base of the tree. `message` is safe to show to a client: no path, no traceback, no secret.

    Args:
        message: one sentence that says what is wrong, with the value and what would be accepted.
        field: the request field at fault, dotted (`adam_params.beta1`), if there is one.
        hint: what to do next, if it is not obvious from the message.
        code: a stable identifier that overrides the class's own, for finer distinctions.
    """

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"
    default_code: ClassVar[str] = "internal"

    def __init__(
        self, message: str, *, field: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = hint
        self.code = code or self.default_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.field, self.hint, self.code)


def _rebuild(cls: type[TinsmithError], message: str, field: str | None, hint: str | None, code: str) -> TinsmithError:
    return cls(message, field=field, hint=hint, code=code)


class InvalidRequest(TinsmithError):
    """The request cannot be honoured as it is: the caller must change it (400)."""

    status, category, default_code = 400, "user", "invalid_request"


class SeqIdConflict(InvalidRequest):
    """A sequence id was used before with another body. 400 and not 409: the SDK retries a 409 for minutes."""

    default_code = "seq_id_conflict"


class AlreadyExists(InvalidRequest):
    """A name is taken. 400 and not 409, for the same reason."""

    default_code = "already_exists"


class OverLimit(InvalidRequest):
    """A limit of the project or key does not allow this, now or later, unless the request or the limit is changed."""

    default_code = "over_limit"


class Unauthenticated(TinsmithError):
    """No key, or a key that is not valid (401)."""

    status, category, default_code = 401, "user", "unauthenticated"


class InvalidToken(Unauthenticated):
    """A token in place of a key that has ended or was altered (401): a client exchanges its key for a new one."""

    default_code = "invalid_token"


class Forbidden(TinsmithError):
    """The key is good, but not for this: administration of the server (403)."""

    status, category, default_code = 403, "user", "forbidden"


class NotFound(TinsmithError):
    """The object does not exist, or belongs to another project: the two are indistinguishable (404)."""

    status, category, default_code = 404, "user", "not_found"


class Gone(TinsmithError):
    """The object existed and is over: an expired result, a finished session (410)."""

    status, category, default_code = 410, "user", "gone"


class Cancelled(Gone):
    """A sample that nobody wants any more was stopped, or never began (410).

    Args:
        prompt_tokens: tokens of its prompt that were read, or found in the prefix cache, until it was stopped.
        cached_tokens: how many of those were found in the prefix cache.
        drawn_tokens: tokens that its sequences had drawn together.
    """

    default_code = "cancelled"

    def __init__(
        self,
        message: str = "the sample was cancelled",
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        drawn_tokens: int = 0,
        field: str | None = None,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, field=field, hint=hint, code=code)
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.drawn_tokens = drawn_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("prompt_tokens", "cached_tokens", "drawn_tokens")
        return *super().__reduce__(), {name: getattr(self, name) for name in names}


class ModelLost(TinsmithError):
    """The live state of a training run is gone (its worker died). It never continues silently from older weights."""

    status, category, default_code = 410, "server", "model_lost"


class PayloadTooLarge(TinsmithError):
    """A body is over the limit, compressed or not (413)."""

    status, category, default_code = 413, "user", "payload_too_large"


class UnsupportedMediaType(TinsmithError):
    """The Content-Type or Content-Encoding is not one that the route reads (415)."""

    status, category, default_code = 415, "user", "unsupported_media_type"


class RangeNotSatisfiable(TinsmithError):
    """The part of a file that is asked for lies beyond it (416)."""

    status, category, default_code = 416, "user", "range_not_satisfiable"


class Unavailable(TinsmithError):
    """The server cannot take work right now: starting, or shutting down (503)."""

    status, category, default_code = 503, "server", "unavailable"


class NotNow(Unavailable):
    """What is needed cannot be read for the moment: the disk, the database or the object storage did not answer (503).

    Nothing is lost. Whoever has accepted work tries it again later, and fails nothing over it.
    """

    default_code = "storage_unavailable"


class TooManyRequests(TinsmithError):
    """Too much of a project waits already (429). Never for what will not pass: the SDK sends a sample again until it is
    taken, and other requests for minutes."""

    status, category, default_code = 429, "user", "too_many_requests"
    retry_after: float | None = None
    """Seconds after which it makes sense to ask again, if that is known."""


class RateLimited(TooManyRequests):
    """A limit of the project or key leaves no room for this yet (429)."""

    default_code = "rate_limited"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, field=field, hint=hint, code=code)
        self.retry_after = retry_after


class NonFiniteGradient(InvalidRequest):
    """The accumulated gradient is not finite: the step is refused, the weights stay, the gradient is cleared."""

    default_code = "non_finite_gradient"


class OutOfMemory(TinsmithError):
    """The work does not fit in the memory of the device."""

    default_code = "out_of_memory"


ADAPTERS_BUSY = "adapters_busy"
"""Code of an `OutOfMemory` that passes when the operations of other adapters have ended."""


def is_adapters_busy(outcome: object) -> bool:
    """Whether an operation has to be run again when others have ended."""
    return isinstance(outcome, OutOfMemory) and outcome.code == ADAPTERS_BUSY


class EngineFailure(TinsmithError):
    """An unexpected failure inside a worker. The message is generic; details are in the server's log by request id."""

    default_code = "engine_failure"


class WorkerDied(TinsmithError):
    """A worker process ended in the middle of the work."""

    default_code = "worker_died"
