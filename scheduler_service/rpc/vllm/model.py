"""The served model in the messages of VllmEngine. This is pure translation."""

import json

from smg_grpc_proto import vllm_engine_pb2

from scheduler_service.serving.engine import DescribedWorker
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.sampling_options import API_DEFAULTS, CHECKPOINTS_OPTIONS

SERVER_TYPE = "vllm-grpc"
_ARCHIVED = "to-be-asked-for"  # names no file


def model_info(
    model: ModelInfo, served_model_name: str, max_sequence_tokens: int
) -> vllm_engine_pb2.GetModelInfoResponse:
    """Paths are this machine's: a gateway that does not find them asks for the files. Files in which it would find
    another tokenizer or chat template it is not told of."""
    directory = str(model.directory)
    values = {name: getattr(model.sampling_defaults, name) for name in CHECKPOINTS_OPTIONS}
    chosen = {name: value for name, value in values.items() if value != getattr(API_DEFAULTS, name)}
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=directory,
        tokenizer_path=directory if model.is_as_gateways_read else f"{directory}/{_ARCHIVED}",
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
    """Return the answer to GetServerInfo, but for the counters."""
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
