"""The front end that `pagewire serve --http-port` runs beside its scheduler: it serves the OpenAI API in a process of
its own, so that no step waits for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.common.option_limits import PORT, check_options, option
from pagewire.common.process import python_command
from pagewire.common.transport.addresses import join
from pagewire.common.transport.listening import check_port, passive_host
from pagewire.hosting.gateway import reachable
from pagewire.installation import shortage


@dataclass(frozen=True)
class HttpConfig:
    http_host: str = option("127.0.0.1", "address to serve the OpenAI API on")
    http_port: int = option(0, "HTTP port of the OpenAI API; 0 turns it off", PORT)
    allowed_origins: str | None = option(
        None, "origins of the web pages that may call --http-port, separated by commas, or * (default: none)"
    )
    scheduler_api_key_file: str | None = option(
        None, "file with the API key that this front end shows the scheduler, whose operator it must be"
    )

    def validate(self) -> None:
        """Raises ValueError that names the flag at fault."""
        check_options(self)
        if self.http_port and (missing := shortage("http")):
            raise ValueError(f"--http-port needs an HTTP server, but {missing}")

    def check_ports(self) -> None:
        """Raises OSError, one line that names the flag, for a port that cannot be had now."""
        if self.http_port:
            check_port(self.http_host, self.http_port, "--http-port")

    @property
    def url(self) -> str:
        return f"http://{join(self.http_host, self.http_port)}"


def front_end_command(config: HttpConfig, scheduler_url: str, given: Mapping[str, Any]) -> list[str]:
    """Make the command that starts the front end of the scheduler at `grpc://HOST:PORT`, with further options."""
    options = {
        "scheduler": reachable(scheduler_url.removeprefix("grpc://")),
        "http-host": passive_host(config.http_host),
        "http-port": config.http_port,
        "port": 0,
        "metrics-port": 0,
        **({} if config.allowed_origins is None else {"allowed-origins": config.allowed_origins}),
        **given,
    }
    return python_command("pagewire", "frontend", *(f"--{name}={value}" for name, value in options.items()))
