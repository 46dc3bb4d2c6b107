"""Storage for the raw numbers of a measurement, and a description of the machine."""

import json
import os
import platform
from pathlib import Path

RESULTS = Path("bench/results")


def machine() -> dict[str, str | int | float | None]:
    """Return a description of the machine.

    The load is the average number of processes that wanted a core in the last minute. It shows whether other work ran
    during a measurement.
    """
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def write(path: Path, figures: dict) -> None:
    """Write figures to a file. If the process is killed, the file contains either the old or the new figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(figures, indent=1) + "\n")
    new.replace(path)
