"""What does a token cost beside the model: choosing it, and bringing it to the client as text?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from cpu_engine import VOCABULARY
from figures import Figures

from engine.sampling import Draw, Sampler
from engine.sequence import Sequence
from protocol.codec import delta_from_wire, write_delta
from protocol.generation import SamplingParams, Token, TokenDelta
from protocol.ids import RequestId, SequenceId
from protocol.ports import Clock
from protocol.wire import splitserve_pb2 as pb
from router.detokenizer import Detokenizer
from router.tokenizer import load_tokenizer

VOCAB_SIZE = 49152
BATCH = 32
NUM_TOKENS = 400
NUM_LIKELY = 50
KINDS = {
    "greedy": SamplingParams(1, temperature=0.0),
    "temperature": SamplingParams(1),
    "top_p": SamplingParams(1, top_p=0.9),
    "top_k": SamplingParams(1, top_k=50),
    "top_p_top_k": SamplingParams(1, top_p=0.9, top_k=50),
}


def text_s(folder: Path, clock: Clock) -> float:
    """Seconds from a token to its piece of text."""
    detokenizer = Detokenizer(load_tokenizer(folder))
    tokens = VOCABULARY[:NUM_TOKENS]
    return median(_timed_s(clock, lambda token=token: detokenizer.push(token)) for token in tokens)  # type: ignore[misc]


def frame_s(clock: Clock) -> float:
    """Seconds to write a token into a frame, the frame into bytes, and back."""

    def once() -> None:
        frame = pb.DecodeFrame()
        write_delta(TokenDelta(RequestId("r" * 32), (Token(1234),)), frame.deltas.add())
        for delta in pb.DecodeFrame.FromString(frame.SerializeToString()).deltas:
            delta_from_wire(delta)

    return median(_timed_s(clock, once) for _ in range(NUM_TOKENS))


def sampling_figures(num_rounds: int, clock: Clock, draw: Draw) -> Figures:
    """Milliseconds to choose BATCH tokens, by what the requests ask for; the kinds take turns.

    Logits as a model's: a few likely tokens and a long tail.
    """
    torch.manual_seed(0)
    logits = torch.randn(BATCH, VOCAB_SIZE).mul_(2.0)
    logits[:, :NUM_LIKELY] += torch.linspace(20.0, 10.0, NUM_LIKELY)
    sampler = Sampler((), draw)
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(num_rounds):
        for name, params in KINDS.items():
            sequences = [
                Sequence(SequenceId(f"s{i}"), params, token_ids=[1] * (i + 2), num_prompt_tokens=1)
                for i in range(BATCH)
            ]
            given = logits.clone()
            times[name].append(_timed_s(clock, lambda given=given, s=sequences: sampler.sample(given, s)))  # type: ignore[misc]
    return {f"sampling_32_{name}": (median(taken) * 1e3, "ms") for name, taken in times.items()}


def _timed_s(clock: Clock, call: Callable[[], object]) -> float:
    started_s = clock()
    call()
    return clock() - started_s
