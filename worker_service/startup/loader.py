"""The loading of a worker from its configuration: device, dtype, weights, KV cache, model runner."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagewire.common.process.child_process import announce_memory
from pagewire.common.process.memory_size import describe_memory
from pagewire.common.wire import messages
from pagewire.common.wire.messages import WorkerCapacity
from pagewire.kernels.cpu import VARIANTS, CpuKernels
from pagewire.kernels.quantized import BITS, quantized_format
from pagewire.network.checkpoint_files import ADAPTER_FILE
from pagewire.network.layer_groups import LayersOfGroup, group_of_layer, layer_groups
from pagewire.network.network import Network
from pagewire.network.operations import Convolve
from pagewire.network.rope import RopeConfig
from pagewire.network.source import load_config, model_digest, weights_digest
from pagewire.network.unused_tensors import describe_parts
from worker_service.attention import AttentionBackend, AttentionShape, create_backend
from worker_service.cache import CacheEngine, CacheShape, num_staging_blocks
from worker_service.config import WorkerConfig
from worker_service.device import (
    CudaDevice,
    DeviceComputation,
    create_device_operations,
    create_sampler,
    is_out_of_memory,
)
from worker_service.engine import LoadedWorker
from worker_service.epoch_grammars import EpochGrammars
from worker_service.host import HostComputation, PackedCache, create_host_operations, host_model
from worker_service.models.communicator import Communicator, RankGroup, SingleRank
from worker_service.models.decoder import Decoder
from worker_service.models.dense import DenseLayer, load_dense_layers
from worker_service.models.importance import Importance
from worker_service.models.loading import UnloadedModel, prepare_model
from worker_service.models.torch_operations import Operations
from worker_service.rows import Pooler, SequenceTable, TableLimits
from worker_service.runner import Computation, ModelRunner
from worker_service.startup.cpu_kernels import load_cpu_kernels, quantized_folder
from worker_service.startup.device_memory import (
    EXCHANGE_BYTES,
    DeviceMemory,
    StepSize,
    check_cpu_weights,
    weights_refusal,
)
from worker_service.startup.grammar_tokenizer import GrammarStart
from worker_service.startup.memory_profile import CudaMeter, measure_memory
from worker_service.startup.pool_size import NOTHING, Counts, PoolSize, blocks_of_sequence, default_swap_bytes
from worker_service.startup.preflight import choose_max_model_len
from worker_service.startup.progress import LoadProgress
from worker_service.startup.resources import available_bytes, num_usable_cpus
from worker_service.startup.warm_up import initialize_vector_math, warm_up

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
# The most steps of a lease. A scheduler that is lost meanwhile costs the computation of these steps.
_MAX_LEASED_STEPS = 63
_CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def load_worker(
    config: WorkerConfig, worker_id: str, report: LoadProgress | None = None, digest: bytes | None = None
) -> LoadedWorker:
    """Load a model from its configuration and return a worker that is ready to compute.

    Call this on the thread that will call the worker's runner. `report` receives the progress. `digest` is the model's
    digest; if None, it is computed. Raises ValueError if the worker cannot start with these options on this machine,
    and CheckpointError if the checkpoint is invalid. The message of either error is meant for the operator.
    """
    config.validate()
    initialize_vector_math()
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), num_usable_cpus()))
    path = Path(config.model)
    whole = load_config(path)
    if config.tensor_parallel_rank == 0:
        log_adapter(path)
    start = GrammarStart(path, whole.vocab_size)
    try:
        report = report or LoadProgress(lambda doing: None)
        report.tell("preparing to load")
        return _load_worker(config, whole, worker_id, report, start, digest or model_digest(path))
    except BaseException:
        start.give_up()
        raise


def _load_worker(
    config: WorkerConfig, whole: Network, worker_id: str, report: LoadProgress, start: GrammarStart, digest: bytes
) -> LoadedWorker:
    """Load the model for `load_worker`. `whole` describes it for all ranks. `start` prepares grammars meanwhile."""
    device, importance = choose_device(config.device, config.tensor_parallel_rank), _importance(config, digest)
    communicator = _communicator(config, device)
    network = whole.of_rank(communicator.rank, communicator.size)
    is_gpu, uses_onednn, block_size = device.type == "cuda", config.cpu_products == "onednn", config.choose_block_size()
    kernels = None if is_gpu else load_cpu_kernels(report.tell)
    dtype = choose_dtype(config.dtype, network.dtype, device, None if uses_onednn else kernels)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else _CACHE_DTYPES[config.kv_cache_dtype]
    max_model_len = choose_max_model_len(config.max_model_len, network.max_position_embeddings)
    host_operations = create_host_operations(kernels, uses_onednn=uses_onednn)
    operations = create_device_operations(network.operations, device) if is_gpu else host_operations
    check_quantization(config.quantization, operations, device)
    groups = layer_groups(network.layers, max_model_len, is_bidirectional=network.is_bidirectional)
    attention = attention_shape(network, block_size, dtype, cache_dtype, groups)
    backend = create_backend(config.attention_backend, device, attention, kernels)
    unloaded = prepare_model(
        Path(config.model),
        dtype=dtype,
        device=device,
        operations=operations,
        is_dummy=config.load_format == "dummy",
        communicator=communicator,
        quantization=config.quantization,
        importance=importance,
        max_model_len=max_model_len,
        storage_dtype=_DTYPES.get(config.dtype),
    )
    shape = cache_shape(network, groups, block_size, cache_dtype, is_head_major=backend.is_head_major)
    windows, state_bytes = tuple(group.window for group in groups), network.state_size * torch.float32.itemsize
    # Also for layer groups with windows: the prefix cache uses what the sequences leave.
    max_num_blocks = config.max_num_seqs * len(windows) * -(-max_model_len // block_size)
    sizes = PoolSize(config, shape.block_bytes, max_num_blocks, len(windows), state_bytes, max_model_len)
    check_memory(unloaded, sizes)
    log_formats(unloaded)
    if communicator.rank == 0:
        log_long_rope(unloaded.model.network.rope, max_model_len)
    assembly = _RunnerParts(
        config=config,
        weight_bytes=unloaded.footprint().held,  # computed before loading, which changes the footprint
        model=_load_weights(unloaded, report, _packed_cache(config, unloaded, kernels, digest, importance)),
        network=network,
        alibi_slopes=whole.heads.alibi_slopes,
        dtype=dtype,
        quantization=_describe_quantization(config, importance),
        weight_format=unloaded.describe_weights(),
        backend=backend,
        shape=shape,
        windows=windows,
        device=device,
        max_model_len=max_model_len,
        communicator=communicator,
        streams=CudaDevice(device) if is_gpu else None,
        kernels=kernels,
        digest=digest,
        dense=_dense_layers(config, network, device),
    )
    return _build_worker(assembly, worker_id, sizes, start, report)


def _dense_layers(config: WorkerConfig, network: Network, device: torch.device) -> tuple[DenseLayer, ...]:
    is_dummy = config.load_format == "dummy"
    return load_dense_layers(Path(config.model), network.hidden_size, device, is_dummy=is_dummy)


def _build_worker(
    assembly: "_RunnerParts", worker_id: str, sizes: PoolSize, start: GrammarStart, report: LoadProgress
) -> LoadedWorker:
    """Build a runner with the largest KV cache that fits, warm up its kernels, and capture its CUDA graphs.

    `sizes` are the configured sizes of the cache. `start` prepares grammars on another thread; this waits for its end.
    """
    device, host = assembly.counts(sizes)
    log_reduced_sizes(assembly.config, sizes)
    if assembly.network.is_bidirectional:
        log_longest_prompt(assembly.config.max_num_batched_tokens, assembly.max_model_len)
    log_size(assembly.shape, device.num_blocks, assembly.max_model_len, assembly.windows)
    log_states(assembly.network, device.num_states)
    grammars, grammar_version = start.finish()
    runner, cache = _allocate(replace(assembly, grammars=grammars), sizes, device, host)
    swap_bandwidth = cache.measure_bandwidth()
    if host.num_blocks:
        logger.info(
            "swap space: %d blocks of %d tokens%s, %s; blocks move at %s a second",
            host.num_blocks,
            assembly.shape.block_size,
            f" and {host.num_states} states" if host.num_states else "",
            describe_memory(sizes.size(host)),
            describe_memory(swap_bandwidth),
        )
    if assembly.device.type == "cuda":
        warm_up(runner, grammars, report.tell)
    if assembly.config.tensor_parallel_size == 1:  # graphs of several ranks depend on the epoch: see `ModelRunner`
        runner.computation.capture_graphs()
    ready = assembly.ready(worker_id, cache, swap_bandwidth, grammar_version)
    return LoadedWorker(runner, ready, grammars.close)


def attention_shape(
    network: Network,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    groups: Sequence[LayersOfGroup] = (),
) -> AttentionShape:
    """Return the heads, dtypes and features by which an attention backend is chosen for a model.

    `groups` are the model's layer groups; empty: all layers are in one group.
    """
    return AttentionShape(
        layers=network.layers,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        has_sinks=network.has_sinks,
        is_bidirectional=network.is_bidirectional,
        layer_groups=group_of_layer(groups),
    )


def cache_shape(
    network: Network,
    groups: Sequence[LayersOfGroup],
    block_size: int,
    dtype: torch.dtype,
    *,
    is_head_major: bool = False,
) -> CacheShape:
    """Return the dimensions of the KV cache's blocks for a model with these layer groups."""
    heads = tuple((of_layer.num_kv_heads, of_layer.head_dim) for of_layer in network.layers)
    return CacheShape(heads, block_size, dtype, is_head_major, tuple(group.layers for group in groups))


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Return the torch device called `name`: "cpu", "cuda", or "auto" for a GPU if torch finds one, else the CPU.

    Tensor-parallel ranks on one machine use its GPUs in rotation. Raises ValueError if `name` is "cuda" and torch finds
    no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no GPU; use --device cpu")
    if name != "cuda":
        return torch.device(name)
    if rank:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def num_state_layers(network: Network) -> int:
    """Return the number of layers with a state. Each of them has a convolution."""
    return sum(type(operation) is Convolve for operation in network.operations)


