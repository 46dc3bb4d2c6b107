"""Certificates for tests: certificate authorities, and certificates that are valid, expired or self-signed."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, in PEM."""

    cert: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """Write the certificate and the key to files in a folder, and return the paths of the two files."""
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        for path, content in zip(paths, (self.cert, self.key), strict=True):
            path.write_bytes(content)
        return str(paths[0]), str(paths[1])


class Authority:
    """A certificate authority. `cert` is its own certificate, in PEM."""

    def __init__(self, name: str, *, ends_in: datetime.timedelta = DAY) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key, ends_in=ends_in).add_extension(constraints, critical=True)
        self.cert = _pem(builder.sign(self._key, hashes.SHA256()))

    def write(self, folder: Path) -> str:
        """Write the authority's own certificate to a file in a folder, and return its path."""
        path = folder / "ca.crt"
        path.write_bytes(self.cert)
        return str(path)

    def issue(
        self,
        name: str,
        *,
        began: datetime.timedelta = 2 * DAY,
        ends_in: datetime.timedelta = DAY,
        other_names: Sequence[x509.GeneralName] = (),
        key: CertificateIssuerPrivateKeyTypes | None = None,
    ) -> Certificate:
        """Issue a certificate for a server or client of this DNS name or IP address.

        It became valid `began` ago, and expires after `ends_in`.
        """
        key = key or ec.generate_private_key(ec.SECP256R1())
        names = _alternative_names(name, other_names)
        builder = _builder(self._name, _name(name), key, began=began, ends_in=ends_in)
        builder = builder.add_extension(names, critical=False)
        return Certificate(_pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key))


def self_signed(name: str) -> Certificate:
    """Return a self-signed certificate for a server or client of this DNS name or IP address.

    It became valid two days ago.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = _alternative_names(name)
    builder = _builder(_name(name), _name(name), key, ends_in=DAY).add_extension(names, critical=False)
    return Certificate(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: CertificateIssuerPrivateKeyTypes,
    *,
    ends_in: datetime.timedelta,
    began: datetime.timedelta = 2 * DAY,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - began)
        .not_valid_after(now + ends_in)
    )


def _alternative_names(name: str, others: Sequence[x509.GeneralName] = ()) -> x509.SubjectAlternativeName:
    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name)), *others])
    except ValueError:
        return x509.SubjectAlternativeName([x509.DNSName(name), *others])


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
