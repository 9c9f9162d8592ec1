"""What do the ranks of one worker tell each other while they start? Through the leader's store, bounded.

say(what, text)   something that the others may want to know
hear(what)        what all ranks say, once they have said it
fail(error)       a rank cannot start: all others hear why, wherever they wait

The store is open to whoever reaches it. So what is said there is sealed with the cluster token: a stranger
can read it, and disturb a start, but speaks for no rank.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.parallel import join_store
from protocol.errors import EngineFault, SplitserveError, StartupError
from protocol.ports import Clock

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

POLL_S = 0.02
FAILED = "failed"


class Meeting:
    """One rank's end of it. Used by one thread."""

    def __init__(
        self,
        address: str,
        rank: int,
        num_ranks: int,
        limit_s: float,
        *,
        token: str,
        watch: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`address` is the store's, `token` the cluster's. All of the meeting may take `limit_s`. `watch`
        is called while others are waited for: what it raises ends the wait. Raises `EngineFault` when the
        leader does not answer.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self._store = join_store(address, limit_s=limit_s)
        self._limit_s = limit_s
        self._key = token.encode()
        self._watch = watch
        self._clock = clock
        self._until_s = clock() + limit_s

    def say(self, what: str, text: str = "") -> None:
        """`what` was never said before by this rank. Raises `EngineFault` when the leader is gone."""
        with self._leader_is_there():
            self._store.set(f"{what}/{self.rank}", self._seal(f"{what}/{self.rank}", text))

    def hear(self, what: str) -> list[str]:
        """What all ranks say, in their order.

        Raises `StartupError` when one cannot start or does not come in time, `EngineFault` when the leader
        is gone.
        """
        keys = [f"{what}/{rank}" for rank in range(self.num_ranks)]
        with self._leader_is_there():
            while not self._store.check(keys):
                self._raise_failure()
                self._watch()
                self._check_time(keys)
                time.sleep(POLL_S)
            return [self._unseal(key) for key in keys]

    def fail(self, error: BaseException) -> None:
        """Tell all others why this rank cannot go on; who fails for that reason need not be told apart."""
        known = isinstance(error, SplitserveError)
        why = error.message if known else f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
        with self._leader_is_there():
            self._store.compare_set(
                FAILED,
                "",
                self._seal(FAILED, f"rank {self.rank} of {self.num_ranks} cannot start: {why}"),
            )

    def group_store(self, name: str) -> Store:
        """For the members of one group to find each other."""
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(name, self._store)

    def group_key(self, name: str) -> bytes:
        """What only the ranks of this cluster know, for them to know each other by."""
        return hmac.digest(self._key, f"group {name}".encode(), "sha256")

    def _seal(self, key: str, text: str) -> str:
        return f"{hmac.digest(self._key, f'{key} {text}'.encode(), 'sha256').hex()} {text}"

    def _unseal(self, key: str) -> str:
        """Raises `StartupError` for what no rank has said."""
        found = self._store.get(key).decode()
        text = found.partition(" ")[2]
        if not hmac.compare_digest(found.encode(), self._seal(key, text).encode()):
            raise StartupError(f"a stranger meddles with the start of these ranks: {key!r} is not sealed")
        return text

    def _raise_failure(self) -> None:
        if self._store.check([FAILED]):
            raise StartupError(self._unseal(FAILED))

    def _check_time(self, keys: list[str]) -> None:
        if self._clock() > self._until_s:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                return  # the last one came just now
            raise StartupError(
                f"rank {', '.join(missing)} of {self.num_ranks} is not ready after {self._limit_s:g} s:"
                " see its log, or raise ranks.start_timeout_s"
            )

    @contextmanager
    def _leader_is_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises for a connection that is lost
            raise EngineFault(
                f"rank {self.rank} of {self.num_ranks} has lost its leader: {error}"
            ) from error
