"""TLS from PEM files, for both sides of a connection. A server reads renewed files while it runs."""

import logging
from pathlib import Path

import grpc

logger = logging.getLogger(__name__)


def server_credentials(cert: str | None, key: str | None, client_ca: str | None) -> grpc.ServerCredentials | None:
    """Make the credentials of a server that shows `cert`, or None without one. With `client_ca`, clients must show one
    of that authority. Raises OSError."""
    if cert is None or key is None:
        return None
    files = _CertificateFiles(cert, key, client_ca)
    return grpc.dynamic_ssl_server_credentials(
        files.read(), files.read_if_changed, require_client_authentication=client_ca is not None
    )


def channel_credentials(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials:
    """Make the credentials of a client, who shows `cert` if it is given. Without `ca`, servers must show a certificate
    of an authority that gRPC knows. Raises OSError."""
    return grpc.ssl_channel_credentials(_read(ca), _read(key), _read(cert))


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


class _CertificateFiles:
    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        self._cert, self._key = Path(cert), Path(key)
        self._client_ca = None if client_ca is None else Path(client_ca)
        self._times: list[int] = []

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read all files. Raises OSError."""
        self._times = self._read_times()
        client_ca = None if self._client_ca is None else self._client_ca.read_bytes()
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)

    def read_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Read the files again if any has changed; gRPC calls this before each handshake, on a thread of its own."""
        try:
            if self._read_times() == self._times:
                return None
            configuration = self.read()
        except OSError as error:
            logger.error("cannot read the renewed certificate: %s; the old one stays", error)
            return None
        logger.info("the certificate was renewed")
        return configuration

    def _read_times(self) -> list[int]:
        return [path.stat().st_mtime_ns for path in (self._cert, self._key, self._client_ca) if path is not None]
