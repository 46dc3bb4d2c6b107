"""The options of the scheduler and of front ends.

`pagewire.options` turns every field, including the core's, into a flag, an environment variable and a YAML key.
"""

import os
from dataclasses import dataclass, field

from pagewire.common.chat.chat_output import REASONING_PARSERS, TOOL_CALL_PARSERS, ChatRules
from pagewire.common.option_limits import (
    HOSTS,
    KEYS,
    ORIGINS,
    PORT,
    URL,
    at_least,
    between,
    check_options,
    flag,
    listed,
    option,
)
from pagewire.common.wire.transport.addresses import MAX_SOCKET_PATH_BYTES, UNIX_SCHEME
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES
from scheduler_service.core.scheduler_options import SchedulerOptions

# Options that the scheduler and front ends share.
_HTTP_PROXY = "through the HTTP proxy in the environment variable http_proxy, which is ignored otherwise"
HTTP_PORT = 8000  # unless one is named


@dataclass(frozen=True)
class ApiOptions:
    """The options of every process that serves the APIs: of the scheduler and of front ends."""

    model: str = option("", "checkpoint directory, GGUF file, or id of a Hugging Face model, such as Qwen/Qwen3-0.6B")
    chat_template: str | None = option(
        None, "Jinja file, or the text of a Jinja template, that replaces the model's chat templates"
    )
    host: str = option("127.0.0.1", "address to listen on")
    drain_timeout: float = option(30.0, "how long running requests get to finish at shutdown, in seconds", at_least(0))
    max_prompt_bytes: int = option(
        1_048_576, "maximum size of one prompt's text, in bytes", between(1, MAX_MESSAGE_BYTES)
    )
    max_waiting_text_bytes: int = option(
        67_108_864,
        "maximum size of all prompts that wait to be tokenized, in bytes; a tenant may use a quarter of it, or one "
        "prompt",
        at_least(1),
    )
    metrics_host: str = option("127.0.0.1", "address to serve /metrics on")
    metrics_port: int | None = option(
        None,
        "HTTP port of /metrics; 0 turns it off (default: 9090, or a free one, which is logged, if 9090 is taken)",
        PORT,
    )
    tls_cert: str | None = option(
        None, "PEM file with the server's certificate chain; turns TLS on", needs=("tls_key",)
    )
    tls_key: str | None = option(None, "PEM file with the server's private key", needs=("tls_cert",))
    tls_client_ca: str | None = option(
        None,
        "PEM file of the authority that signs clients' certificates; turns mutual TLS on",
        needs=("tls_cert",),
    )
    api_key: str | None = option(
        None,
        "API key that all calls must present, except for health and version; several separated by commas. Prefer the "
        "variable: other users of the machine can read flags",
        KEYS,
        is_secret=True,
    )
    health_host: str = option("127.0.0.1", "address that --health-port listens on")


