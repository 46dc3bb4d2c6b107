"""Measurement of a GPU's memory use, without the block pool, by running the largest possible step."""

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from pagewire.common.wire.messages import StepPlan
from pagewire.common.wire.sampling_rules import MAX_ENTRIES, RANGES
from worker_service.device import is_out_of_memory
from worker_service.runner import ModelRunner
from worker_service.startup.device_memory import DeviceMemory, StepSize, graph_bytes, step_refusal
from worker_service.startup.pool_size import Counts, PoolSize
from worker_service.startup.warm_up import FILTERED, TrialRow, plan_trial

_NUM_LISTED, _NUM_PROMPT_LOGPROBS = MAX_ENTRIES["logprob_token_ids"], int(RANGES["prompt_logprobs"].high)


class CudaMeter:
    """A meter for the memory of a GPU and of this process's tensors. All results are in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_and_free(self) -> tuple[int, int]:
        """Return the GPU's total memory and its free memory in bytes. Free memory is used by no process."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def allocated(self) -> int:
        """Return the GPU memory, in bytes, that this process's tensors use."""
        return torch.cuda.memory_allocated(self._device)

    def peak_of(self, operation: Callable[[], object]) -> int:
        """Run `operation`, wait for the GPU, and return the peak memory of this process's tensors, in bytes.

        The peak is the largest total size of the tensors during the run.
        """
        torch.cuda.reset_peak_memory_stats(self._device)
        operation()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        """Free the GPU memory that torch's allocator keeps for reuse."""
        gc.collect()
        torch.cuda.empty_cache()


def measure_memory(
    meter: CudaMeter,
    make_runner: Callable[[Counts], ModelRunner],
    *,
    step: StepSize,
    sizes: PoolSize,
    block_size: int,
    staging_bytes: int,
) -> DeviceMemory:
    """Measure the GPU memory that a worker needs besides the KV cache, by running the largest possible step.

    `make_runner` returns a runner with the given numbers of KV cache blocks and states. That runner must not split
    steps. `sizes` describes the KV cache. Before and after this call, only the weights are allocated. Raises ValueError
    if the largest step does not fit into memory.
    """
    meter.release()
    weights = meter.allocated()
    plan, counts = largest_step(step, sizes.max_model_len, block_size, sizes.num_groups, bool(sizes.state_bytes))
    made: list[ModelRunner] = []
    try:
        made.append(make_runner(counts))
        peak = meter.peak_of(lambda: made[0].execute(plan))
        num_graphs = made[0].computation.num_graphs
        largest = 0
        if num_graphs:
            kept = meter.allocated()
            largest = meter.peak_of(lambda: made[0].computation.run_graphs_uncaptured()) - kept
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        total, free = meter.total_and_free()
        raise step_refusal(total=total, free=free, weights=weights, step=step) from error
    made.clear()
    meter.release()
    total, free = meter.total_and_free()
    return DeviceMemory(
        total=total,
        others=total - free - meter.allocated(),
        weights=weights,
        step=peak - weights - sizes.size(counts),
        graphs=graph_bytes(largest_bytes=largest, num_graphs=num_graphs),
        staging=staging_bytes,
    )


def largest_step(
    step: StepSize, max_model_len: int, block_size: int, num_groups: int = 1, has_states: bool = False
) -> tuple[StepPlan, Counts]:
    """Return a plan for the largest possible step of a worker, and the KV cache blocks and states that the plan uses.

    The plan has `step.num_rows` sequences, all of which sample, and up to `step.num_tokens` tokens. The sequences
    request every sampling feature that needs memory. They have a block table for each of `num_groups` layer groups.
    """
    num_tokens = min(step.num_tokens // step.num_rows, max_model_len)
    sampling = replace(
        FILTERED,
        repetition_penalty=1.1,
        logit_bias_token_ids=(0,),
        logit_bias_values=(1.0,),
        num_logprobs=_NUM_LISTED,
        num_prompt_logprobs=_NUM_PROMPT_LOGPROBS,
    )
    rows = (TrialRow(num_tokens, num_tokens, sampling),) * step.num_rows
    num_blocks = num_groups * sum(row.num_blocks(block_size) for row in rows)
    num_states = rows[0].num_states if has_states else 0  # all rows write the same
    return plan_trial(rows, block_size, num_groups, has_states), Counts(num_blocks, num_states)