def check_quantization(quantization: str | None, operations: Operations, device: torch.device) -> None:
    """Raise ValueError if no kernel can multiply with the quantised weights that `quantization` requests.

    The option is "int8", "int4" or None. `operations` are the kernels that were chosen for `device`.
    """
    if quantization is None or operations.can_store(quantized_format(BITS[quantization]).element, torch.float32):
        return
    if device.type == "cpu":
        needed, reason = "the C kernels of a CPU", "PAGEWIRE_CPU_KERNELS is off, or they cannot be built"
    else:
        needed, reason = "the Triton kernels of a GPU", "Triton cannot be imported, or they cannot compute the model"
    raise ValueError(
        f"--quantization is {quantization}, which needs {needed}, but they are not available: {reason}; "
        "enable them or leave out --quantization"
    )


def _communicator(config: WorkerConfig, device: torch.device) -> Communicator:
    """Return the communicator through which this tensor-parallel rank exchanges data with the other ranks.

    Raises OSError if the ranks cannot use the address in the configuration.
    """
    if config.tensor_parallel_size == 1:
        return SingleRank()
    assert config.tensor_parallel_address is not None
    return RankGroup(
        config.tensor_parallel_rank, config.tensor_parallel_size, config.tensor_parallel_address, config.host, device
    )


