"""TLS from PEM files, for both sides of a connection. Services reload the files when they change."""

import asyncio
import logging
import re
import ssl
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import grpc

from pagewire.common.process.watched_files import NamedFile, WatchedFiles

if TYPE_CHECKING:
    from cryptography import x509

logger = logging.getLogger(__name__)

_WATCH_INTERVAL = 1.0  # seconds between two checks of the files
# The number of seconds for which mismatched files are not reported, because they are written one after the other.
_SETTLING = 3.0
_DAY = 86_400.0
# A warning is due when this share of a certificate's validity period is left, or this number of days if that is less.
# Tools renew certificates earlier, usually when a third of the period is left.
SHARE_LEFT = 0.2
DAYS_LEFT = 30.0
# The elliptic curves of keys that gRPC can use to authenticate both sides, besides RSA. With other curves, gRPC
# silently keeps the old certificate or fails the handshake.
_CURVES = ("secp256r1", "secp384r1")
_PEM = re.compile(rb"^-----BEGIN ", re.MULTILINE)


class Life(NamedTuple):
    """The validity period of a TLS certificate, in seconds of Unix time."""

    begin: float
    end: float

    def days_left(self, now: float) -> float:
        return (self.end - now) / _DAY

    def share_left(self, now: float) -> float:
        return (self.end - now) / max(1.0, self.end - self.begin)  # the period may be empty or negative


