"""The server that is measured: one that runs already, or a pair of services that is started for it."""

import argparse
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagewire.bench.workload import Workload
from pagewire.cli import connection
from pagewire.client import AsyncClient
from pagewire.errors import CommandError
from pagewire.hosting import local_server
from pagewire.options import Parser
from pagewire.server import ServerInfo


def add_flags(parser: argparse.ArgumentParser) -> None:
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
    """Gives the block a client of the server, not yet connected. `extra_flags` are for a server that is started, and
    win."""
    if (parsed.model is None) == (parsed.url is None):
        parser.error("give either --model MODEL, to start a server for it, or --url of a running server")
    if parsed.url is not None:
        if serve_flags:
            parser.error(f"{serve_flags[0]} stands after --, but no server is started with --url")
        yield connection.client(parser, parsed)
        return
    with local_server.serving(parsed.model, [*serve_flags, *extra_flags]) as url:
        yield AsyncClient(url)


def new_cache_salt() -> str:
    """Returns a salt for one run. Equal seeds give equal prompts, and without a salt a run would find in the cache what
    an earlier one has computed."""
    return f"bench-{uuid.uuid4().hex}"


def check_fits(workload: Workload, info: ServerInfo) -> None:
    """Raises CommandError if some request may be longer than the server allows."""
    if workload.max_sequence_len > info.max_model_len:
        raise CommandError(
            f"--random-prefix-len, --input-len and --output-len with --random-range-ratio come to up to "
            f"{workload.max_prompt_len} + {workload.output_len.max} tokens, but max_model_len of the server is "
            f"{info.max_model_len}: lower them"
        )
