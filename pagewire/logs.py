"""Logging of the command: standard error only, standard output is for results."""

import logging
import sys
from dataclasses import dataclass, field

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogConfig:
    log_level: str = field(default="info", metadata={"help": "least level of log lines", "choices": LEVELS})


def configure(config: LogConfig) -> None:
    """Sends the log lines of this process to standard error."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
