"""A `pagewire serve` process on loopback that lives as long as a block of code or this process."""

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

# Free ports, so that the server can run beside any other server.
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
END_TIMEOUT_S = 2.0  # from the first failed call of a dying server to the end of its process
_FLUSH_TIMEOUT_S = 2.0  # for reading the server's last lines
# The size of the retained end of the server's standard error, from which the reason for its exit is read.
MAX_TAIL_BYTES = 4096
# The prefix of the message in a log line, and in an error of the command.
_LINE_PREFIX = re.compile(r"^(\S+ \S+ (WARNING|ERROR|CRITICAL) [\w.]+: |pagewire( \w+)?: error: )")


def split_serve_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command at `--`. Return the flags of the command itself, and the flags for `pagewire
    serve`."""
    own = list(arguments)
    if SEPARATOR not in own:
        return own, []
    at = own.index(SEPARATOR)
    return own[:at], own[at + 1 :]


class LocalServer:
    """A child process that runs `pagewire serve`. The server ends with this process, even if this process is killed.

    The server's standard error is passed on to this process's standard error. Any thread may start and stop the server.
    """

    def __init__(self, model: str, flags: Sequence[str] = (), *, flags_only: Collection[str]) -> None:
        """Prepare the command that runs the server, without starting it. `start` starts the server.

        `flags` are flags of `pagewire serve`. `flags_only` names options that the server reads neither from the
        environment nor from a file.
        """
        self._command = python_command("pagewire", "serve", model, *SERVE_FLAGS, *flags)
        self.owner = os.getpid()
        self._environ = os.environ | {EXIT_WITH_PARENT: str(self.owner), FLAGS_ONLY_VARIABLE: ",".join(flags_only)}
        self._url: Future[str] = Future()
        self._tail = b""
        self._errors = QueuedWriter(stream_writer(lambda: sys.stderr), _dropped_notice)
        self._process: subprocess.Popen[bytes] | None = None
        self._launched = threading.Event()
        # The kernel kills the server when the thread that started it ends (PAGEWIRE_EXIT_WITH_PARENT). This thread
        # lives as long as the server; the thread that calls `start` may not.
        self._watching = threading.Thread(target=self._watch, name="pagewire serve", daemon=True)

    def start(self) -> str:
        """Start the server and return its URL when it is ready.

        Raise StartError if the server does not start. After any exception, no server process is left.
        """
        self._watching.start()
        try:
            return self._url.result()
        except BaseException:
            self.stop()
            raise

    def ends_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the end of the server, and return whether the server has ended.

        The result is always False in a process that was forked from the process that started the server.
        """
        self._watching.join(timeout_s)
        return not self._watching.is_alive() and os.getpid() == self.owner

    def tell(self, line: str) -> None:
        """Write a line to this process's standard error, such that it does not mix with a line that the server
        writes."""
        self._errors.put(f"{line}\n".encode(errors="backslashreplace"))
        self._errors.flush(_FLUSH_TIMEOUT_S)

    @property
    def reason(self) -> str:
        """The last line that the server wrote to standard error, without the log prefix. It usually states why the
        server ended. The text is empty if the server wrote nothing."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return _LINE_PREFIX.sub("", lines[-1].strip()) if lines else ""

    @property
    def exit(self) -> str:
        """A description of how the server process ended: its exit code, or the signal that killed it."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "not started"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Terminate the server process and wait for its end.

        Send SIGTERM first, then SIGKILL after STOP_TIMEOUT_S seconds.
        """
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
            # A separate process group: Ctrl-C on the terminal interrupts only this process, which then stops the
            # server.
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
        """Read the server's standard output and standard error until both are closed.

        Return the last line of standard output if the server ended without reporting a URL, otherwise an empty text.
        """
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
                            said = self._process_line(line) or said
        self._pass_on(errors.end())
        for line in output.end():
            said = self._process_line(line) or said
        return "" if self._url.done() else said

    def _pass_on(self, lines: Sequence[str]) -> None:
        if lines:
            self._errors.put("".join(f"{line}\n" for line in lines).encode())

    def _process_line(self, line: str) -> str:
        """Process a line of the server's standard output. If it is a "ready on" line, set the server's URL and return
        an empty text. Return the text of any other line."""
        # Front ends report ready lines with other schemes.
        if line.startswith(f"{READY_PREFIX}grpc://") and not self._url.done():
            self._url.set_result(line.removeprefix(READY_PREFIX).strip())
        return "" if line.startswith(READY_PREFIX) else line.strip().removeprefix(REFUSAL_PREFIX)


def _dropped_notice(num_dropped: int) -> bytes:
    return b"standard error was not read in time: %d lines of pagewire serve were dropped here\n" % num_dropped


@contextmanager
def serving(model: str, flags: Sequence[str] = (), *, flags_only: Collection[str]) -> Iterator[tuple[str, LocalServer]]:
    """Run a local `pagewire serve` process inside a `with` block. The block gets the server's URL and the
    `LocalServer`.

    Raise CommandError if the server does not start, or if a call in the block fails because the server has ended.
    `flags` and `flags_only` are the arguments of LocalServer. Only the main thread may call this function, because it
    sets the handler of SIGTERM. From then on, SIGTERM interrupts the block as Ctrl-C does, and then raises SystemExit.
    """
    terminations: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Raising an exception here could interrupt any line of an event loop or a gRPC callback, which crashes. The
        # current handler of SIGINT, such as asyncio's inside `asyncio.run`, can unwind safely.
        terminations.append(number)
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:  # no event loop, but an input prompt may survive Ctrl-C
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
            # The last line of the server's standard error has already been shown.
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
