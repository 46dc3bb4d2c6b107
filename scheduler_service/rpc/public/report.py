"""What the scheduler says of itself, as messages. Pure translation."""

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.plan import WorkerCapacity
from scheduler_service.core.request import BlockMap, RequestReport, SchedulerStats

_STATES = {
    "waiting": scheduler_pb2.REQUEST_STATE_WAITING,
    "running": scheduler_pb2.REQUEST_STATE_RUNNING,
    "swapping_out": scheduler_pb2.REQUEST_STATE_SWAPPING_OUT,
    "swapped": scheduler_pb2.REQUEST_STATE_SWAPPED,
    "swapping_in": scheduler_pb2.REQUEST_STATE_SWAPPING_IN,
}


def encode_worker(capacity: WorkerCapacity, epoch: int) -> scheduler_pb2.WorkerInfo:
    return scheduler_pb2.WorkerInfo(
        worker_id=capacity.worker_id,
        epoch=epoch,
        device=capacity.device,
        dtype=capacity.dtype,
        attention_backend=capacity.attention_backend,
        block_size=capacity.block_size,
        num_device_blocks=capacity.num_device_blocks,
        block_bytes=capacity.block_bytes,
        num_host_blocks=capacity.num_host_blocks,
        swap_bandwidth=capacity.swap_bandwidth,
        sliding_window=capacity.sliding_window,
    )


def encode_loads(stats: SchedulerStats) -> scheduler_pb2.GetLoadsResponse:
    """All that the core knows of it."""
    return scheduler_pb2.GetLoadsResponse(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_swapped=stats.num_swapped,
        num_waiting_tokens=stats.num_waiting_tokens,
        num_device_blocks=stats.num_device_blocks,
        num_held_blocks=stats.num_held_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_host_blocks=stats.num_host_blocks,
        num_held_host_blocks=stats.num_held_host_blocks,
        num_cached_host_blocks=stats.num_cached_host_blocks,
        num_preemptions=stats.num_preemptions,
        num_swap_preemptions=stats.num_swap_preemptions,
        num_moved_blocks_out=stats.num_moved_blocks_out,
        num_moved_blocks_in=stats.num_moved_blocks_in,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_prompt_tokens=stats.num_cached_prompt_tokens,
        num_host_cached_prompt_tokens=stats.num_host_cached_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
    )


def encode_report(report: RequestReport, now: float) -> scheduler_pb2.GetRequestResponse:
    """`now` of the clock that the report's times are of."""
    response = scheduler_pb2.GetRequestResponse(
        request_id=report.request_id,
        tenant=report.tenant,
        state=_STATES[report.state],
        reason=report.reason,
        queue_position=report.queue_position,
        num_prompt_tokens=report.num_prompt_tokens,
        num_output_tokens=report.num_output_tokens,
        num_computed_tokens=report.num_computed_tokens,
        num_sequences=report.num_sequences,
        num_running_sequences=report.num_running_sequences,
        num_held_blocks=report.num_held_blocks,
        num_held_host_blocks=report.num_held_host_blocks,
        num_wanted_blocks=report.num_wanted_blocks,
        num_free_blocks=report.num_free_blocks,
        num_preemptions=report.num_preemptions,
        age_seconds=now - report.arrived_at,
    )
    for holder in report.holders:
        response.holders.add(request_id=holder.request_id, num_blocks=holder.num_blocks)
    return response


def encode_block_map(block_map: BlockMap) -> scheduler_pb2.GetBlocksResponse:
    return scheduler_pb2.GetBlocksResponse(
        owners=block_map.owners, device_blocks=block_map.device, host_blocks=block_map.host
    )