def choose_dtype(
    name: str, checkpoint_dtype: str, device: torch.device, kernels: CpuKernels | None = None
) -> torch.dtype:
    """Return the dtype in which the model computes. `name` is the option --dtype.

    "auto" is the checkpoint's dtype, or float32 if the CPU would only emulate that dtype. On a CPU, float16 is computed
    in float32. `kernels` are the C kernels for CPUs, or None if they do not compute the matrix multiplications.
    """
    if device.type == "cpu" and _DTYPES.get(name) == torch.float16:
        held = (
            "held in 16 bits"
            if kernels is not None
            else "in float32 too, since only the C kernels convert 16-bit weights"
        )
        logger.info("--dtype is %s: a CPU computes in float32, over weights %s", name, held)
        return torch.float32
    if name != "auto":
        return _DTYPES[name]
    dtype = _DTYPES[checkpoint_dtype]
    if device.type == "cpu" and not _is_native_on_cpu(dtype, kernels):
        logger.info("this CPU does not compute %s natively: computing in float32", checkpoint_dtype)
        return torch.float32
    return dtype


def _is_native_on_cpu(dtype: torch.dtype, kernels: CpuKernels | None) -> bool:
    if dtype == torch.bfloat16 and kernels is not None:
        return "avx512_bf16" in VARIANTS[kernels.variant]
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@dataclass(frozen=True, slots=True)
class _RunnerParts:
    """All parts from which a model runner is built, except the number of KV cache blocks.

    On a GPU, they are used twice. A temporary runner with few blocks is built first, to measure the memory that steps
    need.
    """

    config: WorkerConfig
    model: Decoder
    network: Network  # of this rank
    alibi_slopes: tuple[float, ...]  # of all ranks
    dtype: torch.dtype
    quantization: str  # done while loading; empty if none
    weight_format: str
    weight_bytes: int
    backend: AttentionBackend
    shape: CacheShape
    windows: tuple[int, ...]  # of each layer group
    device: torch.device
    max_model_len: int
    communicator: Communicator
    streams: CudaDevice | None  # set on a GPU
    kernels: CpuKernels | None
    digest: bytes  # of the model
    dense: tuple[DenseLayer, ...]
    grammars: EpochGrammars | None = None  # set before the final runner is built

    def runner(
        self, device: Counts, host: Counts = NOTHING, *, splits_steps: bool = True
    ) -> tuple[ModelRunner, CacheEngine]:
        """Allocate a KV cache with pools of these sizes. Return (runner, cache), where the runner uses the cache.

        `splits_steps` allows a step to be computed in parts if memory does not suffice. It is ignored if there are
        several ranks, because all ranks would have to split the step in the same way.
        """
        splits_steps = splits_steps and self.communicator.size == 1
        cache = CacheEngine(
            self.shape,
            device.num_blocks,
            self.device,
            host.num_blocks,
            self.streams,
            state_size=self.network.state_size,
            num_device_states=device.num_states,
            num_host_states=host.num_states,
        )
        computation = self._computation(cache)
        return ModelRunner(computation, cache, self.communicator, splits_steps, self.grammars), cache

    def _computation(self, cache: CacheEngine) -> Computation:
        limits = TableLimits(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.shape.block_size,
            num_device_blocks=cache.num_device_blocks,
            vocab_size=self.network.vocab_size,
            windows=self.windows,
            is_bidirectional=self.network.is_bidirectional,
            num_device_states=cache.num_device_states,
        )
        table = SequenceTable(limits, gates_grammars=self.streams is not None)
        pooler, states = Pooler(self.dense), cache.states if cache.num_device_states else None
        if self.streams is None:
            model = host_model(self.model, self.backend)
            return HostComputation(model, cache.layers, self.backend, table, self.kernels, pooler, states)
        graphs = (self.config.max_graph_batch_size, self.config.max_graph_tokens)
        sampler = create_sampler(limits.vocab_size)
        of_host = (sampler, table, self.streams, pooler, *graphs, states)
        return DeviceComputation(self.model, cache.layers, self.backend, *of_host)

    def ready(self, worker_id: str, cache: CacheEngine, swap_bandwidth: float, grammar_version: str) -> WorkerCapacity:
        """Return the capacity that the worker reports to the scheduler, such as its limits and block counts."""
        return WorkerCapacity(
            worker_id=worker_id,
            model_digest=self.digest,
            vocab_size=self.network.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.shape.block_size,
            num_device_blocks=cache.num_device_blocks,
            block_bytes=self.shape.block_bytes,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            device=self.device.type,
            dtype=str(self.dtype).removeprefix("torch."),
            attention_backend=self.backend.name,
            num_host_blocks=cache.num_host_blocks,
            swap_bandwidth=swap_bandwidth,
            layer_groups=tuple(
                messages.LayerGroup(window, len(layers))
                for window, layers in zip(self.windows, self.shape.groups, strict=True)
            ),
            tensor_parallel_rank=self.communicator.rank,
            tensor_parallel_size=self.communicator.size,
            quantization=self.quantization,
            weight_format=self.weight_format,
            weight_bytes=self.weight_bytes,
            grammar_version=grammar_version,
            gates_grammars=self.streams is not None,
            is_bidirectional=self.network.is_bidirectional,
            tables_digest=self.model.tables_digest(self.alibi_slopes),
            num_device_states=cache.num_device_states,
            num_host_states=cache.num_host_states,
            state_bytes=cache.states[0].nbytes,
            num_state_layers=num_state_layers(self.network),
            max_leased_steps=_MAX_LEASED_STEPS if self.streams is None and self.communicator.size == 1 else 0,
        )

    def counts(self, sizes: PoolSize) -> tuple[Counts, Counts]:
        """Return the numbers of blocks and states on the device and in the host's swap space.

        The configuration sets these numbers. By default they follow from the available memory, up to the number of
        blocks that the maximum number of sequences could use together.
        """
        available = available_bytes()
        if self.device.type == "cpu":
            return sizes.counts_of_cpu(available)
        num_local_ranks = min(self.communicator.size, torch.cuda.device_count())
        host = sizes.host_counts(available, default_swap_bytes(self.device.type, available, num_local_ranks))
        return sizes.gpu_counts(self._measure_memory(sizes, host), largest_step_size(self.config)), host

    def _measure_memory(self, sizes: PoolSize, host: Counts) -> DeviceMemory:
        """Run the largest possible step on a temporary runner.

        Return the GPU memory that the worker needs besides the KV cache. `host` is the size of the swap space.
        """
        pools = ((host.num_blocks, sizes.block_bytes), (host.num_states, sizes.state_bytes))
        memory = measure_memory(
            CudaMeter(self.device),
            lambda counts: self.runner(counts, splits_steps=False)[0],
            step=largest_step_size(self.config),
            sizes=sizes,
            block_size=self.shape.block_size,
            staging_bytes=sum(num_staging_blocks(*pool) * pool[1] for pool in pools if pool[0]),
        )
        if self.communicator.size > 1:
            memory = replace(memory, exchange=EXCHANGE_BYTES)
        logger.info("%s", memory.describe())
        return memory


