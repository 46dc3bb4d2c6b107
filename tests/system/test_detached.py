"""Detached requests through both services: clients attach and leave, workers die, and no token is lost."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.forked import running
from testing.oracle import BeamSearch
from testing.services import System

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
PROMPT = "Once upon a time"
WORKER = ["--dtype", "float32", "--num-device-blocks", 200]
NUM_TOKENS = 300
SAMPLING = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def reference():
    return oracle.load(STORYTELLER)


@pytest.fixture(scope="module")
def prompt_token_ids():
    return Tokenizer.from_file(str(STORYTELLER / "tokenizer.json")).encode(PROMPT).ids


@pytest.fixture(scope="module")
def expected(reference, prompt_token_ids):
    return oracle.greedy(reference, prompt_token_ids, NUM_TOKENS)


async def attached(
    client: AsyncClient, request_id: str, *, from_token: int = 0, until: int | None = None, index: int = 0
):
    """Return the tokens and the text of a sample from a token on.

    With `until`, the client leaves after that many tokens.
    """
    tokens: list[int] = []
    texts: list[str] = []
    stream = client.attach(request_id, from_token=from_token)
    async for output in stream:
        if output.index == index:
            assert output.first_token == from_token + len(tokens)
            tokens += output.token_ids
            texts.append(output.text)
        if until is not None and len(tokens) >= until:
            break
    await stream.aclose()
    return tokens, "".join(texts)


async def until_worker_lost(client: AsyncClient, num_losses: int) -> None:
    while (await client.loads()).num_worker_losses < num_losses:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.02)


def replace_worker(system: System) -> None:
    system.worker.kill()
    system.restart_worker()


async def test_clients_come_and_go_and_the_worker_dies(expected):
    with running(STORYTELLER, worker=WORKER) as system:
        async with AsyncClient(system.url) as client:
            request_id = await client.submit(PROMPT, SAMPLING)
            tokens, text = await attached(client, request_id, until=10)
            assert tokens == expected[: len(tokens)]
        replace_worker(system)
        async with AsyncClient(system.url) as client:
            await until_worker_lost(client, 1)
            rest, rest_text = await attached(client, request_id, from_token=len(tokens))
            assert tokens + rest == expected
            again, full_text = await attached(client, request_id)
            assert again == expected
            assert text + rest_text == full_text
            replace_worker(system)
            await until_worker_lost(client, 2)
            for start in (1, 17, NUM_TOKENS - 1, NUM_TOKENS):
                last, last_text = await attached(client, request_id, from_token=start)
                assert last == expected[start:]
                assert full_text.endswith(last_text)
            result = await client.result(request_id)
            assert list(result.outputs[0].token_ids) == expected
            assert result.outputs[0].text == full_text
            while not (await client.loads()).worker_connected:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.02)
            assert (await client.loads()).num_held_blocks == 0


async def test_samples_and_hypotheses_of_detached_requests(reference, prompt_token_ids):
    """The requests are preempted, and the worker is killed before a client attaches."""
    temperature, seed, search = 0.9, 11, BeamSearch(beam_width=4, n=3, max_tokens=60)
    samples = [
        oracle.sampled(reference, prompt_token_ids, 80, temperature=temperature, seed=seed, sample_index=index)
        for index in range(3)
    ]
    hypotheses = [hypothesis.token_ids for hypothesis in oracle.beams(reference, prompt_token_ids, search)]
    drawn = SamplingParams(temperature=temperature, seed=seed, n=3, max_tokens=80, ignore_eos=True)
    searched = SamplingParams(n=3, beam_width=4, max_tokens=60, ignore_eos=True)
    worker = ["--dtype", "float32", "--num-device-blocks", 24, "--num-host-blocks", 100]
    with running(STORYTELLER, worker=worker, scheduler=["--preemption", "swap"]) as system:
        async with AsyncClient(system.url) as client:
            submitted = [await client.submit(PROMPT, sampling) for sampling in (drawn, searched) * 4]
            await attached(client, submitted[0], until=3)
            replace_worker(system)
            await until_worker_lost(client, 1)
            for request_id, tokens in zip(submitted, [samples, hypotheses] * 4, strict=True):
                for index in range(3):
                    assert (await attached(client, request_id, index=index))[0] == tokens[index]
            loads = await client.loads()
    assert loads.num_preemptions > 0
    assert (loads.num_held_blocks, loads.num_held_host_blocks) == (0, 0)
