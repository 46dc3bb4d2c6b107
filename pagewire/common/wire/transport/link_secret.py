"""The shared secret that authenticates a service that dials another one. Both read it from a file."""

import hmac
from collections.abc import Iterable
from functools import partial

from pagewire.common.process.watched_files import NamedFile, WatchedFiles

_FLAG = "--link-secret-file"
_KEY = "pagewire-link-secret-bin"  # a key of the RPC's metadata
_MIN_BYTES, _MAX_BYTES = 16, 4096


class LinkSecret:
    """A secret shared by two services, with which the client of an RPC authenticates itself. The secret is read from a
    file, and read again when the file changes. A new secret applies to later sessions.
    """

    def __init__(self, path: str) -> None:
        """Read the secret from the file at `path`. Raises ValueError, whose message is one line that names the flag, if
        the file cannot be read or used.
        """
        try:
            self.file = WatchedFiles([NamedFile(_FLAG, path)], partial(_secret, path))
        except OSError as error:
            raise ValueError(str(error)) from None

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return the gRPC metadata with which the client of an RPC presents the secret."""
        return ((_KEY, self.file.current),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether the gRPC metadata of an RPC contains the right secret."""
        shown = [value for key, value in metadata if key == _KEY]
        return len(shown) == 1 and isinstance(shown[0], bytes) and hmac.compare_digest(shown[0], self.file.current)


def _secret(path: str, content: bytes) -> bytes:
    """Return the secret in the content of a secret file, without whitespace around it. Raises ValueError if the length
    is out of range.
    """
    secret = content.strip()
    if len(secret) < _MIN_BYTES or len(content) > _MAX_BYTES:
        size = f"more than {_MAX_BYTES}" if len(content) > _MAX_BYTES else str(len(secret))
        raise ValueError(f"{_FLAG} {path} holds {size} bytes, but a secret must have {_MIN_BYTES} to {_MAX_BYTES}")
    return secret


def has_secret(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether the gRPC metadata of an RPC contains any secret, right or wrong."""
    return any(key == _KEY for key, _ in metadata)
