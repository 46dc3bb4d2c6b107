"""The metrics of tokens sent to clients: each token is counted once in every API, and discarded tokens separately."""

import asyncio
import random
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import request, serve
from testing.seeds import seeded
from testing.serving.front_end import serve_front_end

NUM_REQUESTS = 100
COUNTED = ("vllm:generation_tokens_total", "pagewire:discarded_tokens_total")


def draw(rng: random.Random) -> pb.GenerateRequest:
    sampling: dict[str, object] = {"max_tokens": rng.choice([1, 7, 40]), "n": rng.choice([1, 1, 3])}
    sampling["seed"] = rng.randrange(1000)
    kind = rng.choice(["plain", "stop", "stop", "beams", "logprobs"])
    if kind == "stop":
        sampling["stop"] = rng.sample("abcdefghijklmnopqrstuvwxyz ", rng.choice([1, 8, 16]))
    elif kind == "beams":
        sampling |= {"beam_width": 4, "n": rng.choice([1, 4])}
    elif kind == "logprobs":
        sampling |= {"logprobs": 1, "prompt_logprobs": 1}
    return request([rng.randrange(1, 280) for _ in range(rng.randint(1, 40))], **sampling)


async def counters(port: int) -> dict[str, float]:
    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            return response.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(scrape))
    return {
        sample.name: sample.value for family in families for sample in family.samples if not sample.labels.get("le")
    }


async def until(port: int, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    async with asyncio.timeout(10):
        found = await counters(port)
        while not holds(found):  # no event reports the new metrics
            await asyncio.sleep(0.01)
            found = await counters(port)
        return found


async def test_sent_and_discarded_tokens_add_up_to_computed_tokens(checkpoint: Path) -> None:
    seed = 0
    rng = seeded(seed)
    port, front_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    async with (
        serve(checkpoint, metrics_port=port) as stack,
        serve_front_end(checkpoint, stack.url, metrics_port=front_port) as front,
    ):
        got = {"straight": 0, "front end": 0}

        async def send(way: str, message: pb.GenerateRequest) -> None:
            stub = stack.stub if way == "straight" else front.stub
            async for response in stub.Generate(message):
                got[way] += response.usage.completion_tokens

        await asyncio.gather(*(send(rng.choice(sorted(got)), draw(rng)) for _ in range(NUM_REQUESTS)))
        computed = (await stack.until_idle()).num_generation_tokens
        # The front end reports the counts after its clients have received all tokens.
        found = await until(port, lambda found: found["vllm:generation_tokens_total"] >= sum(got.values()))
        assert found["vllm:generation_tokens_total"] == sum(got.values())
        assert found["pagewire:discarded_tokens_total"] == computed - sum(got.values()) > 0
        own = await counters(front_port)
        assert own["pagewire:frontend_generation_tokens_total"] == got["front end"]
        assert (own["pagewire:frontend_connected"], own["pagewire:frontend_running_samples"]) == (1, 0)


async def test_a_client_that_leaves_leaves_no_token_uncounted(checkpoint: Path) -> None:
    port = free_port("127.0.0.1")
    async with (
        serve(checkpoint, metrics_port=port) as stack,
        serve_front_end(checkpoint, stack.url) as front,
    ):
        stack.worker.step_seconds = 0.005
        for stub in (stack.stub, front.stub):
            for sampling in ({}, {"stop": ["never there"]}, {"beam_width": 3, "n": 2}):
                call = stub.Generate(request([1, 2, 3], max_tokens=200, **sampling))
                await stack.until(lambda loads: loads.num_running > 0)
                call.cancel()
                await stack.until_idle()
        computed = (await stack.loads()).num_generation_tokens
        await until(port, lambda found: sum(found[name] for name in COUNTED) == computed)
