"""The division of a GPU's memory. This module calculates sizes; `loader.py` measures and allocates.

 total * utilization = others + weights + largest step + graphs + staging + exchange + states + KV cache

The largest step runs before the block pool exists, with every buffer that the runner keeps, and its peak is measured.

The memory of CUDA graphs cannot be measured, because graphs contain the addresses of the pool, which must exist first.
Graphs keep memory that steps cannot use. All graphs share it, so it is about as large as the largest graph's. The
largest graph's operations are therefore run uncaptured. Their peak is reserved, with an allowance for the memory that
the driver keeps for each graph.

The memory for the exchange between ranks cannot be measured either. Ranks connect only when an epoch begins, and each
rank may be restarted alone.
"""

from dataclasses import dataclass

from pagewire.common.process.memory_size import describe_memory

GIB = 1 << 30
_DRIVER_BYTES_PER_GRAPH = 4 << 20  # an allowance, not a measurement
# An allowance for NCCL's buffers, which NCCL allocates when ranks connect: about 10 MiB for each channel and protocol.
# There are up to 32 channels and 3 protocols between the GPUs of one machine.
EXCHANGE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of the largest possible step of a worker: its number of new tokens and of sequences."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The sizes of the parts of a GPU's memory in bytes, without the block pool of the KV cache."""

    total: int
    others: int  # other processes, and memory that CUDA and its libraries reserve for this process
    weights: int
    step: int  # peak of the largest step, and buffers that the runner keeps between steps
    graphs: int
    staging: int  # buffer in which blocks that move to the host are gathered
    exchange: int = 0  # buffers for communication between ranks
    states: int = 0  # the pool of states, of a model that has states

    def left(self, utilization: float) -> int:
        """Return the bytes of GPU memory that are left for the KV cache, including the unused block 0.

        The result may be negative. `utilization` is the share of the GPU's memory that the worker may use, from 0 to 1.
        """
        used = self.others + self.weights + self.step + self.graphs + self.staging + self.exchange + self.states
        return int(self.total * utilization) - used

    def describe(self) -> str:
        """Return the parts of the GPU's memory and their sizes as one line of text, for logs and error messages."""
        parts = {
            "weights": self.weights,
            "the largest step": self.step,
            "CUDA graphs": self.graphs,
            "staging": self.staging,
            "buffers for the exchange between ranks": self.exchange,
            "states": self.states,
            "CUDA itself and other processes": self.others,
        }
        taken = ", ".join(f"{name} {describe_memory(size)}" for name, size in parts.items() if size)
        return f"of the GPU's {describe_memory(self.total)}, {taken}"


def graph_bytes(*, largest_bytes: int, num_graphs: int) -> int:
    """Return an estimate of the GPU memory, in bytes, that captured CUDA graphs will keep.

    All graphs share one memory pool. `largest_bytes` is the peak memory of the largest captured step.
    """
    return largest_bytes + num_graphs * _DRIVER_BYTES_PER_GRAPH if num_graphs else 0


def size_pool(
    memory: DeviceMemory, *, utilization: float, block_bytes: int, max_num_blocks: int, step: StepSize
) -> int:
    """Return how many KV cache blocks fit into the share `utilization` of a GPU's memory, at most `max_num_blocks`.

    `step` is the largest step, for the error message. Raises ValueError if no block fits.
    """
    num_blocks = min(memory.left(utilization) // block_bytes - 1, max_num_blocks)
    if num_blocks >= 1:
        return num_blocks
    if memory.left(1.0) // block_bytes - 1 >= 1:
        remedy = f"raise --gpu-memory-utilization, which is {utilization}, or {_smaller_step(step)}"
    elif memory.weights + memory.others + 2 * block_bytes > memory.total:
        remedy = "the weights alone leave no room: use a GPU with more memory, or stop other programs on this GPU"
    else:
        remedy = _smaller_step(step)
    raise ValueError(
        f"no block of the KV cache fits: {memory.describe()}; two blocks take {describe_memory(2 * block_bytes)}; "
        f"{remedy}"
    )


def check_pool(*, left: int, memory: str, flag: str, asked: str, num_blocks: int, block_bytes: int) -> None:
    """Raise ValueError if `num_blocks` KV cache blocks and the unused block 0 do not fit into `left` bytes of memory.

    `flag` and `asked` are the option that requested the blocks and its value. `memory` describes the use of the memory
    for the error message.
    """
    num_fitting = left // block_bytes - 1
    if num_blocks > num_fitting:
        fitting = f"{num_fitting} blocks fit, {describe_memory((num_fitting + 1) * block_bytes)}"
        raise ValueError(
            f"{flag} is {asked}: {num_blocks} blocks take {describe_memory((num_blocks + 1) * block_bytes)}; {memory}; "
            f"{'no block fits' if num_fitting < 1 else fitting}: lower {flag}"
        )


def check_cpu_weights(*, available: int, held: int, peak: int, held_in: str) -> None:
    """Raise ValueError if a CPU's memory cannot hold the model's weights, or their peak size during loading.

    `available`, `held` and `peak` are in bytes. `held_in` names the dtypes of the weights for the error message.
    """
    if peak <= available:
        return
    while_loading = f", {describe_memory(peak)} while they load" if peak > held else ""
    raise ValueError(
        f"the weights do not fit: in {held_in} they take {describe_memory(held)}{while_loading}, and "
        f"{describe_memory(available)} of memory are available: use a smaller model or a machine with more "
        "memory, or stop other programs on this machine"
    )


def step_refusal(*, total: int, free: int, weights: int, step: StepSize) -> ValueError:
    """Return the error to raise if the largest possible step runs out of GPU memory during the worker's start.

    Sizes are in bytes. `free` is measured after the weights have been loaded.
    """
    return ValueError(
        f"a step of {step.num_tokens} tokens in {step.num_rows} rows does not fit: of the GPU's "
        f"{describe_memory(total)}, weights {describe_memory(weights)}, and {describe_memory(free)} are free; no block "
        f"fits: {_smaller_step(step)}"
    )


def weights_refusal(*, total: int, free: int, needed: int) -> ValueError:
    """Return the error to raise if the model's weights do not fit into the GPU's memory.

    Sizes are in bytes. `free` is measured before the weights load.
    """
    return ValueError(
        f"the weights do not fit: they take {describe_memory(needed)}, and {describe_memory(free)} of the GPU's "
        f"{describe_memory(total)} are free; no block fits: use a GPU with more memory, stop other programs on "
        "this GPU, or split the model across ranks (--tensor-parallel-size)"
    )


def _smaller_step(step: StepSize) -> str:
    return (
        f"lower --max-num-batched-tokens, which is {step.num_tokens}, or --max-num-seqs, by which a step has "
        f"{step.num_rows} rows"
    )
