"""Try the states, or those that match one of the given patterns, and print a table of them."""

import re
import sys
import tempfile
from pathlib import Path

from tests.first_hour import clones, commands, machines
from tests.first_hour.newcomer import Newcomer, NotReachedError
from tests.first_hour.state import STATES, LeftOutError, State

SUBJECTS = (clones, commands, machines)  # importing them adds their states


def main() -> int:
    patterns = sys.argv[1:] or [""]
    chosen = [state for state in STATES if any(re.search(pattern, state.name) for pattern in patterns)]
    assert chosen, f"no state matches; there are {', '.join(state.name for state in STATES)}"
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder, commands.serving():
        Path(folder).chmod(0o755)
        num_faults = sum(run_state(state, Path(folder), index) for index, state in enumerate(chosen))
    print(f"{len(chosen)} states, {num_faults} at fault")
    return min(num_faults, 1)


def run_state(state: State, folder: Path, index: int) -> bool:
    """Print a line of the table, and the full output if there is a fault. Returns whether there is a fault."""
    newcomer = Newcomer(folder / f"home{index}", folder / "cache")
    try:
        outcome = state.enter(newcomer)
    except LeftOutError as reason:
        print(f"left out  {state.name}: {reason}", flush=True)
        return False
    except NotReachedError as error:
        print(f"FAULT     {state.name} {error}", flush=True)
        return True
    fault = state.fault(outcome)
    times = f"{outcome.seconds:5.1f} s, silent {outcome.silence_s:4.1f} s"
    lines = outcome.said.strip().splitlines() or [""]
    print(f"{'FAULT   ' if fault else 'as it is'}  {state.name}  [{times}]", flush=True)
    print(f"          expected {state.expected}\n          came     {outcome.code}: {lines[-1][:160]}", flush=True)
    if fault:
        print(f"          {fault}:", *lines[-30:], sep="\n            ", flush=True)
    return bool(fault)


if __name__ == "__main__":
    sys.exit(main())
