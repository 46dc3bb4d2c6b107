"""A YAML file of tenants, which is read again when it changes.

    tenants:
      acme:
        api_keys: ["sha256:9f86d0..."]      # the keys' SHA-256, so that the file contains no keys
        certificates: ["acme.example"]      # DNS names in the client's certificate
        max_requests: 64                    # waiting and running at the same time
        max_sequences: 128                  # samples and beams of these requests
        max_queued_tokens: 100000           # prompt tokens of requests without an output token
        max_blocks: 2000                    # that its requests may need, including max_tokens
        max_retention_seconds: 600          # longest retention hint for cached blocks
      dashboard:
        api_keys: ["sha256:60303a..."]
        operator: true                      # may act for any tenant and see all data
      visitor:
        anonymous: true                     # callers without credentials

A missing limit means no limit. Without `max_retention_seconds` the server's limit applies.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from pagewire.common.process.watched_files import NamedFile, WatchedFiles
from pagewire.common.strict_yaml import parse_yaml

# The interval between two checks of the file, in seconds. Content that exists for a shorter time is missed.
_WATCH_INTERVAL = 0.1
_DIGEST_PREFIX = "sha256:"
_MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits on the resources that one tenant's requests may use at the same time: requests, sequences, queued
    tokens and KV cache blocks. Another limit is the longest time for which a request may ask to keep its cached blocks.
    A limit of None means that the tenant has no limit of its own."""

    max_requests: int | None = None
    max_sequences: int | None = None
    max_queued_tokens: int | None = None
    max_blocks: int | None = None
    max_retention_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the server, with its limits and the credentials of its callers. All requests of a tenant share these
    limits."""

    name: str
    quota: Quota
    key_digests: tuple[bytes, ...]
    certificates: frozenset[str]
    is_operator: bool
    is_anonymous: bool


@dataclass(frozen=True, slots=True)
class Tenants:
    """The content of a file of tenants: the tenants by name, and the SHA-256 digest of the file in hexadecimal."""

    by_name: Mapping[str, Tenant]
    revision: str


class TenantFile:
    """A YAML file of tenants, which is watched for changes and read again after each change."""

    def __init__(self, path: str) -> None:
        """Read the file of tenants. Raise OSError if the file cannot be read. Raise ValueError, with a message that
        names the error, if its content is invalid."""
        # Called after a change of the file, with the names of the removed tenants. A tenant that is removed and added
        # again later is therefore reported.
        self.listeners: list[Callable[[frozenset[str]], None]] = []
        self.file = WatchedFiles(
            [NamedFile("--tenants", path)],
            partial(_read, path),
            interval=_WATCH_INTERVAL,
            describe=lambda tenants: f": {len(tenants.by_name)} tenants",
            on_change=self._tell,
        )

    def by_key(self, key: str) -> Tenant | None:
        """Return the tenant to which an API key belongs, or None for an unknown key. The key is compared with every
        known key, so that the response time reveals nothing about the keys."""
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for tenant in self.current().values():
            for known in tenant.key_digests:
                if hmac.compare_digest(digest, known):
                    found = tenant
        return found

    def by_certificate(self, names: Iterable[str]) -> Tenant | None:
        """Return the tenant to which one of the DNS names in a client's certificate belongs, or None."""
        tenants = self.current().values()
        return next((tenant for tenant in tenants if not tenant.certificates.isdisjoint(names)), None)

    def anonymous(self) -> Tenant | None:
        return next((tenant for tenant in self.current().values() if tenant.is_anonymous), None)

    @property
    def revision(self) -> str:
        """The SHA-256 digest of the last valid content of the file of tenants, in hexadecimal."""
        return self.file.current.revision

    def knows(self, name: str) -> bool:
        """Return whether the tenant is in the file. A front end may forward requests of no other tenants."""
        return name in self.current()

    def quota(self, name: str) -> Quota:
        """Return the limits of a tenant. A tenant that is not in the file has no limits; only an operator can send
        requests for such a tenant."""
        tenant = self.current().get(name)
        return Quota() if tenant is None else tenant.quota

    def current(self) -> Mapping[str, Tenant]:
        """Return the tenants by name, as of the last valid content of the file. If the file is removed or becomes
        invalid, its last valid content still applies."""
        return self.file.current.by_name

    def _tell(self, before: Tenants, current: Tenants) -> None:
        for tell in self.listeners:
            tell(frozenset(before.by_name) - frozenset(current.by_name))


