"""What does a benchmark hand over, and how is it shown?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

Figures = dict[str, tuple[float, str]]
"""Name -> value and unit."""


def show(figures: Figures) -> None:
    for name, (value, unit) in figures.items():
        print(f"{name} {value:.4g} {unit}", flush=True)


def write_json(path: Path, figures: Figures) -> None:
    record = {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
