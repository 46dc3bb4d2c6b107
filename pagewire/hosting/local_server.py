"""Runs a `pagewire serve` for this process: both services on loopback, until a block of code or the process ends."""

import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType

from pagewire.client.errors import CommandError, StartError, Unavailable
from pagewire.common.process.child_process import EXIT_WITH_PARENT, READY_PREFIX, REFUSAL_PREFIX, python_command
from pagewire.common.process.queued_writer import QueuedWriter, stream_writer
from pagewire.hosting.child_output import READ_BYTES, ChildOutput
from pagewire.options import FLAGS_ONLY_VARIABLE

# Ports of its own choice, so that it runs beside anything.
SERVE_FLAGS = (
    "--host=127.0.0.1",
    "--port=0",
    "--http-port=0",
    "--metrics-port=0",
    "--health-port=0",
    "--log-level=warning",
)
STOP_TIMEOUT_S = 45.0
SEPARATOR = "--"
END_TIMEOUT_S = 2.0  # from the first call that fails because the server dies to its end
_FLUSH_TIMEOUT_S = 2.0  # for the server's last lines to be read
# Of what the server has written on standard error, to say why it ended.
MAX_TAIL_BYTES = 4096
# What stands before the message in a log line, and in an error of the command.
_LINE_PREFIX = re.compile(r"^(\S+ \S+ (WARNING|ERROR|CRITICAL) [\w.]+: |pagewire( \w+)?: error: )")


def split_serve_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments at `--` into the verb's own and the flags of `pagewire serve`."""
    own = list(arguments)
    if SEPARATOR not in own:
        return own, []
    at = own.index(SEPARATOR)
    return own[:at], own[at + 1 :]


class LocalServer:
    """The process of a `pagewire serve`. It ends with this process, however that ends.

    Its standard error goes to this process's. Any thread may start and stop it.
    """

    def __init__(self, model: str, flags: Sequence[str] = (), *, flags_only: Collection[str]) -> None:
        """Prepares a server, which `start` starts. `flags` are those of `pagewire serve`; `flags_only` are names of
        options that it takes neither from the environment nor from a file."""
        self._command = python_command("pagewire", "serve", model, *SERVE_FLAGS, *flags)
        self.owner = os.getpid()
        self._environ = os.environ | {EXIT_WITH_PARENT: str(self.owner), FLAGS_ONLY_VARIABLE: ",".join(flags_only)}
        self._url: Future[str] = Future()
        self._tail = b""
        self._errors = QueuedWriter(stream_writer(lambda: sys.stderr), _dropped_notice)
        self._process: subprocess.Popen[bytes] | None = None
        self._launched = threading.Event()
        # The kernel kills the server when the thread ends that has started it (PAGEWIRE_EXIT_WITH_PARENT). This one
        # lives as long as the server; whichever called `start` may not.
        self._watching = threading.Thread(target=self._watch, name="pagewire serve", daemon=True)

    def start(self) -> str:
        """Starts the server and returns its url, once it serves. Raises StartError if it does not come up. After an
        exception nothing runs on."""
        self._watching.start()
        try:
            return self._url.result()
        except BaseException:
            self.stop()
            raise

    def ends_within(self, timeout_s: float) -> bool:
        """Returns whether the server has ended, or does so within this time. A process that was forked from the one
        that started it cannot tell, and says no."""
        self._watching.join(timeout_s)
        return not self._watching.is_alive() and os.getpid() == self.owner

    def tell(self, line: str) -> None:
        """Writes a line of this process's to standard error, within no line of the server's."""
        self._errors.put(f"{line}\n".encode(errors="backslashreplace"))
        self._errors.flush(_FLUSH_TIMEOUT_S)

    @property
    def reason(self) -> str:
        """The last line that the server wrote to standard error, without the time and the level before the message."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return _LINE_PREFIX.sub("", lines[-1].strip()) if lines else ""

    @property
    def exit(self) -> str:
        """How the server ended: its exit code, or the signal."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "not started"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Ends the server, and returns when it has ended."""
        if not self._watching.is_alive():
            return
        self._launched.wait()
        if self._process is not None:
            self._process.terminate()
        self._watching.join(STOP_TIMEOUT_S)
        if self._watching.is_alive() and self._process is not None:
            self._process.kill()
            self._watching.join()

    def _watch(self) -> None:
        try:
            # A group of its own: Ctrl-C on the terminal is for this process, which then ends the server.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ,
                process_group=0,
            )
        except BaseException as error:
            self._url.set_exception(error)
            return
        finally:
            self._launched.set()
        with self._process as process:
            said = self._read(process)
            process.wait()
        self._errors.flush(_FLUSH_TIMEOUT_S)
        self._errors.close()
        if not self._url.done():
            reason = said or self.reason
            self._url.set_exception(StartError(reason or f"pagewire serve ended with {self.exit} and gave no reason"))

    def _read(self, process: "subprocess.Popen[bytes]") -> str:
        """Reads both outputs of the server until they are closed. Returns what it said on standard output instead of
        its url."""
        assert process.stdout is not None
        assert process.stderr is not None
        said, output, errors = "", ChildOutput(), ChildOutput()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        self._tail = (self._tail + data)[-MAX_TAIL_BYTES:]
                        self._pass_on(errors.add(data))
                    else:
                        for line in output.add(data):
                            said = self._hear(line) or said
        self._pass_on(errors.end())
        for line in output.end():
            said = self._hear(line) or said
        return "" if self._url.done() else said

    def _pass_on(self, lines: Sequence[str]) -> None:
        if lines:
            self._errors.put("".join(f"{line}\n" for line in lines).encode())

    def _hear(self, line: str) -> str:
        """Takes note of the server's url. Returns what else it says."""
        # A front end reports that it is ready too.
        if line.startswith(f"{READY_PREFIX}grpc://") and not self._url.done():
            self._url.set_result(line.removeprefix(READY_PREFIX).strip())
        return "" if line.startswith(READY_PREFIX) else line.strip().removeprefix(REFUSAL_PREFIX)


