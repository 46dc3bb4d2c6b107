"""Files that services read again at run time are read on other threads, so a disk that hangs delays no stream."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pagewire.common.process.watched_files import NamedFile, WatchedFiles
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import Result, Stack, expected_tokens, request, serve
from testing.serving.front_end import FrontEnd, serve_front_end
from testing.serving.tenants import PROMPT, code_of, credentials, key_file, write_tenants

_guarded: dict[int, list[str]] = {}  # by thread id: the files opened by threads that must not open any


def _note(event: str, arguments: tuple[object, ...]) -> None:
    opened = _guarded.get(threading.get_ident()) if event == "open" and _guarded else None
    # Modules are imported once, and paths below /proc and /dev are not on a disk.
    if opened is not None and not str(arguments[0]).startswith(("/proc/", "/dev/", sys.prefix, sys.base_prefix)):
        opened.append(str(arguments[0]))
        raise RuntimeError(f"the event loop's thread opens {arguments[0]}")


sys.addaudithook(_note)


@contextmanager
def opening_nothing() -> Iterator[None]:
    """Fail if this thread opens a file inside the block."""
    opened = _guarded[threading.get_ident()] = []
    try:
        yield
    finally:
        del _guarded[threading.get_ident()]
    assert opened == []


@asynccontextmanager
async def both(checkpoint: Path, folder: Path) -> AsyncIterator[tuple[Stack, FrontEnd, list[Path]]]:
    """Start a scheduler and a front end with all watched files of one line. Yield both, and the paths."""
    write_tenants(folder / "tenants")
    (folder / "secret").write_bytes(b"0123456789abcdef")
    served = {"tenants": str(folder / "tenants"), "link_secret_file": str(folder / "secret")}
    options = {"tenants": str(folder / "tenants"), "scheduler_api_key_file": key_file(folder, "root")}
    async with serve(checkpoint, **served) as stack, serve_front_end(checkpoint, stack.url, **options) as front:
        yield stack, front, [folder / "tenants", folder / "secret", folder / "root.key"]


def release(pipe: Path) -> None:
    """Let a thread that opened the pipe for writing continue, and remove the pipe."""
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    pipe.unlink()


async def test_files_that_hang_hold_up_no_stream_and_no_call(checkpoint: Path, tmp_path: Path) -> None:
    async with both(checkpoint, tmp_path) as (stack, front, files):
        with ExitStack() as held, opening_nothing():
            async with asyncio.timeout(20):
                for path in files:
                    path.unlink()
                    os.mkfifo(path)
                    held.callback(release, path)
                for path in files:
                    # Blocks until the service opens the pipe for reading. The service then reads until this end is
                    # closed.
                    held.callback(os.close, await asyncio.to_thread(os.open, path, os.O_WRONLY))
                for stub in (stack.stub, front.stub):
                    result = Result()
                    async for response in stub.Generate(request(PROMPT, max_tokens=20), metadata=credentials("acme")):
                        result.add(response)
                    assert result.token_ids[0] == expected_tokens(PROMPT, 20)


async def test_nothing_is_opened_by_the_event_loop_while_it_serves(checkpoint: Path, tmp_path: Path) -> None:
    async with both(checkpoint, tmp_path) as (stack, front, _):
        with opening_nothing():
            await asyncio.to_thread(write_tenants, tmp_path / "tenants", acme={"api_keys": []})
            for stub in (stack.stub, front.stub):
                async with asyncio.timeout(10):
                    code = None
                    while code is not grpc.StatusCode.UNAUTHENTICATED:
                        asked = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=credentials("acme"))
                        code = await code_of(asked)
                        assert code in (None, grpc.StatusCode.UNAUTHENTICATED)
                for message in (request("once upon a time", max_tokens=3), request(PROMPT, max_tokens=3, n=2)):
                    async for _ in stub.Generate(message, metadata=credentials("globex")):
                        pass
            await stack.worker.kill()  # the scheduler must reconnect to the worker
            await stack.worker.start()
            await stack.generate(request(PROMPT, max_tokens=3), metadata=credentials("globex"))


async def test_a_fault_of_the_thread_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")

    def parse(content: bytes) -> int:
        return {b"1": 1}[content]

    files = WatchedFiles([NamedFile("--file", str(tmp_path / "file"))], parse, interval=0.001)
    (tmp_path / "file").write_text("2")
    with pytest.raises(KeyError, match="2"):
        await asyncio.wait_for(files.watch(), 20)


def test_a_pipe_that_nobody_writes_to_hides_no_later_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, taken = tmp_path / "file", []
    path.write_text("1")
    files = WatchedFiles([NamedFile("--file", str(path))], int)
    path.unlink()
    os.mkfifo(path)

    def look_at_both() -> None:
        files.look(taken.append)
        path.unlink()
        path.write_text("2")
        files.look(taken.append)

    looking = threading.Thread(target=look_at_both, daemon=True)
    looking.start()
    looking.join(20)
    assert taken == [2]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_of_an_enormous_file_little_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=f"--file is {tmp_path}/file, which is larger than the limit of 16 MiB"):
        WatchedFiles([NamedFile("--file", str(tmp_path / "file"))], bytes)
