"""`pagewire demo MODEL`: serves a model on loopback, streams one completion, and ends."""

import sys
from collections.abc import Sequence

from pagewire import complete, local_server
from pagewire.client import Client
from pagewire.options import Parser
from pagewire.sampling import SamplingParams

PROMPT = "Once upon a time"


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="pagewire demo", description="Serve a model, stream one completion of it, and end.")
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory")
    parser.add_argument("--prompt", default=PROMPT, help=f"the prompt (default: {PROMPT!r})")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="INT", help="output tokens at most")
    parsed = parser.parse_args(arguments)
    sampling = SamplingParams(temperature=0.0, max_tokens=parsed.max_tokens)
    with local_server.serving(parsed.model) as url, Client(url) as client:
        sys.stdout.write(parsed.prompt)
        completion = complete.stream(client, parsed.prompt, sampling, sys.stdout)
        print(complete.statistics(completion), flush=True)
    return 0
