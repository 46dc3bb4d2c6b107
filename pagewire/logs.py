"""Logging of the command: standard error only, standard output is for results."""

import contextlib
import json
import logging
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
MAX_TERMINATION_LOG = 4096  # bytes that Kubernetes reads of one
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What every record has; the rest is what a caller gave as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True)
class LogConfig:
    log_level: str = field(default="info", metadata={"help": "least severe log lines to write", "choices": LEVELS})
    log_format: str = field(default="text", metadata={"help": "text, or one JSON object per line", "choices": FORMATS})
    termination_log: str = field(
        default="/dev/termination-log",
        metadata={"help": "existing file to write to why the process ended; Kubernetes shows it"},
    )


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, message, then what was given as `extra`, then the exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TerminationLog(logging.Handler):
    """Writes the last critical line, after which a process ends, to a file that is there already."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.CRITICAL)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        # Not there, or not for us to write: this is no pod.
        with contextlib.suppress(OSError), open(self._path, "r+b") as file:
            file.truncate()
            file.write(f"{record.getMessage()}\n".encode()[:MAX_TERMINATION_LOG])


def configure(config: LogConfig) -> None:
    """Sends the log lines of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(TEXT_FORMAT))
    handlers = [handler, TerminationLog(config.termination_log)] if config.termination_log else [handler]
    logging.basicConfig(handlers=handlers, level=config.log_level.upper(), force=True)