def largest_step_size(config: WorkerConfig) -> StepSize:
    return StepSize(config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens))


def check_memory(unloaded: UnloadedModel, sizes: PoolSize) -> None:
    """Raise ValueError if memory is clearly too small for the weights or the KV cache.

    Call this before the weights are loaded. On a GPU the memory that steps need is not known yet. It is measured after
    the weights are loaded.
    """
    footprint, device = unloaded.footprint(), unloaded.device
    if device.type == "cpu":
        available = available_bytes()
        held_in = unloaded.describe_dtypes()
        check_cpu_weights(available=available, held=footprint.held, peak=footprint.peak, held_in=held_in)
        cache_bytes = sum(map(sizes.size, sizes.counts_of_cpu(available - footprint.held)))
        announce_memory(
            f"{describe_memory(footprint.held)} of weights, {describe_memory(footprint.peak)} while they load, and "
            f"{describe_memory(cache_bytes)} of KV cache; {describe_memory(available)} were "
            "available: use a smaller model, lower --kv-cache-memory, or stop other programs that use memory"
        )
        return
    free, total = torch.cuda.mem_get_info(device)
    if footprint.held > free:
        raise weights_refusal(total=total, free=free, needed=footprint.held)
    sizes.host_counts(available_bytes())
    least = DeviceMemory(total=total, others=total - free, weights=footprint.held, step=0, graphs=0, staging=0)
    sizes.gpu_counts(least, largest_step_size(sizes.config))


