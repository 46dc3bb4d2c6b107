"""Everything at once: a tiny pool, chunked prefill, priorities, cancels, kills.

Completed requests must equal a calm run.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from pagewire import AsyncClient, SamplingParams
from testing.forked import running
from testing.services import System

pytestmark = pytest.mark.thorough

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
NUM_REQUESTS = 80
NUM_ENDED_PER_KILL = 18  # after the last kill, some requests still need the worker
CALM = {"worker": ["--dtype", "float32"]}
WILD = {
    "worker": ["--dtype", "float32", "--num-device-blocks", 40, "--max-num-batched-tokens", 48, "--max-num-seqs", 12],
    "scheduler": ["--pipeline-depth", 3],
}


def random_sampling(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {
        "temperature": rng.choice((0, 0, 0.7, 1.2)),
        "seed": rng.getrandbits(64),
        "max_tokens": rng.randint(1, 100),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "top_k": rng.choice((0, 0, rng.randint(1, 50))),
        "top_p": rng.choice((1.0, 1.0, rng.uniform(0.3, 1.0))),
        "min_p": rng.choice((0.0, 0.0, 0.0, 0.05)),
        "stop": rng.choice((None, None, ["river"], ["kite was", ". "])),
        "ignore_eos": rng.random() < 0.2,
        "logprobs": rng.choice((None, None, 0, 3)),
        "prompt_logprobs": rng.choice((None, None, None, 1)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.2)),
        "presence_penalty": rng.choice((0.0, 0.0, 0.3)),
    }
    return SamplingParams(**options, min_tokens=rng.choice((0, 0, min(10, options["max_tokens"]))))


def random_request(rng: random.Random) -> dict[str, Any]:
    """Return random arguments of `AsyncClient.complete`; some prompts share a prefix."""
    shared = [7 * i % 1000 + 5 for i in range(64)][: rng.choice((0, 16, 48, 64))]
    prompt = shared + [rng.randrange(5, 1024) for _ in range(rng.randint(1, 80))]
    return {"prompt_token_ids": prompt, "sampling": random_sampling(rng), "priority": rng.randint(-1, 1)}


def outcome(completion: Any) -> list[Any]:
    """Return the values that must be equal. Log-probabilities are compared separately."""
    return [(output.token_ids, output.text, output.finish_reason, output.stop_reason) for output in completion.outputs]


def logprobs(completion: Any) -> list[float]:
    entries = [entry for output in completion.outputs for entry in output.logprobs or ()]
    return [entry.logprob for entry in [*entries, *(completion.prompt_logprobs or ())]]


async def kill_now_and_then(system: System, ended: asyncio.Semaphore) -> None:
    """Kill the worker whenever another `NUM_ENDED_PER_KILL` requests have ended."""
    while True:
        for _ in range(NUM_ENDED_PER_KILL):
            await ended.acquire()
        system.worker.kill()
        system.restart_worker()


@pytest.mark.parametrize("seed", [1])
async def test_completed_requests_equal_an_undisturbed_run(seed):
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    patience = [rng.random() * 2 if i % 6 == 5 else None for i in range(NUM_REQUESTS)]
    with running(STORYTELLER, **CALM) as system:
        async with AsyncClient(system.url) as client:
            expected = [await client.complete(**request) for request in requests]

    async def one(client: AsyncClient, limit: asyncio.Semaphore, ended: asyncio.Semaphore, i: int) -> Any:
        """Return the completion of request i, or None if it was cancelled."""
        async with limit:
            task = asyncio.create_task(client.complete(**requests[i]))
            await asyncio.wait({task}, timeout=patience[i])
            ended.release()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                return None
            return task.result()

    with running(STORYTELLER, **WILD) as system:
        async with AsyncClient(system.url) as client:
            limit, ended = asyncio.Semaphore(40), asyncio.Semaphore(0)
            killing = asyncio.create_task(kill_now_and_then(system, ended))
            completions = await asyncio.gather(*(one(client, limit, ended, i) for i in range(NUM_REQUESTS)))
            killing.cancel()
            loads = await client.loads()
    assert loads.num_worker_losses > 0
    assert loads.num_preemptions > 0
    assert loads.num_held_blocks == 0
    completed = [(calm, wild) for calm, wild in zip(expected, completions, strict=True) if wild is not None]
    assert len(completed) >= NUM_REQUESTS * 5 // 6
    for calm, wild in completed:
        assert outcome(wild) == outcome(calm)
        assert logprobs(wild) == pytest.approx(logprobs(calm), abs=1e-3)
