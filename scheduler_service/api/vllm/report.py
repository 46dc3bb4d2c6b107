"""Encoding of the served model, the server and the scheduler's load as VllmEngine's messages.

Evictable blocks do not count as used, because a router sends no requests to a server that seems full.
"""

import json
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from pagewire.common.wire.sampling_rules import CHECKPOINTS_OPTIONS
from scheduler_service.core.request import SchedulerStats
from scheduler_service.serving.activity import share
from scheduler_service.serving.availability import DescribedWorker
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.sampling_defaults import API_DEFAULTS

SERVER_TYPE = "vllm-grpc"
_ARCHIVED = "to-be-asked-for"  # no such file exists, so the router calls GetTokenizer


def model_info(
    model: ModelInfo, served_model_name: str, max_sequence_tokens: int
) -> vllm_engine_pb2.GetModelInfoResponse:
    """Return VllmEngine's answer to GetModelInfo, which describes the served model to a router.

    The answer contains file paths on this machine. A router that does not find the files calls GetTokenizer. If the
    files would give a router another tokenizer or chat template than this server uses, the answer contains a tokenizer
    path that does not exist.
    """
    directory = str(model.directory)
    values = {name: getattr(model.sampling_defaults, name) for name in CHECKPOINTS_OPTIONS}
    chosen = {name: value for name, value in values.items() if value != getattr(API_DEFAULTS, name)}
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=directory,
        tokenizer_path=directory if model.has_standard_tokenizer_files else f"{directory}/{_ARCHIVED}",
        served_model_name=served_model_name,
        is_generation=True,
        max_context_length=max_sequence_tokens,
        max_req_input_len=max_sequence_tokens - 1,
        vocab_size=model.vocab_size,
        model_type=model.model_type,
        architectures=model.architectures,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        pad_token_id=model.pad_token_id,
        default_sampling_params_json=json.dumps(chosen),
    )


def server_info(worker: DescribedWorker | None, max_num_seqs: int) -> vllm_engine_pb2.GetServerInfoResponse:
    """Return VllmEngine's answer to GetServerInfo, without the counters of requests. `worker` is None if no worker has
    connected yet."""
    info = vllm_engine_pb2.GetServerInfoResponse(
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        max_num_seqs=max_num_seqs,
        constrained_decoding_start="first_token",
    )
    if worker is not None:
        info.block_size = worker.block_size
        info.attention_backend = worker.attention_backend
        info.model_dtype = info.kv_cache_dtype = worker.dtype
    return info


@dataclass(frozen=True, slots=True)
class Load:
    """The scheduler's load at one time. `generation_throughput` is in output tokens per second."""

    stats: SchedulerStats
    block_size: int  # of the current or last worker; 0 if no worker has connected yet
    max_num_seqs: int
    generation_throughput: float

    @property
    def num_waiting(self) -> int:
        return self.stats.num_waiting + self.stats.num_swapped


def scheduler_load(load: Load) -> vllm_engine_pb2.SchedulerLoad:
    known = engine_load_in_full(load)
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=known.running_requests,
        num_waiting_reqs=known.waiting_requests,
        num_total_reqs=known.running_requests + known.waiting_requests,
        num_used_tokens=known.num_used_tokens,
        max_total_num_tokens=known.max_total_num_tokens,
        token_usage=known.token_usage,
        gen_throughput=known.gen_throughput,
        cache_hit_rate=known.cache_hit_rate,
        utilization=share(load.stats.num_running, load.max_num_seqs),
        max_running_requests=known.max_running_requests,
        num_waiting_uncached_tokens=known.waiting_uncached_tokens,
    )


def engine_load(load: Load) -> common_pb2.EngineLoad:
    """Return the values of the scheduler's load that routers use to distribute requests over servers."""
    usage = share(load.stats.num_held_blocks, load.stats.num_device_blocks)
    return common_pb2.EngineLoad(
        running_requests=load.stats.num_running,
        waiting_requests=load.num_waiting,
        waiting_uncached_tokens=load.stats.num_waiting_tokens,
        token_usage=usage,
        active_token_usage=usage,
        gen_throughput=load.generation_throughput,
        max_running_requests=load.max_num_seqs,
    )


def engine_load_in_full(load: Load) -> common_pb2.EngineLoad:
    record = common_pb2.EngineLoad(
        cache_hit_rate=share(load.stats.num_cached_prompt_tokens, load.stats.num_prompt_tokens),
        num_used_tokens=load.stats.num_held_blocks * load.block_size,
        max_total_num_tokens=load.stats.num_device_blocks * load.block_size,
    )
    record.MergeFrom(engine_load(load))
    return record
