"""Channels to other services, with TLS where the files for it are given. No other module makes channels."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import grpc
import grpc.aio

from pagewire.transport.addresses import target
from pagewire.transport.tls import channel_credentials


def open_channel(
    api: ModuleType,
    address: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, int | str]],
    *,
    uses_http_proxy: bool,
) -> Any:
    """Open a channel of `grpc` or of `grpc.aio`, which `api` is, to a target of gRPC; in plaintext without credentials.

    The variables of the environment that name an HTTP proxy count only where `uses_http_proxy` is set.
    """
    options = (*options, ("grpc.enable_http_proxy", int(uses_http_proxy)))
    if credentials is None:
        return api.insecure_channel(address, options=options)
    return api.secure_channel(address, credentials, options=options)


def dial(
    address: str,
    options: Sequence[tuple[str, int | str]],
    *,
    ca: str | None,
    cert: str | None,
    key: str | None,
    name: str | None,
    uses_http_proxy: bool,
) -> grpc.aio.Channel:
    """Open a channel, in plaintext without `ca`. `name` is the one in the server's certificate, if its host differs.

    Raises OSError for a file that cannot be read.
    """
    credentials = None if ca is None else channel_credentials(ca, cert, key)
    named = () if ca is None or name is None else (("grpc.ssl_target_name_override", name),)
    return open_channel(grpc.aio, target(address), credentials, (*options, *named), uses_http_proxy=uses_http_proxy)