def log_formats(unloaded: UnloadedModel) -> None:
    """Log how the model's quantised weights are stored, and their size in memory and in the checkpoint's files. The
    first rank also logs which tensors of the checkpoint are not used.

    A model without quantised weights and unused tensors logs nothing.
    """
    if unloaded.unused and unloaded.model.communicator.rank == 0:
        logger.info("%s", describe_parts(unloaded.unused))
    description = unloaded.describe_quantization()
    if description is not None:
        held, stored = unloaded.footprint().held, unloaded.checkpoint.num_bytes()
        of_files = f", its files {describe_memory(stored)}" if stored else ""
        logger.info("%s; the model takes %s%s", description, describe_memory(held), of_files)


def log_adapter(path: Path) -> None:
    """Log a warning if there is an adapter beside the model in a checkpoint directory."""
    if (path / ADAPTER_FILE).is_file():
        logger.warning(
            "%s: the adapter beside the model is not applied, but transformers applies it if peft is installed; to "
            "use it, merge it into the model with merge_and_unload of peft",
            ADAPTER_FILE,
        )


def log_long_rope(rope: RopeConfig | None, max_model_len: int) -> None:
    """Log a warning if a LongRoPE model uses its factors for long sequences for all sequences.

    This happens if `max_model_len` exceeds the model's original number of positions. Outputs of short sequences then
    differ from transformers.
    """
    if rope is not None and rope.short_divisors:
        original = rope.original_max_position_embeddings
        logger.warning(
            "LongRoPE: the model has factors for sequences of at most %d tokens and other factors for longer ones; "
            "since max_model_len is %d, all sequences use the factors for longer ones, so outputs of short sequences "
            "differ from transformers; with --max-model-len %d all sequences use the factors for short ones, as in "
            "transformers",
            original,
            max_model_len,
            original,
        )


