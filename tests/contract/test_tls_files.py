"""TLS files at startup and after valid or invalid renewals, for servers and for links."""

import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pagewire.client.client import Client
from pagewire.common.process.watched_files import NamedFile
from pagewire.common.wire.transport.tls import Life, TlsFiles, link_files, server_files
from testing.seeds import seeded
from testing.serving.certificates import DAY, Authority, Certificate

AUTHORITY = Authority("pagewire")
GOOD = AUTHORITY.issue("localhost")
OTHER = AUTHORITY.issue("localhost")
ENDED = AUTHORITY.issue("localhost", ends_in=-DAY)
# Key types that some tools generate and gRPC does not support.
ED25519 = AUTHORITY.issue("localhost", key=ed25519.Ed25519PrivateKey.generate())
P521 = AUTHORITY.issue("localhost", key=ec.generate_private_key(ec.SECP521R1()))
K256 = AUTHORITY.issue("localhost", key=ec.generate_private_key(ec.SECP256K1()))
# Keys that only openssl generates, each with a certificate valid for a hundred years: `openssl genpkey -algorithm
# RSA-PSS`, and `openssl ecparam -name prime256v1 -param_enc explicit -genkey`.
RSA_PSS, EXPLICIT_CURVE = (
    Path(__file__).with_name(f"{name}.pem").read_bytes() for name in ("rsa_pss", "explicit_curve")
)
NOT_BEGUN = AUTHORITY.issue("localhost", began=-DAY, ends_in=2 * DAY)


def encrypted(key: bytes) -> bytes:
    protection = BestAvailableEncryption(b"secret")
    return load_pem_private_key(key, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)


@dataclass
class Folder:
    """The three TLS files of one side, with their contents. None: the file does not exist."""

    path: Path
    contents: dict[str, bytes | None] = field(
        default_factory=lambda: {"ca": AUTHORITY.cert, "cert": GOOD.cert, "key": GOOD.key}
    )

    def write(self, **contents: bytes | None) -> "Folder":
        self.contents |= contents
        for name, content in self.contents.items():
            file = self.path / name
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)
        return self

    def paths(self) -> dict[str, str]:
        return {name: str(self.path / name) for name in self.contents}


def of_server(paths: dict[str, str]) -> TlsFiles | None:
    return server_files(paths["cert"], paths["key"], paths["ca"])


def of_link(paths: dict[str, str]) -> TlsFiles | None:
    return link_files("worker", **paths)


SIDES = {
    "server": (of_server, {"cert": "--tls-cert", "key": "--tls-key", "ca": "--tls-client-ca"}),
    "link": (of_link, {name: f"--worker-tls-{name}" for name in ("cert", "key", "ca")}),
}
# Invalid contents by case, the file that the error names, and the error message.
BAD_FILES: dict[str, tuple[dict[str, bytes | None], str, str]] = {
    "no certificate": ({"cert": None}, "cert", "cannot be read: No such file"),
    "an empty certificate": ({"cert": b""}, "cert", "no valid certificate in PEM"),
    "half a certificate": ({"cert": GOOD.cert[:200]}, "cert", "no valid certificate in PEM"),
    "a broken certificate": ({"cert": GOOD.cert.replace(b"M", b"A", 1)}, "cert", "no valid certificate in PEM"),
    "a key as certificate": ({"cert": GOOD.key}, "cert", "no valid certificate in PEM"),
    "a certificate that has ended": ({"cert": ENDED.cert, "key": ENDED.key}, "cert", "expired on"),
    "a certificate that has not begun": ({"cert": NOT_BEGUN.cert, "key": NOT_BEGUN.key}, "cert", "is not valid before"),
    "no key": ({"key": None}, "key", "cannot be read: No such file"),
    "garbage as key": ({"key": b"\x00\xff garbage"}, "key", "contains no valid private key in PEM"),
    "half a key": ({"key": GOOD.key[:100]}, "key", "contains no valid private key in PEM"),
    "a certificate as key": ({"key": GOOD.cert}, "key", "contains no valid private key in PEM"),
    "an encrypted key": ({"key": encrypted(GOOD.key)}, "key", "is encrypted"),
    "a key of Ed25519": ({"cert": ED25519.cert, "key": ED25519.key}, "key", "is of a kind that gRPC does not support"),
    "a key on P-521": ({"cert": P521.cert, "key": P521.key}, "key", "is of a kind that gRPC does not support"),
    "a key on secp256k1": ({"cert": K256.cert, "key": K256.key}, "key", "is of a kind that gRPC does not support"),
    "a key of RSA-PSS": ({"cert": RSA_PSS, "key": RSA_PSS}, "key", "is of a kind that gRPC does not support"),
    "a key on a curve without a name": (
        {"cert": EXPLICIT_CURVE, "key": EXPLICIT_CURVE},
        "key",
        "is of a kind that gRPC does not support",
    ),
    "a certificate behind a mark": ({"cert": b"\xef\xbb\xbf" + GOOD.cert}, "cert", "no valid certificate in PEM"),
    "an indented key": (
        {"key": textwrap.indent(GOOD.key.decode(), "  ").encode()},
        "key",
        "no valid private key in PEM",
    ),
    "another key": ({"key": OTHER.key}, "key", "is not the key of the first certificate in"),
    "the chain upside down": (
        {"cert": AUTHORITY.cert + GOOD.cert},
        "key",
        "is not the key of the first certificate in",
    ),
    "no authority": ({"ca": None}, "ca", "cannot be read: No such file"),
    "an empty authority": ({"ca": b"\n"}, "ca", "no valid certificate in PEM"),
    "an authority that has ended": ({"ca": Authority("old", ends_in=-DAY).cert}, "ca", "expired on"),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BAD_FILES)
