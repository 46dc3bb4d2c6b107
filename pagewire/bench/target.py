"""The server under test: a running server, or a local server that is started for the benchmark."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagewire.cli import connection, services
from pagewire.client.client import AsyncClient
from pagewire.hosting import local_server
from pagewire.options import Parser


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="checkpoint directory, GGUF file or Hugging Face id to start `pagewire serve` for; flags for it can "
        "follow after --",
    )
    connection.add_flags(parser, without_url="a server is started for --model")


@contextmanager
def opened(
    parser: Parser, parsed: argparse.Namespace, serve_flags: Sequence[str], extra_flags: Sequence[str] = ()
) -> Iterator[AsyncClient]:
    """Provide a client for the server that a benchmark measures, inside a `with` block. With the flag `--url`, this is
    a running server. With the flag `--model`, a local server is started for the block. The client is not yet connected.

    `serve_flags` and `extra_flags` are flags for the local server. `extra_flags` override `serve_flags`.
    """
    if (parsed.model is None) == (parsed.url is None):
        parser.error("give either --model MODEL, to start a server for it, or --url of a running server")
    if parsed.url is not None:
        if serve_flags:
            parser.error(f"{serve_flags[0]} follows --, but no server is started with --url")
        yield connection.client(parser, parsed, AsyncClient)
        return
    with local_server.serving(parsed.model, [*serve_flags, *extra_flags], flags_only=services.API_OPTIONS) as (url, _):
        yield AsyncClient(url)
