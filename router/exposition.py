"""Merges the metrics of many processes into one valid page of Prometheus' text format."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from protocol.membership import WorkerRecord

logger = logging.getLogger(__name__)


def merge(own: CollectorRegistry, workers: Iterable[tuple[WorkerRecord, str]]) -> bytes:
    """One page: a family of one name has one HELP and TYPE, a worker's samples its id and role.

    A worker whose page cannot be read is left out; so is a family whose type contradicts an earlier
    one's of its name.
    """
    families: dict[str, Metric] = {}
    for family in own.collect():
        _add(families, family, {})
    for record, page in workers:
        labels = {"worker_id": str(record.identity.worker_id), "role": record.role.value}
        try:
            parsed = list(text_string_to_metric_families(page))
        except ValueError as error:
            logger.warning("the metrics of %s cannot be read: %s", record.identity, error)
            continue
        for family in parsed:
            _add(families, family, labels)
    return generate_latest(_Collected(families.values()))


def _add(families: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
    if family.name.endswith("_created"):
        return  # times of creation say nothing that anybody asked for
    merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    if merged.type != family.type:
        logger.warning("metric %s is a %s here and a %s there", family.name, merged.type, family.type)
        return
    merged.samples.extend(
        Sample(s.name, {**s.labels, **labels}, s.value, s.timestamp, s.exemplar)
        for s in family.samples
        if not s.name.endswith("_created")
    )


class _Collected:
    """Families that are already there, as `generate_latest` wants them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
