"""Options of a service's process: fields of a frozen dataclass, each with a help text and the limits of its value.

This module does not import gRPC.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on the value of a command line option. `text` completes the sentence "VALUE must be ...", and `holds`
    returns whether a value is within the limit.
    """

    text: str
    holds: Callable[[Any], bool]


def at_least(minimum: float) -> Limit:
    return Limit(f"at least {minimum}", lambda value: value >= minimum)


def between(minimum: float, maximum: float) -> Limit:
    return Limit(f"{minimum} to {maximum}", lambda value: minimum <= value <= maximum)


PORT = between(0, 65535)
_URL = re.compile(r"https?://([^\s/:@?#\[\]]+|\[[0-9a-fA-F:.]+(%[\w.-]+)?\])(:(?P<port>[0-9]{1,5}))?(/\S*)?")


def _is_url(value: str) -> bool:
    found = _URL.fullmatch(value)
    return found is not None and PORT.holds(int(found["port"] or 0))


URL = Limit("http://HOST:PORT or https://HOST:PORT", _is_url)
_ORIGINS = re.compile(r"\*|\s*[a-z][a-z0-9+.-]*://[^\s/,\"']+\s*(,\s*[a-z][a-z0-9+.-]*://[^\s/,\"']+\s*)*")
KEYS = Limit(
    "printable ASCII without spaces, several separated by commas",
    lambda value: bool(re.fullmatch(r"[!-+\--~]+(,[!-+\--~]+)*", value)),
)
HIDDEN = "(hidden)"  # in place of a secret value in messages
ORIGINS = Limit(
    "* or SCHEME://HOST:PORT, several separated by commas, * for any text in them",
    lambda value: bool(_ORIGINS.fullmatch(value)),
)
_HOST = re.compile(r"[\w.*-]+|[\w.*]*(:[\w.*]*){2,}|\[[\w.*:]+\]")  # also an IPv6 address
HOSTS = Limit(
    "a host name without port, several separated by commas, * for any text",
    lambda value: all(_HOST.fullmatch(each.strip()) for each in value.split(",")),
)


def listed(text: str | None) -> list[str]:
    """Return the parts of an option's value that are separated by commas, without spaces, empty parts and
    repetitions."""
    return list(dict.fromkeys(part for each in (text or "").split(",") if (part := each.strip())))


def option(
    default: Any,
    help: str,
    *limits: Limit,
    choices: tuple[str, ...] | None = None,
    needs: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """Return the dataclass field of a command line option. A value that is not None must satisfy every limit. `needs`
    names the options without which this option has no effect. The value of a secret option never appears in messages or
    in the arguments of child processes.
    """
    metadata = {"help": help, "limits": limits, "choices": choices, "needs": needs, "is_secret": is_secret}
    return field(default=default, metadata=metadata, repr=not is_secret)


def check_options(config: Any, must_be: str = ", but must be") -> None:
    """Check every command line option of `config` against its limits, and check that the options it needs are set.

    Raises ValueError that names the flag at fault. `must_be` is the text between the value and its limit in the error
    message.
    """
    given = [
        (each, value) for each in fields(config) if each.metadata and (value := getattr(config, each.name)) is not None
    ]
    for each, value in given:
        limits, choices = each.metadata["limits"], each.metadata["choices"]
        if choices is not None:
            limits = (Limit(f"one of {', '.join(choices)}", choices.__contains__),)
        for limit in limits:
            if not limit.holds(value):
                shown = repr(value) if isinstance(value, str) else value
                shown = HIDDEN if each.metadata["is_secret"] else shown
                raise ValueError(f"{flag(each.name)} is {shown}{must_be} {limit.text}")
    for each, _ in given:
        for needed in each.metadata["needs"]:
            if getattr(config, needed) is None:
                raise ValueError(f"{flag(each.name)} needs {flag(needed)} too")


def flag(name: str) -> str:
    """Return the command line flag of an option, such as --max-model-len for max_model_len."""
    return "--" + name.replace("_", "-")