def test_what_cannot_be_used_is_refused_with_the_flag_the_file_and_the_reason(
    name: str, side: str, tmp_path: Path
) -> None:
    read, flags = SIDES[side]
    contents, file, reason = BAD_FILES[name]
    paths = Folder(tmp_path).write(**contents).paths()
    kind = OSError if None in contents.values() else ValueError
    with pytest.raises(kind) as error:
        read(paths)
    assert str(error.value).startswith(f"{flags[file]} is {paths[file]}, ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_client_takes_no_key_of_another_certificate(tmp_path: Path) -> None:
    paths = Folder(tmp_path).write(key=OTHER.key).paths()
    with pytest.raises(
        ValueError, match=r"^tls_key is .*/key, which is not the key of the first certificate in tls_cert"
    ):
        Client("grpcs://localhost:1", tls_cert=paths["cert"], tls_key=paths["key"])


def test_what_can_be_used_is_taken(tmp_path: Path) -> None:
    """Valid TLS files are accepted: certificate and key in one file, a chain, a new authority beside an expired one,
    and keys of other types.

    Without files, there is nothing to read.
    """
    both = GOOD.key + GOOD.cert
    keys = (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1()))
    issued = [AUTHORITY.issue("localhost", key=key) for key in keys]
    old = Authority("old", ends_in=-DAY)
    for contents in (
        {"cert": both, "key": both},
        {"cert": b"the server\n" + GOOD.cert + AUTHORITY.cert},
        {"ca": old.cert + AUTHORITY.cert},
        *({"cert": each.cert, "key": each.key} for each in issued),
    ):
        for read, _ in SIDES.values():
            assert read(Folder(tmp_path).write(**contents).paths()) is not None
    assert server_files(None, None, None) is None
    assert link_files("worker", None, None, None) is None


@dataclass
class Watched:
    """TLS files that are checked repeatedly, with a fake clock."""

    folder: Folder
    files: TlsFiles
    caplog: pytest.LogCaptureFixture
    now: Callable[[float], None]

    def lines(self, *seconds: float) -> list[tuple[int, str]]:
        """Check the files after each further number of seconds. Return the level and message of all log lines."""
        self.caplog.clear()
        for more in seconds:
            self.now(more)
            self.look()
            self.files.warn_of_expiry()
        return [(record.levelno, record.getMessage()) for record in self.caplog.records]

    def look(self) -> None:
        self.files.watched.look(self.files.watched.take)

    def pair(self) -> Certificate:
        self.look()
        current = self.files.credentials
        return Certificate(current.cert, current.key)


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Watched:
    caplog.set_level("INFO", logger="pagewire.common")
    folder = Folder(tmp_path).write()
    offset = [0.0]
    names = {name: NamedFile(f"--tls-{name}", path) for name, path in folder.paths().items()}
    files = TlsFiles(**names, clock=lambda: time.time() + offset[0])

    def later(seconds: float) -> None:
        offset[0] += seconds

    return Watched(folder, files, caplog, later)


LONG = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # checks for longer than the three files may be inconsistent


def test_a_renewed_pair_is_one_line_and_only_when_both_files_are_there(watched: Watched) -> None:
    assert watched.lines(*LONG) == []
    watched.folder.write(cert=OTHER.cert)
    assert watched.lines(1.0, 1.0) == []
    assert watched.pair() == GOOD
    watched.folder.write(key=OTHER.key)
    ((level, line),) = watched.lines(*LONG)
    assert level == logging.INFO
    assert line.startswith("read --tls-ca, --tls-cert, --tls-key again: --tls-cert is valid until ")
    assert watched.pair() == OTHER
    watched.folder.write()  # with the same content
    assert watched.lines(*LONG) == []


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_renewal_is_one_error_and_the_old_files_stay(name: str, watched: Watched) -> None:
    contents, _, reason = BAD_FILES[name]
    before = watched.files.credentials
    watched.folder.write(**contents)
    ((level, line),) = watched.lines(*LONG, *LONG)
    assert level == logging.ERROR
    assert line.startswith("--tls-")
    assert reason in line
    assert "; the previous contents stay in use: --tls-cert is valid until " in line
    assert watched.files.credentials is before
    watched.folder.write(ca=AUTHORITY.cert, cert=OTHER.cert, key=OTHER.key)
    assert [level for level, _ in watched.lines(*LONG)] == [logging.INFO]
    assert watched.pair() == OTHER


