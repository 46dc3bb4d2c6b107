"""Measures the gaps between tokens of streams over HTTP, alone and beside clients that break the protocol.

    python -m bench hostile-http

A worker, a scheduler with `--max-decode-slowdown` and a front end run as processes, with the 54M shape. Streams go on
beside each attack for as long as that takes: 20,000 requests with changed fields and bytes, bodies that come slowly or
never, 100,000 headers in one request and in many, bodies as large as are taken, and as many connections as the server
has room for, with more than that. The attackers are one process of the lowest priority, as in `hostile`. It counts
answers by status, and takes what memory the front end has had at most, and has once the attack is over. Raw numbers go
to bench/results/hostile_http.json.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.checkpoint import tokenized_checkpoint
from bench.goals import verdict
from bench.services.hostile import MAX_DECODE_SLOWDOWN, PAUSE_S, TOKENIZER, random_prompt
from pagewire.common.limits import raise_descriptor_limit
from pagewire.hosting.supervisor import free_port
from testing.services import HOST, Service, running

NUM_STREAMS, INPUT_LEN, OUTPUT_LEN = 4, 100, 200
CALM_STREAMS = 3  # one after the other
GOAL, MAX_GROWTH_MIB = 2.0, 100
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**31, 2**64, 1e308, "", "x", "\ud800", "é🐢\x00", "x" * 3000, [], [[]], [None], {},
    {"a": {"b": [1]}}, {"role": "user"}, "{{ 1/0 }}", "[a", {"type": "text"}, {"5": 1}, {"regex": "(a|b)*"},
]  # fmt: skip
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "once", "max_tokens": 3, "n": 2, "logprobs": 1, "stop": ["a"], "seed": 1}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "logit_bias": {"5": 1.0}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]


def posted(path: str, content: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}", *headers)
    return "\r\n".join((*lines, "", "")).encode() + content


def changed(rng: random.Random, value: Any) -> Any:
    """Returns a value of JSON with something else somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        return value | {name + "x" * (rng.random() < 0.1): changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.6:
        return [*value, changed(rng, rng.choice(value))]
    return rng.choice(VALUES)


def mutated(rng: random.Random) -> bytes:
    path, asked = rng.choice(REQUESTS)
    for _ in range(rng.randint(1, 3)):
        asked = changed(rng, asked)
    sent = bytearray(posted(path, json.dumps(asked).encode(), "connection: close"))
    for _ in range(rng.choice((0, 0, 1, 3))):
        place = rng.randrange(len(sent))
        sent[place : place + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 3))
    return bytes(sent)


