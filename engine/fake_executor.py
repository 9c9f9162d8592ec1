"""What would a device compute that has no weights but an exact memory?

The shipped fake of `Executor`: no torch, no time. Its KV of a token is a digest of the token and all
before it, kept per (block, offset); the next token is a function of that digest. Whatever a slice
reads through its block table is checked, so a wrong table or a block with two owners is caught.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from collections.abc import Sequence as Items

from engine.plan import Slice, StepPlan, StepResult
from protocol.errors import EngineFault
from protocol.generation import Token
from protocol.ids import BlockId

_MODULUS = (1 << 61) - 1


def kv_digests(token_ids: Iterable[int]) -> list[int]:
    """The fake KV of every position."""
    digests: list[int] = []
    digest = 1
    for token_id in token_ids:
        digest = (digest * 1_000_003 + token_id + 17) % _MODULUS
        digests.append(digest)
    return digests


class FakeExecutor:
    """Keeps KV per slot, and checks what it reads. Used by one thread."""

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 50,
        kv: MutableMapping[tuple[BlockId, int], int] | None = None,
    ) -> None:
        """`kv` keeps the digests by (block, offset), e.g. in memory that a transport can read."""
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._kv: MutableMapping[tuple[BlockId, int], int] = {} if kv is None else kv
        self.plans: list[list[tuple[str, int]]] = []
        """(sequence id, tokens) of every slice of every step so far."""

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append([(piece.sequence.seq_id, piece.num_tokens) for piece in plan.slices])
        if plan.num_tokens != sum(piece.num_tokens for piece in plan.slices):
            raise EngineFault("the plan miscounts its tokens")
        return StepResult([self._compute(piece) for piece in plan.slices])

    def next_token(self, token_ids: Items[int]) -> int:
        """The token that follows, whatever else runs: the oracle for an engine's output."""
        return kv_digests(token_ids)[-1] // 7 % self._vocab_size

    def write(self, block_table: Items[BlockId], token_ids: Items[int], start: int, stop: int) -> None:
        """Put the KV of positions [start, stop) into a table's slots, as a transport would."""
        for position, digest in enumerate(kv_digests(token_ids[:stop])):
            if position >= start:
                self._kv[self._slot(block_table, position)] = digest

    def verify(self, block_table: Items[BlockId], token_ids: Items[int], stop: int) -> None:
        """Raise `EngineFault` unless the slots of positions [0, stop) hold the KV of `token_ids`."""
        for position, digest in enumerate(kv_digests(token_ids[:stop])):
            block_id, offset = self._slot(block_table, position)
            if self._kv.get((block_id, offset)) != digest:
                raise EngineFault(
                    f"block {block_id} slot {offset} does not hold the KV of position {position}"
                )

    def _compute(self, piece: Slice) -> Token | None:
        sequence, num_tokens = piece
        stop = sequence.num_computed + num_tokens
        if num_tokens < 1 or stop > len(sequence.token_ids):
            raise EngineFault(
                f"a slice of {num_tokens} tokens, of which {sequence.num_pending} are pending"
            )
        self.verify(sequence.block_table, sequence.token_ids, sequence.num_computed)
        self.write(sequence.block_table, sequence.token_ids, sequence.num_computed, stop)
        return Token(self.next_token(sequence.token_ids)) if piece.samples else None

    def _slot(self, block_table: Items[BlockId], position: int) -> tuple[BlockId, int]:
        block_id = block_table[position // self._block_size]
        if block_id == 0:
            raise EngineFault("a block table points at the null block")
        return block_id, position % self._block_size
