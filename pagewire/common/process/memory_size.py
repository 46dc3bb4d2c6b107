"""Parsing of sizes of memory and files such as "4GiB", and formatting with a suitable unit."""

_LEAST_BYTES = 1024  # a smaller number without a unit is refused: its unit is probably missing
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_memory(flag: str, text: str, least: int = 1) -> int:
    """Parse a size of memory such as "4GiB", "512MiB" or "1000000", and return the number of bytes.

    Raises ValueError that names `flag` if the text is no size or the size is below `least` bytes.
    """
    number = text.strip().rstrip("abceghikmtABCEGHIKMT ")
    unit = text.strip()[len(number) :].strip().lower()
    units = {"": 1, **{name.lower(): size for name, size in _UNITS.items()}}
    try:
        num_bytes = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        num_bytes = -1
    if not unit and num_bytes >= 0 and 0 < float(number) < _LEAST_BYTES:
        raise ValueError(f"{flag} is {text!r}, which is in bytes; did you mean {number}GiB?")
    if num_bytes < least:
        size = "a positive size" if least else "0 or a size"
        raise ValueError(f"{flag} is {text!r}; it must be {size} such as 4GiB, 512MiB or a number of bytes")
    return num_bytes


def describe_memory(num_bytes: float) -> str:
    """Return a text such as "1.50 GiB" for a number of bytes. The unit is the largest that is not larger than the size.
    A negative size is written as 0 bytes.
    """
    name, size = next(unit for unit in reversed(_UNITS.items()) if num_bytes >= unit[1] or unit[1] == 1)
    return f"{num_bytes / size:.2f} {name}" if size > 1 else f"{max(0, int(num_bytes))} bytes"
