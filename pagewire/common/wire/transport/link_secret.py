"""The secret by which a service knows who dials it, from a file that both have."""

import hmac
from collections.abc import Iterable
from functools import partial

from pagewire.common.process.watched_files import NamedFile, WatchedFiles

_FLAG = "--link-secret-file"
_KEY = "pagewire-link-secret-bin"  # of the call's metadata
_MIN_BYTES, _MAX_BYTES = 16, 4096


class LinkSecret:
    """A secret in a file: one that is replaced counts for the sessions that begin once it is read."""

    def __init__(self, path: str) -> None:
        """Raises ValueError, one line that names the flag."""
        try:
            self.file = WatchedFiles([NamedFile(_FLAG, path)], partial(_secret, path))
        except OSError as error:
            raise ValueError(str(error)) from None

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata by which a caller shows the secret."""
        return ((_KEY, self.file.current),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the metadata of a call shows the secret."""
        shown = [value for key, value in metadata if key == _KEY]
        return len(shown) == 1 and isinstance(shown[0], bytes) and hmac.compare_digest(shown[0], self.file.current)


def _secret(path: str, content: bytes) -> bytes:
    """Raises ValueError."""
    secret = content.strip()
    if len(secret) < _MIN_BYTES or len(content) > _MAX_BYTES:
        size = f"more than {_MAX_BYTES}" if len(content) > _MAX_BYTES else str(len(secret))
        raise ValueError(f"{_FLAG} {path} holds {size} bytes; a secret has {_MIN_BYTES} to {_MAX_BYTES}")
    return secret


def shows_one(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether the metadata of a call shows any secret."""
    return any(key == _KEY for key, _ in metadata)