@dataclass(frozen=True)
class SchedulerConfig(ApiOptions):
    core: SchedulerOptions = field(default_factory=SchedulerOptions)
    worker: str = option(
        "127.0.0.1:50061",
        "address of the worker, HOST:PORT, or unix:PATH of its --socket; for several ranks, all their addresses in "
        "order, separated by commas",
    )
    port: int = option(50051, "port to listen on; 0 picks a free one", PORT)
    socket: str | None = option(
        None,
        "path of a Unix socket to also listen on; clients that can open it are operators and need neither key nor TLS",
    )
    served_model_name: str | None = option(
        None,
        "model name that clients see (default: the hub id, or the name of the directory); if several are given, "
        "separated by commas, clients see the first and may send any of them",
    )
    worker_timeout: float = option(
        120.0, "how long requests wait for a lost worker before they fail, in seconds", at_least(0)
    )
    worker_grace: float | None = option(
        None,
        "seconds without a worker after which new requests, and requests without output, fail so that clients can use "
        "another server (default: --worker-timeout)",
        at_least(0),
    )
    detached_retention: float = option(
        600.0,
        "how long the result of a detached request, or a response, is kept after it ends, in seconds",
        at_least(0),
    )
    max_detached_bytes: int = option(
        268_435_456,
        "maximum size of retained results of detached requests and responses, in bytes; the oldest are dropped first",
        at_least(0),
    )
    max_kv_event_bytes: int = option(
        67_108_864,
        "maximum size of the KV events retained for slow subscribers, in bytes; the oldest are dropped first",
        at_least(0),
    )
    max_retention_seconds: int = option(
        300,
        "longest time, in seconds, that a request may hint to keep its cached blocks, unless its tenant has a "
        "limit of its own; 0 ignores the hints",
        at_least(0),
    )
    record: str | None = option(
        None, "record all events and plans to this file, for `pagewire replay`; it contains every prompt"
    )
    log_requests: bool = option(False, "log a line for every finished sample, not only for failed ones")
    otlp_traces_endpoint: str | None = option(
        None, "where to send traces: http://HOST:PORT of a collector, OTLP over gRPC; needs the extra `tracing`", URL
    )
    tenants: str | None = option(
        None,
        "YAML file of tenants with their API keys, certificates and quotas; without it, and without "
        "--api-key, anyone is admitted",
    )
    health_port: int = option(
        0, "plaintext port for health probes that cannot use TLS; 0 turns it off (--port answers probes too)", PORT
    )
    link_secret_file: str | None = option(
        None, "file with the secret shared with the worker; read again at every connection attempt"
    )
    worker_tls_ca: str | None = option(
        None, "PEM file of the authority that signs the worker's certificate; turns TLS on"
    )
    worker_tls_cert: str | None = option(
        None,
        "PEM file with the certificate chain to show the worker, for mutual TLS",
        needs=("worker_tls_key", "worker_tls_ca"),
    )
    worker_tls_key: str | None = option(
        None, "PEM file with the private key of that certificate", needs=("worker_tls_cert",)
    )
    worker_tls_name: str | None = option(
        None, "name in the worker's certificate, if it differs from its host", needs=("worker_tls_ca",)
    )
    worker_http_proxy: bool = option(False, f"reach the worker {_HTTP_PROXY}")

    @property
    def served_model_names(self) -> list[str]:
        """The names that requests may use for the served model, as configured, or an empty list. Responses contain the
        first name."""
        return listed(self.served_model_name)

    @property
    def worker_addresses(self) -> list[str]:
        """The network addresses of the worker's ranks, in rank order. The ranks are the worker processes that share a
        model."""
        return [address.strip() for address in self.worker.split(",")]

    def validate(self) -> None:
        """Raise ValueError for an invalid option or combination of options. The message names the command line flag."""
        _check_model(self.model)
        check_options(self)
        check_options(self.core)
        _check_credentials(self.tenants, self.api_key)
        if self.worker_grace is not None and self.worker_grace > self.worker_timeout:
            raise ValueError(
                f"--worker-grace is {self.worker_grace}, but must be at most --worker-timeout, which is "
                f"{self.worker_timeout}"
            )
        if self.socket is not None:
            _check_local_address("socket", UNIX_SCHEME + self.socket)
        for address in self.worker_addresses:
            _check_local_address("worker", address)


