"""TLS from PEM files, for both sides of a connection. What a service uses is read again when it changes."""

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

_WATCH_INTERVAL = 1.0  # seconds between two looks
# Seconds for which files may be at odds without a word: they are written one after the other.
_SETTLING = 3.0
_DAY = 86_400.0
# A certificate is told of when this share of its life is left, or these days if that is less. What renews them does so
# before, with a third of their life left as a rule.
SHARE_LEFT = 0.2
DAYS_LEFT = 30.0
# Beside RSA, the curves of keys by which gRPC lets both sides prove who they are. With others it goes on with what it
# had, or agrees with the other side on nothing, without a word.
_CURVES = ("secp256r1", "secp384r1")
_PEM = re.compile(rb"^-----BEGIN ", re.MULTILINE)


class Life(NamedTuple):
    """The seconds of Unix time between which a certificate is good."""

    begin: float
    end: float

    def days_left(self, now: float) -> float:
        return (self.end - now) / _DAY

    def share_left(self, now: float) -> float:
        return (self.end - now) / max(1.0, self.end - self.begin)  # certificates may say anything


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the files of one side held when they were read: PEM that fits together, and when it is good, by flag."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    lives: Mapping[str, Life]

    def for_channel(self) -> grpc.ChannelCredentials:
        """Make those of a client. Without an authority, servers must show a certificate of one that gRPC knows."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """Make those of a server."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.ca)


