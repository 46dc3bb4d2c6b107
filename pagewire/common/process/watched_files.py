"""Files that a running service reloads when they change: certificates, secrets, keys and tenants."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, NoReturn, TypeVar

from pagewire.common.process.event_loop import call_from_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Contents = tuple[bytes | None, ...]

_MAX_BYTES = 16 << 20  # of a file


class NamedFile(NamedTuple):
    """A file that the user names with a command line flag: the flag, and the file's path. The path is None if the flag
    is not given.
    """

    flag: str
    path: str | None


class WatchedFiles(Generic[T]):
    """A value that is parsed from files, such as a certificate. When the files change, and their new content can be
    parsed, the new value replaces the old one.

    A separate thread reads the files, because a disk may hang. Requests and the exit of the process never wait for this
    thread.
    """

    def __init__(
        self,
        files: Sequence[NamedFile],
        parse: Callable[..., T],
        *,
        interval: float = 1.0,
        settling: float = 0.0,
        describe: Callable[[T], str] = lambda current: "",
        on_change: Callable[[T, T], None] = lambda before, current: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read and parse the files for the first time. Raises OSError for a file that cannot be read, and any error of
        `parse`.

        `parse` gets the content of each file (None if its flag is not given), and raises ValueError if the contents are
        unusable. `interval` is the time between two checks in seconds.

        Unusable files are reported only after `settling` seconds. If `settling` is 0, unusable content is reported at
        once, and not parsed again until it changes. `describe` returns a text for the end of log lines. `on_change` is
        called on the event loop with the previous and the new value.
        """
        self._files = files
        self._parse = parse
        self._interval = interval
        self._settling = settling
        self._describe = describe
        self._on_change = on_change
        self._clock = clock
        self._contents = self._read()
        self.current = parse(*self._contents)
        self._refused: tuple[Contents, str] | None = None  # the last unusable content, and the reason
        self._trouble: tuple[str, float] | None = None  # the current problem, and the time when it began
        self._told: str | None = None

    async def watch(self) -> NoReturn:
        """Check the files regularly until cancelled, and replace the value when they change. Changes and problems are
        logged.
        """
        loop, stop = asyncio.get_running_loop(), threading.Event()
        failure: asyncio.Future[Exception] = loop.create_future()

        def fail(error: Exception) -> None:
            if not failure.done():
                failure.set_result(error)

        def look_again_and_again() -> None:
            try:
                while not stop.is_set():
                    self.look(partial(call_from_thread, loop, self.take))
                    stop.wait(self._interval)
            except Exception as error:
                call_from_thread(loop, fail, error)

        threading.Thread(target=look_again_and_again, name="files", daemon=True).start()
        try:
            raise await failure
        finally:
            stop.set()

    def look(self, take: Callable[[T], object]) -> None:
        """Check the files once. If they have changed and can be parsed, call `take` with the new value. Only one thread
        may call this method.
        """
        try:
            contents = self._read()
            if contents != self._contents:
                value = self._parsed(contents)
                self._contents = contents
                take(value)
            elif self._told is not None:
                logger.info("%s: the files match what is in use again%s", self._flags(), self._describe(self.current))
            self._trouble = self._told = None
        except (OSError, ValueError) as error:
            self._report_problem(str(error))

    def take(self, value: T) -> None:
        """Start to use a new value that was parsed from the files. Log the change, and call `on_change`."""
        before, self.current = self.current, value
        logger.info("read %s again%s", self._flags(), self._describe(self.current))
        self._on_change(before, value)

    def _read(self) -> Contents:
        """Read the files, and return the content of each. The content is None if the flag for the file is not given.
        Raises OSError if a file cannot be read.
        """
        return tuple([_content(file) for file in self._files])

    def _parsed(self, contents: Contents) -> T:
        """Parse the contents of the files, and return the value. Raises ValueError if the contents cannot be parsed. If
        `settling` is 0, contents that failed before are not parsed again: the same error is raised at once.
        """
        if self._refused is not None and self._refused[0] == contents and not self._settling:
            raise ValueError(self._refused[1])
        try:
            return self._parse(*contents)
        except ValueError as error:
            self._refused = contents, str(error)
            raise

    def _report_problem(self, reason: str) -> None:
        """Log a problem with the watched files, but only after it has lasted for `settling` seconds. A shorter problem
        may only mean that another program is writing the files.
        """
        now = self._clock()
        if self._trouble is None or self._trouble[0] != reason:
            self._trouble = (reason, now)
        if reason != self._told and abs(now - self._trouble[1]) >= self._settling:  # abs: a clock may be set back
            self._told = reason
            logger.error("%s; the previous contents stay in use%s", reason, self._describe(self.current))

    def _flags(self) -> str:
        return ", ".join(file.flag for file in self._files if file.path is not None)


def _content(file: NamedFile) -> bytes | None:
    if file.path is None:
        return None
    try:
        # Without O_NONBLOCK, a pipe without a writer would block the start of the service, or all later checks.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            os.set_blocking(descriptor, True)
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OSError(f"{file.flag} is {file.path}, which cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise OSError(f"{file.flag} is {file.path}, which is larger than the limit of {_MAX_BYTES >> 20} MiB")
    return content
