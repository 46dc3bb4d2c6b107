"""Log output to a slow, stuck or closed reader: the writing thread never waits, and lost lines are counted."""

import asyncio
import fcntl
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from pagewire.common.process import queued_writer
from pagewire.common.process.queued_writer import QueuedWriter, descriptor_writer
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import request, serve
from testing.serving.certificates import Authority
from tests.contract.service_process import service
from tests.thorough import thorough

PROMPT = [1, 2, 3, 4, 5]
MAX_BYTES = 1000


class Pipe:
    """A small pipe, which is filled at first if `is_full` is true."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)
        if is_full:
            os.write(self.write_end, b"\n" * fcntl.fcntl(self.write_end, fcntl.F_GETPIPE_SZ))

    def close_write_end(self) -> None:
        os.close(self.write_end)
        self.write_end = -1

    def read_all(self) -> str:
        """Close this process's write end, and read until no process has a write end open."""
        self.close_write_end()
        with open(self.read_end, encoding="utf-8", closefd=False) as file:
            return file.read()

    def close(self) -> None:
        for end in (self.read_end, self.write_end):
            if end != -1:
                os.close(end)


@pytest.fixture
def full_pipe() -> Iterator[Pipe]:
    pipe = Pipe(is_full=True)
    yield pipe
    pipe.close()


def notice(num_dropped: int) -> bytes:
    return b"%d dropped\n" % num_dropped


def lines_from(descriptor: int, *, until: str = "") -> list[str]:
    """Read lines until the line `until`, or until a line ends if `until` is empty."""
    text = ""
    while not text.endswith("\n") or f"{until}\n" not in text:
        text += os.read(descriptor, 65536).decode()
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize("is_blocking", [True, False])
def test_dropped_lines_are_counted_at_their_position(full_pipe: Pipe, is_blocking: bool) -> None:
    os.set_blocking(full_pipe.write_end, is_blocking)
    writer = QueuedWriter(descriptor_writer(full_pipe.write_end), notice, max_waiting_bytes=MAX_BYTES)
    for number in range(1000):
        writer.put(b"line %04d\n" % number)
    assert not writer.flush(0.01)
    num_dropped = writer.num_dropped
    assert 1000 - 2 * MAX_BYTES // 10 <= num_dropped < 1000, "the lines that wait, and those that are being written"
    # Whenever the writer begins to write, new lines are accepted once the waiting lines were written.
    told, following = [], 0
    while following < 1000:
        told += lines_from(full_pipe.read_end)
        following = 0
        for line in told:
            dropped = re.fullmatch(r"(\d+) dropped", line)
            assert dropped or line == f"line {following:04}"
            following += int(dropped[1]) if dropped else 1
    assert following == 1000
    writer.put(b"after\n")
    assert writer.flush(20)
    assert lines_from(full_pipe.read_end) == ["after"], "told once"
    assert writer.num_dropped == num_dropped == 1000 - sum(line.startswith("line") for line in told)
    writer.close()


def test_a_line_longer_than_the_queue_is_written_too() -> None:
    pipe = Pipe()
    writer = QueuedWriter(descriptor_writer(pipe.write_end), notice)
    reader: list[str] = []
    reading = threading.Thread(target=lambda: reader.extend(lines_from(pipe.read_end, until="end")))
    reading.start()
    writer.put(b"x" * (queued_writer.MAX_WAITING_BYTES + 1) + b"\n")
    assert writer.flush(20)
    writer.put(b"end\n")
    assert writer.flush(20)
    reading.join()
    assert [len(line) for line in reader] == [queued_writer.MAX_WAITING_BYTES + 1, 3]
    writer.close()
    pipe.close()


@pytest.mark.parametrize("ends_at_loss", [False, True])
def test_a_queue_takes_all_its_bytes_and_none_beyond(ends_at_loss: bool) -> None:
    """The queue accepts exactly its byte limit. With `ends_at_loss`, no line is written after the first lost line."""
    begun, goes_on = threading.Event(), threading.Event()

    def write(block: bytes) -> None:
        begun.set()
        goes_on.wait()

    writer = QueuedWriter(write, notice, max_waiting_bytes=MAX_BYTES, ends_at_loss=ends_at_loss)
    with writer._changed:  # so that the first line is not written before the next arrives
        writer.put(b"x" * (MAX_BYTES - 6) + b"\n")
        writer.put(b"last\n")
    assert begun.wait(20)
    writer.put(b"x" * (MAX_BYTES - 6) + b"\n")
    writer.put(b"last\n")
    assert writer.num_dropped == 0
    writer.put(b"\n")
    assert writer.num_dropped == 1
    goes_on.set()
    assert writer.flush(20)
    writer.put(b"late\n")
    assert writer.num_dropped == 1 + ends_at_loss
    writer.close()


def test_a_closed_reader_loses_only_the_lines() -> None:
    pipe = Pipe()
    os.close(pipe.read_end)
    pipe.read_end = -1
    writer = QueuedWriter(descriptor_writer(pipe.write_end), notice)
    writer.put(b"lost\n")
    assert writer.flush(20)
    assert writer.num_dropped == 1
    writer.close()
    pipe.close()


