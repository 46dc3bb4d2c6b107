"""From a configuration to a worker that can compute: device, dtype, weights, KV cache, model runner."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from worker_service.attention import AttentionBackend, AttentionShape, create_backend
from worker_service.cache_engine import (
    CacheEngine,
    CacheShape,
    available_cpu_bytes,
    count_blocks,
    cpu_cache_bytes,
    log_host_size,
    log_size,
)
from worker_service.checkpoint_files import model_digest
from worker_service.config import WorkerConfig, parse_memory
from worker_service.cpu_decoder import fused
from worker_service.cuda_device import CudaDevice
from worker_service.cuda_runner import CudaRunner
from worker_service.device_error import is_out_of_memory
from worker_service.device_memory import (
    GIB,
    DeviceMemory,
    StepSize,
    check_cpu_pool,
    check_pool,
    size_pool,
    weights_refusal,
)
from worker_service.device_sampler import create_sampler
from worker_service.engine import LoadedWorker
from worker_service.memory_profile import CudaMeter, measure_memory
from worker_service.model_runner import Model, ModelRunner
from worker_service.models.communicator import Communicator, SingleRank
from worker_service.models.config import ModelConfig
from worker_service.models.loading import load_model
from worker_service.models.shard import Shard
from worker_service.moves import num_staging_blocks
from worker_service.operations import create_operations
from worker_service.preflight import choose_max_model_len
from worker_service.rank_group import RankGroup
from worker_service.sequence_table import TableLimits
from worker_service.step import Ready

logger = logging.getLogger(__name__)

M = TypeVar("M")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}


def load_worker(config: WorkerConfig, worker_id: str, report: Callable[[int, int], None] | None = None) -> LoadedWorker:
    """Load everything on the calling thread, which must be the one that will call the runner.

    `report(done, total)` is called as the checkpoint's tensors load. Raises ValueError and CheckpointError with a text
    for people.
    """
    config.validate()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    path = Path(config.model)
    device = choose_device(config.device, config.tensor_parallel_rank)
    communicator = _communicator(config, device)
    model_config = Shard.of(ModelConfig.load(path), communicator.rank, communicator.size).config
    dtype = choose_dtype(config.dtype, model_config.dtype, device)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else _CACHE_DTYPES[config.kv_cache_dtype]
    max_model_len = choose_max_model_len(config.max_model_len, model_config.max_position_embeddings)
    operations = create_operations(device, model_config)
    backend = create_backend(
        config.attention_backend, device, attention_shape(model_config, config.block_size, dtype, cache_dtype)
    )
    is_dummy = config.load_format == "dummy"
    load = partial(
        load_model,
        path,
        dtype=dtype,
        device=device,
        progress=report,
        operations=operations,
        is_dummy=is_dummy,
        communicator=communicator,
    )
    model = fused(_load_weights(config, device, load), dtype, backend)
    shape = CacheShape(
        num_layers=model_config.num_layers,
        block_size=config.block_size,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=cache_dtype,
        is_head_major=backend.is_head_major,
    )
    streams = CudaDevice(device) if device.type == "cuda" else None
    assembly = _Assembly(
        config, model, model_config, dtype, backend, shape, device, max_model_len, communicator, streams
    )
    num_host_blocks = count_host_blocks(config, shape.block_bytes, available_cpu_bytes())
    num_device_blocks = assembly.num_device_blocks(num_host_blocks)
    log_size(shape, num_device_blocks, max_model_len)
    if device.type == "cpu":  # both pools are there
        count_host_blocks(config, shape.block_bytes, _host_bytes(num_device_blocks, shape))
    runner, cache = assembly.runner(num_device_blocks, num_host_blocks)
    swap_bandwidth = cache.measure_bandwidth()
    if num_host_blocks:
        log_host_size(shape, num_host_blocks, swap_bandwidth)
    if isinstance(runner, CudaRunner):
        _capture_graphs(runner, config)
    return LoadedWorker(runner, assembly.ready(worker_id, cache, swap_bandwidth))


def attention_shape(
    model_config: ModelConfig, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> AttentionShape:
    """What attention has to compute for a model."""
    return AttentionShape(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        windows=model_config.windows,
    )


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Ranks of one machine take its GPUs in turn. Raises ValueError if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no GPU; use --device cpu")
    if name != "cuda":
        return torch.device(name)
    if rank:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _communicator(config: WorkerConfig, device: torch.device) -> Communicator:
    """Raises OSError if rank 0 cannot listen."""
    if config.tensor_parallel_size == 1:
        return SingleRank()
    assert config.tensor_parallel_address is not None
    return RankGroup(
        config.tensor_parallel_rank, config.tensor_parallel_size, config.tensor_parallel_address, config.host, device
    )


def choose_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The named dtype; for "auto" the checkpoint's, or float32 where the CPU would only emulate that."""
    if name != "auto":
        return _DTYPES[name]
    dtype = _DTYPES[checkpoint_dtype]
    if device.type == "cpu" and not _is_native_on_cpu(dtype):
        logger.info("this CPU does not compute %s natively: computing in float32", checkpoint_dtype)
        return torch.float32
    return dtype


