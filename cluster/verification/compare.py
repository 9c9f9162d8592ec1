"""Where do two runs of the same cases differ, and which differences are ties of the reference?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.verification.cases import Case

Answers = Sequence[Sequence[int]]
"""Output token ids, one list per case."""

IsTie = Callable[[Case, Sequence[int]], bool]
"""Whether the reference cannot tell its two best next tokens apart, after this common output."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first position at which two answers to one case differ."""

    case: int
    prompt_length: int
    position: int
    """Index into the output."""
    left: int | None
    """None: this answer has ended."""
    right: int | None

    def __str__(self) -> str:
        return (
            f"prompt {self.case} ({self.prompt_length} tokens) differs first at output token "
            f"{self.position}: {_name(self.left)} against {_name(self.right)}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of comparing two runs."""

    title: str
    num_cases: int
    mismatches: tuple[Mismatch, ...]
    num_ties: int

    @property
    def is_equal(self) -> bool:
        return not self.mismatches

    def __str__(self) -> str:
        num_same = self.num_cases - len(self.mismatches) - self.num_ties
        ties = f", {self.num_ties} split at a tie of the reference" if self.num_ties else ""
        return f"{self.title}: {num_same} of {self.num_cases} identical{ties}"


def compare(
    title: str, cases: Sequence[Case], left: Answers, right: Answers, is_tie: IsTie | None = None
) -> Comparison:
    """Compare token for token. With `is_tie`, a difference at a tie is counted, not reported."""
    mismatches: list[Mismatch] = []
    num_ties = 0
    for index, (case, mine, theirs) in enumerate(zip(cases, left, right, strict=True)):
        position = first_difference(mine, theirs)
        if position is None:
            continue
        if is_tie is not None and is_tie(case, theirs[:position]):
            num_ties += 1
            continue
        mismatches.append(
            Mismatch(
                index, len(case.prompt_token_ids), position, _at(mine, position), _at(theirs, position)
            )
        )
    return Comparison(title, len(cases), tuple(mismatches), num_ties)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, an early end included; None when they are equal."""
    for position, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _at(answer: Sequence[int], position: int) -> int | None:
    return answer[position] if position < len(answer) else None


def _name(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
