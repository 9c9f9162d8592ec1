"""How much of the KV memory does the scheduler waste on real requests, and how much does its cache find?

The real scheduler, a device that computes nothing, and virtual time: a step takes `STEP_S` and `TOKEN_S`
per token. So the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from figures import Figures
from traces import TracedRequest, azure_conversation, mooncake_conversation

from engine import AddSequence, EngineCore, SchedulerConfig, SequenceFailed, StepPlan, StepResult
from engine.roster import Roster
from protocol.generation import SamplingParams, Token
from protocol.ids import SequenceId

BLOCK_SIZE = 16
STEP_S, TOKEN_S = 0.010, 0.000_1
AZURE_BLOCKS = 4096
MOONCAKE_BLOCKS = (1024, 4096, 16384, 65536, 131072)
"""Pools of the curve; the last one holds all that the 2,000 requests compute."""


class VirtualDevice:
    """Samples the same token for everyone and moves its own clock on."""

    _token = Token(7)

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_s += STEP_S + TOKEN_S * plan.num_tokens
        return StepResult([self._token if piece.samples else None for piece in plan.slices])


@dataclass
class Replay:
    """What a replay saw, summed over its steps and weighted with their length."""

    used_slots_s: float = 0.0
    unused_slots_s: float = 0.0
    """Slots without KV in blocks that a sequence owns."""
    num_hit_tokens: int = 0
    num_preemptions: int = 0

    def look(self, roster: Roster, step_s: float) -> None:
        running = (*roster.decodes, *roster.prefills)
        unused = sum(len(s.block_table) * BLOCK_SIZE - s.num_computed for s in running)
        allocated = (roster.pool.num_total - roster.pool.num_free) * BLOCK_SIZE
        self.used_slots_s += (allocated - unused) * step_s
        self.unused_slots_s += unused * step_s


def replay(requests: list[TracedRequest], num_blocks: int) -> Replay:
    """All requests, each at its time, to their ends. Fails when one is refused or left over."""
    config = SchedulerConfig(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_model_len=1 + max(len(r.prompt) + r.num_output_tokens for r in requests),
        max_num_waiting=len(requests),
    )
    device, roster, seen = VirtualDevice(), Roster(config), Replay()
    core = EngineCore(config, device, frozenset(), device.clock, roster)
    num_arrived = 0
    while num_arrived < len(requests) or core.has_work:
        if not core.has_work:
            device.now_s = max(device.now_s, requests[num_arrived].arrival_s)
        while num_arrived < len(requests) and requests[num_arrived].arrival_s <= device.now_s:
            _add(core, num_arrived, requests[num_arrived])
            num_arrived += 1
        started_s = device.now_s
        core.step()
        seen.look(roster, device.now_s - started_s)
    core.assert_idle()
    stats = core.stats()
    seen.num_hit_tokens, seen.num_preemptions = stats.prefix_hits_tokens, stats.num_preemptions
    return seen


def unbounded_hit_tokens(requests: Iterable[TracedRequest]) -> int:
    """What a cache would hit that forgets nothing and has each prompt's KV when the next request comes."""
    known: set[tuple[int, int]] = set()
    num_hits = 0
    for request in requests:
        ends = range(BLOCK_SIZE, len(request.prompt) + 1, BLOCK_SIZE)
        # A token of these prompts stands after the same tokens wherever it is met: it names its prefix.
        names = [(end, request.prompt[end - 1]) for end in ends]
        for end, name in zip(ends, names, strict=True):
            if name not in known or end == len(request.prompt):  # the last token is always computed
                break
            num_hits += BLOCK_SIZE
        known.update(names)
    return num_hits


def measure() -> Figures:
    azure = replay(azure_conversation(), AZURE_BLOCKS)
    figures: Figures = {
        "trace_azure_conv_unused_slots": (_unused_percent(azure), "%"),
        "trace_azure_conv_preemptions": (azure.num_preemptions, "count"),
    }
    requests = mooncake_conversation()
    most = unbounded_hit_tokens(requests)
    all_tokens = sum(len(request.prompt) for request in requests)
    figures["trace_mooncake_unbounded_hit_rate"] = 100 * most / all_tokens, "%"
    for num_blocks in MOONCAKE_BLOCKS:
        seen = replay(requests, num_blocks)
        figures[f"trace_mooncake_hits_of_unbounded_{num_blocks}_blocks"] = (
            100 * seen.num_hit_tokens / most,
            "%",
        )
    figures["trace_mooncake_unused_slots"] = _unused_percent(seen), "%"
    return figures


def _unused_percent(seen: Replay) -> float:
    return 100 * seen.unused_slots_s / seen.used_slots_s


def _add(core: EngineCore, number: int, request: TracedRequest) -> None:
    sampling = SamplingParams(request.num_output_tokens, temperature=0.0, ignore_eos=True)
    for event in core.handle(AddSequence(SequenceId(f"r{number}"), request.prompt, sampling)):
        if isinstance(event, SequenceFailed):
            raise event.error