def _is_native_on_cpu(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _host_bytes(num_device_blocks: int, shape: CacheShape) -> int:
    """A CPU's memory that is left beside the device blocks."""
    return max(0, available_cpu_bytes() - (num_device_blocks + 1) * shape.block_bytes)


def count_host_blocks(config: WorkerConfig, block_bytes: int, available_bytes: int) -> int:
    """Blocks to swap to, as told. Raises ValueError if the memory does not hold them."""
    if config.swap_space is not None:
        flag, asked = "--swap-space", config.swap_space
        pool_bytes = parse_memory("--swap-space", config.swap_space)
        num_blocks = pool_bytes // block_bytes - 1  # block 0 is never used
        if num_blocks < 1:
            raise ValueError(
                f"--swap-space is {asked}; two blocks take {2 * block_bytes} bytes: raise it or leave it out"
            )
    elif config.num_host_blocks:
        flag, asked, num_blocks = "--num-host-blocks", str(config.num_host_blocks), config.num_host_blocks
        pool_bytes = (num_blocks + 1) * block_bytes
    else:
        return 0
    if pool_bytes > available_bytes:
        raise ValueError(
            f"{flag} is {asked}, which takes {pool_bytes / GIB:.3f} GiB; {available_bytes / GIB:.3f} GiB of memory are "
            "available: lower it"
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class _Assembly:
    """The parts of a runner before it is known how many blocks it gets."""

    config: WorkerConfig
    model: Model
    model_config: ModelConfig
    dtype: torch.dtype
    backend: AttentionBackend
    shape: CacheShape
    device: torch.device
    max_model_len: int
    communicator: Communicator
    streams: CudaDevice | None  # on a GPU

    def runner(
        self, num_device_blocks: int, num_host_blocks: int = 0, *, splits_steps: bool = True
    ) -> tuple[ModelRunner | CudaRunner, CacheEngine]:
        """`splits_steps`: where memory does not suffice for one. Ranks cannot: all would have to do so alike."""
        splits_steps = splits_steps and self.communicator.size == 1
        limits = TableLimits(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            num_device_blocks=num_device_blocks,
            vocab_size=self.model_config.vocab_size,
            sliding_window=self.model_config.sliding_window,
        )
        cache = CacheEngine(self.shape, num_device_blocks, self.device, num_host_blocks, self.streams)
        if self.streams is None:
            return ModelRunner(
                self.model, cache, self.backend, limits, self.device, self.communicator, splits_steps=splits_steps
            ), cache
        runner = CudaRunner(
            self.model,
            cache,
            self.backend,
            create_sampler(limits.vocab_size),
            limits,
            self.streams,
            self.communicator,
            # A graph would hold what ranks exchange by the connections of one epoch.
            max_graph_batch_size=self.config.max_graph_batch_size if self.communicator.size == 1 else 0,
            splits_steps=splits_steps,
        )
        return runner, cache

    def ready(self, worker_id: str, cache: CacheEngine, swap_bandwidth: float) -> Ready:
        """What the worker says of itself once it has its cache."""
        return Ready(
            worker_id=worker_id,
            model_digest=model_digest(Path(self.config.model)),
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            num_device_blocks=cache.num_device_blocks,
            block_bytes=self.shape.block_bytes,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            device=self.device.type,
            dtype=str(self.dtype).removeprefix("torch."),
            attention_backend=self.backend.name,
            num_host_blocks=cache.num_host_blocks,
            swap_bandwidth=swap_bandwidth,
            sliding_window=self.model_config.sliding_window,
            tensor_parallel_rank=self.communicator.rank,
            tensor_parallel_size=self.communicator.size,
        )

    def num_device_blocks(self, num_host_blocks: int) -> int:
        """As told, else as many as the memory holds and all rows together could use."""
        config, block_bytes = self.config, self.shape.block_bytes
        max_num_blocks = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        flag, asked, num_asked = _asked_blocks(config, block_bytes, max_num_blocks)
        if self.device.type == "cuda":
            memory = self._measure_memory(num_host_blocks)
            if num_asked is None:
                return size_pool(
                    memory,
                    utilization=config.gpu_memory_utilization,
                    block_bytes=block_bytes,
                    max_num_blocks=max_num_blocks,
                    step=self._largest_step,
                )
            check_pool(memory, flag=flag, asked=asked, num_blocks=num_asked, block_bytes=block_bytes)
        elif num_asked is None:
            return count_blocks(
                cache_bytes=cpu_cache_bytes(available_cpu_bytes()),
                block_bytes=block_bytes,
                max_num_blocks=max_num_blocks,
                remedy="free memory, set --kv-cache-memory or lower --block-size",
            )
        else:
            check_cpu_pool(
                available=available_cpu_bytes(),
                flag=flag,
                asked=asked,
                num_blocks=num_asked,
                block_bytes=block_bytes,
            )
        return num_asked

    @property
    def _largest_step(self) -> StepSize:
        max_num_batched_tokens = self.config.max_num_batched_tokens
        return StepSize(max_num_batched_tokens, min(self.config.max_num_seqs, max_num_batched_tokens))

    def _measure_memory(self, num_host_blocks: int) -> DeviceMemory:
        """Runs the largest steps on a runner of their own."""

        def make_runner(num_blocks: int) -> CudaRunner:
            runner, _ = self.runner(num_blocks, splits_steps=False)
            assert isinstance(runner, CudaRunner)
            return runner

        block_bytes = self.shape.block_bytes
        memory = measure_memory(
            CudaMeter(self.device),
            make_runner,
            step=self._largest_step,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            block_bytes=block_bytes,
            staging_bytes=num_staging_blocks(num_host_blocks, block_bytes) * block_bytes,
        )
        logger.info("%s", memory.describe())
        return memory


def _asked_blocks(config: WorkerConfig, block_bytes: int, max_num_blocks: int) -> tuple[str, str, int | None]:
    """The flag by which somebody sized the pool, its value, and usable blocks; these are None if nobody did."""
    if config.num_device_blocks is not None:
        return "--num-device-blocks", str(config.num_device_blocks), config.num_device_blocks
    if config.kv_cache_memory is None:
        return "", "", None
    num_blocks = count_blocks(
        cache_bytes=parse_memory("--kv-cache-memory", config.kv_cache_memory),
        block_bytes=block_bytes,
        max_num_blocks=max_num_blocks,
        remedy="raise --kv-cache-memory or lower --block-size",
    )
    return "--kv-cache-memory", config.kv_cache_memory, num_blocks


def _load_weights(config: WorkerConfig, device: torch.device, load: Callable[[], M]) -> M:
    """Raises ValueError if a GPU's memory does not hold them."""
    if device.type != "cuda":
        return load()
    free, total = torch.cuda.mem_get_info(device)
    try:
        return load()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        needed = sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors"))
        raise weights_refusal(total=total, free=free, needed=needed) from error


def _capture_graphs(runner: CudaRunner, config: WorkerConfig) -> None:
    """Raises ValueError if they take more memory than was reserved for them, and that is not there."""
    try:
        runner.capture_graphs()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"CUDA graphs do not fit beside the KV cache: lower --max-graph-batch-size, which is "
            f"{config.max_graph_batch_size}, or --gpu-memory-utilization, which is {config.gpu_memory_utilization}"
        ) from error
