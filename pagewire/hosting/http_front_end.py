"""The front end that `pagewire serve --http-port` runs beside its scheduler: it serves the OpenAI API in a process of
its own, so that no step waits for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.common.option_limits import PORT, check_options, option
from pagewire.common.process import python_command
from pagewire.common.transport.addresses import UNIX_SCHEME
from pagewire.common.transport.listening import check_port, passive_host
from pagewire.installation import shortage


@dataclass(frozen=True)
class HttpConfig:
    http_host: str = option("127.0.0.1", "address to serve the OpenAI API on")
    http_port: int = option(0, "HTTP port of the OpenAI API; 0 turns it off", PORT)
    allowed_origins: str | None = option(
        None, "origins of the web pages that may call --http-port, separated by commas, or * (default: none)"
    )
    lenient: bool = option(False, "ignore fields of HTTP requests that are not known, instead of refusing them")

    def validate(self) -> None:
        """Raises ValueError that names the flag at fault."""
        check_options(self)
        if self.http_port and (missing := shortage("http")):
            raise ValueError(f"--http-port needs an HTTP server, but {missing}")

    def check_ports(self) -> None:
        """Raises OSError, one line that names the flag, for a port that cannot be had now."""
        if self.http_port:
            check_port(self.http_host, self.http_port, "--http-port")


def front_end_command(config: HttpConfig, scheduler_socket: str, given: Mapping[str, Any]) -> list[str]:
    """Make the command that starts the front end of the scheduler behind a Unix socket, with further options."""
    options = {
        "scheduler": UNIX_SCHEME + scheduler_socket,
        "http_host": passive_host(config.http_host),
        "http_port": config.http_port,
        "port": 0,
        "metrics_port": 0,
        "allowed_origins": config.allowed_origins,
        **given,
    }
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None)
    return python_command("pagewire", "frontend", *flags, *(["--lenient"] if config.lenient else []))
