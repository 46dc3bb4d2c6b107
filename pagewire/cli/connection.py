"""The flags that select a server, and the client for that server."""

import argparse
import os
from typing import TypeVar

from pagewire.client.client import AsyncClient, Client
from pagewire.options import Parser

AnyClient = TypeVar("AnyClient", AsyncClient, Client)

DEFAULT_URL = "127.0.0.1:50051"
URL_VARIABLE = "PAGEWIRE_URL"
# An environment variable, since every user of a machine can read the arguments of a process.
API_KEY_VARIABLE = "PAGEWIRE_API_KEY"


def add_flags(parser: Parser, *, without_url: str | None = None) -> None:
    """Add the command line flags for the connection to a server, such as `--url`, to a parser.

    For a command that can also run without a server, `without_url` describes the alternative in the help of `--url`.
    The flag `--url` then has no default, not even from the environment.
    """
    group = parser.add_argument_group("connection")
    text = "address of the server: HOST:PORT, or grpcs://HOST:PORT for TLS"
    if without_url is None:
        group.add_argument("--url", default=default_url(), help=f"{text} (default: ${URL_VARIABLE}, or {DEFAULT_URL})")
    else:
        group.add_argument("--url", help=f"{text} (default: {without_url})")
    group.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file of the authority that signed the server's certificate; turns on TLS"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="PEM file with this client's certificate, for mutual TLS")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file with this client's private key, for mutual TLS")
    where = f"set it in the environment variable {API_KEY_VARIABLE}"
    parser.epilog = f"If the server asks for an API key, {where}."
    parser.explain("--api-key", f"{where}, since other users of the machine can read flags")


def default_url() -> str:
    return os.environ.get(URL_VARIABLE) or DEFAULT_URL


def client(parser: Parser, arguments: argparse.Namespace, kind: type[AnyClient]) -> AnyClient:
    """Return a client for the server that the parsed command line flags select. End the command with an error if the
    flags are invalid."""
    try:
        return kind(
            arguments.url,
            tls_ca=arguments.tls_ca,
            tls_cert=arguments.tls_cert,
            tls_key=arguments.tls_key,
            api_key=os.environ.get(API_KEY_VARIABLE) or None,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
