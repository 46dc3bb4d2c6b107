"""Workers die, stall and return; clients leave. Streams continue at the same token, and no block leaks."""

import asyncio
import random
import signal
import time
from dataclasses import replace

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.client.errors import Unavailable
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from testing.parity import STORYTELLER
from testing.streams import NUM_STREAMS, Progress, requests_of, run_streams, run_with_ends, until_connected
from tests.thorough import thorough

NUM_KILLS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("recovery") / "model", "qwen3", seed=3)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
async def test_20_kills_during_100_streams_stay_within_the_margin_in_bf16():
    """Every served token must be within the margin of float32's best choice.

    Another batch shape may decide a near tie the other way, after which the texts differ.
    """
    exact, rounded = oracle.load(STORYTELLER), oracle.load_rounded(STORYTELLER)
    requests = requests_of(4, exact.config.vocab_size, max_suffix=16)
    requests = [
        (prompt, replace(sampling, temperature=0.0, max_tokens=sampling.max_tokens // 2))
        for prompt, sampling in requests
    ]
    run = await run_with_ends(running, STORYTELLER, requests, NUM_KILLS, worker=["--dtype", "bfloat16"])
    for served in run.disturbed:
        assert sum(one != other for one, other in zip(run.calm, served, strict=True)) < NUM_STREAMS // 2
    served = [(prompt, tokens) for one in run.disturbed for (prompt, _), tokens in zip(requests, one, strict=True)]
    shortfall = max(oracle.shortfalls(exact, prompt, tokens).max().item() for prompt, tokens in served)
    rounding = max(oracle.rounding_error(rounded, exact, prompt + tokens) for prompt, tokens in served)
    print(f"the furthest below the best: {shortfall:.3f}; transformers' bf16 moves a logit by up to {rounding:.3f}")
    assert shortfall <= rounding


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_kills", [3, *thorough(NUM_KILLS)])
async def test_kills_during_100_streams_change_nothing_in_float32(model, num_kills):
    flags = {"worker": ["--dtype", "float32"], "scheduler": ["--max-num-batched-tokens", 512]}
    run = await run_with_ends(running, model, requests_of(1, 151), num_kills, **flags)
    assert all(served == run.calm for served in run.disturbed)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_restarts", [3, *thorough(10)])
async def test_rolling_restarts_under_100_streams_change_nothing(model, num_restarts):
    """Each worker receives SIGTERM, announces its shutdown, and exits with 0."""
    flags = {"worker": ["--dtype", "float32"], "scheduler": ["--max-num-batched-tokens", 512]}
    run = await run_with_ends(running, model, requests_of(2, 151), num_restarts, kills=False, **flags)
    assert all(served == run.calm for served in run.disturbed)


@pytest.mark.alone
async def test_a_stopped_worker_is_noticed_and_its_streams_go_on(model):
    """SIGSTOP leaves the connection open and silent.

    A new worker replaces the stopped one, whose later messages are ignored.
    """
    with running(model, worker=["--dtype", "float32"], scheduler=["--worker-timeout", 60]) as system:
        async with AsyncClient(system.url) as client:
            requests = requests_of(2, 151)[:8]
            calm = await run_streams(client, requests)
            progress = Progress()
            streams = asyncio.create_task(run_streams(client, requests, progress))
            await progress.until(40)
            system.worker.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            await until_connected(client, False)
            noticed_after = time.monotonic() - stopped_at
            assert noticed_after <= 3.0
            system.worker.send_signal(signal.SIGCONT)
            assert await streams == calm
            assert (await client.loads()).num_worker_losses == 1


@pytest.mark.alone
async def test_requests_wait_for_a_missing_worker_and_fail_after_its_timeout(model):
    with running(model, worker=["--dtype", "float32"], scheduler=["--worker-timeout", 2]) as system:
        async with AsyncClient(system.url) as client:
            sampling = SamplingParams(temperature=0, max_tokens=4)
            before = await client.complete(None, sampling, prompt_token_ids=[1, 2])
            system.worker.kill()
            started_at = time.monotonic()
            with pytest.raises(Unavailable, match="no worker has been connected for 2 s"):
                await client.complete(None, sampling, prompt_token_ids=[1, 2])
            assert 1.5 < time.monotonic() - started_at < 6
            with pytest.raises(Unavailable):
                await client.complete(None, sampling, prompt_token_ids=[1, 2])
            system.restart_worker()
            system.worker.wait_until_ready()
            await until_connected(client, True)
            after = await client.complete(None, sampling, prompt_token_ids=[1, 2])
            assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.parametrize("num_cancels", [100, *thorough(1000)])
async def test_cancels_at_random_moments_hold_no_block(model, num_cancels):
    """The requests are cancelled while queued, in prefill, while decoding, or just when they end."""
    rng = random.Random(9)
    with running(model, worker=["--dtype", "float32", "--num-device-blocks", 200]) as system:
        async with AsyncClient(system.url) as client:
            limit = asyncio.Semaphore(48)
            num_cancelled = 0

            async def one(i: int) -> None:
                nonlocal num_cancelled
                prompt = [rng.randrange(151) for _ in range(rng.randint(1, 200))]
                sampling = SamplingParams(
                    temperature=0.7, seed=i, max_tokens=rng.randint(1, 200), n=rng.choice((1, 1, 2))
                )
                async with limit:
                    task = asyncio.create_task(client.complete(None, sampling, prompt_token_ids=prompt))
                    done, _ = await asyncio.wait({task}, timeout=rng.random() ** 3)
                    if not done:
                        task.cancel()
                        num_cancelled += 1
                    await asyncio.wait({task})

            while num_cancelled < num_cancels:
                await asyncio.gather(*(one(i) for i in range(num_cancels - num_cancelled)))
            # A cancel has no response, and a busy server reads it late, but before later messages of the same call. A
            # single request uses a call of its own, and the requests of a list share one.
            alone = await client.complete(None, SamplingParams(max_tokens=2), prompt_token_ids=[5])
            (shared,) = await client.complete([[5]], SamplingParams(max_tokens=2))
            assert (alone.usage.completion_tokens, shared.usage.completion_tokens) == (2, 2)
            loads = await client.loads()
    assert (loads.num_running, loads.num_waiting, loads.num_held_blocks) == (0, 0, 0)


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(model):
    with running(model, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            sampling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            stream = client.stream(None, sampling, prompt_token_ids=[1, 2, 3])
            first = await anext(stream)
            num_tokens = len(first.token_ids)
            system.scheduler.send_signal(signal.SIGTERM)
            refused = False
            async for output in stream:
                num_tokens += len(output.token_ids)
                if not refused and output.usage is None:
                    try:
                        await client.complete(None, SamplingParams(max_tokens=1), prompt_token_ids=[1])
                    except Unavailable:
                        refused = True
            assert refused
            assert num_tokens == 400
