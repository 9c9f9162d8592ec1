"""The board asks only for metrics, labels and values that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ROW = re.compile(r"^\| `(splitserve_\w+)` \| (\w+) \| ([\w, -]+) \|", re.MULTILINE)


def exposed() -> dict[str, set[str]]:
    """Labels by the names of samples, as docs/metrics.md has them, which another test holds to the code."""
    samples: dict[str, set[str]] = {}
    for name, kind, labels in ROW.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")):
        own = set() if labels == "-" else set(labels.split(", "))
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for suffix in suffixes:
            samples.setdefault(name + suffix, {"le"} if suffix == "_bucket" else set()).update(own)
    return samples


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_metric_and_label_of_a_panel_exists(panel: dict[str, Any]) -> None:
    known = exposed()
    for target in panel["targets"]:
        names = re.findall(r"splitserve_\w+", target["expr"])
        assert names
        assert set(names) <= set(known)
        labels = {label for name in names for label in known[name]}
        grouped = {
            label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")
        }
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert grouped | shown <= labels
        assert shown <= grouped or not grouped


def test_panels_lie_beside_each_other_and_have_numbers_of_their_own() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in places
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
