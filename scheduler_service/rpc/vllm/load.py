"""How busy the scheduler is, in VllmEngine's words. Pure translation.

What can be evicted is not in use: a gateway sends no more requests to a server that seems full.
"""

from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from scheduler_service.core.request import SchedulerStats
from scheduler_service.serving.activity import share


@dataclass(frozen=True, slots=True)
class Load:
    """One look at the scheduler. `generation_throughput` is in output tokens per second."""

    stats: SchedulerStats
    block_size: int  # of the worker that is there or was there last; 0: there was none
    max_num_seqs: int
    generation_throughput: float

    @property
    def num_waiting(self) -> int:
        return self.stats.num_waiting + self.stats.num_swapped

    @property
    def num_used_tokens(self) -> int:
        return self.stats.num_held_blocks * self.block_size

    @property
    def max_total_tokens(self) -> int:
        return self.stats.num_device_blocks * self.block_size

    @property
    def token_usage(self) -> float:
        return share(self.stats.num_held_blocks, self.stats.num_device_blocks)

    @property
    def cache_hit_rate(self) -> float:
        return share(self.stats.num_cached_prompt_tokens, self.stats.num_prompt_tokens)


def scheduler_load(load: Load) -> vllm_engine_pb2.SchedulerLoad:
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=load.stats.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.stats.num_running + load.num_waiting,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.max_total_tokens,
        token_usage=load.token_usage,
        gen_throughput=load.generation_throughput,
        cache_hit_rate=load.cache_hit_rate,
        utilization=share(load.stats.num_running, load.max_num_seqs),
        max_running_requests=load.max_num_seqs,
        num_waiting_uncached_tokens=load.stats.num_waiting_tokens,
    )


def engine_load(load: Load) -> common_pb2.EngineLoad:
    """Encode what routing needs of the load."""
    return common_pb2.EngineLoad(
        running_requests=load.stats.num_running,
        waiting_requests=load.num_waiting,
        waiting_uncached_tokens=load.stats.num_waiting_tokens,
        token_usage=load.token_usage,
        active_token_usage=load.token_usage,
        gen_throughput=load.generation_throughput,
        max_running_requests=load.max_num_seqs,
    )


def engine_load_in_full(load: Load) -> common_pb2.EngineLoad:
    record = common_pb2.EngineLoad(
        cache_hit_rate=load.cache_hit_rate,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.max_total_tokens,
    )
    record.MergeFrom(engine_load(load))
    return record
