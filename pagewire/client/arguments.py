"""Checks what users give as arguments. An error names the argument."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, TypeGuard

from pagewire.client.errors import InvalidText

# What has elements, but is no list of them.
_TEXTS = str | bytes | bytearray | memoryview
# What is added to a byte that is no UTF-8 to make a character of it (PEP 383).
_ESCAPED = 0xDC00
# The longest time that gRPC can still count.
_MAX_SECONDS = 1e8


def require(argument: str, value: object, is_legal: bool, kind: str) -> None:
    """Raises TypeError for an argument that is not of a kind."""
    if not is_legal:
        raise TypeError(f"{argument} must be {kind}{';' if ',' in kind else ','} got {value!r:.80}")


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_listed(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether these are several things, not one: a sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, _TEXTS)


def as_list(argument: str, value: object, kind: str) -> list[Any]:
    """Returns the elements of what must be a list. Raises TypeError for an argument that has none, or whose elements
    are something else, such as characters, bytes and keys, or have no order."""
    try:
        if not isinstance(value, Mapping | set | frozenset | _TEXTS):
            return list(value)  # type: ignore[call-overload]
    except TypeError:
        pass
    raise TypeError(f"{argument} must be {kind}; got {value!r:.80}")


def split_prompt(prompt: object, index: int, prefix: str = "") -> tuple[str | None, Sequence[int] | None]:
    """Returns the text or the token ids of the prompt at a place of a list. Raises TypeError."""
    if isinstance(prompt, str):
        return prompt, None
    if are_token_ids(prompt):
        return None, prompt
    hint = "; the token ids of one prompt go into prompt_token_ids" if is_integer(prompt) else ""
    raise TypeError(f"{prefix}prompt {index} of the list is {prompt!r:.80}, but must be a text or token ids{hint}")


def as_prompts(token_ids: object) -> tuple[list[Sequence[int]], bool]:
    """Returns lists of token ids, and whether there was only one that was not in a list. Raises TypeError."""
    kind = "a list of integers, or a list of such lists"
    given = as_list("token_ids", token_ids, kind)
    if all(map(is_integer, given)):
        return [given], True
    require("token_ids", token_ids, all(map(are_token_ids, given)), kind)
    return given, False


def are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    """Whether these are integers that are there to stay, unlike those of an iterator, and no bytes."""
    if not isinstance(value, Iterable) or isinstance(value, Iterator | Mapping | Set | _TEXTS):
        return False
    try:
        return all(map(is_integer, value))
    except TypeError:  # an array of no dimension
        return False


def refuse_unknown(callee: str, options: Mapping[str, object], legal: type) -> None:
    """Raises TypeError for an option that a typed mapping does not have."""
    for name in options.keys() - legal.__annotations__.keys():
        raise TypeError(f"{callee} takes no {name!r}, but {', '.join(legal.__annotations__)}")


def check_text(path: str, text: str, argument: str = "") -> None:
    """Raises InvalidText for a string with half a character, which stands for a byte where Python has read what is not
    UTF-8; where the `path` is not what the caller calls it, the error names the `argument` too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f" from {argument}" if argument else ""
        half = f"{text[error.start]!r} at {error.start}, half a character"
        if (byte := ord(text[error.start]) - _ESCAPED) in range(0x80, 0x100):
            half += f" or the byte {byte:#x} of a text that is not UTF-8"
        raise InvalidText.of_field(path, f"{path} has {half}, which cannot be sent; remove it{where}") from None


def as_seconds(name: str, value: Any) -> float:
    """Returns a time that a user has given, or the longest that there is if that is less. Raises TypeError, or
    ValueError for one that is below 0 or NaN."""
    require(name, value, is_real(value), "a number of seconds")
    if not value >= 0:
        raise ValueError(f"{name} is {value}, but must be a number of seconds from 0")
    return float(min(value, _MAX_SECONDS))
