"""The inference engine that both roles share.

The pure core's face is re-exported here and needs no torch. What computes has its own modules:
`engine.model`, `engine.ops`, `engine.weights`, `engine.runner`, `engine.sampler`, `engine.kv_cache`.
"""

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.fake_executor import FakeExecutor
from engine.messages import (
    AbortSequence,
    AddSequence,
    AdmitSequence,
    BlocksAllocated,
    CacheInvalidated,
    Command,
    Event,
    FirstTokens,
    InvalidateCache,
    PrefillProgressed,
    PromptScored,
    RecomputeSequence,
    ReleaseSequence,
    ReserveSequence,
    SequenceFailed,
    TokensSampled,
)
from engine.plan import Executor, Slice, StepPlan, StepResult
from engine.sequence import Sequence, SequenceState
from engine.stats import EngineStats
from engine.thread import EngineThread

__all__ = [
    "AbortSequence",
    "AddSequence",
    "AdmitSequence",
    "BlocksAllocated",
    "CacheInvalidated",
    "Command",
    "EngineCore",
    "EngineStats",
    "EngineThread",
    "Event",
    "Executor",
    "FakeExecutor",
    "FirstTokens",
    "InvalidateCache",
    "PrefillProgressed",
    "PromptScored",
    "RecomputeSequence",
    "ReleaseSequence",
    "ReserveSequence",
    "SchedulerConfig",
    "Sequence",
    "SequenceFailed",
    "SequenceState",
    "Slice",
    "StepPlan",
    "StepResult",
    "TokensSampled",
]
