"""Measures the effect of a hostile HTTP client on other tenants: token gaps, small chats, health checks, memory.

    python -m bench hostile-http

A worker, a scheduler with `--max-decode-slowdown` and tenants, and a front end run as processes, with the 54M shape.
One tenant streams, chats and requests the server's health: alone, during each attack of another tenant, and during all
attacks together. A heartbeat in the front end's event loop (`heartbeat/sitecustomize.py`) measures how long the loop is
blocked at a time. Its own work or a thread that holds the GIL may block it. The attackers run in one process of the
lowest priority, as in `hostile`. The raw numbers are written to bench/results/hostile_http.json.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint import tokenized_checkpoint
from bench.goals import verdict
from bench.services.heartbeat.sitecustomize import FORM
from bench.services.hostile import KEYS, MAX_DECODE_SLOWDOWN, QUOTA, TOKENIZER, random_prompt, tenants
from bench.services.http_attacks import ATTACKS, CHAT, COMPLETIONS, SMUGGLED, TEMPLATES, Attacker, Connection, posted
from pagewire.common.process.limits import raise_descriptor_limit
from pagewire.hosting.supervisor import free_port
from testing.services import ENVIRON, HOST, Process, Service, running

NUM_STREAMS, INPUT_LEN, OUTPUT_LEN = 4, 100, 200
ALL = "all together"
KEY = f"authorization: Bearer {KEYS['polite']}"
CHAT_PAUSE_S, HEALTH_PAUSE_S, SETTLE_S = 0.1, 0.05, 2.0
PATIENCE_S = 60.0  # timeout of a response
GAP_GOAL, CHAT_GOAL = 2.0, 3.0  # multiples of the calm arm
HEALTH_GOAL_S, HELD_GOAL_S, GROWTH_GOAL_MIB = 0.2, 0.02, 100
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FrontEnd:
    """A front end with a heartbeat in its event loop."""

    def __init__(self, model: Path, scheduler: str, directory: Path) -> None:
        self.port = free_port(HOST)
        self._beats = directory / "heartbeat"
        self._beats.write_bytes(bytes(FORM.size))
        key = directory / "key"
        key.write_text(KEYS["watcher"])
        flags = ["--model", model, "--scheduler", scheduler, "--port", 0, "--http-port", self.port, "--metrics-port", 0]
        flags += ["--tenants", directory / "tenants.yaml", "--scheduler-api-key-file", key, "--log-level", "error"]
        self.service = Service("frontend", flags, self._start)

    def _start(self, arguments: Sequence[str]) -> Process:
        paths = os.pathsep.join((str(Path(__file__).parent / "heartbeat"), ENVIRON["PYTHONPATH"]))
        environ = {**ENVIRON, "PYTHONPATH": paths, "HEARTBEAT": str(self._beats)}
        command = [sys.executable, "-m", "pagewire", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)

    def beats(self) -> dict[str, float]:
        """Return the maximum delay and blocking time of the loop since the last call, in seconds."""
        late, held = FORM.unpack(self._beats.read_bytes())
        with self._beats.open("r+b") as file:
            file.write(bytes(FORM.size))
        return {"late": late, "held": held}


class Victim:
    """A tenant that streams, chats and requests the server's health concurrently.

    Attributes:
        gaps: the seconds between the tokens of its streams.
        chats: the seconds that each chat took.
        health: the seconds that each request of /health took.
        answers: the number of responses by status code or error.
    """

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self._is_over = False
        self.gaps: list[float] = []
        self.chats: list[float] = []
        self.health: list[float] = []
        self.answers: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Start new requests for `seconds`, and return when all of them have been answered."""
        asyncio.get_running_loop().call_later(seconds, self._stop)
        acts = [*[(self._stream, self.gaps)] * NUM_STREAMS, (self._chat, self.chats), (self._ask_health, self.health)]
        await asyncio.gather(*(self._repeat(act, seconds) for act, seconds in acts))

    def _stop(self) -> None:
        self._is_over = True

    async def _repeat(self, act: Callable[[Connection], Awaitable[None]], waited: list[float]) -> None:
        """Repeat an act. If the act fails, its seconds are appended to `waited`."""
        connection: Connection | None = None
        while not self._is_over:
            begun = time.perf_counter()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    if connection is None:
                        connection = await asyncio.open_connection(HOST, self._port)
                    await act(connection)
            except (OSError, TimeoutError, EOFError) as error:
                self.answers[type(error).__name__] += 1
                waited.append(time.perf_counter() - begun)
                if connection is not None:
                    connection[1].close()
                connection = None
                await asyncio.sleep(CHAT_PAUSE_S)
        if connection is not None:
            connection[1].close()

    async def _stream(self, connection: Connection) -> None:
        body = {"prompt": random_prompt(self._rng, INPUT_LEN), "max_tokens": OUTPUT_LEN, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        if not await self._send(connection, posted(COMPLETIONS, _json(body), KEY)):
            return
        times = []
        async for line in connection[0]:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            elif line == b"0\r\n":
                break
        await connection[0].readline()
        self.answers["stream that ends early"] += len(times) < OUTPUT_LEN // 2
        self.gaps += [after - before for before, after in itertools.pairwise(times)]

    async def _chat(self, connection: Connection) -> None:
        body = {"messages": [{"role": "user", "content": str(self._rng.random())}], "max_tokens": 1}
        begun = time.perf_counter()
        await self._send(connection, posted(CHAT, _json(body), KEY))
        self.chats.append(time.perf_counter() - begun)
        await asyncio.sleep(CHAT_PAUSE_S)

    async def _ask_health(self, connection: Connection) -> None:
        begun = time.perf_counter()
        await self._send(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        self.health.append(time.perf_counter() - begun)
        await asyncio.sleep(HEALTH_PAUSE_S)

    async def _send(self, connection: Connection, request: bytes) -> bool:
        """Send a request and read the response. Return True for a stream, of which only the head is read."""
        reader, writer = connection
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        self.answers[head[9:12].decode()] += 1
        if b"text/event-stream" in head:
            return True
        (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        return False


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def corrected(gaps: list[float], usual: float) -> list[float]:
    """Return the gaps, with additional gaps that correct for coordinated omission.

    A stalled stream has one long gap, after which its tokens arrive at once. If tokens had arrived at their usual pace,
    a client would have seen several shorter gaps within the long one. The result contains these gaps too.
    """
    return [gap - usual * number for gap in gaps for number in range(max(1, int(gap / usual)))]


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the p50, p99 and maximum of durations. Without any measurement, all are the timeout."""
    found = sorted(seconds) or [PATIENCE_S]
    return {"p50": found[len(found) // 2], "p99": found[int(len(found) * 0.99)], "max": found[-1]}


async def run_arm(
    name: str, front_end: FrontEnd, arguments: argparse.Namespace, rng: random.Random, usual: float = PATIENCE_S
) -> dict[str, Any]:
    """Run one arm and return its figures. `usual` is the median token gap of a calm server, if it is known."""
    names = ATTACKS if name == ALL else [each for each in ATTACKS if each == name]
    victim, service = Victim(front_end.port, rng), front_end.service
    before = service.resident_bytes
    service.forget_peak()
    front_end.beats()
    command = ("nice", "-n", "19", sys.executable, "-m", "bench", "hostile-http")
    seconds = arguments.seconds + arguments.warm_up
    attack = json.dumps({"port": front_end.port, "seconds": seconds, "names": list(names)})
    # A separate command, as in `hostile`.
    attackers = (
        await asyncio.create_subprocess_exec(*command, "--attack", attack, stdout=asyncio.subprocess.PIPE)
        if names
        else None
    )
    if attackers is not None:
        assert attackers.stdout is not None
        assert await attackers.stdout.readline() == b"begun\n", "the attackers have not begun"
        await asyncio.sleep(arguments.warm_up)
    await victim.run(arguments.seconds)
    answers = json.loads((await attackers.communicate())[0]) if attackers is not None else {}
    found = {
        "gaps": quantiles(corrected(victim.gaps, usual)),
        "chats": quantiles(victim.chats),
        "health": quantiles(victim.health),
    }
    await until_well(front_end.port)
    found |= {"loop": front_end.beats(), "peak_mib": (service.peak_bytes - before) / 2**20}
    found |= {"growth_mib": (service.resident_bytes - before) / 2**20, "victim": +victim.answers, "answers": answers}
    print(f"  {name}: {found}", flush=True)
    return found


async def until_well(port: int) -> None:
    """Wait until the server has finished the work that the attackers left behind."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await asyncio.sleep(SETTLE_S)


def served_model(directory: Path) -> Path:
    """Create a model with a default chat template, and a further template for each tool call format."""
    model = tokenized_checkpoint("54M", TOKENIZER, directory / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "additional_chat_templates").mkdir()
    for name, text in TEMPLATES.items():
        named = model / "additional_chat_templates" / f"{name}.jinja"
        named.write_text(TEMPLATE + "{# " + text + " #}")
    return model


async def attack(port: int, seconds: float, names: Sequence[str]) -> None:
    """Run the attacks, and print the numbers of responses by status."""
    raise_descriptor_limit()
    print("begun", flush=True)
    attacker = Attacker(port, time.monotonic() + seconds)
    await asyncio.gather(*(attacker.run(name) for name in names))
    print(json.dumps(attacker.answers), flush=True)


async def measure(arguments: argparse.Namespace) -> dict[str, Any] | None:
    if arguments.attack is not None:
        return await attack(**json.loads(arguments.attack))
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model = served_model(directory)
        # Without this limit, a long prompt would delay other requests' tokens by seconds.
        scheduler = ["--tenants", tenants(directory), "--max-decode-slowdown", MAX_DECODE_SLOWDOWN]
        worker = ["--num-device-blocks", 1024, "--num-threads", 1]
        with running(model, worker=worker, scheduler=scheduler) as system:
            front_end = FrontEnd(model, system.url, directory)
            try:
                front_end.service.wait_until_ready()
                rng = random.Random(0)
                usual = (await run_arm("calm", front_end, arguments, rng))["gaps"]["p50"]  # warm-up
                names = [name for name in (*ATTACKS, ALL) if arguments.only in name]
                arms = {name: await run_arm(name, front_end, arguments, rng, usual) for name in ("calm", *names)}
            finally:
                front_end.service.stop()
    load = {"model": "54M", "streams": NUM_STREAMS, "quota": QUOTA, "max_decode_slowdown": MAX_DECODE_SLOWDOWN}
    return {"load": load | {"seconds": arguments.seconds}, "arms": arms}


def report(figures: dict[str, Any]) -> None:
    arms = figures["arms"]
    calm = arms["calm"]
    print(
        f"a tenant with {NUM_STREAMS} streams over HTTP during attacks of {figures['load']['seconds']:g} s; in ms, MiB"
    )
    for name, found in arms.items():
        print(name)
        for key, goal, text in (("gaps", GAP_GOAL, "gaps between tokens"), ("chats", CHAT_GOAL, "small chats")):
            ratio = found[key]["p99"] / calm[key]["p99"]
            print(f"  {text:20} {_told(found[key])}; p99 {ratio:.2f} times calm {verdict(ratio, goal, at_least=False)}")
        health = verdict(found["health"]["max"] * 1000, HEALTH_GOAL_S * 1000, at_least=False)
        print(f"  {'/health':20} {_told(found['health'])} {health}")
        late, held = (found["loop"][key] * 1000 for key in ("late", "held"))
        print(f"  {'event loop':20} held {held:.1f} {_goal(held, HELD_GOAL_S * 1000, name)}, late {late:.1f}")
        for key, text in (("peak_mib", "memory at most"), ("growth_mib", "memory afterwards")):
            print(f"  {text:20} {found[key]:.0f} more {verdict(found[key], GROWTH_GOAL_MIB, at_least=False)}")
        wrong = num_wrong(found)
        print(
            f"  {'answers':20} {wrong} that no client should get {verdict(wrong, 0, at_least=False)}: {_answers(found)}"
        )


def num_wrong(found: dict[str, Any]) -> int:
    """Return the number of responses that no client should receive.

    These are server errors, a 429 or 503 without a retry time, a response to a request inside another request's body,
    and every failure of the victim.
    """
    wrong = sum(
        count for status, count in found["answers"].items() if status in ("500", SMUGGLED) or "at once" in status
    )
    return wrong + sum(count for status, count in found["victim"].items() if status != "200")


def _answers(found: dict[str, Any]) -> str:
    return f"attackers {dict(found['answers'])}, the other tenant {dict(found['victim'])}"


def _goal(value: float, goal: float, name: str) -> str:
    """Return the verdict on a value. The bound applies to each single attack, not to the calm or combined arm."""
    return "" if name in ("calm", ALL) else verdict(value, goal, at_least=False)


def _told(found: dict[str, float]) -> str:
    return ", ".join(f"{key} {found[key] * 1000:.1f}" for key in ("p50", "p99", "max"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each attack (default: 20)")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds for the attackers to start (default: 4)")
    parser.add_argument("--only", default="", help="run the attacks whose names contain this text (default: all)")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
