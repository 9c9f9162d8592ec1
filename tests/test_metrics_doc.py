"""docs/metrics.md names every metric that is exposed, and no other, as it is exposed."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from worker_fakes import D0, FINGERPRINT

from decode_worker.metrics import DecodeMetrics
from engine import EngineStats
from prefill_worker.metrics import PrefillMetrics
from protocol.errors import EngineFault
from protocol.generation import Receipt
from protocol.handoff import Verdict
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.signals import StageSignals
from router.metrics import RouterMetrics
from rpc import EngineCollector, StartupClock, StartupCollector

DOC = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
WORKERS = "worker_id, role"

Row = tuple[str, str, str, str, str]
"""Name, type, labels, process, meaning."""


def rows_of(registry: CollectorRegistry, process: str, always: str = "") -> set[Row]:
    """What a registry exposes; `always` are labels that every sample has on the merged page."""
    rows: set[Row] = set()
    for family in registry.collect():
        samples = [s for s in family.samples if not s.name.endswith("_created")]
        own = {label for sample in samples for label in sample.labels} - {"le", *always.split(", ")}
        labels = ", ".join(filter(None, [*sorted(own), always]))
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.add((f"`{name}`", family.type, labels, process, family.documentation))
    return rows


def router_rows() -> set[Row]:
    metrics = RouterMetrics()
    for counter in (metrics.successes, metrics.failures, metrics.retries, metrics.local_prefills):
        counter.labels("x")
    metrics.responses.labels("/", "200")
    metrics.workers.labels("prefill")
    return rows_of(metrics.registry, "router")


def engine_rows() -> set[Row]:
    registry = CollectorRegistry()
    record = WorkerRecord(D0, Role.DECODE, "10.0.0.1:1", FINGERPRINT, 100)
    registry.register(EngineCollector(EngineStats, lambda: record, StageSignals))
    return rows_of(registry, "both workers", WORKERS)


def startup_rows() -> set[Row]:
    registry, clock = CollectorRegistry(), StartupClock()
    registry.register(StartupCollector(clock))
    clock.end("listen")
    return rows_of(registry, "both workers", WORKERS)


def prefill_rows() -> set[Row]:
    registry = CollectorRegistry()
    metrics = PrefillMetrics(registry, lambda: 0)
    metrics.observe_failure(EngineFault("x"))
    metrics.observe_verdict(Verdict.VALID)
    return rows_of(registry, "prefill worker", WORKERS)


def decode_rows() -> set[Row]:
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry, lambda: 0)
    metrics.observe_failure(EngineFault("x"))
    metrics.observe_transfer_failure(EngineFault("x"))
    metrics.observe_queue(Receipt())
    return rows_of(registry, "decode worker", WORKERS)


def documented_rows() -> list[Row]:
    rows: list[Row] = []
    for line in DOC.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `splitserve_"):
            name, kind, labels, process, meaning = (cell.strip() for cell in line.strip("| ").split(" | "))
            rows.append((name, kind, labels.replace("-", ""), process, meaning))
    return rows


def line_of(row: Row) -> str:
    name, kind, labels, process, meaning = row
    return f"| {name} | {kind} | {labels or '-'} | {process} | {meaning} |"


def test_table_of_metrics_is_what_is_exposed() -> None:
    exposed = router_rows() | engine_rows() | startup_rows() | prefill_rows() | decode_rows()
    documented = documented_rows()
    assert len(documented) == len(set(documented))
    missing = sorted(map(line_of, exposed - set(documented)))
    stale = sorted(map(line_of, set(documented) - exposed))
    assert not missing, "docs/metrics.md lacks these lines:\n" + "\n".join(missing)
    assert not stale, "docs/metrics.md has lines for what is not exposed:\n" + "\n".join(stale)
