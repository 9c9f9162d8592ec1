"""How is a diagnosis shown: a table for people, JSON for programs?"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from cluster.doctor.doctor import Diagnosis
from cluster.doctor.facts import Live
from cluster.doctor.findings import Finding, Severity, exit_code, worst

STYLES = {
    Severity.OK: "green",
    Severity.INFO: "cyan",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
}
JSON_VERSION = 1
PIPE_WIDTH = 160
"""Columns where there is no terminal to ask."""


def print_table(diagnosis: Diagnosis, console: Console) -> None:
    """All findings by place, each with what is to be done, and a verdict."""
    width = console.width if console.is_terminal else PIPE_WIDTH
    indent = max((len(finding.check) for finding in diagnosis.findings), default=0) + 13
    where = None
    for finding in _by_place(diagnosis.findings):
        if finding.where != where:
            where = finding.where
            _print(console, Text(where, style="bold"))
        head = Text.assemble(
            (f"  {finding.severity:<7}", STYLES[finding.severity]), f"  {finding.check:<{indent - 11}}"
        )
        for line in _wrapped(finding.what, width - indent):
            _print(console, head + Text(line))
            head = Text(" " * indent)
        for line in _wrapped(f"-> {finding.todo}" if finding.todo else "", width - indent):
            _print(console, head + Text(line, style="bold"))
    _print(console, Text(f"\n{in_a_line(diagnosis.findings)}", style=STYLES[worst(diagnosis.findings)]))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(30, width), break_long_words=False, break_on_hyphens=False)


def _print(console: Console, text: Text) -> None:
    """As it is: what is too wide to be wrapped is not cut."""
    console.print(text, soft_wrap=True, highlight=False)


def _by_place(findings: Sequence[Finding]) -> list[Finding]:
    """In the order in which places are first named."""
    order = {where: i for i, where in reversed(list(enumerate(finding.where for finding in findings)))}
    return sorted(findings, key=lambda finding: order[finding.where])


def in_a_line(findings: Sequence[Finding]) -> str:
    """`1 problem, 2 warnings: not fit for traffic`."""
    counts = Counter(finding.severity for finding in findings)
    said = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in (Severity.PROBLEM, Severity.WARNING)
        if counts[severity]
    ]
    verdict = "something would go wrong" if exit_code(findings) else "nothing stands in the way"
    return f"{', '.join(said) or 'no problem, no warning'}: {verdict}"


def as_json(diagnosis: Diagnosis) -> str:
    """Findings, and the facts behind them. Neither holds a secret."""
    seen = diagnosis.seen
    document: dict[str, Any] = {
        "version": JSON_VERSION,
        "worst": worst(diagnosis.findings).value,
        "exit_code": exit_code(diagnosis.findings),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "nodes": [asdict(node) for node in seen.nodes],
        "reads": [asdict(read) | {"bytes_per_s": read.bytes_per_s} for read in seen.reads],
        "cluster": _live(seen.live),
    }
    return json.dumps(document, indent=2)


def _live(live: Live) -> dict[str, Any]:
    return {
        "ray_address": live.address,
        "workers": [
            {
                "role": a.record.role.value,
                "worker": str(a.record.identity),
                "address": a.record.address,
                "answers": a.answer is not None,
            }
            for a in live.workers
        ],
        "lost_nodes": list(live.lost_nodes),
    }
