"""Checks for the arguments that users pass. Every error names the argument."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, TypeGuard

from pagewire.client.errors import InvalidText

# Types that are sequences but are not accepted as lists.
_TEXTS = str | bytes | bytearray | memoryview
# Python decodes an invalid UTF-8 byte to the code point _ESCAPED + byte (PEP 383, "surrogateescape").
_ESCAPED = 0xDC00
# The longest timeout, in seconds, that gRPC can represent.
_MAX_SECONDS = 1e8


def require(argument: str, value: object, is_legal: bool, kind: str) -> None:
    """Check an argument that a user gave. If `is_legal` is False, raise TypeError with a message that says that
    `argument` must be `kind`, and that shows `value`."""
    if not is_legal:
        raise TypeError(f"{argument} must be {kind}{';' if ',' in kind else ','} got {value!r:.80}")


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_listed(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a user's argument is a list or another sequence, but not a text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, _TEXTS)


def as_list(argument: str, value: object, kind: str) -> list[Any]:
    """Return the elements of a user's list argument as a list.

    Raise TypeError for a value that is not iterable, and for iterables that are not accepted as lists: texts, bytes,
    mappings and sets.
    """
    try:
        if not isinstance(value, Mapping | set | frozenset | _TEXTS):
            return list(value)  # type: ignore[call-overload]
    except TypeError:
        pass
    raise TypeError(f"{argument} must be {kind}; got {value!r:.80}")


def split_prompt(prompt: object, index: int, prefix: str = "") -> tuple[str | None, Sequence[int] | None]:
    """Return a prompt as a pair (text, token ids). One of the two is None, depending on the form in which the user gave
    the prompt.

    `index` is the position of the prompt in its list, for the error message. Raise TypeError for any other value.
    """
    if isinstance(prompt, str):
        return prompt, None
    if are_token_ids(prompt):
        return None, prompt
    hint = "; the token ids of one prompt go into prompt_token_ids" if is_integer(prompt) else ""
    raise TypeError(f"{prefix}prompt {index} of the list is {prompt!r:.80}, but must be a text or token ids{hint}")


def as_prompts(token_ids: object) -> tuple[list[Sequence[int]], bool]:
    """Convert a user's `token_ids` argument to a list of token id lists. Also return whether the argument was a single
    list of token ids.

    Raise TypeError for any other value.
    """
    kind = "a list of integers, or a list of such lists"
    given = as_list("token_ids", token_ids, kind)
    if all(map(is_integer, given)):
        return [given], True
    require("token_ids", token_ids, all(map(are_token_ids, given)), kind)
    return given, False


def are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    """Return whether a value is a list of token ids: an iterable of integers that can be iterated repeatedly, such as a
    list or an array.

    Iterators, mappings, sets, texts and bytes are not accepted.
    """
    if not isinstance(value, Iterable) or isinstance(value, Iterator | Mapping | Set | _TEXTS):
        return False
    try:
        return all(map(is_integer, value))
    except TypeError:  # a zero-dimensional array
        return False


def refuse_unknown(callee: str, options: Mapping[str, object], legal: type) -> None:
    """Raise TypeError for a keyword option that the TypedDict `legal` does not declare. `callee` names the called
    function in the message."""
    for name in options.keys() - legal.__annotations__.keys():
        raise TypeError(f"{callee} has no option {name!r}; the options are {', '.join(legal.__annotations__)}")


def check_text(path: str, text: str, argument: str = "") -> None:
    """Raise InvalidText for a string that contains a surrogate, which UTF-8 cannot encode. Such a string cannot be sent
    to the server.

    Python decodes an invalid UTF-8 byte to a surrogate. `path` is the field of the protobuf message. The error also
    names `argument` if the caller passed the text under another name.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f" from {argument}" if argument else ""
        half = f"{text[error.start]!r} at {error.start}, half a character"
        if (byte := ord(text[error.start]) - _ESCAPED) in range(0x80, 0x100):
            half += f" or the byte {byte:#x} of a text that is not UTF-8"
        raise InvalidText.of_field(path, f"{path} has {half}, which cannot be sent; remove it{where}") from None


def as_seconds(name: str, value: Any) -> float:
    """Check a duration that a user gave in seconds, and return it as a float. The result is limited to the longest
    timeout that gRPC supports.

    Raise TypeError for a value that is not a number, and ValueError for a negative number or NaN.
    """
    require(name, value, is_real(value), "a number of seconds")
    if not value >= 0:
        raise ValueError(f"{name} is {value}, but must be a number of seconds from 0")
    return float(min(value, _MAX_SECONDS))
