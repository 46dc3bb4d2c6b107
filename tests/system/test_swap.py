"""A pool that is far too small: preempted requests continue unchanged, whether swapped or recomputed."""

import asyncio
import random

import pytest

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from testing.services import System
from tests.thorough import thorough

VOCAB_SIZE = 151
TINY_POOL = ["--dtype", "float32", "--num-device-blocks", 36, "--num-host-blocks", 300]
MODES = ("swap", "recompute", "auto")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("swap") / "model", "qwen3", seed=8)


def requests_of(seed: int, num_requests: int, num_tokens: int) -> list[tuple[list[int], SamplingParams]]:
    """Return greedy and seeded requests of different lengths, alone and in pairs; some share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(48)]
    requests = []
    for i in range(num_requests):
        prompt = shared[: rng.choice((0, 0, 16, 48))] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 150))]
        sampling = SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            n=2 if i % 5 == 0 else 1,
            max_tokens=rng.randint(num_tokens // 2, num_tokens),
            ignore_eos=True,
        )
        requests.append((prompt, sampling))
    return requests


async def complete_all(client: AsyncClient, requests: list) -> list[list[tuple[int, ...]]]:
    calls = (client.complete(None, sampling, prompt_token_ids=prompt) for prompt, sampling in requests)
    return [[output.token_ids for output in completion.outputs] for completion in await asyncio.gather(*calls)]


@pytest.fixture(scope="module")
def calm(model):
    """Return requests, and their outputs in an undisturbed run."""
    requests = requests_of(1, 20, 90)

    async def run() -> list:
        async with AsyncClient(system.url) as client:
            return await complete_all(client, requests)

    with running(model, worker=["--dtype", "float32"]) as system:
        return requests, asyncio.run(run())


@pytest.mark.one_of_each
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
async def test_preempted_requests_get_the_tokens_of_an_undisturbed_run(model, calm, mode, depth):
    requests, expected = calm
    flags = {"worker": TINY_POOL, "scheduler": ["--preemption", mode, "--pipeline-depth", depth]}
    with running(model, **flags) as system:
        async with AsyncClient(system.url) as client:
            squeezed = await complete_all(client, requests)
            loads = await client.loads()
    assert squeezed == expected
    assert loads.num_preemptions > 0
    if mode == "swap":
        assert loads.num_swap_preemptions > 0
    if mode == "recompute":
        assert loads.num_swap_preemptions == 0
    assert_all_free(loads)


@pytest.mark.parametrize("num_host_blocks", [7, *thorough(0)])
async def test_what_does_not_fit_into_the_host_pool_is_recomputed(model, calm, num_host_blocks):
    requests, expected = calm
    worker = ["--dtype", "float32", "--num-device-blocks", 36, "--num-host-blocks", num_host_blocks]
    with running(model, worker=worker, scheduler=["--preemption", "swap"]) as system:
        async with AsyncClient(system.url) as client:
            squeezed = await complete_all(client, requests)
            loads = await client.loads()
    assert squeezed == expected
    assert loads.num_preemptions > loads.num_swap_preemptions
    assert_all_free(loads)


async def kill_while_something_is_swapped(client: AsyncClient, system: System) -> None:
    """Kill the worker three times, each time while the host has blocks of a request."""
    for kill in range(3):
        while (await client.loads()).num_swapped == 0:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.005)
        system.worker.kill()
        system.restart_worker()
        while (await client.loads()).num_worker_losses == kill:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("mode", ["swap", *thorough("auto")])
async def test_a_worker_killed_while_requests_are_swapped_changes_nothing(model, calm, mode):
    requests, expected = calm
    with running(model, worker=TINY_POOL, scheduler=["--preemption", mode]) as system:
        async with AsyncClient(system.url) as client:
            killing = asyncio.create_task(kill_while_something_is_swapped(client, system))
            disturbed = await complete_all(client, requests * 3)
            assert killing.done(), "the requests ended before three kills: give them more tokens"
            loads = await client.loads()
    assert loads.num_worker_losses == 3
    assert disturbed == expected * 3
    assert_all_free(loads)


async def test_cancelled_while_swapped_holds_no_host_block(model):
    """Requests are cancelled while their blocks are being swapped out, are on the host, or are being swapped in."""
    rng = random.Random(3)
    requests = requests_of(2, 60, 120)
    with running(model, worker=TINY_POOL, scheduler=["--preemption", "swap"]) as system:
        async with AsyncClient(system.url) as client:

            async def one(i: int) -> None:
                prompt, sampling = requests[i]
                task = asyncio.create_task(client.complete(None, sampling, prompt_token_ids=prompt))
                await asyncio.wait({task}, timeout=rng.random() * 4)
                task.cancel()
                await asyncio.wait({task})

            await asyncio.gather(*(one(i) for i in range(len(requests))))
            last = await client.complete(None, SamplingParams(max_tokens=2), prompt_token_ids=[5])
            loads = await client.loads()
    assert last.usage.completion_tokens == 2
    assert loads.num_swap_preemptions > 0
    assert_all_free(loads)


def assert_all_free(loads) -> None:
    assert (loads.num_running, loads.num_waiting, loads.num_swapped) == (0, 0, 0)
    assert (loads.num_held_blocks, loads.num_held_host_blocks) == (0, 0)


WINDOWS = {
    "mistral, every layer": ("mistral", {"sliding_window": 48}, 48),
    "mistral, requests longer than the pool": ("mistral", {"sliding_window": 32}, 20),
    "qwen2, the upper layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        60,
    ),
}


@pytest.fixture(
    scope="module", params=["qwen2, the upper layer", *thorough(*[name for name in WINDOWS if "mistral" in name])]
)
def windowed(request, tmp_path_factory):
    """Return a checkpoint, its number of blocks, prompts, and the greedy tokens of each prompt."""
    family, overrides, num_device_blocks = WINDOWS[request.param]
    path = make_checkpoint(tmp_path_factory.mktemp("windows") / "model", family, seed=9, **overrides)
    prompts = oracle.random_prompts(5, VOCAB_SIZE, (1, 20, 47, 48, 49, 90, 130, 200, 260, 310, 3, 5, 8, 9, 11, 2, 7, 6))
    prompts.append(prompts[9][:180] + prompts[1])
    model = oracle.load(path)
    return path, num_device_blocks, prompts, [oracle.greedy(model, prompt, 60) for prompt in prompts]


@pytest.mark.parametrize("mode", ["auto", *thorough("swap", "recompute")])
async def test_sliding_windows_under_pressure_are_what_transformers_generates(windowed, mode):
    """Prompts shorter and far longer than the window, computed in chunks and preempted.

    The short prompts fit the pool together, but not with their outputs.
    """
    path, num_device_blocks, prompts, expected = windowed
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    worker = ["--dtype", "float32", "--block-size", 8, "--num-device-blocks", num_device_blocks]
    worker += ["--num-host-blocks", 200]
    flags = {"worker": worker, "scheduler": ["--preemption", mode, "--max-num-batched-tokens", 100]}
    with running(path, **flags) as system:
        async with AsyncClient(system.url) as client:
            squeezed = await complete_all(client, [(prompt, sampling) for prompt in prompts])
            loads = await client.loads()
    assert [list(samples[0]) for samples in squeezed] == expected
    assert loads.num_preemptions > 0
    assert_all_free(loads)