def test_what_comes_after_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(threading.enumerate())
    writer = QueuedWriter(lambda block: None, notice)
    (thread,) = (thread for thread in set(threading.enumerate()) - others if thread.name == "writer")
    writer.close()
    thread.join()
    assert writer.flush(20)
    writer.put(b"late\n")
    monkeypatch.setattr(writer._changed, "wait_for", lambda *_: pytest.fail("it waits"))
    assert not writer.flush(20)


ENDS = {
    "returns": ("", 0),
    "raises": ("raise RuntimeError('why')", 1),
    "refuses": ("print('what people read', file=sys.stderr); sys.exit(78)", 78),
    "is told again": ("end_at_once(143)", 143),
    "ends within a line": ("sys.stderr.write('what')", 0),
}
STARTS = {
    "by itself": "exec(program)",
    "forked": """
import multiprocessing
from testing.forked import ending
process = multiprocessing.get_context("fork").Process(target=ending()(exec), args=(program,))
process.start()
process.join()
sys.exit(process.exitcode)""",
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_whether_or_not_its_last_lines_are_read(full_pipe: Pipe, end: str, start: str) -> None:
    body, code = ENDS[end]
    program = (
        "import logging, sys\nfrom pagewire.hosting import logs\nfrom worker_service.engine import end_at_once\n"
        "logs.FLUSH_TIMEOUT = 0.1\nlogs.configure(logs.LogConfig())\n"
        f"for number in range(300):\n    logging.info('line %d', number)\n{body}"
    )
    command = [sys.executable, "-c", f"import sys\nprogram = {program!r}\n{STARTS[start]}"]
    assert subprocess.run(command, stderr=full_pipe.write_end, timeout=60, check=False).returncode == code
    pipe = Pipe()
    command[2] = command[2].replace("0.1", "60")
    with subprocess.Popen(command, stderr=pipe.write_end) as process:
        text = pipe.read_all()
    pipe.close()
    assert process.returncode == code
    numbers = [int(number) for number in re.findall(r"INFO root: line (\d+)", text)]
    assert numbers == list(range(300)), "all is flushed"
    last = {"raises": "RuntimeError: why\n", "refuses": "what people read\n", "ends within a line": "what"}
    assert text.endswith(last.get(end, "line 299\n"))


async def dropped_lines(metrics_port: int) -> float:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=20) as response:
            return response.read().decode()

    text = await asyncio.to_thread(get)
    (value,) = re.findall(r"^pagewire:log_lines_dropped_total\{.*\} (.*)$", text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize("is_read_again", [True, *thorough(False)])
async def test_a_scheduler_goes_on_when_its_log_is_not_read(
    checkpoint: Path, full_pipe: Pipe, is_read_again: bool
) -> None:
    metrics_port = free_port("127.0.0.1")
    worker = await FakeWorker.started(checkpoint)
    flags = [f"--worker=127.0.0.1:{worker.port}", "--port=0", f"--metrics-port={metrics_port}", "--log-requests"]
    async with (
        service("scheduler", str(checkpoint), *flags, stderr=full_pipe.write_end) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def fill_log() -> None:
            async for _ in stub.Generate(request(PROMPT, max_tokens=1, n=16), timeout=60):
                pass

        # Each sample logs a line. Continue until more lines arrived than the queue holds.
        async with asyncio.timeout(120):
            while await dropped_lines(metrics_port) == 0:
                await asyncio.gather(*(fill_log() for _ in range(20)))
        if is_read_again:
            told = await asyncio.to_thread(read_until, full_pipe, r"standard error was not read .*: (\d+) lines")
            assert int(told) > 0
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)).version
    await worker.kill()


async def test_a_standard_output_that_is_not_read_stops_no_scheduler(checkpoint: Path, full_pipe: Pipe) -> None:
    worker = await FakeWorker.started(checkpoint)
    port = free_port("127.0.0.1")
    flags = [f"--worker=127.0.0.1:{worker.port}", f"--port={port}", "--metrics-port=0"]
    async with (
        service("scheduler", str(checkpoint), *flags, stdout=full_pipe.write_end, stderr=full_pipe.write_end),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Generate(request(PROMPT, max_tokens=3), wait_for_ready=True, timeout=60)
        assert sum([len(response.token_ids) async for response in call]) == 3
    await worker.kill()


def read_until(pipe: Pipe, pattern: str) -> str:
    text = ""
    while not (found := re.search(pattern, text)):
        text += os.read(pipe.read_end, 65536).decode()
    return found[1]


async def test_bad_handshakes_and_a_silent_log_stop_no_front_end(
    tmp_path: Path, checkpoint: Path, full_pipe: Pipe
) -> None:
    """Failed handshakes and a blocked log do not block a front end, although gRPC's core would log a line for each
    handshake.
    """
    authority = Authority("pagewire")
    cert, key = authority.issue("localhost").write(tmp_path, "server")
    async with serve(checkpoint) as stack:
        flags = [
            f"--scheduler={stack.url.removeprefix('grpc://')}",
            "--host=localhost",
            "--port=0",
            "--log-level=debug",
        ]
        flags += [f"--tls-cert={cert}", f"--tls-key={key}"]
        async with service("frontend", str(checkpoint), *flags, stderr=full_pipe.write_end) as (_, address):
            for _ in range(40):
                reader, writer = await asyncio.open_connection(*address.split(":"))
                writer.write(b"garbage" * 100)
                await reader.read()
                writer.close()
            secure = grpc.ssl_channel_credentials(authority.cert)
            async with grpc.aio.secure_channel(address, secure) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                assert (await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)).version
