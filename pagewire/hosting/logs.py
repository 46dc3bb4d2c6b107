"""The logging of the services. Logs go to standard error, since standard output is for results.

Lines pass through a queue (`queued_writer.py`), so that an unread standard error does not block a service.
"""

import atexit
import contextlib
import io
import logging
import os
import sys
import textwrap
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pagewire.common.process.queued_writer import QueuedWriter, descriptor_writer
from pagewire.common.strict_json import StrictEncoder
from pagewire.hosting.printable import printable, printable_json, printable_lines, shortened

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
MAX_TERMINATION_LOG = 4096  # bytes of a termination log that Kubernetes reads
# The seconds that an exiting process waits for its last lines to be written.
FLUSH_TIMEOUT = 2.0
_STDERR = 2
# The attributes of every log record. All other attributes come from a caller's `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True)
class LogConfig:
    log_level: str = field(default="info", metadata={"help": "least severe log lines to write", "choices": LEVELS})
    log_format: str = field(default="text", metadata={"help": "text, or one JSON object per line", "choices": FORMATS})
    termination_log: str = field(
        default="/dev/termination-log",
        metadata={"help": "existing file to write to why the process ended; Kubernetes shows it"},
    )


_to_json = StrictEncoder(str, ensure_ascii=False, default=str).encode


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line with a JSON object. The object contains the time (UTC), level, logger, message,
    the caller's `extra`, and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        entry = {name: shortened(value) if isinstance(value, str) else value for name, value in entry.items()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return printable_json(_to_json(entry))


class TextFormatter(logging.Formatter):
    """Formats a log record as one line of text, whatever characters the message contains. If there is an exception, it
    follows in indented lines.

    A message cannot forge a log line: only this formatter writes a line that begins with a time.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(logging.makeLogRecord(vars(record) | {"message": printable(record.message)}))

    def formatException(self, exc_info: Any) -> str:
        return textwrap.indent(printable_lines(super().formatException(exc_info)), "  ")


class TerminationLog(logging.Handler):
    """A log handler that writes critical log lines to an existing file, such as Kubernetes' termination log. The file
    contains only the last of these lines, which usually states why the process ended.

    A file that blocks on writing delays the exit by at most FLUSH_TIMEOUT seconds.
    """

    def __init__(self, path: str) -> None:
        super().__init__(logging.CRITICAL)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{printable(record.getMessage())}\n".encode()[:MAX_TERMINATION_LOG]
        writing = threading.Thread(target=self._write, args=(line,), name="termination log", daemon=True)
        writing.start()
        writing.join(FLUSH_TIMEOUT)

    def _write(self, line: bytes) -> None:
        # The file does not exist or is not writable: the process does not run in a pod.
        with contextlib.suppress(OSError), open(self._path, "r+b") as file:
            file.truncate()
            file.write(line)


class LogQueue(logging.Handler):
    """A log handler that passes the log lines of this process to a background thread, which writes them.
    `logging.shutdown` waits for the remaining lines at exit."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.writer = QueuedWriter(descriptor_writer(descriptor), self._dropped_notice)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self._line(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self.writer.flush(FLUSH_TIMEOUT)

    def close(self) -> None:
        self.writer.close()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _dropped_notice(self, num_dropped: int) -> bytes:
        text = "standard error was not read in time: %d lines were dropped here"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_dropped,), None)
        record.num_dropped = num_dropped
        return self._line(record)


class _QueuedFile(io.RawIOBase):
    """A file object that replaces `sys.stderr`. It writes to the same queue as the log handler, so that log lines and
    other output stay in order."""

    def __init__(self, writer: QueuedWriter, descriptor: int) -> None:
        self._writer = writer
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._writer.put(bytes(data))
        return len(data)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def configure(config: LogConfig) -> None:
    """Configure logging: log lines of this process go to standard error. Other output to `sys.stderr` goes the same
    way, so that the order is kept."""
    queue = LogQueue(_STDERR, JsonFormatter() if config.log_format == "json" else TextFormatter())
    handlers: list[logging.Handler] = [queue]
    if config.termination_log:
        handlers.append(TerminationLog(config.termination_log))
    logging.basicConfig(handlers=handlers, level=config.log_level.upper(), force=True)
    if sys.stderr is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_QueuedFile(queue.writer, _STDERR)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        atexit.register(sys.stderr.flush)  # flush an unfinished line before the queue is closed


def num_dropped_lines() -> int:
    """Return the number of log lines that were dropped because the reader of standard error was too slow."""
    queues = [handler for handler in logging.getLogger().handlers if isinstance(handler, LogQueue)]
    return sum(queue.writer.num_dropped for queue in queues)
