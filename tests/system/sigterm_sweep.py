"""Send SIGTERM to each service at every moment of its start, as the first process of a container: it must end each
time.

    python -m tests.system.sigterm_sweep --services scheduler frontend worker --step 0.01 --until 3

The program starts a process for each moment, in a process namespace of its own, and takes minutes. The last line
reports how many services have not ended within half a minute.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "storyteller")
NAMESPACE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The commands by which images and manifests start the services.
PAGEWIRE = ["env", "--block-signal=TERM", sys.executable, "-m", "pagewire"]
COMMANDS = {
    "scheduler": [*PAGEWIRE, "scheduler", f"--model={MODEL}", "--worker=127.0.0.1:1", "--port=0", "--metrics-port=0"],
    "frontend": [*PAGEWIRE, "frontend", f"--model={MODEL}", "--scheduler=127.0.0.1:1", "--port=0"],
    "worker": [*PAGEWIRE, "worker", f"--model={MODEL}", "--port=0", "--num-device-blocks=64"],
}
PATIENCE_S = 30.0


class End(NamedTuple):
    """The exit code of a service, or None if it did not end, and the seconds until it ended."""

    after: float
    code: int | None
    seconds: float


def first_process(namespace: "subprocess.Popen[bytes]") -> int:
    """Return the first process of a namespace as soon as it runs the service's command."""
    children = Path(f"/proc/{namespace.pid}/task/{namespace.pid}/children")
    unshare = os.path.realpath(shutil.which("unshare") or "")
    while namespace.poll() is None:
        if (found := children.read_text().split()) and os.readlink(f"/proc/{found[0]}/exe") != unshare:
            return int(found[0])
        time.sleep(0.0005)  # the kernel reports no event
    raise AssertionError(f"unshare has ended with {namespace.returncode}")


def ended(command: Sequence[str], after: float) -> End:
    """Start a service, send it SIGTERM after `after` seconds, and wait for its end."""
    with subprocess.Popen(
        [*NAMESPACE, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        first = first_process(process)
        time.sleep(after)
        assert process.poll() is None, f"{command} ends by itself with {process.returncode}"
        os.kill(first, signal.SIGTERM)
        began_at = time.monotonic()
        try:
            code: int | None = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
        return End(after, code, time.monotonic() - began_at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--step", type=float, default=0.01, help="seconds between two moments")
    parser.add_argument("--until", type=float, default=3.0, help="seconds after the start of the last moment")
    parser.add_argument("--concurrent", type=int, default=4, help="processes at a time")
    arguments = parser.parse_args()
    moments = [(index + 1) * arguments.step for index in range(round(arguments.until / arguments.step))]
    num_lost = 0
    for service in arguments.services:
        with ThreadPoolExecutor(arguments.concurrent) as pool:
            ends = list(pool.map(partial(ended, COMMANDS[service]), moments))
        lost = [f"{end.after:.2f} s" for end in ends if end.code is None]
        num_lost += len(lost)
        codes = ", ".join(f"{count} with {code}" for code, count in Counter(end.code for end in ends).items())
        slowest = max(ends, key=lambda end: end.seconds)
        print(f"{service}: {len(ends)} starts; {codes}; the slowest took {slowest.seconds:.2f} s, ", end="")
        print(f"told after {slowest.after:.2f} s{'; lost after ' + ', '.join(lost) if lost else ''}", flush=True)
    print(f"{num_lost} have not ended")
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
