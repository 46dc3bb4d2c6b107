"""`pagewire status --watch` on a pseudo-terminal: what fits on the screen, the keys, and the restored terminal."""

import dataclasses
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pyte.modes
import pytest

from pagewire.cli.block_view import MIN_LINES
from pagewire.cli.status import ServerState, View
from pagewire.client import wire
from pagewire.client.server_info import HELD, BlockMap
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving.scripted_scheduler import ScriptedScheduler, abort, serving
from testing.terminal import Terminal
from tests.contract.drawn_data import drawn_message

SIZES = [(60, 20), (80, 24), (200, 50)]
ALTERNATE_SCREEN = 1049 << 5  # as pyte numbers private modes
CODE = re.compile("\033[^m]*m")


def busy() -> ScriptedScheduler:
    """Return a scheduler with a worker, latencies and the blocks of 12 requests."""
    scheduler = ScriptedScheduler()
    latency = pb.Latency(num_sequences=9, mean=0.0123456, p50=0.01, p99=1.5)
    scheduler.loads.MergeFrom(pb.GetLoadsResponse(num_waiting=2, num_waiting_tokens=777, time_to_first_token=latency))
    scheduler.info.worker.MergeFrom(pb.WorkerInfo(device="cpu", dtype="float32", attention_backend="cpu", epoch=9))
    scheduler.blocks.owners.extend(f"request-{index}" for index in range(12))
    scheduler.blocks.device_blocks.extend(HELD + index // 10 if index < 120 else 0 for index in range(4000))
    return scheduler


def watching(url: str, columns: int = 80, rows: int = 24) -> Terminal:
    command = [sys.executable, "-m", "pagewire", "status", "--watch", "--url", url]
    # Some programs export a size that does not follow a resize.
    return Terminal(command, columns=columns, rows=rows, environ={"NO_COLOR": "1", "COLUMNS": "80", "LINES": "24"})


def is_restored(terminal: Terminal, settings: list[Any]) -> bool:
    """Return whether the terminal has its first settings, and shows its main screen with a cursor and wrapped lines."""
    modes = terminal._screen.mode
    shown = ALTERNATE_SCREEN not in modes and {pyte.modes.DECTCEM, pyte.modes.DECAWM} <= modes
    return shown and terminal.settings == settings


def footer(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: text in lines[-1]


def is_whole(lines: list[str]) -> bool:
    """Return whether the screen shows the whole view. The screen may be read while it is drawn."""
    first = [line.split("  ")[0] for line in lines if re.match("[A-Za-z]", line)]
    return (
        lines[0].startswith("model")
        and first[:4] == ["model", "running", "waiting", "KV cache"]
        and any(line.endswith("mean 12.3 ms, p50 10.0 ms, p99 1.50 s") for line in lines)
        and any(line.endswith("queue time   none yet") for line in lines)
        and sum("..." in line for line in lines) >= 2  # of the map
        and "q: end" in lines[-1]
    )


def test_the_view_fits_every_size_and_answers_to_keys() -> None:
    with serving(busy()) as url, watching(url, *SIZES[0]) as terminal:
        settings = terminal.settings
        for columns, rows in SIZES:
            terminal.resize(columns, rows)
            terminal.wait_for(is_whole)
        # The largest screen has all rows.
        terminal.wait_for(lambda lines: any(line.startswith("since start") for line in lines))

        terminal.resize(60, 20)
        terminal.wait_for(footer("lines 1-19 of"))
        keys = {"\033[B": "2-20", "j": "3-21", "\033[A": "2-20", "\033[6~": "12-30", "\033[5~": "1-19", "jkk": "1-19"}
        for key, shown in keys.items():
            terminal.type(key)
            terminal.wait_for(footer(f"lines {shown}"))
        terminal.type("\033[6~" * 9)
        terminal.wait_for(lambda lines: lines[-2].endswith("workers lost") or lines[-2].strip() == "lost")

        terminal.type("/request-1")
        terminal.wait_for(footer("/request-1_"))
        lines = terminal.wait_for(lambda lines: not lines[3])
        assert re.findall(r"\w request-\d+ 10", " ".join(lines)) == [
            "b request-1 10",
            "k request-10 10",
            "l request-11 10",
        ]
        terminal.type("\x7f" * 9 + "WAIT\r")
        terminal.wait_for(footer("filter WAIT"))
        lines = terminal.wait_for(lambda lines: "2 (777 prompt tokens)" in lines[0])
        assert not any("model" in line for line in lines)
        terminal.type("\033")
        terminal.wait_for(lambda lines: "model" in lines[0])
        terminal.type("/q")
        terminal.wait_for(footer("/q_"))
        terminal.type("\033\033")
        assert terminal.wait() == 0
        assert is_restored(terminal, settings)


def test_a_server_that_goes_away_is_a_line_until_it_is_back() -> None:
    scheduler = busy()
    with serving(scheduler) as url:
        terminal = watching(url)
        settings = terminal.settings
        terminal.wait_for("first token")
        assert not is_restored(terminal, settings)
    with terminal:
        port = int(url.rpartition(":")[2])
        # The last state stays. The screen may be read while it is drawn.
        terminal.wait_for(lambda lines: all(text in "\n".join(lines) for text in ("no server answers", "first token")))
        terminal.type("/")
        terminal.wait_for(footer("/_"))
        terminal.type("\033")
        scheduler.loads.num_running = 78
        with serving(scheduler, port=port):
            lines = terminal.wait_for(" 78, ")
            assert lines[0].startswith("model")
            terminal.type("\x03")
            assert terminal.wait() == 130
        assert is_restored(terminal, settings)


@pytest.mark.thorough
def test_the_terminal_is_restored_after_a_signal() -> None:
    with serving(busy()) as url, watching(url) as terminal:
        settings = terminal.settings
        terminal.wait_for("first token")
        terminal.type("\x1a/")  # Ctrl-Z does not stop the command
        terminal.wait_for(footer("/_"))
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 128 + signal.SIGTERM
        assert is_restored(terminal, settings)


class Refusing(ScriptedScheduler):
    """A scheduler that refuses GetServerInfo after the first call."""

    num_calls = 0

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext) -> Any:
        self.num_calls += 1
        if self.num_calls > 1:
            abort(context, grpc.StatusCode.UNAUTHENTICATED, "the key has expired")
        return self.info


@pytest.mark.thorough
def test_the_terminal_is_restored_after_an_error() -> None:
    with serving(Refusing()) as url, watching(url) as terminal:
        settings = terminal.settings
        terminal.expect("UNAUTHENTICATED: the key has expired")
        assert terminal.wait() == 1
        assert is_restored(terminal, settings)


class Stuck(ScriptedScheduler):
    """A scheduler whose GetLoads does not answer while `goes_on` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.ServicerContext) -> Any:
        self.goes_on.wait()
        return self.loads


@pytest.mark.thorough
def test_a_server_that_does_not_answer_delays_no_key() -> None:
    scheduler = Stuck()
    with serving(scheduler) as url, watching(url) as terminal:
        terminal.wait_for("waiting for the server")
        terminal.type("/")
        terminal.wait_for(footer("/_"))
        terminal.wait_for("the server does not answer within 5 s")
        scheduler.goes_on.set()
        terminal.wait_for("first token")
        terminal.type("\033q")
        assert terminal.wait() == 0


def compact(text: str) -> str:
    return "".join(CODE.sub("", text).split())


@pytest.mark.parametrize("seed", range(3))
def test_no_line_is_too_long_and_no_figure_is_lost(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    info = wire.decode_server_info(drawn_message(pb.GetServerInfoResponse, rng))
    loads = wire.decode_loads(drawn_message(pb.GetLoadsResponse, rng))
    report = wire.decode_report(drawn_message(pb.GetRequestResponse, rng))
    owners = tuple(f"{index}{'x' * rng.randrange(1, 130)}" for index in range(40))
    uses = tuple(rng.randrange(HELD + len(owners)) for _ in range(5000))
    view = View(colour=True)
    for columns in range(60, 201, 7):
        plain = ServerState(info, loads, None)
        server = dataclasses.replace(plain, blocks=BlockMap(owners, uses, uses[9:]))
        for state, rows in ((report, report), (plain, plain), (server, plain)):
            lines = [CODE.sub("", line) for line in view.lines(state, columns, rng.randrange(19, 60), "")]
            assert max(map(len, lines)) <= columns
            shown = compact("".join(lines))
            assert all(compact(row) in shown for row in view.text(rows).split("\n"))
        map_lines = [line for line in lines if re.fullmatch(r"[.+#~A-Za-z]{30,}", line)]
        assert len(map_lines) >= MIN_LINES - 2, "the device pool and the host pool have a heading each"