class ApiKeys(TenantFile):
    """The keys of `--api-key`, in place of a file of tenants. All callers with a key are the same operator, so a
    request may name any tenant, as on a server without keys."""

    def __init__(self, keys: str) -> None:
        """Accept the API keys in `keys`, which are separated by commas."""
        digests = tuple(sorted(hashlib.sha256(key.encode()).digest() for key in keys.split(",")))
        caller = Tenant("", Quota(), digests, frozenset(), is_operator=True, is_anonymous=False)
        tenants = Tenants({"": caller}, hashlib.sha256(b"".join(digests)).hexdigest())
        self.listeners = []
        self.file = WatchedFiles([], lambda: tenants)

    def knows(self, name: str) -> bool:
        return True


def _read(path: str, content: bytes) -> Tenants:
    """Parse the content of a file of tenants and return the tenants. Raise ValueError, with a message that names the
    file, if the content is invalid."""
    try:
        return Tenants(parse_tenants(content.decode()), hashlib.sha256(content).hexdigest())
    except ValueError as error:  # not UTF-8, or invalid
        raise ValueError(f"--tenants {path}: {error}") from None


def parse_tenants(text: str) -> dict[str, Tenant]:
    """Return the tenants in the YAML text of a file of tenants, by name. Raise ValueError if the text is invalid. The
    message names the tenant, the key and the expected value."""
    document = parse_yaml(text)
    if not isinstance(document, dict) or set(document) != {"tenants"} or not isinstance(document["tenants"], dict):
        raise ValueError("expected one key, tenants, with a mapping from tenant names to their settings")
    tenants = {str(name): _parse(str(name), entry or {}) for name, entry in document["tenants"].items()}
    _check_unique(tenants.values())
    return tenants


_KEYS = {"api_keys", "certificates", "operator", "anonymous", *(field.name for field in fields(Quota))}


def _parse(name: str, entry: Any) -> Tenant:
    if not 1 <= len(name) <= _MAX_NAME_CHARS:
        raise ValueError(f"a tenant's name has {len(name)} characters, but must have 1 to {_MAX_NAME_CHARS}")
    if not isinstance(entry, dict):
        raise ValueError(f"tenant {name!r} is a {type(entry).__name__}, but must be a mapping")
    unknown = sorted(map(str, set(entry) - _KEYS))
    if unknown:
        raise ValueError(f"tenant {name!r} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    return Tenant(
        name,
        Quota(**{field.name: _limit(name, field.name, entry) for field in fields(Quota)}),
        tuple(_digest(name, text) for text in _texts(name, "api_keys", entry)),
        frozenset(_texts(name, "certificates", entry)),
        _flag(name, "operator", entry),
        _flag(name, "anonymous", entry),
    )


def _limit(name: str, key: str, entry: Mapping[str, Any]) -> int | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"tenant {name!r}: {key} is {value!r}, but must be a whole number, at least 0")
    return value


def _flag(name: str, key: str, entry: Mapping[str, Any]) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"tenant {name!r}: {key} is {value!r}, but must be true or false")
    return value


def _texts(name: str, key: str, entry: Mapping[str, Any]) -> list[str]:
    values = entry.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"tenant {name!r}: {key} must be a list of texts")
    return values


def _digest(name: str, text: str) -> bytes:
    """Return the SHA-256 digest of an API key from an entry of api_keys. Raise ValueError if the entry is not a digest.
    The error does not repeat the entry, which may be an API key written by mistake."""
    try:
        digest = bytes.fromhex(text.removeprefix(_DIGEST_PREFIX))
    except ValueError:
        digest = b""
    if not text.startswith(_DIGEST_PREFIX) or len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"tenant {name!r}: an entry of api_keys is not {_DIGEST_PREFIX!r} and 64 hexadecimal digits")
    return digest


def _check_unique(tenants: Iterable[Tenant]) -> None:
    owners: dict[object, str] = {}
    for tenant in tenants:
        for credential in (*tenant.key_digests, *tenant.certificates, *([""] if tenant.is_anonymous else [])):
            owner = owners.setdefault(credential, tenant.name)
            if owner != tenant.name:
                raise ValueError(f"tenants {owner!r} and {tenant.name!r} have the same credentials")
