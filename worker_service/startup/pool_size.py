"""The number of blocks in each pool, from the configuration or by default.

This module calculates sizes and allocates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.common.process.memory_size import describe_memory, parse_memory
from worker_service.config import WorkerConfig
from worker_service.startup.device_memory import GIB, DeviceMemory, StepSize, check_pool, size_pool

_MAX_DEFAULT_CPU_BYTES = 4 * GIB
_DEFAULT_CPU_SHARE = 0.3
_MAX_DEFAULT_SWAP_BYTES = 4 * GIB
_DEFAULT_SWAP_SHARE = 10  # divisor: a tenth of the available memory


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


def count_blocks(*, cache_bytes: int, block_bytes: int, max_num_blocks: int, remedy: str) -> int:
    """Return how many KV cache blocks fit into `cache_bytes` besides the unused block 0, at most `max_num_blocks`.

    Raises ValueError with the needed size and the text `remedy` if not even one block fits.
    """
    num_blocks = min(cache_bytes // block_bytes - 1, max_num_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"the KV cache may use {describe_memory(cache_bytes)}, but two blocks need "
            f"{describe_memory(2 * block_bytes)}; {remedy}"
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The configured size of the KV cache, from which the numbers of device blocks and host blocks are computed.

    `max_num_blocks` is the number of blocks that the maximum number of sequences, at maximum length, could use
    together. A sequence needs at least one block in each of `num_groups` layer groups.
    """

    config: WorkerConfig
    block_bytes: int
    max_num_blocks: int
    num_groups: int = 1

    def num_host_blocks(self, available_bytes: int, default_bytes: int = 0) -> int:
        """Return the number of swap blocks in host memory that the options request, or that fit into `default_bytes`.

        Raises ValueError if the requested size exceeds `available_bytes`, or is too small for one block.
        """
        config, block_bytes = self.config, self.block_bytes
        if config.swap_space is not None:
            flag, asked = "--swap-space", config.swap_space
            pool_bytes = parse_memory("--swap-space", config.swap_space, least=0)
            if pool_bytes == 0:
                return 0
            num_blocks = pool_bytes // block_bytes - 1  # block 0 is never used
            if num_blocks < 1:
                raise ValueError(
                    f"--swap-space is {asked}; two blocks take {2 * block_bytes} bytes: raise it, or set it to 0"
                )
        elif config.num_host_blocks is not None:
            flag, asked, num_blocks = "--num-host-blocks", str(config.num_host_blocks), config.num_host_blocks
            pool_bytes = (num_blocks + 1) * block_bytes if num_blocks else 0
        else:
            return max(0, default_bytes // block_bytes - 1)
        if pool_bytes > available_bytes:
            raise ValueError(
                f"{flag} is {asked}, which takes {describe_memory(pool_bytes)}; "
                f"{describe_memory(available_bytes)} of memory are available: lower it"
            )
        return num_blocks

    def num_cpu_blocks(self, available_bytes: int) -> int:
        """Return the number of KV cache blocks for a CPU worker, without its swap blocks.

        The number is set by an option or follows from `available_bytes`. Raises ValueError if the memory is too small
        for the requested number, or for a block of each layer group.
        """
        left = max(0, available_bytes)
        num_asked = self._num_asked(left, f"{describe_memory(left)} of memory are available")
        if num_asked is not None:
            return self._checked(num_asked)
        num_blocks = count_blocks(
            cache_bytes=cpu_cache_bytes(available_bytes),
            block_bytes=self.block_bytes,
            max_num_blocks=self.max_num_blocks,
            remedy="free memory, set --kv-cache-memory or lower --block-size",
        )
        return self._checked(num_blocks)

    def num_blocks_of_cpu(self, available_bytes: int) -> tuple[int, int]:
        """Return the numbers of KV cache blocks and of swap blocks for a CPU worker.

        Both pools use the machine's memory. Raises ValueError if the memory is too small for both pools.
        """
        self.num_host_blocks(available_bytes)
        num_device_blocks = self.num_cpu_blocks(available_bytes)
        left = available_bytes - (num_device_blocks + 1) * self.block_bytes
        return num_device_blocks, self.num_host_blocks(left)

    def num_gpu_blocks(self, memory: DeviceMemory, step: StepSize) -> int:
        """Return the number of KV cache blocks on a GPU. `memory` is the measured use of its memory without the cache.

        The number is set by an option or follows from --gpu-memory-utilization. Raises ValueError if the memory is too
        small for the requested number, or for a block of each layer group.
        """
        num_asked = self._num_asked(memory.left(1.0), memory.describe())
        if num_asked is not None:
            return self._checked(num_asked)
        num_blocks = size_pool(
            memory,
            utilization=self.config.gpu_memory_utilization,
            block_bytes=self.block_bytes,
            max_num_blocks=self.max_num_blocks,
            step=step,
        )
        return self._checked(num_blocks)

    def describe_reduced(self) -> str | None:
        """Return a warning for the log if the KV cache is smaller than --kv-cache-memory allows, else None.

        The cache is never larger than the maximum number of sequences can use.
        """
        asked = self.config.kv_cache_memory
        used = (self.max_num_blocks + 1) * self.block_bytes
        if asked is None or parse_memory("--kv-cache-memory", asked) < used + self.block_bytes:
            return None
        return (
            f"--kv-cache-memory is {asked}, but the KV cache uses only {describe_memory(used)}: --max-num-seqs "
            f"{self.config.max_num_seqs} sequences of --max-model-len tokens need no more"
        )

    def _checked(self, num_blocks: int) -> int:
        """Return the number of KV cache blocks. Raises ValueError if there are fewer blocks than layer groups."""
        if num_blocks < self.num_groups:
            raise ValueError(
                f"the KV cache would have {num_blocks} blocks of {describe_memory(self.block_bytes)}, but a sequence "
                f"needs a block in each of the model's {self.num_groups} layer groups: raise --num-device-blocks or "
                "--kv-cache-memory, or free memory"
            )
        return num_blocks

    def _num_asked(self, left: int, memory: str) -> int | None:
        """Return the number of KV cache blocks that an option requests, or None if no such option is set.

        Raises ValueError if the blocks do not fit into `left` bytes. `memory` describes the memory for the error
        message.
        """
        config = self.config
        if config.num_device_blocks is not None:
            flag, asked, num_blocks = "--num-device-blocks", str(config.num_device_blocks), config.num_device_blocks
        elif config.kv_cache_memory is not None:
            flag, asked = "--kv-cache-memory", config.kv_cache_memory
            num_blocks = count_blocks(
                cache_bytes=parse_memory(flag, asked),
                block_bytes=self.block_bytes,
                max_num_blocks=self.max_num_blocks,
                remedy="raise --kv-cache-memory or lower --block-size",
            )
        else:
            return None
        check_pool(
            left=left, memory=memory, flag=flag, asked=asked, num_blocks=num_blocks, block_bytes=self.block_bytes
        )
        return num_blocks
