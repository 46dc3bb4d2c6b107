"""`pagewire demo MODEL`: serves a model on loopback, streams one completion, and ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagewire import complete
from pagewire.client import Client
from pagewire.errors import CommandError
from pagewire.options import Parser
from pagewire.sampling import SamplingParams
from pagewire.supervisor import READY_PREFIX

PROMPT = "Once upon a time"
# Ports of their own choice, so that the demo runs beside anything.
SERVE_FLAGS = ("--host=127.0.0.1", "--port=0", "--metrics-port=0", "--log-level=warning")
STOP_TIMEOUT_S = 45.0


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="pagewire demo", description="Serve a model, stream one completion of it, and end.")
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory")
    parser.add_argument("--prompt", default=PROMPT, help=f"the prompt (default: {PROMPT!r})")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="INT", help="output tokens at most")
    parsed = parser.parse_args(arguments)
    sampling = SamplingParams(temperature=0.0, max_tokens=parsed.max_tokens)
    with _server(parsed.model) as url, Client(url) as client:
        sys.stdout.write(parsed.prompt)
        completion = complete.stream(client, parsed.prompt, sampling, sys.stdout)
        print(complete.statistics(completion), flush=True)
    return 0


@contextmanager
def _server(model: str) -> Iterator[str]:
    """The url of a `pagewire serve` that runs inside the block. CommandError if it does not come up."""
    signal.signal(signal.SIGTERM, _exit)
    command = [sys.executable, "-m", "pagewire", "serve", model, *SERVE_FLAGS]
    print(f"starting pagewire serve {model}", file=sys.stderr)
    started_at = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.startswith(READY_PREFIX):
                raise CommandError(f"pagewire serve {model} ended with exit code {process.wait()}")
            print(f"{line} after {time.monotonic() - started_at:.1f} s", file=sys.stderr)
            yield line.removeprefix(READY_PREFIX)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _exit(number: int, frame: object) -> None:
    """Unwinds the block, so that the server goes too."""
    sys.exit(128 + number)
