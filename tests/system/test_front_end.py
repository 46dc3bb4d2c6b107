"""Front ends as processes between clients and both services.

One is killed and one drains, without effects on the others.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from pagewire import AsyncClient, SamplingParams, Unavailable
from testing import oracle
from testing.forked import running
from testing.services import Service, System

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
PROMPT = "Once upon a time"
WORKER = ["--dtype", "float32", "--num-device-blocks", 400]
NUM_TOKENS = 300
NUM_CLIENTS = 4  # of each front end
SAMPLING = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
DEADLINE = 120


@pytest.fixture(scope="module")
def expected() -> list[int]:
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    return oracle.greedy(oracle.load(STORYTELLER), tokenizer.encode(PROMPT).ids, NUM_TOKENS)


@contextmanager
def front_end(system: System) -> Iterator[Service]:
    flags = ["--scheduler", system.url, "--model", STORYTELLER, "--port", 0, "--log-level", "error"]
    service = Service("frontend", flags)
    try:
        yield service
    finally:
        service.kill()


async def stream(url: str, begun: asyncio.Event) -> tuple[list[int], str]:
    """Return the tokens and the text of the prompt's completion; `begun` is set after ten tokens."""
    tokens: list[int] = []
    texts: list[str] = []
    async with AsyncClient(url) as client:
        async for output in client.stream(PROMPT, SAMPLING):
            assert output.first_token == len(tokens)
            tokens += output.token_ids
            texts.append(output.text)
            if len(tokens) >= 10:
                begun.set()
    return tokens, "".join(texts)


async def test_a_front_end_dies_and_another_drains(expected: list[int]) -> None:
    with running(STORYTELLER, worker=WORKER) as system, front_end(system) as one, front_end(system) as two:
        urls = {service: service.wait_until_ready() for service in (one, two)}
        begun = [asyncio.Event() for _ in range(2 * NUM_CLIENTS)]
        of_one = [asyncio.create_task(stream(urls[one], each)) for each in begun[:NUM_CLIENTS]]
        of_two = [asyncio.create_task(stream(urls[two], each)) for each in begun[NUM_CLIENTS:]]
        async with asyncio.timeout(DEADLINE), AsyncClient(system.url) as direct:
            for each in begun:
                await each.wait()
            one.kill()
            for result in await asyncio.gather(*of_one, return_exceptions=True):
                assert isinstance(result, Unavailable), result
                assert result.code is grpc.StatusCode.UNAVAILABLE
            # Running requests continue during a drain, and then the process exits with 0.
            stopping = asyncio.create_task(asyncio.to_thread(two.stop))
            outputs = await asyncio.gather(*of_two)
            assert await stopping == 0
            assert [tokens for tokens, _ in outputs] == [expected] * NUM_CLIENTS
            completion = await direct.complete(PROMPT, SAMPLING)
            assert list(completion.outputs[0].token_ids) == expected
            assert {text for _, text in outputs} == {completion.outputs[0].text}
            # The scheduler has ended the requests of the killed front end.
            while (loads := await direct.loads()).num_running or loads.num_held_blocks:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.05)
            assert loads.num_generation_tokens < (2 * NUM_CLIENTS + 1) * NUM_TOKENS