class Attacker:
    def __init__(self, port: int) -> None:
        self._port = port
        self._rng = random.Random(0)
        self.answers: Counter[str] = Counter()

    async def mutate(self) -> None:
        await self._each(20_000, 16, lambda _: self._send(mutated(self._rng)))

    async def send_slow_bodies(self) -> None:
        async def trickle(number: int) -> None:
            content = json.dumps({"prompt": "x" * 200_000, "max_tokens": 1}).encode()
            if number % 2:
                await self._send(posted("/v1/completions", content)[:150], until=time.monotonic() + 5.0)
            else:
                await self._send(posted("/v1/completions", content, "connection: close"), pause=0.05)

        await self._each(400, 400, trickle)

    async def send_headers(self) -> None:
        async def flood(number: int) -> None:
            num_headers = 100_000 if number % 50 == 0 else 90
            await self._send(
                posted("/tokenize", b"{}", *(f"x-{index}: y" for index in range(num_headers)), "connection: close")
            )

        await self._each(1000, 16, flood)

    async def send_large_bodies(self) -> None:
        async def send(number: int) -> None:
            piece = ('"x",', "[", "1,", '{"a":', '"\\u00e9",')[number % 5]
            content = b'{"prompt": [' + (piece * ((15 << 20) // len(piece))).encode()
            await self._send(posted("/v1/completions", content, "connection: close"))

        await self._each(40, 4, send)

    async def open_connections(self) -> None:
        """Holds what it gets, and opens others for some seconds."""
        held: list[Connection] = []
        until = time.monotonic() + 20.0
        for number in itertools.count():
            if time.monotonic() > until:
                break
            source = (f"127.0.0.{2 + number % 8}", 0)  # one has too few ports
            try:
                held.append(await asyncio.open_connection(HOST, self._port, local_addr=source))
            except OSError:  # refused, or this process may open no more
                await asyncio.sleep(PAUSE_S)
            if number % 1000 == 0:
                for reader, writer in held:
                    if reader.at_eof():
                        writer.close()
                self.answers["connections closed"] += sum(reader.at_eof() for reader, _ in held)
                held = [(reader, writer) for reader, writer in held if not reader.at_eof()]
        self.answers["connections held"] += len(held)
        for _, writer in held:
            writer.close()

    async def _each(self, number: int, num_at_once: int, act: Callable[[int], Awaitable[None]]) -> None:
        numbers = iter(range(number))

        async def some() -> None:
            for index in numbers:
                await act(index)

        await asyncio.gather(*(some() for _ in range(num_at_once)))

    async def _send(self, sent: bytes, *, pause: float = 0.0, until: float = 0.0) -> None:
        """Sends in pieces, and counts the answer. Where the bytes are no whole request, it waits until then."""
        answer = b""
        try:
            reader, writer = await asyncio.open_connection(HOST, self._port)
            try:
                for start in range(0, len(sent), 4096 if pause else len(sent)):
                    writer.write(sent[start : start + (4096 if pause else len(sent))])
                    await writer.drain()
                    await asyncio.sleep(pause)
                async with asyncio.timeout(max(1.0, until - time.monotonic()) if until or not pause else 30.0):
                    answer = await reader.read(1 << 16)
            finally:
                writer.close()
        except (OSError, TimeoutError):
            pass
        status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.1 ") else "none"
        self.answers[status] += 1


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "mutated requests": Attacker.mutate,
    "slow bodies": Attacker.send_slow_bodies,
    "headers": Attacker.send_headers,
    "large bodies": Attacker.send_large_bodies,
    "connections": Attacker.open_connections,
}


async def stream(connection: Connection, rng: random.Random) -> list[float]:
    """Returns the seconds between the events of a stream, but for the first ones: these come while the prompts are
    computed."""
    reader, writer = connection
    asked = {"prompt": random_prompt(rng, INPUT_LEN), "max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
    writer.write(posted("/v1/completions", json.dumps(asked | {"return_token_ids": True}).encode()))
    times = []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        elif line == b"0\r\n":
            await reader.readline()
            break
    assert len(times) >= OUTPUT_LEN // 2, f"a stream ended behind {len(times)} events"
    return [after - before for before, after in itertools.pairwise(times)][NUM_STREAMS:]


async def run_arm(name: str, port: int, front_end: Service, rng: random.Random) -> dict[str, Any]:
    """Streams as long as an attack goes on."""
    connections = [await asyncio.open_connection(HOST, port) for _ in range(NUM_STREAMS)]
    before = front_end.resident_bytes
    front_end.forget_peak()
    # By a command, as in `hostile`.
    command = ("nice", "-n", "19", sys.executable, "-m", "bench", "hostile-http", "--attack", f"{port} {name}")
    attack = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) if name in ATTACKS else None
    ended = asyncio.create_task(attack.communicate()) if attack is not None else None
    gaps: list[float] = []
    for number in itertools.count():
        if ended.done() if ended is not None else number == CALM_STREAMS:
            break
        for of_stream in await asyncio.gather(*(stream(connection, rng) for connection in connections)):
            gaps += of_stream
    gaps.sort()
    answers = json.loads((await ended)[0]) if ended is not None else {}
    peak = (front_end.peak_bytes - before) / 2**20
    await asyncio.sleep(2.0)
    growth = (front_end.resident_bytes - before) / 2**20
    quantiles = {"p50": gaps[len(gaps) // 2], "p99": gaps[int(len(gaps) * 0.99)], "max": gaps[-1]}
    for _, writer in connections:
        writer.close()
    found = {**quantiles, "answers": answers, "peak_mib": peak, "growth_mib": growth}
    print(f"  {name}: {found}", flush=True)
    return found


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.attack is not None:
        raise_descriptor_limit()
        port, name = arguments.attack.split(" ", 1)
        attacker = Attacker(int(port))
        await ATTACKS[name](attacker)
        print(json.dumps(attacker.answers), flush=True)
        sys.exit()
    with tempfile.TemporaryDirectory() as made:
        model = tokenized_checkpoint("54M", TOKENIZER, Path(made) / "model")
        scheduler = ["--max-decode-slowdown", MAX_DECODE_SLOWDOWN]  # or a long prompt is a gap of seconds for others
        with running(model, worker=["--num-device-blocks", 1024, "--num-threads", 1], scheduler=scheduler) as system:
            port = free_port(HOST)
            flags = ["--model", model, "--scheduler", system.url, "--port", 0, "--http-port", port, "--metrics-port", 0]
            front_end = Service("frontend", flags)
            try:
                front_end.wait_until_ready()
                rng = random.Random(0)
                await run_arm("calm", port, front_end, rng)  # warms up
                chosen = [name for name in ATTACKS if arguments.only in name]
                return {name: await run_arm(name, port, front_end, rng) for name in ("calm", *chosen)}
            finally:
                front_end.stop()


def report(figures: dict[str, Any]) -> None:
    print(f"gaps between tokens of {NUM_STREAMS} streams over HTTP, in ms; the front end's memory; answers by status")
    for name, found in ((name, figures[name]) for name in ("calm", *ATTACKS) if name in figures):
        gaps = ", ".join(f"{key} {found[key] * 1000:.1f}" for key in ("p50", "p99", "max"))
        ratio = found["p99"] / figures["calm"]["p99"]
        num_failed = sum(count for status, count in found["answers"].items() if status.startswith("50"))
        print(f"  {name:16} {gaps}; p99 {ratio:.2f} times calm {verdict(ratio, GOAL, at_least=False)}")
        print(f"  {'':16} {num_failed} answers of 5xx {verdict(num_failed, 0, at_least=False)}: {found['answers']}")
        growth = verdict(found["growth_mib"], MAX_GROWTH_MIB, at_least=False)
        print(f"  {'':16} {found['peak_mib']:.0f} MiB more, {found['growth_mib']:.0f} behind it {growth}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="attacks whose names have this within them (default: all)")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
