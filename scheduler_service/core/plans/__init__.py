"""A step's plan while it is made, and what is remembered of it until its result is there."""

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
