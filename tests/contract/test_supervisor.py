"""The supervisor with real child processes. Short Python programs replace the worker."""

import asyncio
import contextlib
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pagewire.common.process.child_process import ANNOUNCING_WORD, EXIT_REFUSED
from pagewire.hosting import supervisor
from pagewire.hosting.child_output import MAX_LINE_CHARS, ChildOutput
from pagewire.hosting.supervisor import (
    Exit,
    GivenUp,
    RestartPolicy,
    Restarts,
    Supervisor,
    child_environ,
    free_port,
)

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, stop_timeout_s=0.5)


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (1, "exit code 1"), (-1, "signal SIGHUP"), (-9, "signal SIGKILL")]
)
def test_an_exit_is_told_by_its_code_or_its_signal(code: int, text: str) -> None:
    assert str(Exit(code, was_ready=True, ran_s=1.0)) == text


def test_the_delay_doubles_until_a_run_was_steady() -> None:
    restarts = Restarts(RestartPolicy())
    crash = Exit(-signal.SIGKILL, was_ready=True, ran_s=1.0)
    delays = [restarts.delay_after(crash) for _ in range(8)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert restarts.delay_after(Exit(-signal.SIGKILL, was_ready=True, ran_s=30.0)) == 0.1
    assert restarts.delay_after(crash) == 0.2


def test_giving_up_takes_three_failed_starts_in_a_row() -> None:
    failure = Exit(1, was_ready=False, ran_s=1.0)
    killed = Exit(-signal.SIGKILL, was_ready=False, ran_s=1.0)
    replaced = Exit(-signal.SIGKILL, was_ready=False, ran_s=1.0, was_replaced=True)
    restarts = Restarts(RestartPolicy())
    verdicts = [restarts.delay_after(ended) for ended in (failure, failure, replaced, failure, killed, killed)]
    assert [verdict is None for verdict in verdicts] == [False] * 5 + [True]


def test_a_worker_that_was_once_ready_is_never_given_up() -> None:
    restarts = Restarts(RestartPolicy())
    restarts.delay_after(Exit(1, was_ready=True, ran_s=1.0))
    failure = Exit(1, was_ready=False, ran_s=1.0)
    assert None not in [restarts.delay_after(failure) for _ in range(10)]


def test_permanent_failures_are_not_retried_unless_once_ready() -> None:
    refused = Exit(EXIT_REFUSED, was_ready=False, ran_s=1.0, refusal="no GPU")
    assert Restarts(RestartPolicy()).delay_after(refused) is None
    restarts = Restarts(RestartPolicy())
    restarts.delay_after(Exit(-signal.SIGKILL, was_ready=True, ran_s=1.0))
    assert None not in [restarts.delay_after(refused) for _ in range(10)]


class Child:
    """A program that creates a file named after its process id at each start, and then runs `body`."""

    def __init__(self, directory: Path, body: str) -> None:
        self.starts = directory / "starts"
        self.starts.mkdir()
        program = directory / "child.py"
        head = f"""
            import os, pathlib, signal, sys, time
            starts = pathlib.Path({str(self.starts)!r})
            (starts / str(os.getpid())).touch()
            def announce(line): print(os.environ[{ANNOUNCING_WORD!r}] + line, flush=True)
        """
        program.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        self.command = [sys.executable, "-S", str(program)]

    def pids(self) -> list[int]:
        files = sorted(self.starts.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return [int(file.name) for file in files]


READY_FOREVER = """
    announce("ready on grpc://127.0.0.1:1")
    signal.pause()
"""


@contextlib.asynccontextmanager
async def supervised(child: Child, policy: RestartPolicy = QUICK) -> AsyncIterator["asyncio.Task[GivenUp]"]:
    task = asyncio.create_task(Supervisor(child.command, child_environ(os.environ, []), policy).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


class ReadyLines(logging.Handler):
    """Reports each log line of the supervisor that contains `part`, by default each "ready on" line."""

    def __init__(self, part: str = "ready on") -> None:
        super().__init__()
        self._part = part
        self._seen: asyncio.Queue[None] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if self._part in record.getMessage():
            self._seen.put_nowait(None)

    async def next(self) -> None:
        await asyncio.wait_for(self._seen.get(), 20)


@pytest.fixture
def ready(caplog: pytest.LogCaptureFixture) -> Iterator[ReadyLines]:
    caplog.set_level(logging.DEBUG)
    handler = ReadyLines()
    logging.getLogger("pagewire.hosting.supervisor").addHandler(handler)
    yield handler
    logging.getLogger("pagewire.hosting.supervisor").removeHandler(handler)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_child_is_started_again(
    tmp_path: Path, ready: ReadyLines, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(tmp_path, READY_FOREVER)
    async with supervised(child) as task:
        for _ in range(4):
            await ready.next()
            os.kill(child.pids()[-1], signal.SIGKILL)
        await ready.next()
        assert not task.done()
        assert sum(map(alive, child.pids())) == 1
    assert not any(map(alive, child.pids()))
    assert "signal SIGKILL" in caplog.text


async def test_another_child_has_its_name_and_says_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = """
        print("trifle")
        print("\\x1b[33mshade\\x1b[0m", flush=True)
        announce("ready on http://here")
        signal.pause()
    """
    child = Child(tmp_path, body)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    supervisor = Supervisor(child.command, os.environ, QUICK, name="front end", on_ready=url.set_result)
    running = asyncio.create_task(supervisor.run())
    assert await asyncio.wait_for(url, 20) == "http://here"
    running.cancel()
    await asyncio.wait({running})
    assert "the front end is process" in caplog.text
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert told[-3:] == [
        (logging.INFO, "front end: trifle"),
        (logging.INFO, "front end: shade"),  # terminal colors are removed
        (logging.DEBUG, "front end: ready on http://here"),
    ]


async def test_a_child_that_never_comes_up_is_given_up(tmp_path: Path) -> None:
    child = Child(tmp_path, "sys.exit(1)")
    async with supervised(child) as task:
        reason = await asyncio.wait_for(task, 20)
    assert reason == GivenUp("the worker failed to start 3 times in a row (exit code 1): giving up", 1)
    assert len(child.pids()) == 3


async def test_a_child_that_the_system_kills_for_its_memory_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A child that the system repeatedly kills for its memory is given up.

    Only after such a kill, the log mentions memory and a remedy.
    """
    caplog.set_level(logging.INFO)
    body = """
        announce("takes memory: 9 GiB of weights; 8 GiB were available")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = Child(tmp_path, body)
    async with supervised(child) as task:
        given_up = await asyncio.wait_for(task, 20)
    ended = "signal SIGKILL, probably because the system ran out of memory; 9 GiB of weights; 8 GiB were available"
    assert given_up == GivenUp(f"the worker failed to start 3 times in a row ({ended}): giving up", 1)
    assert len(child.pids()) == 3
    assert "takes memory" not in caplog.text


async def test_a_child_that_is_replaced_while_it_starts_is_no_failed_start(
    tmp_path: Path, ready: ReadyLines, caplog: pytest.LogCaptureFixture
) -> None:
    """A child that its supervisor kills before it is ready is not a failed start, however often that happens."""
    first = "if len(list(starts.iterdir())) < 6:\n print('waiting', flush=True); signal.pause()\n"
    child = Child(tmp_path, first + textwrap.dedent(READY_FOREVER))
    supervisor, waiting = Supervisor(child.command, os.environ, QUICK), ReadyLines("worker: waiting")
    logging.getLogger("pagewire.hosting.supervisor").addHandler(waiting)
    task = asyncio.create_task(supervisor.run())
    for _ in range(5):
        await waiting.next()
        supervisor.restart("it is of no use")
    await ready.next()
    logging.getLogger("pagewire.hosting.supervisor").removeHandler(waiting)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert len(child.pids()) == 6
    assert "the worker ended (signal SIGKILL) after" in caplog.text


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Lower the limit so that this process cannot open any file descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Warnings(logging.Handler):
    """Waits for warnings of the supervisor."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._seen.put_nowait(record.getMessage())

    async def next(self, text: str) -> None:
        async with asyncio.timeout(20):
            while text not in await self._seen.get():
                pass


async def test_a_child_that_cannot_be_started_is_started_later(tmp_path: Path, ready: ReadyLines) -> None:
    child = Child(tmp_path, READY_FOREVER)
    warnings = Warnings()
    logging.getLogger("pagewire.hosting.supervisor").addHandler(warnings)
    try:
        async with supervised(child) as task:
            await ready.next()
            (first,) = child.pids()
            with no_descriptors():
                os.kill(first, signal.SIGKILL)
                for _ in range(4):
                    await warnings.next("it could not be started: [Errno 24] Too many open files")
            await ready.next()
            assert not task.done()
    finally:
        logging.getLogger("pagewire.hosting.supervisor").removeHandler(warnings)


async def test_a_child_that_can_never_be_started_is_given_up(tmp_path: Path) -> None:
    child = Child(tmp_path, READY_FOREVER)
    child.command[0] = str(tmp_path / "nothing")
    async with supervised(child) as task:
        given_up = await asyncio.wait_for(task, 20)
    assert given_up.code == 1
    assert "failed to start 3 times in a row (it could not be started: [Errno 2] No such file" in given_up.reason


REFUSAL = """
    announce("cannot start: --device is cuda, but torch finds no GPU")
    sys.exit(78)
"""


async def test_a_child_that_cannot_start_is_started_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    child = Child(tmp_path, REFUSAL)
    async with supervised(child) as task:
        given_up = await asyncio.wait_for(task, 20)
    assert given_up == GivenUp("the worker cannot start: --device is cuda, but torch finds no GPU", 78)
    assert len(child.pids()) == 1
    assert "torch finds no GPU" not in caplog.text, "the process that ends for it says so, once"


async def test_a_child_that_was_ready_before_is_started_again_whatever_it_says(
    tmp_path: Path, ready: ReadyLines, caplog: pytest.LogCaptureFixture
) -> None:
    first, then = textwrap.dedent(READY_FOREVER), textwrap.dedent(REFUSAL)
    child = Child(
        tmp_path,
        f"n = len(list(starts.iterdir()))\nif n != 2:{textwrap.indent(first, ' ')}\nelse:{textwrap.indent(then, ' ')}",
    )
    async with supervised(child) as task:
        await ready.next()
        os.kill(child.pids()[-1], signal.SIGKILL)
        await ready.next()
        assert not task.done()
    assert len(child.pids()) == 3
    assert "the worker ended (--device is cuda, but torch finds no GPU)" in caplog.text


async def test_stopping_ends_a_child_that_ignores_sigterm(
    tmp_path: Path, ready: ReadyLines, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(READY_FOREVER))
    async with supervised(child):
        await ready.next()
    assert not any(map(alive, child.pids()))
    assert "killing it" in caplog.text


async def test_stopping_ends_a_stopped_child(
    tmp_path: Path, ready: ReadyLines, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(tmp_path, READY_FOREVER)
    async with supervised(child):
        await ready.next()
        os.kill(child.pids()[-1], signal.SIGSTOP)
    assert not any(map(alive, child.pids()))


async def test_stopping_while_the_child_starts(tmp_path: Path) -> None:
    child = Child(tmp_path, READY_FOREVER)
    for turns in range(6):
        async with supervised(child):
            for _ in range(turns):
                await asyncio.sleep(0)
    assert not any(map(alive, child.pids()))


async def test_the_childs_output_is_not_ours(
    tmp_path: Path, ready: ReadyLines, capfd: pytest.CaptureFixture[str]
) -> None:
    body = 'print("loud", file=sys.stderr, flush=True); announce("ready on grpc://x"); signal.pause()'
    async with supervised(Child(tmp_path, body)):
        await ready.next()
    out, err = capfd.readouterr()
    assert out == ""
    assert "loud" in err


NOISE = """
    import random
    rng = random.Random({seed})
    for _ in range(10):
        length = rng.choice([0, 1, 65_535, 65_536, 65_537, 200_000])
        alphabet = rng.choice([b"x", bytes(range(11, 256)), "\u00e9\U0001f98a".encode(), b"ready on"])
        sys.stdout.buffer.write((alphabet * length)[:length] + rng.choice([b"", b"\\n", b"\\n\\r\\0\\x1b["]))
    print(flush=True)
    announce("ready on grpc://127.0.0.1:1\\nlast words")
    signal.pause()
"""


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_that_a_child_prints_ends_the_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    caplog.set_level(logging.DEBUG)
    child = Child(tmp_path, NOISE.format(seed=seed))
    urls: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(Supervisor(child.command, os.environ, QUICK, on_ready=urls.put_nowait).run())
    try:
        for _ in range(2):
            async with asyncio.timeout(60):
                while await urls.get() != "grpc://127.0.0.1:1":
                    pass
            os.kill(child.pids()[-1], signal.SIGKILL)
        await asyncio.wait_for(urls.get(), 60)
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert max(len(record.getMessage()) for record in caplog.records) < MAX_LINE_CHARS + 100
    assert caplog.text.count("worker: last words") >= 2


async def test_only_what_a_child_announces_is_taken_for_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Printed lines are not taken for announcements, because a child may print text of its clients."""
    caplog.set_level(logging.INFO)
    forged = ["cannot start: forged", "takes memory: forged", "ready on http://forged", "deadbeef ready on http://f"]
    child = Child(tmp_path, f"print({chr(10).join(forged)!r}, flush=True)\n" + textwrap.dedent(READY_FOREVER))
    urls: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(Supervisor(child.command, os.environ, QUICK, on_ready=urls.put_nowait).run())
    try:
        for _ in range(2):
            assert await asyncio.wait_for(urls.get(), 20) == "grpc://127.0.0.1:1"
            os.kill(child.pids()[-1], signal.SIGKILL)
    finally:
        running.cancel()
        await asyncio.wait({running})
    told = [record.getMessage() for record in caplog.records]
    assert all(f"worker: {line}" in told for line in forged)
    assert "the worker ended (signal SIGKILL) after" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_the_same_whatever_pieces_they_come_in(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["", "short", "\u00e9" * 5000, "x" * MAX_LINE_CHARS, "y" * (MAX_LINE_CHARS + 1), "\U0001f98a" * 30_000]
    lines = rng.choices(texts, k=6)
    data, output, found = "\n".join(lines).encode(), ChildOutput(), []
    while data:
        size = rng.choice([1, 7, 4096, 65_536])
        found += output.add(data[:size])
        data = data[size:]
    found += output.end()

    def told(line: str) -> str:
        rest = len(line) - MAX_LINE_CHARS
        return f"{line[:MAX_LINE_CHARS]} [{rest} more characters]" if rest > 0 else line

    assert found == [told(line) for line in (lines if lines[-1] else lines[:-1])]


async def test_a_terminals_interrupt_does_not_reach_the_child(
    tmp_path: Path, ready: ReadyLines, caplog: pytest.LogCaptureFixture
) -> None:
    child = Child(tmp_path, READY_FOREVER)
    async with supervised(child):
        await ready.next()
        assert os.getpgid(child.pids()[-1]) != os.getpgid(0)


def test_the_childs_environment() -> None:
    environ = {"PATH": "/bin", "PAGEWIRE_PORT": "1", "PAGEWIRE_OTHER": "2"}
    assert child_environ(environ, ["PAGEWIRE_PORT"]) == {
        "PATH": "/bin",
        "PAGEWIRE_OTHER": "2",
        "PAGEWIRE_EXIT_WITH_PARENT": str(os.getpid()),
    }


def test_a_free_port_is_free() -> None:
    port = free_port("127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_a_free_port_is_none_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port("127.0.0.1")
    monkeypatch.setattr(supervisor, "WORKER_PORTS", range(port, port + 1))
    monkeypatch.setattr(supervisor, "_found", [])
    with pytest.raises(OSError, match="no free port on"):
        free_port("127.0.0.1", {port})


def test_a_free_port_is_not_found_again_at_once() -> None:
    """A free port is not returned again at once, because the process that found it may not have bound it yet."""
    ports = [free_port("127.0.0.1") for _ in range(500)]
    assert len(set(ports)) == 500


def test_supervising_loads_no_torch() -> None:
    program = (
        "import sys, pagewire.cli.services, scheduler_service.config, worker_service.config\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
