"""Pointers of Git LFS: what a clone holds in place of large files that were not fetched."""

from pathlib import Path

_START = b"version https://git-lfs.github.com/spec/"


class LfsPointerError(ValueError):
    """A file that is a pointer. The text is a clause that names the remedy."""


def check_pointer(path: Path) -> None:
    """Raises LfsPointerError for a pointer, and OSError for what cannot be read."""
    with path.open("rb") as stream:
        _check(stream.read(len(_START)))


def read_text(path: Path) -> str:
    """Return the text of a model's file. Raises LfsPointerError, OSError, or UnicodeDecodeError for what is no text."""
    content = path.read_bytes()
    _check(content)
    return content.decode("utf-8")


def _check(content: bytes) -> None:
    if content.startswith(_START):
        raise LfsPointerError(
            "it is a pointer of Git LFS in place of the file: run `git lfs pull` in the clone that it is from"
        )
