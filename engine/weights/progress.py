"""Who is told how far a long start-up job is, and how a console shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from protocol.ports import Clock

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """Told about one job at a time, by one thread: start, advance..., finish."""

    def start(self, label: str, total_bytes: int) -> None:
        """A job of `total_bytes` begins."""

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are done."""

    def finish(self) -> None:
        """The job is over, well or not."""


class SilentProgress:
    """Tells nobody."""

    def start(self, label: str, total_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass


class LineProgress:
    """Writes a line when a job is over, and one every `interval_s` before: for logs."""

    def __init__(self, stream: TextIO, *, interval_s: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._label = ""
        self._total_bytes = 0
        self._done_bytes = 0
        self._started_s = self._told_s = clock()

    def start(self, label: str, total_bytes: int) -> None:
        self._label, self._total_bytes, self._done_bytes = label, total_bytes, 0
        self._started_s = self._told_s = self._clock()

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._clock() - self._told_s >= self._interval_s:
            self._tell()

    def finish(self) -> None:
        self._tell()

    def _tell(self) -> None:
        self._told_s = self._clock()
        done, total = self._done_bytes / 1e6, self._total_bytes / 1e6
        took_s = self._told_s - self._started_s
        self._stream.write(f"{self._label}: {done:.0f} of {total:.0f} MB in {took_s:.1f} s\n")
        self._stream.flush()


class BarProgress:
    """Draws a bar on a terminal; it goes away when the job is over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, label: str, total_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._bars.add_task(label, total=total_bytes)
        self._bars.start()

    def advance(self, num_bytes: int) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, num_bytes)

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = None


def console_progress(stream: TextIO | None = None) -> Progress:
    """A bar where `stream` (standard error when None) is a terminal, otherwise lines."""
    out = sys.stderr if stream is None else stream
    return BarProgress(out) if out.isatty() else LineProgress(out)


@contextmanager
def tracked(progress: Progress | None, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Run one job under `progress`; yields its `advance`."""
    told = progress or SilentProgress()
    told.start(label, total_bytes)
    try:
        yield told.advance
    finally:
        told.finish()
