"""The secret by which a service knows who dials it, from a file that both have."""

import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

_KEY = "pagewire-link-secret-bin"  # of the call's metadata
_MIN_BYTES, _MAX_BYTES = 16, 4096


class LinkSecret:
    """A secret in a file, which is read anew for every session: a file that is replaced counts from the next one on."""

    def __init__(self, path: str) -> None:
        """Raises ValueError, one line that names the flag."""
        self._path = Path(path)
        self._last = self._read()
        self._told = ""  # what is wrong with the file since it was last read

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata by which a caller shows the secret."""
        return ((_KEY, self._current()),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the metadata of a call shows the secret."""
        shown = [value for key, value in metadata if key == _KEY]
        return len(shown) == 1 and isinstance(shown[0], bytes) and hmac.compare_digest(shown[0], self._current())

    def _current(self) -> bytes:
        try:
            self._last, self._told = self._read(), ""
        except ValueError as error:
            if self._told != str(error):
                logger.error("%s; the one that was read before stays", error)
            self._told = str(error)
        return self._last

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise ValueError(f"cannot read --link-secret-file {self._path}: {error.strerror}") from None
        secret = content.strip()
        if len(secret) < _MIN_BYTES or len(content) > _MAX_BYTES:
            size = f"more than {_MAX_BYTES}" if len(content) > _MAX_BYTES else str(len(secret))
            raise ValueError(
                f"--link-secret-file {self._path} holds {size} bytes; a secret has {_MIN_BYTES} to {_MAX_BYTES}"
            )
        return secret


def shows_one(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether the metadata of a call shows any secret."""
    return any(key == _KEY for key, _ in metadata)