@dataclass(frozen=True)
class HttpOptions:
    """The options of the OpenAI-compatible HTTP API. They apply to a stand-alone front end and to the front end within
    `pagewire serve`."""

    http_host: str = option("127.0.0.1", "address to serve the OpenAI API on")
    http_port: int | None = option(
        None,
        f"HTTP port of the OpenAI API; 0 turns it off (default: {HTTP_PORT}, if pagewire[http] is installed)",
        PORT,
    )
    allowed_origins: str | None = option(
        None,
        "origins of the web pages that may call --http-port, such as https://*.example.com, separated by commas, or *; "
        "applications on this machine (app://, file://, tauri://, vscode-webview://, http://localhost) always may",
        ORIGINS,
    )
    allowed_hosts: str | None = option(
        None,
        "names in the Host header of HTTP requests, separated by commas, beside --http-host, localhost and names under "
        ".localhost and .internal (default: any other name only if --http-host is no loopback address)",
        HOSTS,
    )
    any_model_name: bool = option(
        False, "answer HTTP requests whatever model they name, instead of refusing names that are not served"
    )
    lenient: bool = option(False, "ignore fields of HTTP requests that are not known, instead of refusing them")
    strict_tools: bool = option(
        True,
        "constrain all tool calls to their schemas, also with a tool_choice of auto",
    )
    tool_call_parser: str | None = option(
        None, "format of the model's tool calls (default: detected from its chat template)", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = option(
        None, "format of the model's reasoning (default: detected from its chat template)", choices=REASONING_PARSERS
    )

    @property
    def chats(self) -> ChatRules:
        return ChatRules(self.strict_tools, self.tool_call_parser, self.reasoning_parser)


@dataclass(frozen=True)
class FrontEndConfig(ApiOptions):
    scheduler: str = option("127.0.0.1:50051", "address of the scheduler, HOST:PORT, or unix:PATH of its --socket")
    model: str = option("", "the scheduler's model: its checkpoint directory, GGUF file, or Hugging Face id")
    port: int = option(50052, "port to listen on; 0 picks a free one", PORT)
    http: HttpOptions = field(default_factory=HttpOptions)
    health_port: int = option(
        0, "port of a plaintext health service, for probes without certificates; 0 is off (--port answers too)", PORT
    )
    tenants: str | None = option(
        None,
        "the scheduler's YAML file of tenants; the front end then acts as an operator towards the scheduler",
    )
    scheduler_api_key_file: str | None = option(
        None,
        "file with this front end's API key for the scheduler, which must be an operator's key (default: "
        "the first --api-key)",
    )
    scheduler_tls_ca: str | None = option(
        None, "PEM file of the authority that signs the scheduler's certificate; turns TLS on"
    )
    scheduler_tls_cert: str | None = option(
        None,
        "PEM file with the certificate chain to show the scheduler, for mutual TLS",
        needs=("scheduler_tls_key", "scheduler_tls_ca"),
    )
    scheduler_tls_key: str | None = option(
        None, "PEM file with the private key of that certificate", needs=("scheduler_tls_cert",)
    )
    scheduler_tls_name: str | None = option(
        None, "name in the scheduler's certificate, if it differs from its host", needs=("scheduler_tls_ca",)
    )
    scheduler_http_proxy: bool = option(False, f"reach the scheduler {_HTTP_PROXY}")

    def validate(self) -> None:
        """Raise ValueError for an invalid option or combination of options. The message names the command line flag."""
        _check_model(self.model)
        check_options(self)
        check_options(self.http)
        _check_credentials(self.tenants, self.api_key)
        self.http.chats.check()
        _check_local_address("scheduler", self.scheduler)


def _check_model(model: str) -> None:
    if not model:
        raise ValueError("--model is missing: name a checkpoint directory or a GGUF file")


def _check_credentials(tenants: str | None, api_key: str | None) -> None:
    if tenants and api_key:
        raise ValueError(
            "--tenants and --api-key (or PAGEWIRE_API_KEY) are both given; list the key's hash in the tenants file, or "
            "give only one of them"
        )


def _check_local_address(name: str, address: str) -> None:
    if not address.startswith(UNIX_SCHEME):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{flag(name)} is {address!r}, but must be HOST:PORT or unix:PATH")
        return
    num_bytes = len(os.fsencode(address.removeprefix(UNIX_SCHEME)))
    if not 0 < num_bytes <= MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{flag(name)} is {address!r}, but the path of a Unix socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes, not "
            f"{num_bytes}"
        )