class TlsFiles:
    """One side's certificate with its key, and the authority of whom it believes the other side, each if given."""

    def __init__(
        self,
        *,
        ca: NamedFile,
        cert: NamedFile,
        key: NamedFile,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the files. `clock` is in seconds of Unix time. Raises OSError for a file that cannot be read, and
        ValueError for what cannot be used."""
        self._ca, self._cert, self._key = ca, cert, key
        self._clock = clock
        self._told_days: dict[str, int] = {}  # left of each file when that was told
        self.watched = WatchedFiles(
            (ca, cert, key), self._parse, interval=_WATCH_INTERVAL, settling=_SETTLING, describe=_ends, clock=clock
        )

    @property
    def credentials(self) -> Credentials:
        """What is in use."""
        return self.watched.current

    def server_credentials(self) -> grpc.ServerCredentials:
        """Make the credentials of a server, whose clients must show a certificate if there is an authority for them.
        New ones hold from the next handshake on."""
        given = self.credentials

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self.credentials
            return None if given is before else given.for_server()

        return grpc.dynamic_ssl_server_credentials(
            given.for_server(), renewed, require_client_authentication=given.ca is not None
        )

    def server_context(self) -> ssl.SSLContext:
        """Make the same for servers of Python's ssl."""
        given, current = self.credentials, self._context()
        context = current

        def renewed(connection: ssl.SSLObject, name: str | None, begun_with: ssl.SSLContext) -> None:
            nonlocal given, current
            if given is not self.credentials:
                try:
                    given, current = self.credentials, self._context()
                except OSError as error:  # they have changed again, and the next handshake finds them as they are
                    logger.warning("the certificate that is shown stays as it was: %s", error)
            connection.context = current

        context.sni_callback = renewed  # which is called for clients too that name no server
        return context

    def _context(self) -> ssl.SSLContext:
        """Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert self._cert.path is not None, "a server has a certificate"
        context.load_cert_chain(self._cert.path, self._key.path)
        if self._ca.path is not None:
            context.load_verify_locations(self._ca.path)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    async def watch(self) -> NoReturn:
        """Keep what is in use up to date until cancelled, and tell what becomes of it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watched.watch())
            while True:
                self.tell_days_left()
                await asyncio.sleep(_WATCH_INTERVAL)

    def tell_days_left(self) -> None:
        """Warn of certificates that end soon, each once a day, and once of those that have ended."""
        now = self._clock()
        for flag, life in self.credentials.lives.items():
            days = max(-1, int((life.end - now) // _DAY))
            if life.share_left(now) >= SHARE_LEFT or life.days_left(now) >= DAYS_LEFT:
                self._told_days.pop(flag, None)
            elif self._told_days.get(flag) != days:
                self._told_days[flag] = days
                verb = "ends" if life.end > now else "has ended, and is refused: it ended"
                logger.warning("the certificate of %s %s on %s; renew it", flag, verb, _date(life.end))

    def _parse(self, *contents: bytes | None) -> Credentials:
        """Make what can be used now of what the files hold. Raises ValueError."""
        # gRPC overlooks PEM that begins in the middle of a line.
        ca, cert, key = (content if content is None or _PEM.search(content) else b"" for content in contents)
        return Credentials(ca, cert, key, dict(self._lives(ca, cert, key)))

    def _lives(self, ca: bytes | None, cert: bytes | None, key: bytes | None) -> Iterator[tuple[str, Life]]:
        """Yield when the certificates of each file are good. Raises ValueError."""
        now = self._clock()
        if cert is not None and key is not None:
            chain = _certificates(self._cert, cert)
            _check_pair(self._cert, self._key, chain[0], key)
            lives = list(map(_life, chain))
            _usable(self._cert, lives[:1], now)
            yield self._cert.flag, min(lives, key=lambda life: life.end)
        if ca is not None:
            # An authority that is being replaced is in the file beside the next one.
            lives = _usable(self._ca, list(map(_life, _certificates(self._ca, ca))), now)
            yield self._ca.flag, max(lives, key=lambda life: life.end)


def server_files(cert: str | None, key: str | None, client_ca: str | None) -> TlsFiles | None:
    """Read a server's files, or return None without a certificate. Raises OSError, ValueError."""
    if cert is None:
        return None
    return TlsFiles(
        ca=NamedFile("--tls-client-ca", client_ca), cert=NamedFile("--tls-cert", cert), key=NamedFile("--tls-key", key)
    )


def link_files(name: str, ca: str | None, cert: str | None, key: str | None) -> TlsFiles | None:
    """Read the files with which a service dials the one that its flags call `name`, or return None without an
    authority. Raises OSError, ValueError."""
    if ca is None:
        return None
    flag = f"--{name}-tls"
    return TlsFiles(
        ca=NamedFile(f"{flag}-ca", ca), cert=NamedFile(f"{flag}-cert", cert), key=NamedFile(f"{flag}-key", key)
    )


def _ends(credentials: Credentials) -> str:
    return ": " + ", ".join(f"{flag} is good until {_date(life.end)}" for flag, life in credentials.lives.items())


def _certificates(file: NamedFile, pem: bytes) -> "list[x509.Certificate]":
    """Return the certificates of a file, one at least. Raises ValueError."""
    from cryptography import x509
    from cryptography.utils import CryptographyDeprecationWarning

    # Authorities of the last century, which bundles still have, break rules for which it would warn.
    warnings.filterwarnings("ignore", category=CryptographyDeprecationWarning)
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise ValueError(f"{file.flag} is {file.path}, which holds no certificate in PEM, or a broken one") from None


def _check_pair(cert_file: NamedFile, key_file: NamedFile, cert: "x509.Certificate", key_pem: bytes) -> None:
    """Raises ValueError if the key is not that of the certificate, or gRPC takes none of its kind."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    where = f"{key_file.flag} is {key_file.path}, which"
    unfit = f"{where} is of a kind that gRPC does not take; have one made of RSA, or on the curve P-256"
    try:
        key = load_pem_private_key(key_pem, None)
        is_pair = key.public_key() == cert.public_key()
    except TypeError:
        raise ValueError(
            f"{where} is encrypted; give the key as it is, in a file that only this user can read"
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        # Before cryptography 47 a curve whose parameters stand in the key is not read.
        raise ValueError(
            unfit
            if "explicit parameters are" in str(error)
            else f"{where} holds no private key in PEM, or a broken one"
        ) from None
    if not is_pair:
        raise ValueError(f"{where} is not the key of the first certificate in {cert_file.flag} {cert_file.path}")
    is_elliptic = isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES
    # A plain RSA key, or a curve by its name, and not one whose parameters stand in the certificate.
    is_plain = (
        key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) in cert.tbs_certificate_bytes
    )
    if not is_plain or not (is_elliptic or isinstance(key, rsa.RSAPrivateKey)):
        raise ValueError(unfit)


def _usable(file: NamedFile, lives: list[Life], now: float) -> list[Life]:
    """Return the lives that now belongs to. Raises ValueError if there is none."""
    usable = [life for life in lives if life.begin <= now < life.end]
    if not usable:
        last = max(lives, key=lambda life: life.end)
        what = f"ended on {_date(last.end)}" if last.end <= now else f"is good from {_date(last.begin)} on"
        raise ValueError(f"{file.flag} is {file.path}, whose certificate {what}; renew it, or set this machine's clock")
    return usable


def _life(certificate: "x509.Certificate") -> Life:
    return Life(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
