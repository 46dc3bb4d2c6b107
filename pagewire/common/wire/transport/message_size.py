"""The limit on the size of a client's message, and the error for a larger one. This module does not import gRPC."""

import re

MAX_MESSAGE_BYTES = 4 << 20
# A message that exceeds the limit by less than this margin is read completely, so that the server can refuse it itself.
# gRPC rejects larger ones as RESOURCE_EXHAUSTED before it allocates memory for them.
MARGIN_BYTES = 16 << 20
_CUT_OFF = re.compile(r"^SERVER: .*larger than max \((\d+) vs\. (\d+)\)")


def too_large(num_bytes: int, max_bytes: int) -> str:
    return f"the request has {num_bytes} bytes, but this server accepts at most {max_bytes} in a message; shorten it"


def of_cut_off(details: str) -> str | None:
    """Return a readable error message for a request that gRPC rejected as too large. `details` is the detail text of
    gRPC's status. Return None if the text reports another error.
    """
    found = _CUT_OFF.search(details)
    return found and too_large(int(found[1]), int(found[2]) - MARGIN_BYTES)
