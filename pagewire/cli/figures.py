"""The notation of measured figures in tables: three significant digits, with a unit."""


def rounded(value: float) -> str:
    """Return a number with three significant digits, or more if it has more digits before its decimal point."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """Return a duration with three significant digits, in seconds or, below one second, in milliseconds."""
    return f"{rounded(seconds)} s" if abs(seconds) >= 1 else f"{rounded(seconds * 1e3)} ms"
