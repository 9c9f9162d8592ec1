"""What does the doctor say? Findings, each with what to do about it, and the exit code that follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is, the least first."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    severity: Severity
    where: str
    """A node, a pair of nodes, a worker, or `config`."""
    check: str
    """What was looked at: one word, for programs."""
    what: str
    todo: str = ""


Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Topic:
    """Where one check looks: makes its findings."""

    where: str
    check: str

    def ok(self, what: str) -> Finding:
        return Finding(Severity.OK, self.where, self.check, what)

    def info(self, what: str, todo: str = "") -> Finding:
        return Finding(Severity.INFO, self.where, self.check, what, todo)

    def warning(self, what: str, todo: str) -> Finding:
        return Finding(Severity.WARNING, self.where, self.check, what, todo)

    def problem(self, what: str, todo: str) -> Finding:
        return Finding(Severity.PROBLEM, self.where, self.check, what, todo)


def worst(findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in findings), key=lambda s: s.rank, default=Severity.OK)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: traffic may come, warnings or not; 1: something would go wrong."""
    return int(worst(findings) is Severity.PROBLEM)


def in_words(num_bytes: float) -> str:
    """`64 KiB`, `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            digits = 0 if num_bytes >= 100 * size else 1
            return f"{num_bytes / size:.{digits}f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes:.0f} bytes"


def difference(name: str, by_place: Mapping[str, str]) -> str:
    """`ray differs: 2.60.0 on n0, 2.59.0 on n1`; empty when all are equal."""
    if len(set(by_place.values())) < 2:
        return ""
    return f"{name} differs: " + ", ".join(f"{value} on {place}" for place, value in by_place.items())