def _dropped_notice(num_dropped: int) -> bytes:
    return b"standard error was not read in time: %d lines of pagewire serve were dropped here\n" % num_dropped


@contextmanager
def serving(model: str, flags: Sequence[str] = (), *, flags_only: Collection[str]) -> Iterator[tuple[str, LocalServer]]:
    """Runs a server inside the block, which gets its url and it. Raises CommandError if it does not come up, or a call
    fails because it has ended.

    `flags` and `flags_only` are those of LocalServer. This is for the main thread only: from now on SIGTERM unwinds the
    block as Ctrl-C does, and then raises SystemExit.
    """
    terminations: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Raising here would throw out of any line of an event loop, gRPC's callbacks among them, which crashes: what
        # handles Ctrl-C at this time, asyncio's handler inside `asyncio.run`, knows how to unwind.
        terminations.append(number)
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:  # no loop, but what asks a user may go on after Ctrl-C
            sys.exit(128 + number)
        assert callable(handler)
        handler(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)
    started_at = time.monotonic()
    server = LocalServer(model, flags, flags_only=flags_only)
    server.tell(f"starting pagewire serve {model}")
    try:
        try:
            url = server.start()
        except StartError as error:
            # What it wrote on standard error stands there already.
            reason = "" if str(error) == server.reason else f": {error}"
            raise CommandError(f"pagewire serve {model} ended with {server.exit}{reason}") from None
        server.tell(f"{READY_PREFIX}{url} after {time.monotonic() - started_at:.1f} s")
        yield url, server
    except Unavailable:
        if not server.ends_within(END_TIMEOUT_S):
            raise
        raise CommandError(f"pagewire serve {model} ended with {server.exit}") from None
    finally:
        server.stop()
        if terminations:
            sys.exit(128 + terminations[0])
