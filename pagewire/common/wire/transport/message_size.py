"""How large a message of a client may be, and what is said of a larger one. Loads nothing of gRPC."""

import re

MAX_MESSAGE_BYTES = 4 << 20
# A message that exceeds its limit by less is read whole, so that the server itself can refuse it. gRPC cuts off larger
# ones as RESOURCE_EXHAUSTED before they take any memory.
MARGIN_BYTES = 16 << 20
_CUT_OFF = re.compile(r"^SERVER: .*larger than max \((\d+) vs\. (\d+)\)")


def too_large(num_bytes: int, max_bytes: int) -> str:
    return f"the request has {num_bytes} bytes, but this server takes {max_bytes} in a message: shorten it"


def of_cut_off(details: str) -> str | None:
    """Return what a server says of a message that gRPC cut off, or None if `details` are not gRPC's words for one."""
    found = _CUT_OFF.search(details)
    return found and too_large(int(found[1]), int(found[2]) - MARGIN_BYTES)
