"""A `pagewire serve` of one's own: both services on loopback, for as long as a block of code runs."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from pagewire.errors import CommandError
from pagewire.supervisor import READY_PREFIX

# Ports of its own choice, so that it runs beside anything.
SERVE_FLAGS = ("--host=127.0.0.1", "--port=0", "--metrics-port=0", "--log-level=warning")
STOP_TIMEOUT_S = 45.0
SEPARATOR = "--"


def split_serve_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before `--` and what after it: the verb's own arguments and the flags of `pagewire serve`."""
    own = list(arguments)
    if SEPARATOR not in own:
        return own, []
    at = own.index(SEPARATOR)
    return own[:at], own[at + 1 :]


@contextmanager
def serving(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """The url of a server that runs inside the block. CommandError if it does not come up.

    `flags` are those of `pagewire serve`. For the main thread only: from now on SIGTERM unwinds the block as Ctrl-C
    does, and then raises SystemExit.
    """
    terminations: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Raising here would throw out of any line of an event loop, gRPC's callbacks among them, which crashes: what
        # handles Ctrl-C at this time, asyncio's handler inside `asyncio.run`, knows how to unwind.
        terminations.append(number)
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)
    command = [sys.executable, "-m", "pagewire", "serve", model, *SERVE_FLAGS, *flags]
    print(f"starting pagewire serve {model}", file=sys.stderr)
    started_at = time.monotonic()
    # A group of its own: Ctrl-C on the terminal is for this process, which then ends the server.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.startswith(READY_PREFIX):
                raise CommandError(f"pagewire serve {model} ended with exit code {process.wait()}")
            print(f"{line} after {time.monotonic() - started_at:.1f} s", file=sys.stderr)
            yield line.removeprefix(READY_PREFIX)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if terminations:
                sys.exit(128 + terminations[0])