def _importance(config: WorkerConfig, digest: bytes) -> Importance | None:
    """Read the file of --calibrate, if there is one. Raises ValueError if it is of a model with another configuration
    or tokenizer."""
    if config.calibrate is None:
        return None
    found = Importance.load(Path(config.calibrate))
    if found.model_digest != digest:
        raise ValueError(f"--calibrate is {config.calibrate}, which was made with another model: calibrate this one")
    return found


def _describe_quantization(config: WorkerConfig, importance: Importance | None) -> str:
    """Return a text that differs if weights are quantised differently while they load."""
    calibrated = "" if importance is None else f" calibrated {importance.digest()[:16]}"
    return (config.quantization or "") + calibrated


def _packed_cache(
    config: WorkerConfig,
    unloaded: UnloadedModel,
    kernels: CpuKernels | None,
    digest: bytes,
    importance: Importance | None,
) -> PackedCache | None:
    """Return the disk cache of a CPU model's quantised weights, or None if the worker does not use such a cache.

    The cache is used only if the weights are quantised at the start, the C kernels are available, and a folder is
    configured.
    """
    folder, path = quantized_folder(), Path(config.model)
    if config.quantization is None or config.load_format == "dummy" or folder is None or kernels is None:
        return None
    identity = {
        "checkpoint": str(path.resolve()),
        "model": digest.hex(),
        "weights": weights_digest(path),
        "quantization": config.quantization,
    }
    if importance is not None:
        identity["calibration"] = importance.digest()
    return PackedCache(folder, kernels, unloaded.dtype, identity)


