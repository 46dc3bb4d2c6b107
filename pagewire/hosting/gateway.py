"""The OpenAI-compatible gateway that `pagewire serve --gateway` runs in front of its scheduler.

It is smg (PyPI, the extra `gateway`) as a process of its own. It speaks HTTP to clients and
`vllm.grpc.engine.VllmEngine` to the scheduler; chat templates, tokenizing and detokenizing are its business.
"""

import logging
import re
from dataclasses import dataclass

from pagewire.common.option_limits import PORT, between, check_options, option
from pagewire.common.process import python_command
from pagewire.common.transport.addresses import join
from pagewire.common.transport.listening import check_port, passive_host
from pagewire.installation import shortage

# The variable with the key that the gateway's administration asks for: adding workers, tokenizers, flushing caches.
ADMIN_KEY_VARIABLE = "PAGEWIRE_GATEWAY_KEY"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "127.0.0.1"}  # where this process reaches what listens everywhere
_METRICS_HOST = "127.0.0.1"
_LOG_LEVELS = {"debug": "debug", "info": "warn", "warning": "warn", "error": "error"}
# How smg's lines begin: date, time, level.
_LINE = re.compile(r"\S+ \S+ +(?P<level>[A-Z]+) ")
_LEVELS = {"TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "WARN": logging.WARNING, "ERROR": logging.ERROR}
# At each start smg warns that pictures may be read with other pixels: no model here reads pictures. And that it asks
# for no credentials, with flags of its own that would: `pagewire serve` has others, and says what holds for those.
_EXPECTED = re.compile(
    r".* WARN smg::(routers::grpc::multimodal: .*: libturbojpeg not found: |posture: .*: SECURITY POSTURE: )"
)
# Seconds between two looks at a replica that does not answer, and between two looks at one that does.
_STARTUP_CHECK_INTERVAL = 1
_HEALTH_CHECK_INTERVAL = 5
# A character of a prompt can take so much more in JSON, with room for the rest of a request.
_BODY_BYTES_OF_PROMPT = 8
_SHUTDOWN_GRACE = 1  # seconds; it is ended when the scheduler has drained


@dataclass(frozen=True)
class GatewayConfig:
    gateway: bool = option(False, "also run a gateway with the OpenAI API; needs pagewire[gateway]")
    gateway_host: str = option("127.0.0.1", "address that the gateway listens on; it admits everyone who can reach it")
    gateway_port: int = option(8080, "HTTP port that the gateway listens on", between(1, 65535))
    gateway_metrics_port: int = option(0, "port of the gateway's own /metrics, on loopback; 0 picks a free one", PORT)

    def validate(self) -> None:
        """Raises ValueError that names the flag at fault."""
        check_options(self)
        if self.gateway and (missing := shortage("gateway")):
            raise ValueError(f"--gateway needs smg, but {missing}")

    def check_ports(self) -> None:
        """Raises OSError, one line that names the flag, for a port that cannot be had now."""
        if self.gateway:
            check_port(self.gateway_host, self.gateway_port, "--gateway-port")
            if self.gateway_metrics_port:
                check_port(_METRICS_HOST, self.gateway_metrics_port, "--gateway-metrics-port")

    @property
    def url(self) -> str:
        return f"http://{join(self.gateway_host, self.gateway_port)}"


def reachable(address: str) -> str:
    """Return HOST:PORT at which this machine reaches what listens at an address."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def level_of(line: str) -> int:
    """Find the level at which a line that the gateway printed is logged here."""
    if _EXPECTED.match(line):
        return logging.DEBUG
    found = _LINE.match(line)
    return _LEVELS.get(found["level"], logging.INFO) if found else logging.INFO


def gateway_command(config: GatewayConfig, scheduler_url: str, log_level: str, max_prompt_bytes: int) -> list[str]:
    """Make the command that starts the gateway for the scheduler at `grpc://HOST:PORT`, which takes prompts of so many
    bytes."""
    options = {
        "host": passive_host(config.gateway_host),
        "port": config.gateway_port,
        "worker-urls": f"grpc://{reachable(scheduler_url.removeprefix('grpc://'))}",
        "prometheus-host": _METRICS_HOST,
        "prometheus-port": config.gateway_metrics_port,
        "worker-startup-check-interval": _STARTUP_CHECK_INTERVAL,
        "health-check-interval-secs": _HEALTH_CHECK_INTERVAL,
        "shutdown-grace-period-secs": _SHUTDOWN_GRACE,
        "max-payload-size": _BODY_BYTES_OF_PROMPT * max_prompt_bytes,
        "log-level": _LOG_LEVELS[log_level],
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return python_command("pagewire.hosting.gateway_process", config.url, *flags)
