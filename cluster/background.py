"""A call on a thread of its own that never keeps the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Starts `call` at once. Its value or error waits for whoever asks."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # handed to the caller of `result`
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self.is_running

    def raise_if_failed(self) -> None:
        """Raise what the call raised, if it has ended so."""
        if self._error is not None:
            raise self._error

    def result(self) -> T:
        """Wait for the value. Raises what the call raised."""
        self._thread.join()
        self.raise_if_failed()
        return self._value[0]
