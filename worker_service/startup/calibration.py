"""The calibration of `--quantization int4`: measures with a text which inputs of a model's weights are large."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.states import StateRows
from pagewire.network.layer_groups import layer_groups
from pagewire.network.source import load_config
from worker_service.attention import AttentionBatch, create_backend
from worker_service.cache import CacheEngine
from worker_service.config import WorkerConfig
from worker_service.host import create_host_operations
from worker_service.models.decoder import Decoder
from worker_service.models.importance import Importance, InputSquares
from worker_service.models.loading import prepare_model
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.device_memory import check_cpu_weights
from worker_service.startup.loader import attention_shape, cache_shape, choose_dtype
from worker_service.startup.preflight import check_worker
from worker_service.startup.resources import available_bytes, num_usable_cpus
from worker_service.startup.warm_up import initialize_vector_math

CHUNK_TOKENS = 512  # tokens of each sequence, at most
_BLOCK_SIZE = 16
_CPU = torch.device("cpu")


def measure_importance(path: Path, token_ids: Sequence[int], tell: Callable[[str], object]) -> Importance:
    """Compute a text with the float weights of a model, on the CPU, and return how much the errors of each weight's
    inputs count.

    The text is divided into sequences of `CHUNK_TOKENS` tokens. `tell` receives the progress. Raises ValueError if
    `--quantization int4` would refuse the model or if memory does not suffice, and CheckpointError if the checkpoint is
    invalid.
    """
    digest = check_worker(WorkerConfig(model=str(path), device="cpu", quantization="int4"))
    initialize_vector_math()
    torch.set_num_threads(min(torch.get_num_threads(), num_usable_cpus()))
    network, kernels = load_config(path), load_cpu_kernels(tell)
    if max(token_ids) >= network.vocab_size:
        raise ValueError(f"the text has the token {max(token_ids)}, but the model has {network.vocab_size} tokens")
    length = min(CHUNK_TOKENS, network.max_position_embeddings)
    dtype = choose_dtype("auto", network.dtype, _CPU, kernels)
    operations = create_host_operations(kernels)
    unloaded = prepare_model(path, dtype=dtype, device=_CPU, operations=operations, max_model_len=length)
    footprint = unloaded.footprint()
    held_in = unloaded.describe_dtypes()
    check_cpu_weights(available=available_bytes(), held=footprint.held, peak=footprint.peak, held_in=held_in)
    tell("loading the model")
    model = unloaded.load()
    squares, sequence = InputSquares.of(model), _Sequence(model, length, dtype, kernels)
    for start in range(0, len(token_ids), length):
        chunk = token_ids[start : start + length]
        sequence.compute(chunk)
        tell(f"computed {start + len(chunk)} of {len(token_ids)} tokens")
    means = squares.mean()
    for name, values in means.items():
        if not values.isfinite().all():
            raise ValueError(f"inputs of {name} are not finite in {dtype}: the model cannot be calibrated")
    return Importance(digest, means)


class _Sequence:
    """A model with a KV cache for one sequence, which each computation begins anew."""

    def __init__(self, model: Decoder, max_tokens: int, dtype: torch.dtype, kernels: CpuKernels | None) -> None:
        self._model, network = model, model.network
        groups = layer_groups(network.layers, max_tokens, is_bidirectional=network.is_bidirectional)
        self._backend = create_backend(
            "auto", _CPU, attention_shape(network, _BLOCK_SIZE, dtype, dtype, groups), kernels
        )
        shape = cache_shape(network, groups, _BLOCK_SIZE, dtype, is_head_major=self._backend.is_head_major)
        num_blocks = -(-max_tokens // _BLOCK_SIZE)
        total = len(groups) * num_blocks
        self._cache = CacheEngine(shape, total, _CPU, state_size=network.state_size, num_device_states=1)
        self._tables = torch.arange(1, total + 1).view(len(groups), 1, num_blocks)  # [G, 1, max_blocks]

    @torch.inference_mode()
    def compute(self, token_ids: Sequence[int]) -> None:
        """Compute the tokens of one sequence from its beginning."""
        num_tokens = len(token_ids)
        positions = torch.arange(num_tokens)
        slots = self._tables[:, 0, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        batch = AttentionBatch([0, num_tokens], [num_tokens], self._tables, slots)
        attend = self._backend.prepare(batch, self._cache.layers)
        columns = ([0, num_tokens], [0], [0, 1], [num_tokens], [1])
        states = StateRows(self._cache.states, *(torch.tensor(column, dtype=torch.int32) for column in columns))
        self._model(torch.tensor(token_ids), positions, attend, states)
