"""Keeps the raw numbers of a measurement, and describes the machine they were measured on."""

import json
import os
import platform
from pathlib import Path

RESULTS = Path("bench/results")


def machine() -> dict[str, str | int | float | None]:
    """Describes the machine. Its load is the average number of processes that wanted a core in the last minute, so
    that figures which were taken beside other work show it."""
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
    """Write figures to a file, which has the old or the new ones whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(figures, indent=1) + "\n")
    new.replace(path)
