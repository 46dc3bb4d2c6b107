"""Checks that find, without torch, why a worker could not start. They take milliseconds and run before any start.

Checks that need torch are in `loader.py`, for example whether there is a GPU, and which dtype a CPU computes in.
"""

from collections.abc import Mapping
from pathlib import Path

from pagewire.common.gguf import is_gguf
from pagewire.common.process.memory_size import describe_memory
from pagewire.network.checkpoint_files import FLOAT_BYTES, CheckpointError, TensorHeader
from pagewire.network.network import Network
from pagewire.network.operations import num_elements
from pagewire.network.rewrites import cut, tied
from pagewire.network.source import load_config, model_digest, read_headers
from worker_service.config import WorkerConfig
from worker_service.startup.resources import available_bytes

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # at least one of them exists if torch can find a GPU
_32_BITS = ("float32", "F32")
_16_BITS = ("bfloat16", "float16", "half", "BF16", "F16")


def check_worker(config: WorkerConfig, num_local_ranks: int = 1) -> bytes:
    """Check that a worker can start with this configuration, without starting it. Return the digest of the model.

    Computing the digest takes a while. `num_local_ranks` is the number of ranks that start on this machine. Raises
    ValueError with a one-line message for an error that every start would repeat.
    """
    config.validate()
    path = Path(config.model)
    if not path.is_dir() and not is_gguf(path):
        raise ValueError(f"--model is {config.model!r}, but that is neither a directory nor a GGUF file")
    try:
        model = load_config(path)
        digest = model_digest(path)
        choose_max_model_len(config.max_model_len, model.max_position_embeddings)
        headers = {} if config.load_format == "dummy" else read_headers(path)
    except CheckpointError as error:
        raise ValueError(f"--model {config.model}: {error}") from error
    if config.quantization is not None:
        _check_unquantized(config, model, headers)
    listed = tied(model.operations) if model.tie_word_embeddings else model.operations
    own = cut(listed, config.tensor_parallel_rank, config.tensor_parallel_size)
    if config.device == "cpu" or (config.device == "auto" and not any(Path(file).exists() for file in _GPU_FILES)):
        computed = model.dtype if config.dtype == "auto" else config.dtype
        bits = _least_bits({config.quantization or computed, *(header.dtype for header in headers.values())})
        weights = num_local_ranks * num_elements(own) * bits // 8
        available = available_bytes()
        if weights > available:
            raise ValueError(
                f"--model {config.model}: its weights take at least {describe_memory(weights)}, and "
                f"{describe_memory(available)} of memory are available: use a smaller model or a machine with more "
                "memory, or stop other programs on this machine"
            )
    return digest


def _check_unquantized(config: WorkerConfig, model: Network, headers: Mapping[str, TensorHeader]) -> None:
    """Raise ValueError if --quantization is set for a checkpoint whose weights are quantised already."""
    found = {header.dtype for header in headers.values()} - FLOAT_BYTES.keys()
    if model.quantization is not None:
        found = {model.quantization.method}
    if found:
        raise ValueError(
            f"--quantization is {config.quantization}, but --model {config.model} is quantised already "
            f"({', '.join(sorted(found))}); leave it out, or use the model in float32, bfloat16 or float16"
        )


def _least_bits(dtypes: set[str]) -> int:
    """Return the fewest bits in which a CPU worker could store a weight, to estimate the minimum size of the weights.

    `dtypes` are the dtypes in the checkpoint, and the dtype in which the model computes. Weights may be stored in any
    of them.
    """
    if not dtypes <= {*_32_BITS, *_16_BITS}:
        return 4
    return 32 if dtypes.isdisjoint(_16_BITS) else 16


def choose_max_model_len(asked: int | None, max_position_embeddings: int) -> int:
    """Return the maximum length of a sequence in tokens: `asked`, or by default the checkpoint's number of positions.

    Raises ValueError if `asked` exceeds the checkpoint's number of positions.
    """
    if asked is not None and asked > max_position_embeddings:
        raise ValueError(
            f"--max-model-len is {asked}; the checkpoint has {max_position_embeddings} positions at most: lower it"
        )
    return asked or max_position_embeddings
