"""Files that are read again while a service runs: of certificates, secrets, keys and tenants."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, NoReturn, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
Contents = tuple[bytes | None, ...]

_MAX_BYTES = 16 << 20  # of a file


class NamedFile(NamedTuple):
    """The flag that names a file, and its path, None if the flag is not given."""

    flag: str
    path: str | None


class WatchedFiles(Generic[T]):
    """What is made of the content of files, taken into use anew when they hold something else that can be used.

    A thread reads them: they may be on a disk that hangs, which is to hold up neither calls nor the end of the process.
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
        """Read the files for the first time. Raises OSError for one that cannot be read, and what `parse` raises.

        `parse` gets the content of each file, None if its flag is not given, and raises ValueError. `interval` is in
        seconds, from one look to the next. For `settling` seconds the files may be unusable without a word; without
        them, what cannot be used is told at once, and not parsed again. `describe` makes the end of log lines.
        `on_change` is called on the event loop, with what was in use before and what is.
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
        self._refused: tuple[Contents, str] | None = None  # what could not be used last, and why
        self._trouble: tuple[str, float] | None = None  # with the files as they are now, and since when
        self._told: str | None = None

    async def watch(self) -> NoReturn:
        """Keep what is in use up to date until cancelled, and tell what becomes of it."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        failure: asyncio.Future[Exception] = loop.create_future()

        def on_loop(call: Callable[[U], object], value: U) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(call, value)

        def fail(error: Exception) -> None:
            if not failure.done():
                failure.set_result(error)

        def look_again_and_again() -> None:
            try:
                while not stop.is_set():
                    self.look(partial(on_loop, self.take))
                    stop.wait(self._interval)
            except Exception as error:
                on_loop(fail, error)

        threading.Thread(target=look_again_and_again, name="files", daemon=True).start()
        try:
            raise await failure
        finally:
            stop.set()

    def look(self, take: Callable[[T], object]) -> None:
        """Let `take` have what the files hold now, if that is new and can be used. It belongs to one thread."""
        try:
            contents = self._read()
            if contents != self._contents:
                value = self._parsed(contents)
                self._contents = contents
                take(value)
            elif self._told is not None:
                logger.info("%s: again what is in use%s", self._flags(), self._describe(self.current))
            self._trouble = self._told = None
        except (OSError, ValueError) as error:
            self._note_trouble(str(error))

    def take(self, value: T) -> None:
        """Take it into use."""
        before, self.current = self.current, value
        logger.info("read %s again%s", self._flags(), self._describe(self.current))
        self._on_change(before, value)

    def _read(self) -> Contents:
        """Raises OSError."""
        return tuple([_content(file) for file in self._files])

    def _parsed(self, contents: Contents) -> T:
        """Raises ValueError."""
        if self._refused is not None and self._refused[0] == contents and not self._settling:
            raise ValueError(self._refused[1])
        try:
            return self._parse(*contents)
        except ValueError as error:
            self._refused = contents, str(error)
            raise

    def _note_trouble(self, reason: str) -> None:
        """Tell of files that cannot be used, once they have been so for long enough to be no change under way."""
        now = self._clock()
        if self._trouble is None or self._trouble[0] != reason:
            self._trouble = (reason, now)
        if reason != self._told and abs(now - self._trouble[1]) >= self._settling:  # a clock may be set back
            self._told = reason
            logger.error("%s; what was read before stays%s", reason, self._describe(self.current))

    def _flags(self) -> str:
        return ", ".join(file.flag for file in self._files if file.path is not None)


def _content(file: NamedFile) -> bytes | None:
    if file.path is None:
        return None
    try:
        # Without O_NONBLOCK a pipe that nobody writes to would hold up this start, or all later looks at the file.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            os.set_blocking(descriptor, True)
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OSError(f"{file.flag} is {file.path}, which cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise OSError(f"{file.flag} is {file.path}, which has more than {_MAX_BYTES >> 20} MiB, the most that is read")
    return content
