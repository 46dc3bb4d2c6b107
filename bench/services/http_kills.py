"""Kills workers and front ends under 100 streams over HTTP, and compares what the streams tell with a calm run.

    python -m bench http-kills

A worker, a scheduler and two front ends run as processes, with the bundled model. Streams go on through one front end,
one after the other in each of 100 tasks; the worker is killed and started again, in turns with the other front end,
which has streams of its own. Every stream of the front end that lives must tell exactly the tokens of an undisturbed
run; those of the other one break off, or are whole too. In the end nothing may be left running. Raw numbers go to
bench/results/http_kills.json.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.goals import verdict
from bench.services.http_attacks import posted
from pagewire import AsyncClient
from pagewire.hosting.supervisor import free_port
from testing.services import HOST, Service, System, running

MODEL = Path("models/storyteller")
NUM_STREAMS, NUM_BESIDE, NUM_PROMPTS, MAX_TOKENS = 100, 20, 40, 120
WORKER_FLAGS = ("--dtype", "float32", "--num-threads", 1, "--num-device-blocks", 4096)
PAUSE_S = 0.5  # between what is ready again and the next kill


class Counts:
    def __init__(self) -> None:
        self.streams = self.different = self.broken = 0


async def told(port: int, prompt: int) -> list[int] | None:
    """Returns the tokens that a stream tells, or None if it breaks off."""
    asked = {"prompt": [300 + prompt, 301, 302], "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": prompt}
    content = json.dumps(asked | {"stream": True, "return_token_ids": True}).encode()
    token_ids: list[int] = []
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(posted("/v1/completions", content, "connection: close"))
        async for line in reader:
            if line == b"data: [DONE]\n":
                writer.close()
                return token_ids
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: ")).get("choices", ()):
                    token_ids += choice["token_ids"]
        writer.close()
    except OSError:
        pass
    return None


async def keep_streaming(
    port: int, seed: int, calm: list[list[int] | None], counts: Counts, until: asyncio.Event
) -> None:
    rng = random.Random(seed)
    while not until.is_set():
        prompt = rng.randrange(NUM_PROMPTS)
        tokens = await told(port, prompt)
        counts.streams += 1
        counts.broken += tokens is None
        counts.different += tokens is not None and tokens != calm[prompt]
        await asyncio.sleep(0.05 if tokens is None else 0)


@contextmanager
def front_end(system: System, port: int) -> Iterator[list[Service]]:
    """Yields a list whose last entry is the one that lives."""
    services = [start_front_end(system, port)]
    try:
        yield services
    finally:
        services[-1].stop()


def start_front_end(system: System, port: int) -> Service:
    flags = ["--model", MODEL, "--scheduler", system.url, "--port", 0, "--http-port", port, "--metrics-port", 0]
    service = Service("frontend", [*flags, "--log-level", "error"])
    service.wait_until_ready()
    return service


async def kill_in_turns(system: System, port: int, killed: list[Service], seconds: float) -> int:
    """Returns how many kills there were."""
    num_kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        if num_kills % 3 == 2:
            killed[-1].kill()
            killed.append(await asyncio.to_thread(start_front_end, system, port))
        else:
            system.worker.kill()
            system.restart_worker()
            await asyncio.to_thread(system.worker.wait_until_ready)
        num_kills += 1
        await asyncio.sleep(PAUSE_S)
    return num_kills


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    ports = [free_port(HOST), free_port(HOST)]
    scheduler = ("--worker-timeout", 600)
    with running(MODEL, worker=WORKER_FLAGS, scheduler=scheduler) as system, front_end(system, ports[0]):
        calm = [await told(ports[0], prompt) for prompt in range(NUM_PROMPTS)]
        with front_end(system, ports[1]) as killed:
            lives, dies, until = Counts(), Counts(), asyncio.Event()
            tasks = [
                asyncio.create_task(keep_streaming(ports[0], seed, calm, lives, until)) for seed in range(NUM_STREAMS)
            ]
            tasks += [
                asyncio.create_task(keep_streaming(ports[1], seed, calm, dies, until)) for seed in range(NUM_BESIDE)
            ]
            num_kills = await kill_in_turns(system, ports[1], killed, arguments.seconds)
            until.set()
            await asyncio.gather(*tasks)
        async with AsyncClient(system.url) as client:
            loads = await client.loads()
    left = loads.num_running + loads.num_waiting
    return {"kills": num_kills, "lives": vars(lives), "dies": vars(dies), "left": left}


def report(figures: dict[str, Any]) -> None:
    lives, dies = figures["lives"], figures["dies"]
    print(f"{figures['kills']} kills under {NUM_STREAMS} streams at a time through a front end that lives:")
    print(f"  {lives['streams']} streams, {lives['different']} with other tokens", end=" ")
    print(verdict(lives["different"], 0, at_least=False), end=", ")
    print(f"{lives['broken']} broken {verdict(lives['broken'], 0, at_least=False)}")
    print(f"  through the one that is killed: {dies['streams']}, {dies['broken']} refused or broken off", end=", ")
    print(f"{dies['different']} with other tokens {verdict(dies['different'], 0, at_least=False)}")
    print(f"  {figures['left']} requests left {verdict(figures['left'], 0, at_least=False)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=180.0, help="for which there are kills (default: 180)")
