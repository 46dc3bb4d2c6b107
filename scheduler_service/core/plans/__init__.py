"""The plan of a step while it is built, and its record until the result arrives."""

from scheduler_service.core.plans.dispatch import Dispatch, PlannedRow, ResolvedResult, SampledRow, read_result
from scheduler_service.core.plans.plan_builder import PlanBuilder, Work, WorkerRows, num_missing_blocks

__all__ = [
    "Dispatch",
    "PlanBuilder",
    "PlannedRow",
    "ResolvedResult",
    "SampledRow",
    "Work",
    "WorkerRows",
    "num_missing_blocks",
    "read_result",
]
