"""Logging of the command: standard error only, standard output is for results."""

import json
import logging
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What every record has; the rest is what a caller gave as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True)
class LogConfig:
    log_level: str = field(default="info", metadata={"help": "least severe log lines to write", "choices": LEVELS})
    log_format: str = field(default="text", metadata={"help": "text, or one JSON object per line", "choices": FORMATS})


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


def configure(config: LogConfig) -> None:
    """Sends the log lines of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler], level=config.log_level.upper(), force=True)
