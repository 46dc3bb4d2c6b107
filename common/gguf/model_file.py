"""Files of a model that are read whole: of bounded size, and never pointers of Git LFS, which a clone holds in place of
large files that were not fetched."""

import os
from pathlib import Path

# Of settings, which have far below a megabyte as published, or some 12 where they list a codebook's tokens; and of a
# vocabulary or an index of weights, of which the largest have some 30 MB.
MAX_SETTINGS_BYTES = 16 << 20
MAX_LISTING_BYTES = 128 << 20
_POINTER = b"version https://git-lfs.github.com/spec/"


class ModelFileError(ValueError):
    """A file that is not read. The text is one line that names the file and the remedy."""


def check_pointer(path: Path) -> None:
    """Raises ModelFileError for a pointer, and OSError for what cannot be read."""
    with path.open("rb") as stream:
        _check(path, stream.read(len(_POINTER)))


def read_bytes(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Read a file, but not one that is larger than it can be. Raises ModelFileError, OSError."""
    with path.open("rb") as stream:
        content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            size = max(len(content), os.fstat(stream.fileno()).st_size)
            raise ModelFileError(
                f"{path} has {size} bytes; {max_bytes} are the most: take the file that the model was published with"
            )
    _check(path, content)
    return content


def read_text(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Raises ModelFileError, OSError, or UnicodeDecodeError for what is no text."""
    return read_bytes(path, max_bytes).decode("utf-8")


def _check(path: Path, content: bytes) -> None:
    if content.startswith(_POINTER):
        raise ModelFileError(
            f"{path} is a pointer of Git LFS in place of the file: run `git lfs pull` in the clone that it is from"
        )
