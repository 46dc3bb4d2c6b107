"""A service in a separate process."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

Process = subprocess.Popen[str]


@asynccontextmanager
async def service(
    *arguments: str, launcher: Sequence[str] = (), stdout: int = subprocess.PIPE, stderr: int | None = None
) -> AsyncIterator[tuple[Process, str]]:
    """Start `pagewire` with the given arguments, optionally through the command `launcher`.

    Yields the process and its address. The address is empty if standard output is redirected. At the end the process
    gets SIGTERM and must exit with status 0.
    """
    command = [*launcher, sys.executable, "-m", "pagewire", *arguments]
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)  # noqa: ASYNC220 - it returns at once
    try:
        line = "" if process.stdout is None else await asyncio.to_thread(process.stdout.readline)
        yield process, line.strip().removeprefix("ready on grpc://")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()