@dataclass(frozen=True, slots=True)
class Credentials:
    """The validated PEM contents of the TLS files of a client or a server. `lives` maps the command line flag of each
    file to the validity period of the certificates in the file.
    """

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    lives: Mapping[str, Life]

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return the gRPC credentials of a client with these TLS files. Without a CA file, gRPC's default CAs are
        trusted.
        """
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificate configuration of a gRPC server with these TLS files."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.ca)


class TlsFiles:
    """The TLS files of a client or a server: its own certificate, its private key, and the CA that signs the
    certificates of the other side. Each file is optional. The files are read again when they change.
    """

    def __init__(
        self,
        *,
        ca: NamedFile,
        cert: NamedFile,
        key: NamedFile,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the TLS files for the first time. `clock` returns seconds of Unix time.

        Raises OSError for a file that cannot be read, and ValueError for contents that cannot be used, such as an
        expired certificate.
        """
        self._ca, self._cert, self._key = ca, cert, key
        self._clock = clock
        self._told_days: dict[str, int] = {}  # the days left at the last warning, by flag
        self.watched = WatchedFiles(
            (ca, cert, key), self._parse, interval=_WATCH_INTERVAL, settling=_SETTLING, describe=_ends, clock=clock
        )

    @property
    def credentials(self) -> Credentials:
        """The TLS credentials in use: the last valid contents of the files."""
        return self.watched.current

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return gRPC credentials for a server that follow the TLS files. New contents of the files apply from the next
        handshake on. If a CA is given, clients must present a certificate.
        """
        given = self.credentials

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self.credentials
            return None if given is before else given.for_server()

        return grpc.dynamic_ssl_server_credentials(
            given.for_server(), renewed, require_client_authentication=given.ca is not None
        )

    def server_context(self) -> ssl.SSLContext:
        """Return an SSL context for a server that uses Python's ssl module. The context follows the TLS files: new
        contents apply from the next handshake on.
        """
        given, current = self.credentials, self._context()
        context = current

        def renewed(connection: ssl.SSLObject, name: str | None, begun_with: ssl.SSLContext) -> None:
            nonlocal given, current
            if given is not self.credentials:
                try:
                    given, current = self.credentials, self._context()
                except OSError as error:  # the files have changed again; the next handshake reads them
                    logger.warning(
                        "the previous certificate stays in use, because the new one cannot be loaded: %s", error
                    )
            connection.context = current

        context.sni_callback = renewed  # called also for clients that send no server name
        return context

    def _context(self) -> ssl.SSLContext:
        """Return an SSL context for a server with the current contents of the TLS files. Raises OSError if a file
        cannot be loaded.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert self._cert.path is not None, "a server has a certificate"
        context.load_cert_chain(self._cert.path, self._key.path)
        if self._ca.path is not None:
            context.load_verify_locations(self._ca.path)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    async def watch(self) -> NoReturn:
        """Reload the TLS files when they change, until cancelled. Changes, problems and certificates that expire soon
        are logged.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watched.watch())
            while True:
                self.warn_of_expiry()
                await asyncio.sleep(_WATCH_INTERVAL)

    def warn_of_expiry(self) -> None:
        """Log a warning for each TLS certificate that expires soon, once a day. A certificate that has expired is
        reported once.
        """
        now = self._clock()
        for flag, life in self.credentials.lives.items():
            days = max(-1, int((life.end - now) // _DAY))
            if life.share_left(now) >= SHARE_LEFT or life.days_left(now) >= DAYS_LEFT:
                self._told_days.pop(flag, None)
            elif self._told_days.get(flag) != days:
                self._told_days[flag] = days
                verb = "expires" if life.end > now else "has expired, and is refused: it expired"
                logger.warning("the certificate of %s %s on %s; renew it", flag, verb, _date(life.end))

    def _parse(self, *contents: bytes | None) -> Credentials:
        """Validate the contents of the TLS files, and return the credentials. Raises ValueError if the contents cannot
        be used now.
        """
        # gRPC ignores PEM that begins in the middle of a line.
        ca, cert, key = (content if content is None or _PEM.search(content) else b"" for content in contents)
        return Credentials(ca, cert, key, dict(self._lives(ca, cert, key)))

    def _lives(self, ca: bytes | None, cert: bytes | None, key: bytes | None) -> Iterator[tuple[str, Life]]:
        """Yield the command line flag of each TLS file with certificates, and the validity period of these
        certificates. Raises ValueError for unusable contents.
        """
        now = self._clock()
        if cert is not None and key is not None:
            chain = _certificates(self._cert, cert)
            _check_pair(self._cert, self._key, chain[0], key)
            lives = list(map(_life, chain))
            _usable(self._cert, lives[:1], now)
            yield self._cert.flag, min(lives, key=lambda life: life.end)
        if ca is not None:
            # While a CA is being replaced, the file contains the old and the new one.
            lives = _usable(self._ca, list(map(_life, _certificates(self._ca, ca))), now)
            yield self._ca.flag, max(lives, key=lambda life: life.end)


def server_files(cert: str | None, key: str | None, client_ca: str | None) -> TlsFiles | None:
    """Read the TLS files of a server. Return None if no certificate is given. Raises OSError if a file cannot be read,
    and ValueError if its content cannot be used.
    """
    if cert is None:
        return None
    return TlsFiles(
        ca=NamedFile("--tls-client-ca", client_ca), cert=NamedFile("--tls-cert", cert), key=NamedFile("--tls-key", key)
    )


def link_files(name: str, ca: str | None, cert: str | None, key: str | None) -> TlsFiles | None:
    """Read the TLS files for connections to another of our services. `name` is that service's name in the command line
    flags, as in --NAME-tls-ca. Return None if no CA is given. Raises OSError if a file cannot be read, and ValueError
    if its content cannot be used.
    """
    if ca is None:
        return None
    flag = f"--{name}-tls"
    return TlsFiles(
        ca=NamedFile(f"{flag}-ca", ca), cert=NamedFile(f"{flag}-cert", cert), key=NamedFile(f"{flag}-key", key)
    )


def _ends(credentials: Credentials) -> str:
    return ": " + ", ".join(f"{flag} is valid until {_date(life.end)}" for flag, life in credentials.lives.items())


def _certificates(file: NamedFile, pem: bytes) -> "list[x509.Certificate]":
    """Return the certificates in the content of a PEM file, at least one. Raises ValueError if the content has no valid
    certificate.
    """
    from cryptography import x509
    from cryptography.utils import CryptographyDeprecationWarning

    # Bundles still contain CAs from the 1990s, whose certificates violate rules that cryptography would warn about.
    warnings.filterwarnings("ignore", category=CryptographyDeprecationWarning)
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise ValueError(f"{file.flag} is {file.path}, which contains no valid certificate in PEM") from None


def _check_pair(cert_file: NamedFile, key_file: NamedFile, cert: "x509.Certificate", key_pem: bytes) -> None:
    """Check that a private key belongs to a certificate. Raises ValueError if the key does not match the certificate,
    or if gRPC does not support this kind of key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    where = f"{key_file.flag} is {key_file.path}, which"
    unfit = f"{where} is of a kind that gRPC does not support; use an RSA key, or a key on the curve P-256"
    try:
        key = load_pem_private_key(key_pem, None)
        is_pair = key.public_key() == cert.public_key()
    except TypeError:
        raise ValueError(f"{where} is encrypted; store it unencrypted in a file that only this user can read") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        # cryptography before version 47 cannot read a curve that is given by explicit parameters.
        raise ValueError(
            unfit if "explicit parameters are" in str(error) else f"{where} contains no valid private key in PEM"
        ) from None
    if not is_pair:
        raise ValueError(f"{where} is not the key of the first certificate in {cert_file.flag} {cert_file.path}")
    is_elliptic = isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES
    # Accept plain RSA keys and named curves, but no curve that the certificate gives by explicit parameters.
    is_plain = (
        key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) in cert.tbs_certificate_bytes
    )
    if not is_plain or not (is_elliptic or isinstance(key, rsa.RSAPrivateKey)):
        raise ValueError(unfit)


def _usable(file: NamedFile, lives: list[Life], now: float) -> list[Life]:
    """Return the validity periods in `lives` that include `now`. Raises ValueError if no period includes it."""
    usable = [life for life in lives if life.begin <= now < life.end]
    if not usable:
        last = max(lives, key=lambda life: life.end)
        what = f"expired on {_date(last.end)}" if last.end <= now else f"is not valid before {_date(last.begin)}"
        raise ValueError(
            f"{file.flag} is {file.path}, whose certificate {what}; renew it, or correct this machine's clock"
        )
    return usable


def _life(certificate: "x509.Certificate") -> Life:
    return Life(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
