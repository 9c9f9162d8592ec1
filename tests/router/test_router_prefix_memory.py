"""What a router remembers of what it sent to a worker."""

from __future__ import annotations

from router.prefix_memory import PrefixMemory

BLOCK_SIZE = 4
MANY = 100


def test_full_blocks_of_a_common_prefix_are_known() -> None:
    memory = PrefixMemory(BLOCK_SIZE)
    memory.note(range(10), "", MANY)
    assert memory.num_known_tokens(range(10), "") == 8
    assert memory.num_known_tokens(range(7), "") == 4
    assert memory.num_known_tokens([*range(4), 9, 9, 9, 9], "") == 4
    assert memory.num_known_tokens(range(1, 9), "") == 0


def test_same_tokens_elsewhere_in_a_prompt_are_another_block() -> None:
    memory = PrefixMemory(BLOCK_SIZE)
    memory.note([1, 2, 3, 4, 5, 6, 7, 8], "", MANY)
    assert memory.num_known_tokens([5, 6, 7, 8], "") == 0


def test_salts_share_nothing() -> None:
    memory = PrefixMemory(BLOCK_SIZE)
    memory.note(range(8), "tenant", MANY)
    assert memory.num_known_tokens(range(8), "") == 0
    assert memory.num_known_tokens(range(8), "tenant") == 8


def test_memory_is_bounded_and_forgets_the_end_of_the_oldest_first() -> None:
    memory = PrefixMemory(BLOCK_SIZE)
    memory.note(range(12), "", 4)
    memory.note(range(100, 108), "", 4)
    assert len(memory) == 4
    assert memory.num_known_tokens(range(12), "") == 8
    assert memory.num_known_tokens(range(100, 108), "") == 8


def test_used_prefixes_live_on() -> None:
    memory = PrefixMemory(BLOCK_SIZE)
    memory.note(range(8), "", 4)
    memory.note(range(100, 108), "", 4)
    memory.note(range(8), "", 4)
    memory.note(range(200, 208), "", 4)
    assert memory.num_known_tokens(range(8), "") == 8
    assert memory.num_known_tokens(range(100, 108), "") == 0


def test_cleared_memory_knows_nothing() -> None:
    memory = PrefixMemory(BLOCK_SIZE)
    memory.note(range(8), "", MANY)
    memory.clear()
    assert memory.num_known_tokens(range(8), "") == 0
