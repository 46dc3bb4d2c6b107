"""Sizes of pools for known cards, computed by hand.

MiB are as nvidia-smi reports them; the comments derive the block counts.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from worker_service.cache.cache_engine import CacheShape
from worker_service.cache.stream_moves import num_staging_blocks
from worker_service.startup.device_memory import (
    EXCHANGE_BYTES,
    DeviceMemory,
    StepSize,
    check_cpu_weights,
    check_pool,
    graph_bytes,
    size_pool,
    step_refusal,
    weights_refusal,
)

MIB, GIB = 1 << 20, 1 << 30
CARDS = {24: 24_564 * MIB, 80: 81_559 * MIB, 141: 143_771 * MIB}
STEP = StepSize(num_tokens=2048, num_rows=256)


@dataclass(frozen=True)
class ModelShape:
    num_parameters: int
    cache: CacheShape


# Qwen3-0.6B: 28 layers of hidden size 1,024 and 16 heads of 128 with 8 KV heads. Parameters of a layer: query and
# output 2 * 1024 * 2048, key and value 2 * 1024 * 1024, three matrices of the MLP 3 * 1024 * 3072, norms 2 * 1024 + 2 *
# 128: 15,730,944. All layers: 440,466,432; tied embedding: 151,936 * 1024 = 155,582,464; last norm: 1,024.
SMALL = ModelShape(
    28 * 15_730_944 + 155_582_464 + 1024,
    CacheShape(heads=((8, 128),) * 28, block_size=16, dtype=torch.bfloat16),
)
# Qwen3-8B: 36 layers of hidden size 4,096, intermediate 12,288, 32 heads of 128 with 8 KV heads. A layer:
# 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128 = 192,946,432. Embedding and head, untied:
# 2 * 151,936 * 4096 = 1,244,659,712; last norm 4,096.
LARGE = ModelShape(
    36 * 192_946_432 + 1_244_659_712 + 4096,
    CacheShape(heads=((8, 128),) * 36, block_size=16, dtype=torch.bfloat16),
)


def memory_of(card: int, model: ModelShape, *, step: int = GIB, graphs: int = GIB // 2) -> DeviceMemory:
    """Return the memory of a card with half a GiB for CUDA, and a staging buffer for a host pool of 1,000 blocks."""
    staging = num_staging_blocks(1000, model.cache.block_bytes) * model.cache.block_bytes
    return DeviceMemory(CARDS[card], GIB // 2, 2 * model.num_parameters, step, graphs, staging)


def test_shapes_are_those_of_the_models() -> None:
    assert SMALL.num_parameters == 596_049_920
    assert LARGE.num_parameters == 8_190_735_360
    assert SMALL.cache.block_bytes == 2 * 28 * 16 * 8 * 128 * 2 == 1_835_008
    assert LARGE.cache.block_bytes == 2 * 36 * 16 * 8 * 128 * 2 == 2_359_296
    assert replace(LARGE.cache, dtype=torch.float8_e4m3fn).block_bytes == 1_179_648


def test_ranks_reserve_memory_for_communication() -> None:
    alone = memory_of(80, LARGE)
    among = replace(alone, exchange=EXCHANGE_BYTES)
    assert alone.left(0.9) - among.left(0.9) == 512 << 20
    assert "buffers for the exchange between ranks 512.00 MiB" in among.describe()
    assert "exchange" not in alone.describe()


@pytest.mark.parametrize(
    ("card", "model", "expected"),
    [
        # The remainder is 0.9 of the card, in bytes, less 2 GiB for CUDA, the step and graphs (2,147,483,648), and less
        # weights and staging: for the small model 1,192,099,840 and 18 blocks, for the large one 16,381,470,720 and 14
        # blocks. 24 GB: int(25,757,220,864 * 0.9) = 23,181,498,777
        (24, SMALL, 10_793),  # 19,808,885,145 // 1,835,008 = 10,794, including block 0
        (24, LARGE, 1_957),  # 4,619,514,265 // 2,359,296 = 1,958
        # 80 GB: int(85,520,809,984 * 0.9) = 76,968,728,985
        (80, SMALL, 40_105),  # 73,596,115,353 // 1,835,008 = 40,106
        (80, LARGE, 24_755),  # 58,406,744,473 // 2,359,296 = 24,756
        # 141 GB: int(150,754,820,096 * 0.9) = 135,679,338,086
        (141, SMALL, 72_100),  # 132,306,724,454 // 1,835,008 = 72,101
        (141, LARGE, 49_639),  # 117,117,353,574 // 2,359,296 = 49,640
    ],
)
def test_blocks_of_known_cards(card: int, model: ModelShape, expected: int) -> None:
    block_bytes = model.cache.block_bytes
    found = size_pool(
        memory_of(card, model), utilization=0.9, block_bytes=block_bytes, max_num_blocks=1 << 30, step=STEP
    )
    assert found == expected


def test_fp8_holds_twice_as_many() -> None:
    # 24 GB, the large model, 28 blocks of staging with the same number of bytes: 4,619,514,265 // 1,179,648 = 3,916
    shape = replace(LARGE, cache=replace(LARGE.cache, dtype=torch.float8_e4m3fn))
    arguments = {"utilization": 0.9, "block_bytes": 1_179_648, "max_num_blocks": 1 << 30, "step": STEP}
    assert size_pool(memory_of(24, shape), **arguments) == 3_915  # type: ignore[arg-type]


def test_no_more_blocks_than_all_rows_could_use() -> None:
    memory = memory_of(141, SMALL)
    found = size_pool(memory, utilization=0.9, block_bytes=1_835_008, max_num_blocks=500, step=STEP)
    assert found == 500


def test_one_block_is_a_pool() -> None:
    # 4,619,514,265 // 2,200,000,000 = 2, including block 0
    memory = memory_of(24, LARGE)
    assert size_pool(memory, utilization=0.9, block_bytes=2_200_000_000, max_num_blocks=500, step=STEP) == 1


@pytest.mark.parametrize(
    ("memory", "utilization", "remedy"),
    [
        # 15,454,332,518 of 25,757,220,864 bytes: less than the weights need; the whole card would suffice.
        (memory_of(24, LARGE), 0.6, r"raise --gpu-memory-utilization, which is 0.6, or lower --max-num-batched-tokens"),
        (memory_of(24, LARGE, step=9 * GIB), 0.9, r"MiB; lower --max-num-batched-tokens, which is 2048, or --max-num-"),
        (replace(memory_of(24, LARGE), others=9 * GIB), 0.9, "the weights alone leave no room: use a GPU with more"),
    ],
)
def test_no_room_says_what_takes_it_and_what_to_do(memory: DeviceMemory, utilization: float, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy) as raised:
        size_pool(memory, utilization=utilization, block_bytes=2_359_296, max_num_blocks=1 << 30, step=STEP)
    assert "of the GPU's 23.99 GiB, weights 15.26 GiB, the largest step" in str(raised.value)


def test_a_pool_that_is_too_large_says_how_many_blocks_fit() -> None:
    # The whole card: 25,757,220,864 - 2,147,483,648 - 1,192,099,840 - 18 * 1,835,008 = 22,384,607,232; // 1,835,008 =
    # 12,198, less block 0.
    memory = memory_of(24, SMALL)
    left, block_bytes = memory.left(1.0), 1_835_008
    asked = {"memory": "M", "flag": "--num-device-blocks", "asked": "n", "block_bytes": block_bytes}
    check_pool(left=left, num_blocks=12_197, **asked)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"--num-device-blocks is n: 12198 blocks take .*; M; 12197 blocks fit"):
        check_pool(left=left, num_blocks=12_198, **asked)  # type: ignore[arg-type]
    asked |= {"flag": "--kv-cache-memory", "asked": "1GiB"}
    full = replace(memory, others=24 * GIB)
    with pytest.raises(ValueError, match=r"--kv-cache-memory is 1GiB: .* no block fits: lower --kv-cache-memory"):
        check_pool(left=full.left(1.0), num_blocks=584, **asked)  # type: ignore[arg-type]


def test_weights_that_do_not_fit_into_a_cpus_memory_say_in_which_dtype() -> None:
    check_cpu_weights(available=10 * GIB, held=9 * GIB, peak=10 * GIB, held_in="float32")
    with pytest.raises(
        ValueError, match=r"do not fit: in float32 they take 9.00 GiB, 11.00 GiB while they load, and 10."
    ):
        check_cpu_weights(available=10 * GIB, held=9 * GIB, peak=11 * GIB, held_in="float32")
    with pytest.raises(ValueError, match=r"they take 11.00 GiB, and 10.00 GiB of memory are available: use a smaller"):
        check_cpu_weights(available=10 * GIB, held=11 * GIB, peak=11 * GIB, held_in="float32")


def test_graphs_share_the_memory_of_the_largest() -> None:
    assert graph_bytes(largest_bytes=100 * MIB, num_graphs=0) == 0
    assert graph_bytes(largest_bytes=100 * MIB, num_graphs=70) == (100 + 70 * 4) * MIB


def test_refusals_of_steps_and_weights_say_what_to_lower() -> None:
    error = step_refusal(total=CARDS[24], free=GIB, weights=2 * LARGE.num_parameters, step=StepSize(65536, 256))
    assert "a step of 65536 tokens in 256 rows does not fit" in str(error)
    assert "lower --max-num-batched-tokens, which is 65536" in str(error)
    error = weights_refusal(total=CARDS[24], free=20 * GIB, needed=61 * GIB)
    assert "they take 61.00 GiB, and 20.00 GiB of the GPU's 23.99 GiB are free" in str(error)
