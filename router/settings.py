"""What can be set about a router."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.errors import StartupError


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Immutable, validated once; every bound that the router keeps is named here."""

    max_in_flight: int = 1024
    """Requests that may be at the workers at once."""
    max_queued: int = 1024
    """Requests that may wait for a place in flight; one more is refused with 429."""
    retry_after_s: float = 1.0
    """What a refused client is told to wait."""
    request_timeout_s: float = 600.0
    """Deadline of a request that names none, and the longest that one may name."""
    worker_wait_s: float = 30.0
    """How long a request waits for a worker of a role to appear before it fails with 503, or for the
    credit of one before it fails with 429."""
    num_retries: int = 3
    """Further legs that a request may get in a row after one failed in a retryable way: a decode worker
    that gets on with it renews them."""
    retry_backoff_s: float = 0.05
    """Pause before the first retry in a row; doubled for each further one."""
    max_num_choices: int = 16
    """The largest `n` that a request may ask for."""
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    """A body that has not arrived within this time is answered with 408, and the connection closed."""
    api_key: str | None = field(default=None, repr=False)
    """Clients of /v1 must send it as a bearer token; None lets everybody in."""
    poll_interval_s: float = 0.5
    """How often the directory is read."""
    absent_grace_s: float = 5.0
    """How long a connected worker may be missing in the directory before it gets no more requests."""
    frame_timeout_s: float = 4.0
    """A worker from which nothing came for so long is taken for dead."""
    local_prefill_tokens: int = 0
    """A prompt is computed where it is decoded when presumably no more than so many of its tokens are not
    cached there; 0: never."""
    local_prefill_on_failure: bool = True
    """Let decode workers compute prompts when prefill workers fail, or there are none."""
    prefill_grace_s: float = 2.0
    """How long there must have been no prefill worker before decode workers do without."""
    reconnect_backoff_s: float = 0.2
    """Pause before a broken stream to a listed worker is opened again; doubled up to 16 times that."""
    canary_interval_s: float = 10.0
    """A hand-off of the router's own is made when no user's succeeded within this time."""
    canary_timeout_s: float = 5.0
    metrics_timeout_s: float = 1.0
    """A worker that does not tell its metrics within this time is left out."""
    admin_timeout_s: float = 5.0
    """How long a worker may take to carry an operator's command out."""
    stop_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        positive = (
            "max_in_flight",
            "max_num_choices",
            "request_timeout_s",
            "worker_wait_s",
            "max_body_bytes",
            "body_timeout_s",
            "poll_interval_s",
            "frame_timeout_s",
            "reconnect_backoff_s",
            "canary_interval_s",
            "canary_timeout_s",
            "metrics_timeout_s",
            "admin_timeout_s",
            "stop_timeout_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise StartupError(f"router setting {name} must be above 0, got {getattr(self, name)}")
        not_negative = (
            "max_queued",
            "num_retries",
            "retry_after_s",
            "retry_backoff_s",
            "absent_grace_s",
            "local_prefill_tokens",
            "prefill_grace_s",
        )
        for name in not_negative:
            if getattr(self, name) < 0:
                raise StartupError(f"router setting {name} must not be negative, got {getattr(self, name)}")
        if self.api_key == "":
            raise StartupError("the API key is empty: leave it out to let everybody in, or set a real one")
