"""When did what happen in which process? Stamps of the machine's one clock, in a file for each process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import AdmitSequence, Command, Event, TokensSampled
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import BlockId, Role
from protocol.ports import FetchStatus, KvReader, TokenFetch
from rpc import Engine

SUFFIX = ".stamps"
SMALL = 64
"""Tokens of a read that is not noted: the router's own hand-offs are so small."""
READ_BEGINS, READ_ENDS, ADMITTED = "read_begins", "read_ends", "admitted"


def sampled(role: Role) -> str:
    """A step that gave tokens is over; the value: seconds that it computed."""
    return f"sampled_{role.value}"


@dataclass(frozen=True, slots=True)
class Stamp:
    time_s: float
    name: str
    whose: str
    """The engine's name for the request; empty where it is not known."""
    value: float


class StampFile:
    """Written by one process."""

    def __init__(self, path: Path) -> None:
        self._file = path.with_suffix(SUFFIX).open("a", buffering=1, encoding="utf-8")

    def note(self, name: str, whose: str = "", value: float = 0.0) -> None:
        self._file.write(f"{time.monotonic()},{name},{whose},{value}\n")


def read_stamps(folder: Path, since_s: float) -> list[Stamp]:
    """Those of all processes, in order."""
    stamps = [stamp for path in folder.glob(f"*{SUFFIX}") for stamp in _stamps(path)]
    return sorted((s for s in stamps if s.time_s >= since_s), key=lambda stamp: stamp.time_s)


def _stamps(path: Path) -> Iterator[Stamp]:
    for line in path.read_text(encoding="utf-8").splitlines():
        time_s, name, whose, value = line.split(",")
        yield Stamp(float(time_s), name, whose, float(value))


class StampedEngine:
    """The `Engine` that is another one, and notes when it samples and when it is told to decode."""

    def __init__(self, stamps: StampFile, role: Role) -> None:
        self._stamps = stamps
        self._sampled = sampled(role)
        self._inner: Engine[Command] | None = None

    def around(self, engine: Engine[Command]) -> StampedEngine:
        self._inner = engine
        return self

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def post(self, command: Command) -> None:
        if isinstance(command, AdmitSequence):
            self._stamps.note(ADMITTED, command.seq_id)
        assert self._inner is not None
        self._inner.post(command)

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokensSampled):
                self._stamps.note(self._sampled, event.seq_id, getattr(self.stats, "last_execute_s"))  # noqa: B009


class StampedReader:
    """The `KvReader` that is another one, and notes when reads begin and end."""

    def __init__(self, reader: KvReader, stamps: StampFile) -> None:
        self._reader = reader
        self._stamps = stamps

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        self._reader.connect(peer, fingerprint)

    def disconnect(self, agent: str) -> None:
        self._reader.disconnect(agent)

    def fetch_tokens(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> TokenFetch:
        is_small = len(tokens) < SMALL
        if not is_small:
            self._stamps.note(READ_BEGINS)
        fetch = self._reader.fetch_tokens(agent, remote_table, local_table, tokens)
        return fetch if is_small else _StampedFetch(fetch, self._stamps)

    def close(self) -> None:
        self._reader.close()


class _StampedFetch:
    def __init__(self, fetch: TokenFetch, stamps: StampFile) -> None:
        self._fetch = fetch
        self._stamps = stamps

    @property
    def num_bytes(self) -> int:
        return self._fetch.num_bytes

    def poll(self) -> FetchStatus:
        status = self._fetch.poll()
        if status is not FetchStatus.PENDING:
            self._stamps.note(READ_ENDS)
        return status

    def checksums(self) -> dict[int, int]:
        return dict(self._fetch.checksums())

    def release(self) -> None:
        self._fetch.release()
