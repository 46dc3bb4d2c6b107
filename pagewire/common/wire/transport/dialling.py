"""The way to another service, with TLS where the files for it are given. No other module makes channels."""

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
    """Open a channel to a target of gRPC; in plaintext without credentials.

    The variables of the environment that name an HTTP proxy count only where `uses_http_proxy` is set.
    """
    options = (*options, ("grpc.enable_http_proxy", int(uses_http_proxy)))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class Dialler:
    """Opens channels to one address. gRPC reads a client's certificates once for each channel."""

    def __init__(
        self,
        address: str,
        options: Sequence[tuple[str, int | str]],
        *,
        tls: TlsFiles | None = None,
        name: str | None = None,
        uses_http_proxy: bool = False,
    ) -> None:
        """It is plaintext without `tls`. `name` is the one in the server's certificate, if its host differs."""
        named = () if tls is None or name is None else (("grpc.ssl_target_name_override", name),)
        self._target = target(address)
        self._options = (*options, *named)
        self._uses_http_proxy = uses_http_proxy
        self._tls = tls
        self._credentials: Credentials | None = None  # of the channel
        self._channel: grpc.aio.Channel | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the files for TLS were renewed since the channel was made."""
        return self._tls is not None and self._tls.credentials is not self._credentials

    async def channel(self) -> grpc.aio.Channel:
        """Return the channel that is open, or a new one in its place if that is outdated: its calls end then."""
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
