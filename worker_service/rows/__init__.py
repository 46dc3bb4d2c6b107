"""The rows of a worker: each row's sampling request, the rows of a step, and the results of a step.

This package does not know where rows are computed.
"""

from worker_service.rows.parts import StepPart, run_in_parts
from worker_service.rows.pooling import (
    PooledChunk,
    Pooler,
    choosing_rows,
    pooled_chunks,
    read_embeddings,
)
from worker_service.rows.prompt_logprobs import MAX_LOGITS_POSITIONS, PromptChunk, prompt_chunks
from worker_service.rows.reading import ValueReader, flatten_to_int32
from worker_service.rows.results import BegunStep, StepOutline, StepWatch, join_results
from worker_service.rows.sampling import Samples, StepSampling, has_penalties, row_statuses
from worker_service.rows.states import NO_ROW_STATES, PartStates
from worker_service.rows.table import SequenceTable, TableLimits
from worker_service.rows.working_rows import WorkingRows

__all__ = [
    "MAX_LOGITS_POSITIONS",
    "NO_ROW_STATES",
    "BegunStep",
    "PartStates",
    "PooledChunk",
    "Pooler",
    "PromptChunk",
    "Samples",
    "SequenceTable",
    "StepOutline",
    "StepPart",
    "StepSampling",
    "StepWatch",
    "TableLimits",
    "ValueReader",
    "WorkingRows",
    "choosing_rows",
    "flatten_to_int32",
    "has_penalties",
    "join_results",
    "pooled_chunks",
    "prompt_chunks",
    "read_embeddings",
    "row_statuses",
    "run_in_parts",
]
