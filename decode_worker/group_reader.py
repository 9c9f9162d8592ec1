"""How does a worker of several ranks read KV? All of its ranks do, and all count.

    GroupReader ──> this rank's `KvReader`
        ├─ gRPC ──> rank 1's            DONE once all are; FAILED once all are terminal and one failed
        └─ gRPC ──> rank 2's            a rank that is lost leaves the read PENDING: the worker is replaced
Every rank has the same block table over memory of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from decode_worker.rank_proxy import RankCall, RankProxy
from kv_transfer import JointFetch, num_rows
from protocol.errors import SplitserveError, TransferFailed
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import KvReader, TokenFetch
from protocol.rank_layout import kv_parts

_log = logging.getLogger(__name__)


class GroupReader:
    """The leader's `KvReader`. Owns its rank's reader and the connections to the others."""

    def __init__(self, own: KvReader, others: Sequence[RankProxy], fingerprint: Fingerprint) -> None:
        """`others` are the worker's other ranks, in order."""
        self._own = own
        self._others = others
        self._agents: set[str] = set()
        rows = [
            num_rows(part)
            for part in kv_parts(fingerprint.num_layers, fingerprint.num_kv_heads, fingerprint.rank_layout)
        ]
        if len(rows) != 1 + len(others):
            raise ValueError(f"{1 + len(others)} ranks cannot be those of {fingerprint}")
        self._rows, self._own_rows = sum(rows), rows[0]

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        """Of all ranks or of none."""
        calls = [rank.connect(peer, fingerprint) for rank in self._others]
        errors = _errors(lambda: self._own.connect(peer, fingerprint), calls)
        if not errors:
            self._agents.add(peer.agent)
            return
        if peer.agent not in self._agents:
            self._undo(peer.agent)
        raise errors[0]

    def disconnect(self, agent: str) -> None:
        """Of all ranks, whatever becomes of the others."""
        self._agents.discard(agent)
        calls = [rank.disconnect(agent) for rank in self._others]
        errors = _errors(lambda: self._own.disconnect(agent), calls)
        if errors:
            raise errors[0]

    def fetch_tokens(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> TokenFetch:
        """As `KvReader.fetch_tokens`, but what cannot be started fails later: other ranks read already.

        They begin first, since a transport may copy on the spot.
        """
        for rank in self._others:
            rank.check()
        theirs = [rank.fetch_tokens(agent, remote_table, local_table, tokens) for rank in self._others]
        try:
            own = self._own.fetch_tokens(agent, remote_table, local_table, tokens)
        except TransferFailed as error:
            _log.warning("%s", error.message)
            return JointFetch(theirs, num_bytes=0, has_failed=True)
        # All ranks read the same of the owner's blocks, each its own rows.
        return JointFetch([own, *theirs], num_bytes=own.num_bytes * self._rows // self._own_rows)

    def close(self) -> None:
        with ExitStack() as ends:
            for rank in self._others:
                ends.callback(rank.close)
            self._own.close()

    def _undo(self, agent: str) -> None:
        try:
            self.disconnect(agent)
        except SplitserveError as error:
            _log.warning("%s", error.message)


def _errors(call_own: Callable[[], None], calls: Iterable[RankCall]) -> list[SplitserveError]:
    """Of this rank's call and of those under way at the others, once all of them are over."""
    errors: list[SplitserveError] = []
    try:
        call_own()
    except SplitserveError as error:
        errors.append(error)
    return errors + [failed for call in calls if (failed := call.error()) is not None]
