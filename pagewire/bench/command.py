"""`pagewire bench` runs the benchmark that its first argument names."""

import importlib
import sys
from collections.abc import Sequence

from pagewire.cli import SUCCESS, USAGE
from pagewire.compatibility import suggestion

# What a verb does, and the module whose `main` does it.
VERBS = {
    "throughput": "many requests at once: tokens per second",
    "latency": "one request at a time: how long it takes, and where the time goes",
    "serve": "requests that arrive over time at a running server: TTFT, TPOT, ITL, goodput",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return SUCCESS if arguments else USAGE
    name, *rest = arguments
    if name not in VERBS:
        print(f"pagewire bench: error: unknown verb {name!r}{suggestion(name, VERBS)}\n{usage()}", file=sys.stderr)
        return USAGE
    code: int = importlib.import_module(f"pagewire.bench.{name}").main(rest)
    return code


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {text}" for name, text in VERBS.items()]
    return "\n".join(["usage: pagewire bench VERB ... (pagewire bench VERB --help tells more)", "", *lines])
