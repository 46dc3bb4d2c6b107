"""`pagewire demo` serves the bundled model, or another, on loopback, streams one completion, and ends."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pagewire.cli import request
from pagewire.client import Client
from pagewire.hosting import local_server
from pagewire.options import Parser
from pagewire.sampling import SamplingParams

PROMPT = "Once upon a time"
# A link to models/storyteller of the source tree; an installed package has the files themselves.
BUNDLED_MODEL = Path(__file__).parents[1] / "storyteller"


def main(arguments: Sequence[str]) -> int:
    own, serve_flags = local_server.split_serve_flags(arguments)
    parser = Parser(
        prog="pagewire demo",
        description="Serve a model on this machine, stream one completion of it, and end. Flags for `pagewire serve` "
        "can follow after --.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=str(BUNDLED_MODEL),
        help="checkpoint directory, GGUF file or Hugging Face id (default: the bundled model, which tells stories)",
    )
    parser.add_argument("--prompt", default=PROMPT, help=f"the prompt (default: {PROMPT!r})")
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="INT", help="how many tokens to generate at most (default: 200)"
    )
    parsed = parser.parse_args(own)
    sampling = SamplingParams(temperature=0.0, max_tokens=parsed.max_tokens)
    with local_server.serving(parsed.model, serve_flags) as url, Client(url) as client:
        sys.stdout.write(parsed.prompt)
        told = request.stream(client, parsed.prompt, sampling, request.SamplePrinter(1, sys.stdout))
        print(request.statistics(told), flush=True)
    return 0
