"""The directory of a running `pagewire serve`. Its worker listens on sockets there, and no other user may enter it."""

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
_MAX_BASE_BYTES = 56  # the path of a socket has 107 at most


class RuntimeDirectory:
    """A directory that lasts as long as the block of a `with` statement. Its path is known before it is made.

    While it lasts it is locked. No killed process leaves a lock behind, and systemd-tmpfiles keeps what is locked.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.path = _base(environ.get("XDG_RUNTIME_DIR", "")) / f"{_PREFIX}{secrets.token_hex(8)}"
        self._lock: int | None = None

    def __enter__(self) -> Path:
        """Makes the directory, and removes those that killed processes have left. Raises OSError with one line."""
        base = self.path.parent
        # Under a name that is not looked for, until it is locked.
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
    """Returns the user's own directory for such things if it can be used, else the one for everybody."""
    is_usable = os.path.isabs(named) and len(os.fsencode(named)) <= _MAX_BASE_BYTES and "," not in named
    return Path(named if is_usable and os.access(named, os.W_OK | os.X_OK) else _FALLBACK)


def _lock(directory: Path) -> int:
    """Locks a directory and returns the file descriptor that holds the lock. Raises OSError if another process holds
    it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(base: Path) -> None:
    """Removes the directories of this user that no process has locked."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if not _NAME.fullmatch(path.name) or path.lstat().st_uid != os.getuid():
                continue
            lock = _lock(path)
        except OSError:  # its server runs, or has removed it
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
