"""The numbers of blocks and states in each pool, from the configuration or by default.

This module calculates sizes and allocates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagewire.common.process.memory_size import describe_memory, parse_memory
from worker_service.config import WorkerConfig
from worker_service.startup.device_memory import GIB, DeviceMemory, StepSize, check_pool, size_pool

_MAX_DEFAULT_CPU_BYTES = 4 * GIB
_DEFAULT_CPU_SHARE = 0.3
_MAX_DEFAULT_SWAP_BYTES = 4 * GIB
_DEFAULT_SWAP_SHARE = 10  # divisor: a tenth of the available memory
# A sequence is assumed to need this number of states and the KV cache of this number of tokens. A row writes one or two
# states, and other sequences may continue from the states that it has saved.
_STATES_OF_SEQUENCE = 3
_MAX_TOKENS_OF_SEQUENCE = 4096
_MIN_STATES = 12  # enough for a beam search with 5 beams
_MIN_SHARE_OF_STATES = 16  # divisor: a sixteenth of the pool. If a state is small, many more can be cached.


def cpu_cache_bytes(available_bytes: int) -> int:
    """Return the default size, in bytes, of the KV cache on a CPU: a share of the available memory, up to a limit.

    The share is modest, because other programs use the same memory.
    """
    return min(_MAX_DEFAULT_CPU_BYTES, int(available_bytes * _DEFAULT_CPU_SHARE))


def default_swap_bytes(device: str, available_bytes: int, num_local_ranks: int) -> int:
    """Return the default size, in bytes, of the host memory to which KV cache blocks are swapped out.

    On a GPU the default is a share of `available_bytes`, divided among the `num_local_ranks` ranks of this machine. On
    a CPU the default is 0: device blocks and host blocks would use the same memory, and only device blocks can be
    computed with.
    """
    if device == "cpu":
        return 0
    return min(_MAX_DEFAULT_SWAP_BYTES, available_bytes // _DEFAULT_SWAP_SHARE // num_local_ranks)


def blocks_of_sequence(windows: Sequence[int], max_model_len: int, block_size: int, num_step_tokens: int) -> int:
    """Return how many KV cache blocks one sequence of the maximum length uses at the same time, in all layer groups.

    `windows` has the window of each layer group, or 0. A group with a window needs blocks for the positions that the
    `num_step_tokens` tokens of a step read and write. The first of these positions may be the last of a block.
    """
    num_whole = -(-max_model_len // block_size)
    return sum(
        min(num_whole, (window + num_step_tokens + block_size - 3) // block_size + 1) if window else num_whole
        for window in windows
    )


def count_blocks(
    *,
    cache_bytes: int,
    block_bytes: int,
    max_num_blocks: int,
    remedy: str,
    num_states: int = 0,
    state_bytes: int = 0,
) -> int:
    """Return how many KV cache blocks fit into `cache_bytes` besides the unused block 0 and the states.

    The result is at most `max_num_blocks`. Raises ValueError with the needed size and the text `remedy` if not even one
    block fits.
    """
    states = _with_unused(num_states, state_bytes)
    num_blocks = min((cache_bytes - states) // block_bytes - 1, max_num_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"the KV cache may use {describe_memory(cache_bytes)}, but {_describe_least(num_states)} need "
            f"{describe_memory(2 * block_bytes + states)}; {remedy}"
        )
    return num_blocks


def _describe_least(num_states: int) -> str:
    return f"two blocks and {num_states + 1} states" if num_states else "two blocks"


class Counts(NamedTuple):
    """The numbers of blocks and states in a pool, without the unused block 0 and state 0."""

    num_blocks: int
    num_states: int = 0


NOTHING = Counts(0)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The configured size of the KV cache, from which the numbers of blocks and states in both pools are computed.

    `max_num_blocks` is the number of blocks that the maximum number of sequences, at maximum length, could use
    together. A sequence needs at least one block in each of `num_groups` layer groups. `state_bytes` is the size of a
    state, and `max_model_len` the maximum length; 0: the model has no states.
    """

    config: WorkerConfig
    block_bytes: int
    max_num_blocks: int
    num_groups: int = 1
    state_bytes: int = 0
    max_model_len: int = 0

    def num_states(self, pool_bytes: int) -> int:
        """Return the number of states in a pool of `pool_bytes`. The rest of the pool is for blocks.

        The rule: the pool has the states and the blocks of the same number of sequences. A sequence is assumed to need
        3 states and the blocks of 4,096 tokens, or of the maximum length if it is lower. But states get at least a
        sixteenth of the pool. There are at least 12 states, and at most 4 for each sequence that may run and 4 more.
        """
        if not self.state_bytes:
            return 0
        sequence_bytes = _STATES_OF_SEQUENCE * self.state_bytes + self._blocks_of_sequence * self.block_bytes
        num_least = pool_bytes // (_MIN_SHARE_OF_STATES * self.state_bytes)
        return self._limited(max(_STATES_OF_SEQUENCE * pool_bytes // sequence_bytes, num_least) - 1)

    def num_states_beside(self, num_blocks: int) -> int:
        """Return the number of states in a pool that has the given number of blocks, by the same rule."""
        if not self.state_bytes or not num_blocks:
            return 0
        num_least = num_blocks * self.block_bytes // ((_MIN_SHARE_OF_STATES - 1) * self.state_bytes)
        return self._limited(max(_STATES_OF_SEQUENCE * num_blocks // self._blocks_of_sequence, num_least))

    def _limited(self, num_states: int) -> int:
        return min(max(num_states, _MIN_STATES), 4 * self.config.max_num_seqs + 4)

    @property
    def _blocks_of_sequence(self) -> int:
        num_tokens = min(self.max_model_len, _MAX_TOKENS_OF_SEQUENCE)
        return self.num_groups * -(-num_tokens // self.config.choose_block_size())

    def size(self, counts: Counts) -> int:
        """Return the size of a pool in bytes, with block 0 and state 0."""
        return _with_unused(counts.num_blocks, self.block_bytes) + _with_unused(counts.num_states, self.state_bytes)

    def host_counts(self, available_bytes: int, default_bytes: int = 0) -> Counts:
        """Return the sizes of the swap space in host memory that the options request, or that fit into `default_bytes`.

        Raises ValueError if the requested size exceeds `available_bytes`, or is too small for one block.
        """
        config = self.config
        if config.swap_space is not None:
            flag, asked = "--swap-space", config.swap_space
            pool_bytes = parse_memory("--swap-space", config.swap_space, least=0)
            if pool_bytes == 0:
                return NOTHING
            counts = self._divide(pool_bytes)
            if counts.num_blocks < 1:
                raise ValueError(
                    f"--swap-space is {asked}; {_describe_least(counts.num_states)} take "
                    f"{self.size(Counts(1, counts.num_states))} bytes: raise it, or set it to 0"
                )
        elif config.num_host_blocks is not None:
            flag, asked = "--num-host-blocks", str(config.num_host_blocks)
            counts = Counts(config.num_host_blocks, self.num_states_beside(config.num_host_blocks))
            pool_bytes = self.size(counts)
        else:
            counts = self._divide(default_bytes)
            return counts if counts.num_blocks > 0 else NOTHING
        if pool_bytes > available_bytes:
            raise ValueError(
                f"{flag} is {asked}, which takes {describe_memory(pool_bytes)}; "
                f"{describe_memory(available_bytes)} of memory are available: lower it"
            )
        return counts

    def _divide(self, pool_bytes: int) -> Counts:
        """Divide a pool between states and blocks. The number of blocks may be too low for use."""
        num_states = self.num_states(pool_bytes)
        left = pool_bytes - _with_unused(num_states, self.state_bytes)
        return Counts(left // self.block_bytes - 1, num_states)

    def device_counts(self, available_bytes: int) -> Counts:
        """Return the sizes of the KV cache of a CPU worker, without its swap space.

        The sizes are set by an option or follow from `available_bytes`. Raises ValueError if the memory is too small
        for the requested sizes, or for a block of each layer group.
        """
        left = max(0, available_bytes)
        asked = self._counts_asked(left, f"{describe_memory(left)} of memory are available")
        if asked is not None:
            return self._checked(asked)
        remedy = "free memory, set --kv-cache-memory or lower --block-size"
        return self._checked(self._counts_within(cpu_cache_bytes(available_bytes), remedy))

    def _counts_within(self, cache_bytes: int, remedy: str) -> Counts:
        """Divide the memory of the KV cache between states and blocks. Raises ValueError, with the text `remedy`, if it
        is too small."""
        num_states = self.num_states(cache_bytes)
        num_blocks = count_blocks(
            cache_bytes=cache_bytes,
            block_bytes=self.block_bytes,
            max_num_blocks=self.max_num_blocks,
            remedy=remedy,
            num_states=num_states,
            state_bytes=self.state_bytes,
        )
        return Counts(num_blocks, num_states)

    def counts_of_cpu(self, available_bytes: int) -> tuple[Counts, Counts]:
        """Return the sizes of the KV cache and of the swap space of a CPU worker.

        Both pools use the machine's memory. Raises ValueError if the memory is too small for both pools.
        """
        self.host_counts(available_bytes)
        device = self.device_counts(available_bytes)
        return device, self.host_counts(available_bytes - self.size(device))

    def gpu_counts(self, memory: DeviceMemory, step: StepSize) -> Counts:
        """Return the size of the KV cache on a GPU. `memory` is the measured use of its memory without the cache.

        The size is set by an option or follows from --gpu-memory-utilization. Raises ValueError if the memory is too
        small for the requested size, or for a block of each layer group.
        """
        asked = self._counts_asked(memory.left(1.0), memory.describe())
        if asked is not None:
            return self._checked(asked)
        utilization = self.config.gpu_memory_utilization
        num_states = self.num_states(max(0, memory.left(utilization)))
        num_blocks = size_pool(
            replace(memory, states=_with_unused(num_states, self.state_bytes)),
            utilization=utilization,
            block_bytes=self.block_bytes,
            max_num_blocks=self.max_num_blocks,
            step=step,
        )
        return self._checked(Counts(num_blocks, num_states))

    def describe_reduced(self) -> str | None:
        """Return a warning for the log if the KV cache is smaller than --kv-cache-memory allows, else None.

        The cache is never larger than the maximum number of sequences can use.
        """
        asked = self.config.kv_cache_memory
        used = self.size(Counts(self.max_num_blocks, self.num_states_beside(self.max_num_blocks)))
        if asked is None or parse_memory("--kv-cache-memory", asked) < used + self.block_bytes:
            return None
        return (
            f"--kv-cache-memory is {asked}, but the KV cache uses only {describe_memory(used)}: --max-num-seqs "
            f"{self.config.max_num_seqs} sequences of --max-model-len tokens need no more"
        )

    def _checked(self, counts: Counts) -> Counts:
        """Return the sizes of the KV cache. Raises ValueError if there are fewer blocks than layer groups."""
        if counts.num_blocks < self.num_groups:
            raise ValueError(
                f"the KV cache would have {counts.num_blocks} blocks of {describe_memory(self.block_bytes)}, but a "
                f"sequence needs a block in each of the model's {self.num_groups} layer groups: raise "
                "--num-device-blocks or --kv-cache-memory, or free memory"
            )
        return counts

    def _counts_asked(self, left: int, memory: str) -> Counts | None:
        """Return the sizes of the KV cache that an option requests, or None if no such option is set.

        Raises ValueError if the KV cache does not fit into `left` bytes. `memory` describes the memory for the error
        message.
        """
        config = self.config
        if config.num_device_blocks is not None:
            flag, asked = "--num-device-blocks", str(config.num_device_blocks)
            counts = Counts(config.num_device_blocks, self.num_states_beside(config.num_device_blocks))
        elif config.kv_cache_memory is not None:
            flag, asked = "--kv-cache-memory", config.kv_cache_memory
            counts = self._counts_within(parse_memory(flag, asked), "raise --kv-cache-memory or lower --block-size")
        else:
            return None
        state_pool = _with_unused(counts.num_states, self.state_bytes)
        of_states = f", of which {counts.num_states} states take {describe_memory(state_pool)}" if state_pool else ""
        check_pool(
            left=left - state_pool,
            memory=memory + of_states,
            flag=flag,
            asked=asked,
            num_blocks=counts.num_blocks,
            block_bytes=self.block_bytes,
        )
        return counts


def _with_unused(num: int, bytes_of_each: int) -> int:
    """Return the size of a number of blocks or states and of the unused one in front of them; 0 if there are none."""
    return (num + 1) * bytes_of_each if num else 0
