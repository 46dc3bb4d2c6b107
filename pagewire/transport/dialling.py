"""Channels to other services, with TLS where the files for it are given."""

from collections.abc import Sequence

import grpc
import grpc.aio

from pagewire.transport.addresses import target
from pagewire.transport.tls import channel_credentials


def dial(
    address: str,
    options: Sequence[tuple[str, int | str]],
    *,
    ca: str | None,
    cert: str | None,
    key: str | None,
    name: str | None,
) -> grpc.aio.Channel:
    """Open a channel, in plaintext without `ca`. `name` is the one in the server's certificate, if its host differs.

    Raises OSError for a file that cannot be read.
    """
    if ca is None:
        return grpc.aio.insecure_channel(target(address), options=options)
    named = () if name is None else (("grpc.ssl_target_name_override", name),)
    return grpc.aio.secure_channel(target(address), channel_credentials(ca, cert, key), options=(*options, *named))
