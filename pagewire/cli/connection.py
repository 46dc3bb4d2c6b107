"""The flags that say which server a verb talks to, and the client for that server."""

import argparse
import os
from typing import TypeVar

from pagewire.client.client import AsyncClient, Client
from pagewire.options import Parser

AnyClient = TypeVar("AnyClient", AsyncClient, Client)

DEFAULT_URL = "127.0.0.1:50051"
URL_VARIABLE = "PAGEWIRE_URL"
# No flag: the arguments of a process are seen by everybody on its machine.
API_KEY_VARIABLE = "PAGEWIRE_API_KEY"


def add_flags(parser: argparse.ArgumentParser, *, without_url: str | None = None) -> None:
    """Adds the flags. For a verb that needs no server, `without_url` says what it does without; `--url` then has no
    default, whatever the environment says."""
    group = parser.add_argument_group("connection")
    text = "address of the server: HOST:PORT, or grpcs://HOST:PORT for TLS"
    if without_url is None:
        group.add_argument("--url", default=default_url(), help=f"{text} (default: ${URL_VARIABLE}, or {DEFAULT_URL})")
    else:
        group.add_argument("--url", help=f"{text} (default: {without_url})")
    group.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file of the authority that signed the server's certificate; turns TLS on"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="PEM file with this client's certificate, for mutual TLS")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file with this client's private key, for mutual TLS")
    parser.epilog = f"If the server asks for an API key, set it in the environment variable {API_KEY_VARIABLE}."


def default_url() -> str:
    return os.environ.get(URL_VARIABLE) or DEFAULT_URL


def client(parser: Parser, arguments: argparse.Namespace, kind: type[AnyClient]) -> AnyClient:
    """Returns a client of this kind as the flags say. Ends the command for flags that cannot be."""
    tls = {"tls_ca": arguments.tls_ca, "tls_cert": arguments.tls_cert, "tls_key": arguments.tls_key}
    try:
        return kind(arguments.url, **tls, api_key=os.environ.get(API_KEY_VARIABLE) or None)
    except (OSError, ValueError) as error:
        parser.error(str(error))
