"""The private directory of a running `pagewire serve`, which contains the Unix sockets of its services."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_FALLBACK = "/tmp"
_PREFIX = "pagewire-serve-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{16}}")
_MAX_BASE_BYTES = 56  # the path of a socket has at most 107 bytes


class RuntimeDirectory:
    """The private directory for the Unix sockets of a running `pagewire serve`. The directory exists inside a `with`
    block, but its path is known before it is created.

    The directory is locked while it exists. The kernel releases the lock of a killed process, and systemd-tmpfiles does
    not remove a locked directory.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.path = _base(environ.get("XDG_RUNTIME_DIR", "")) / f"{_PREFIX}{secrets.token_hex(8)}"
        self._lock: int | None = None

    def __enter__(self) -> Path:
        """Create the directory, and remove the directories that killed processes left behind. Return the path. Raise
        OSError with a one-line message if the directory cannot be created."""
        base = self.path.parent
        # Created under a name that other processes do not clean up, until it is locked.
        unlocked = base / f".{self.path.name}"
        try:
            _remove_abandoned(base)
            unlocked.mkdir(mode=0o700)
            self._lock = _lock(unlocked)
            unlocked.rename(self.path)
        except OSError as error:
            raise OSError(
                f"cannot make a directory for the worker's socket in {base} ({error.strerror}); name another one in "
                "XDG_RUNTIME_DIR"
            ) from None
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._lock is not None
        os.close(self._lock)


def _base(named: str) -> Path:
    """Return the folder in which the runtime directory is created. This is the user's own folder `named`, from
    XDG_RUNTIME_DIR, if it is usable. Otherwise, it is the shared folder for temporary files."""
    is_usable = os.path.isabs(named) and len(os.fsencode(named)) <= _MAX_BASE_BYTES and "," not in named
    return Path(named if is_usable and os.access(named, os.W_OK | os.X_OK) else _FALLBACK)


def _lock(directory: Path) -> int:
    """Lock a runtime directory and return the file descriptor that holds the lock.

    Raise OSError if another process holds the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(base: Path) -> None:
    """Remove the runtime directories of this user that no process has locked. Such directories are left over from
    processes that were killed."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if not _NAME.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                continue
            lock = _lock(path)
        except OSError:  # its server is running, or has just removed it
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
