"""Every error that crosses a seam of the system, as one tree.

    SplitserveError
    ├── InvalidRequest        400  the request can never succeed
    ├── NotFound              404  no such model or path
    ├── Unauthorized          401  no valid API key or cluster token
    ├── Overloaded            429  bounded queue full; `retry_after_s` says when to come back
    ├── RequestCancelled      499  the client went away
    ├── DeadlineExceeded      504  the request's time is up
    ├── WorkerUnavailable     503  no worker of a role can take the request now
    ├── TransferError         503  the KV hand-off failed
    │   ├── LeaseExpired           the owner gave the blocks up before they were validated
    │   ├── TransferFailed         the transport reported a failure
    │   └── TransferTimeout        the transport did not finish in time
    ├── LayoutMismatch        500  two workers whose KV cannot be exchanged
    ├── StartupError          500  a process cannot start; the message says what to do
    └── EngineFault           500  the engine broke an invariant of its own; it is replaced

Only the router's orchestrator decides about retries, by `retryable`.
"""

from __future__ import annotations

from typing import ClassVar


class SplitserveError(Exception):
    """Base of all errors that this system raises on purpose."""

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.param, self.code, self.retry_after_s)


class InvalidRequest(SplitserveError):
    """The request is malformed or asks for something that this model or server cannot do."""

    http_status = 400
    openai_type = "invalid_request_error"


class NotFound(SplitserveError):
    """The named model or path does not exist here."""

    http_status = 404
    openai_type = "invalid_request_error"


class Unauthorized(SplitserveError):
    """The API key or the cluster token is missing or wrong."""

    http_status = 401
    openai_type = "authentication_error"


class Overloaded(SplitserveError):
    """A bounded queue is full; come back after `retry_after_s`."""

    http_status = 429
    retryable = True
    openai_type = "rate_limit_error"


class RequestCancelled(SplitserveError):
    """The client went away before the answer was complete."""

    http_status = 499
    openai_type = "invalid_request_error"


class DeadlineExceeded(SplitserveError):
    """The request's deadline passed before the answer was complete."""

    http_status = 504


class WorkerUnavailable(SplitserveError):
    """No worker of the needed role can take the request now."""

    http_status = 503
    retryable = True


class TransferError(SplitserveError):
    """The KV hand-off between two workers failed."""

    http_status = 503
    retryable = True


class LeaseExpired(TransferError):
    """The owner gave the held blocks up before the reader had them validated."""


class TransferFailed(TransferError):
    """The transport reported that a read failed."""


class TransferTimeout(TransferError):
    """A read did not reach a terminal state in time."""


class LayoutMismatch(SplitserveError):
    """Two workers disagree about the KV layout or the model; the message shows both sides."""


class StartupError(SplitserveError):
    """A process cannot start; the message says what to do about it."""


class EngineFault(SplitserveError):
    """The engine broke one of its own invariants and is replaced."""

    retryable = True


def _rebuild(
    kind: type[SplitserveError],
    message: str,
    param: str | None,
    code: str | None,
    retry_after_s: float | None,
) -> SplitserveError:
    return kind(message, param=param, code=code, retry_after_s=retry_after_s)


def error_classes() -> dict[str, type[SplitserveError]]:
    """All error classes by name, as they are named on the wire."""
    found: dict[str, type[SplitserveError]] = {}
    pending: list[type[SplitserveError]] = [SplitserveError]
    while pending:
        kind = pending.pop()
        found[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return found
