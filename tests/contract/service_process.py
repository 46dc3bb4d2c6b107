"""A service as a process of its own."""

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
    """Start `pagewire` with arguments, by a command that runs another if one is given. Yield the process, and its
    address unless its standard output goes elsewhere. It ends at SIGTERM, with 0."""
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
