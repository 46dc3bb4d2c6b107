"""The division of a GPU's memory. It is pure arithmetic: `loader.py` measures, and allocates what comes out here.

    total * utilization = others + weights + largest step + graphs + staging + exchange + KV cache

The largest step is run before the pool exists, with every buffer that the runner keeps, and its peak is measured. CUDA
graphs cannot be: they hold the pool's addresses, so the pool comes first. They keep memory of their own, which steps
cannot use meanwhile, about that of the largest one since all share it; so what that will hold is run too, uncaptured,
and its peak reserved, with an allowance for what the driver keeps of each graph. Nor can what ranks exchange by: they
meet when an epoch begins, and each may be started again alone.
"""

from dataclasses import dataclass

from pagewire.common.process.memory_size import describe_memory

GIB = 1 << 30
_DRIVER_BYTES_PER_GRAPH = 4 << 20  # an allowance
# An allowance for the buffers of NCCL, which it allocates by itself when ranks meet: some 10 MiB for each channel and
# protocol, of which there are up to 32 and 3 between GPUs of a machine.
EXCHANGE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step there can be."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory beside the pool of blocks, in bytes."""

    total: int
    others: int  # other processes, and what CUDA itself and its libraries keep for this one
    weights: int
    step: int  # the largest step at its peak, and what the runner keeps from step to step
    graphs: int
    staging: int  # where blocks are gathered that move to the host
    exchange: int = 0  # what ranks exchange by

    def left(self, utilization: float) -> int:
        """Bytes for the pool, block 0 included, if so much of the memory may be used; may be below 0."""
        used = self.others + self.weights + self.step + self.graphs + self.staging + self.exchange
        return int(self.total * utilization) - used

    def describe(self) -> str:
        """Return all figures of the memory in words, for logs and refusals."""
        parts = {
            "weights": self.weights,
            "the largest step": self.step,
            "CUDA graphs": self.graphs,
            "staging": self.staging,
            "what ranks exchange by": self.exchange,
            "CUDA itself and other processes": self.others,
        }
        taken = ", ".join(f"{name} {describe_memory(size)}" for name, size in parts.items() if size)
        return f"of the GPU's {describe_memory(self.total)}, {taken}"


def graph_bytes(*, largest_bytes: int, num_graphs: int) -> int:
    """Return the bytes that CUDA graphs which share one pool of memory will keep.

    `largest_bytes`: what the largest of the captured steps takes at its peak.
    """
    return largest_bytes + num_graphs * _DRIVER_BYTES_PER_GRAPH if num_graphs else 0


def size_pool(
    memory: DeviceMemory, *, utilization: float, block_bytes: int, max_num_blocks: int, step: StepSize
) -> int:
    """Usable blocks by --gpu-memory-utilization, at most `max_num_blocks`. Raises ValueError if there is no room."""
    num_blocks = min(memory.left(utilization) // block_bytes - 1, max_num_blocks)
    if num_blocks >= 1:
        return num_blocks
    if memory.left(1.0) // block_bytes - 1 >= 1:
        remedy = f"raise --gpu-memory-utilization, which is {utilization}, or {_smaller_step(step)}"
    elif memory.weights + memory.others + 2 * block_bytes > memory.total:
        remedy = "the weights alone leave no room: use a GPU with more memory, or do not share it"
    else:
        remedy = _smaller_step(step)
    raise ValueError(
        f"no block of the KV cache fits: {memory.describe()}; two blocks take {describe_memory(2 * block_bytes)}; "
        f"{remedy}"
    )


def check_pool(*, left: int, memory: str, flag: str, asked: str, num_blocks: int, block_bytes: int) -> None:
    """Raises ValueError if as many usable blocks as `flag` asks for do not fit into the bytes that are left.

    `memory`: what there is, for people.
    """
    num_fitting = left // block_bytes - 1
    if num_blocks > num_fitting:
        fitting = f"{num_fitting} blocks fit, {describe_memory((num_fitting + 1) * block_bytes)}"
        raise ValueError(
            f"{flag} is {asked}: {num_blocks} blocks take {describe_memory((num_blocks + 1) * block_bytes)}; {memory}; "
            f"{'no block fits' if num_fitting < 1 else fitting}: lower {flag}"
        )


def check_cpu_weights(*, available: int, held: int, peak: int, held_in: str) -> None:
    """Raises ValueError if a CPU's memory does not hold the weights, or what they take for a while as they load.

    `held_in`: the dtypes that the weights are in, for people.
    """
    if peak <= available:
        return
    while_loading = f", {describe_memory(peak)} while they load" if peak > held else ""
    raise ValueError(
        f"the weights do not fit: in {held_in} they take {describe_memory(held)}{while_loading}, and "
        f"{describe_memory(available)} of memory are available: take a smaller model, a machine with more memory, "
        "or end what else uses this one's"
    )


def step_refusal(*, total: int, free: int, weights: int, step: StepSize) -> ValueError:
    """The largest step ran out of memory beside the weights. Bytes; `free`: with the weights loaded."""
    return ValueError(
        f"a step of {step.num_tokens} tokens in {step.num_rows} rows does not fit: of the GPU's "
        f"{describe_memory(total)}, weights {describe_memory(weights)}, and {describe_memory(free)} are free; no block "
        f"fits: {_smaller_step(step)}"
    )


def weights_refusal(*, total: int, free: int, needed: int) -> ValueError:
    """The weights do not fit. Bytes; `free`: before they are loaded."""
    return ValueError(
        f"the weights do not fit: they take {describe_memory(needed)}, and {describe_memory(free)} of the GPU's "
        f"{describe_memory(total)} are free; no block fits: use a GPU with more memory, end what else uses this one, "
        "or share the model among ranks (--tensor-parallel-size)"
    )


def _smaller_step(step: StepSize) -> str:
    return (
        f"lower --max-num-batched-tokens, which is {step.num_tokens}, or --max-num-seqs, by which a step has "
        f"{step.num_rows} rows"
    )
