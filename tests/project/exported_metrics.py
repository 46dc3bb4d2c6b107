"""The metrics that services export."""

import re
from dataclasses import MISSING, fields

from pagewire.common.wire.messages import WorkerCapacity
from pagewire.common.wire.transport.tls import Life
from scheduler_service.core.request import SchedulerStats
from scheduler_service.metrics import FrontEndCollector, FrontEndStats, Metrics, MetricsCollector, ServiceStats

# Prometheus adds these labels to every series that it scrapes from a pod.
TARGET_LABELS = {"namespace", "pod"}
NAME = re.compile(r"\b(?:vllm|pagewire):[a-z0-9_:]+")


def exported() -> dict[str, set[str]]:
    """Return all series that the scheduler and front ends export, each with its labels."""
    capacity = WorkerCapacity("w", b"", 300, 256, 16, 64, 1, 8, 64, "cpu", "float32", "torch")
    numbers = {field.name: 0 for field in fields(SchedulerStats) if field.default is MISSING}
    lives = {"--tls-cert": Life(0.0, 1.0)}
    service = ServiceStats(capacity, certificate_validity=lives)
    collector = MetricsCollector(Metrics(), lambda: SchedulerStats(**numbers), "model", lambda: service)
    front_end = FrontEndCollector(lambda: FrontEndStats(certificate_validity=lives))
    return {
        sample.name: set(sample.labels) | TARGET_LABELS
        for family in (*collector.collect(), *front_end.collect())
        for sample in family.samples
    }
