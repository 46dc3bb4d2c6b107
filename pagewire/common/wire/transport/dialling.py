"""Channels to other services, with TLS if its files are given. All channels are created in this module."""

from collections.abc import Sequence

import grpc
import grpc.aio

from pagewire.common.wire.transport.addresses import target
from pagewire.common.wire.transport.tls import Credentials, TlsFiles


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, int | str]],
    *,
    uses_http_proxy: bool,
) -> grpc.aio.Channel:
    """Create a gRPC channel to a target. Without credentials the channel uses plaintext. HTTP proxy settings in
    environment variables apply only if `uses_http_proxy` is set.
    """
    options = (*options, ("grpc.enable_http_proxy", int(uses_http_proxy)))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class Dialler:
    """A factory of gRPC channels to one address. When the client's TLS files change, the dialler replaces its channel,
    because gRPC reads these files only once per channel.
    """

    def __init__(
        self,
        address: str,
        options: Sequence[tuple[str, int | str]],
        *,
        tls: TlsFiles | None = None,
        name: str | None = None,
        uses_http_proxy: bool = False,
    ) -> None:
        """Prepare gRPC channels to an address, without creating a channel yet. Without `tls` the channels use
        plaintext. `name` is the name in the server's certificate, if it differs from the host.
        """
        named = () if tls is None or name is None else (("grpc.ssl_target_name_override", name),)
        self._target = target(address)
        self._options = (*options, *named)
        self._uses_http_proxy = uses_http_proxy
        self._tls = tls
        self._credentials: Credentials | None = None  # used by the current channel
        self._channel: grpc.aio.Channel | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the client's TLS files have changed since the current gRPC channel was created."""
        return self._tls is not None and self._tls.credentials is not self._credentials

    async def channel(self) -> grpc.aio.Channel:
        """Return the current gRPC channel. If there is none, or the TLS files have changed, create a new channel. RPCs
        on the old channel then end.
        """
        if self._channel is None or self.is_outdated:
            await self.close()
            self._credentials = None if self._tls is None else self._tls.credentials
            self._channel = open_channel(
                self._target,
                None if self._credentials is None else self._credentials.for_channel(),
                self._options,
                uses_http_proxy=self._uses_http_proxy,
            )
        return self._channel

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
