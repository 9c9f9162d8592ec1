"""Ask every implementation, compare all against each other, and say what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cluster.verification.cases import Case, seeded_cases
from cluster.verification.compare import Answers, Comparison, IsTie, compare

Answerer = Callable[[Sequence[Case]], Awaitable[Answers]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """All comparisons of one run."""

    comparisons: tuple[Comparison, ...]

    @property
    def is_equal(self) -> bool:
        return all(c.is_equal for c in self.comparisons)

    def lines(self) -> list[str]:
        """One line per comparison, and one per difference."""
        return [
            line
            for c in self.comparisons
            for line in (str(c), *(f"  {mismatch}" for mismatch in c.mismatches))
        ]


async def verify_answers(
    cases: Sequence[Case],
    *,
    cluster: Answerer,
    colocated: Answerer,
    reference: Answerer | None,
    is_tie: IsTie | None,
    adds_up_alike: bool = True,
    say: Say,
) -> Verification:
    """Greedy and seeded, prefill + decode against colocated; greedy against the reference as well.

    Args:
        reference: transformers; None leaves it out.
        is_tie: the reference's judgement of a difference; None allows none.
        adds_up_alike: the cluster adds numbers up in the order of the lone engine, so that not even a tie
            is excused between them.
    """
    say(f"greedy, {len(cases)} prompts: prefill + decode ...")
    split = await cluster(cases)
    say("greedy: colocated ...")
    lone = await colocated(cases)
    split_tie = None if adds_up_alike else is_tie
    found = [compare("greedy: prefill + decode = colocated", cases, split, lone, split_tie)]
    if reference is not None:
        say("greedy: transformers ...")
        truth = await reference(cases)
        found.append(compare("greedy: prefill + decode = transformers", cases, split, truth, is_tie))
        found.append(compare("greedy: colocated = transformers", cases, lone, truth, is_tie))
    if split_tie is not None:
        return Verification(tuple(found))  # the reference has no word on what is sampled
    seeded = seeded_cases(cases)
    say("seeded sampling: prefill + decode, colocated ...")
    found.append(
        compare(
            "seeded: prefill + decode = colocated", seeded, await cluster(seeded), await colocated(seeded)
        )
    )
    return Verification(tuple(found))
