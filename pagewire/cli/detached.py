"""`pagewire submit`, `attach` and `result` are for requests that outlive their client."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pagewire.cli import complete, connection
from pagewire.client import AsyncClient
from pagewire.common.strict_json import to_json
from pagewire.completion import Result
from pagewire.options import Parser


def submit(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="pagewire submit",
        usage="pagewire submit TEXT [flags]",
        description="Queue a request that runs without a connection, and print its id (see attach and result).",
    )
    complete.add_request_flags(parser)
    parsed = parser.parse_args(arguments)
    request = complete.request_arguments(parser, parsed)
    client = connection.client(parser, parsed)
    print(connection.run(client, client.submit(**request)), flush=True)
    return 0


def attach(arguments: Sequence[str]) -> int:
    description = "Stream the output of a submitted request. Ctrl-C leaves it running. A broken connection is retried."
    parser = _parser("attach", description)
    parser.add_argument(
        "--from-token", type=int, default=0, metavar="INT", help="start at this token of the output (default: 0)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.from_token < 0:
        parser.error(f"--from-token is {parsed.from_token}, but must be at least 0")
    client = connection.client(parser, parsed)
    connection.run(client, _attach(client, parsed.request_id, parsed.tenant, parsed.from_token))
    return 0


def result(arguments: Sequence[str]) -> int:
    parser = _parser("result", "Show the state of a submitted request and its output so far.")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of the text")
    parsed = parser.parse_args(arguments)
    client = connection.client(parser, parsed)
    found = connection.run(client, client.result(parsed.request_id, tenant=parsed.tenant))
    if parsed.json:
        print(to_json(describe(found)), flush=True)
    else:
        _print(found)
    if found.error is not None:
        raise found.error
    return 0


def describe(found: Result) -> dict[str, Any]:
    """Returns the object that `--json` prints."""
    described = asdict(found)
    for output in described["outputs"]:
        del output["request_id"], output["first_token"]
    if found.error is not None:
        described["error"] = {"code": found.error.code.name, "message": str(found.error)}
    return described


def _parser(verb: str, description: str) -> Parser:
    parser = Parser(prog=f"pagewire {verb}", description=description)
    parser.add_argument("request_id", metavar="ID", help="the id that `pagewire submit` printed")
    parser.add_argument("--tenant", default="", help="tenant that the request belongs to")
    connection.add_flags(parser)
    return parser


async def _attach(client: AsyncClient, request_id: str, tenant: str, from_token: int) -> None:
    num_samples = len((await client.result(request_id, tenant=tenant)).outputs)
    printer = complete.SamplePrinter(num_samples, sys.stdout)
    async with contextlib.aclosing(client.attach(request_id, tenant=tenant, from_token=from_token)) as outputs:
        async for output in outputs:
            printer.add(output)


def _print(found: Result) -> None:
    for output in found.outputs:
        if len(found.outputs) > 1:
            print(f"--- sample {output.index} ---")
        print(output.text, flush=True)
    num_tokens = sum(len(output.token_ids) for output in found.outputs)
    print(f"{found.state}, {num_tokens} completion tokens", file=sys.stderr)