def test_a_bad_renewal_that_is_taken_back_is_told(watched: Watched) -> None:
    watched.folder.write(key=OTHER.key)
    watched.lines(*LONG)
    watched.folder.write(key=GOOD.key)
    assert [level for level, _ in watched.lines(*LONG)] == [logging.INFO]


def test_a_bad_renewal_is_told_though_the_clock_is_set_back(watched: Watched) -> None:
    watched.folder.write(key=OTHER.key)
    assert [level for level, _ in watched.lines(1.0, -3600.0, 1.0)] == [logging.ERROR]


def test_a_life_of_no_length_has_nothing_left() -> None:
    assert Life(begin=2.0, end=2.0).share_left(5.0) < 0


def test_a_certificate_that_begins_later_is_taken_then(watched: Watched) -> None:
    watched.folder.write(cert=NOT_BEGUN.cert, key=NOT_BEGUN.key)
    assert [level for level, _ in watched.lines(*LONG)] == [logging.ERROR]
    watched.folder.write(ca=Authority("long", ends_in=30 * DAY).cert)
    assert watched.pair() == GOOD
    assert logging.INFO in [level for level, _ in watched.lines(DAY.total_seconds())]
    assert watched.pair() == NOT_BEGUN


def test_an_end_is_told_in_time_once_a_day_and_once_when_it_has_come(
    tmp_path: Path, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    own = AUTHORITY.issue("localhost", began=60 * DAY, ends_in=30 * DAY)
    watched.folder.write(cert=own.cert, key=own.key, ca=Authority("long", ends_in=3650 * DAY).cert)
    assert [level for level, _ in watched.lines(1.0)] == [logging.INFO]
    lives = watched.files.credentials.lives
    now = time.time()
    assert {flag: round(life.days_left(now)) for flag, life in lives.items()} == {"--tls-cert": 30, "--tls-ca": 3650}
    assert round(lives["--tls-cert"].share_left(now), 2) == 0.33
    hour = timedelta(hours=1).total_seconds()
    lines = watched.lines(*[hour] * (40 * 24))
    assert len(lines) == 18 + 1
    assert all(level == logging.WARNING and line.startswith("the certificate of --tls-cert ") for level, line in lines)
    assert ["has expired" in line for _, line in lines] == [False] * 18 + [True]
    assert round(watched.files.credentials.lives["--tls-cert"].days_left(now + 40 * DAY.total_seconds())) == -10


HUNG = """
import asyncio, os, sys
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.tls import link_files


async def main():
    files = link_files("worker", *sys.argv[1:])
    dialler = Dialler("localhost:1", (), tls=files)
    os.unlink(sys.argv[1])
    os.mkfifo(sys.argv[1])
    watching = asyncio.create_task(files.watch())
    for _ in range(3):
        await asyncio.sleep(0)
    await dialler.channel()
    assert not dialler.is_outdated
    await dialler.close()
    watching.cancel()


asyncio.run(main())
"""


def test_a_disk_that_hangs_holds_up_neither_links_nor_the_end_of_the_process(tmp_path: Path) -> None:
    paths = Folder(tmp_path).write().paths()
    command = [sys.executable, "-c", HUNG, *(paths[name] for name in ("ca", "cert", "key"))]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_random_replacements_always_use_matching_files(watched: Watched) -> None:
    """Files are replaced one by one in random order, with checks in between. A reference model knows
    the valid state.
    """
    draw = seeded()
    authorities = [AUTHORITY, Authority("next")]
    pairs = [GOOD, OTHER, authorities[1].issue("localhost"), ENDED]
    current = (AUTHORITY.cert, GOOD.cert, GOOD.key)
    for _ in range(200):
        name = draw.choice(["ca", "cert", "key"])
        content = {
            "ca": [each.cert for each in authorities],
            "cert": [each.cert for each in pairs],
            "key": [each.key for each in pairs],
        }[name]
        watched.folder.write(**{name: draw.choice([*content, b"", None])})
        written = tuple(watched.folder.contents[name] for name in ("ca", "cert", "key"))
        if Certificate(*written[1:]) in pairs[:3] and written[0]:
            current = written
        watched.look()
        used = watched.files.credentials
        assert (used.ca, used.cert, used.key) == current
