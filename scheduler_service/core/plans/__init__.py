"""A step's plan while it is made, and what is remembered of it until its result is there."""

from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import Dispatch, PlannedRow, ResolvedResult, SampledRow, read_result
from scheduler_service.core.plans.plan_builder import PlanBuilder, RowSlots

__all__ = [
    "DecodeBatch",
    "Dispatch",
    "PlanBuilder",
    "PlannedRow",
    "ResolvedResult",
    "RowSlots",
    "SampledRow",
    "read_result",
]