def _load_weights(unloaded: UnloadedModel, report: LoadProgress, cache: PackedCache | None) -> Decoder:
    """Load the model's weights and return the model. Quantised weights are read from `cache` if it has them.

    Raises ValueError if memory turns out to be insufficient.
    """
    kept = None if cache is None or cache.is_empty else cache
    if kept is not None:
        logger.info("reading weights that were quantised and packed at an earlier start: %s", kept.path)
    report.begin_tensors(unloaded.quantization if kept is None else None)
    needed, device = unloaded.footprint().held, unloaded.device
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (available_bytes(), 0)
    try:
        model = unloaded.load(report) if cache is None else unloaded.load(report, cache.find)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if device.type == "cuda":
            raise weights_refusal(total=total, free=free, needed=needed) from error
        raise ValueError(
            f"the weights, {describe_memory(needed)}, cannot be allocated: this process may have a lower limit"
        ) from error
    if cache is not None:
        cache.keep(unloaded.model)
    return model


def _allocate(assembly: _RunnerParts, sizes: PoolSize, device: Counts, host: Counts) -> tuple[ModelRunner, CacheEngine]:
    """Allocate the KV cache's pools and build the model runner.

    Raises ValueError if the allocation fails, although the estimate of memory said that the pools fit.
    """
    try:
        return assembly.runner(device, host)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        pools = (
            f"{counts.num_blocks} {where} blocks{f' and {counts.num_states} states' if counts.num_states else ''}, "
            f"{describe_memory(sizes.size(counts))}"
            for where, counts in (("device", device), ("host", host))
        )
        raise ValueError(
            f"the KV cache cannot be allocated: {', and '.join(pools)}: lower --num-device-blocks or "
            "--kv-cache-memory, and --swap-space"
        ) from error


def log_reduced_sizes(config: WorkerConfig, sizes: PoolSize) -> None:
    """Log a warning if the worker uses less KV cache memory, or fewer sequences, than its options request."""
    lowered = sizes.describe_reduced()
    if lowered is not None:
        logger.warning("%s", lowered)
    if config.max_num_seqs > config.max_num_batched_tokens:
        logger.warning(
            "--max-num-seqs is %d, but at most %d sequences run at the same time: a step computes a token of each, and "
            "--max-num-batched-tokens is %d",
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_num_batched_tokens,
        )


def log_longest_prompt(max_num_batched_tokens: int, max_model_len: int) -> None:
    """Log a warning if prompts of a bidirectional model may be longer than a step, which must compute them whole."""
    if max_num_batched_tokens < max_model_len - 1:
        logger.warning(
            "the model computes a prompt in one step, so prompts of more than %d tokens are refused: raise "
            "--max-num-batched-tokens; max_model_len is %d",
            max_num_batched_tokens,
            max_model_len,
        )


def log_size(shape: CacheShape, num_device_blocks: int, max_model_len: int, windows: tuple[int, ...] = (0,)) -> None:
    """Log the size of the KV cache, and a warning if it is too small for one sequence of the maximum length.

    `windows` has the window of each layer group.
    """
    num_needed = blocks_of_sequence(windows, max_model_len, shape.block_size, 1)
    logger.info(
        "KV cache: %d blocks of %d tokens, enough for %.2f sequences of max_model_len (%d), %s",
        num_device_blocks,
        shape.block_size,
        num_device_blocks / num_needed,
        max_model_len,
        describe_memory((num_device_blocks + 1) * shape.block_bytes),
    )
    if num_device_blocks < num_needed:
        logger.warning(
            "the KV cache has %d blocks, less than one sequence of max_model_len %d needs (%d): longer requests are "
            "refused; raise the memory or lower --max-model-len",
            num_device_blocks,
            max_model_len,
            num_needed,
        )


def log_states(network: Network, num_states: int) -> None:
    """Log the number and the size of the states, if the model has any."""
    if num_states:
        state_bytes = network.state_size * torch.float32.itemsize
        logger.info(
            "states of %d layers: %d of %s each, %s",
            num_state_layers(network),
            num_states,
            describe_memory(state_bytes),
            describe_memory((num_states + 1) * state_bytes),
        )
