"""The options of the scheduler service. `pagewire.options` turns every field into a flag, a variable and a YAML key."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from pagewire.transport.addresses import MAX_SOCKET_PATH_BYTES, UNIX_SCHEME
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.policy import POLICIES


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class SchedulerConfig:
    model: str = _option("", "checkpoint directory, or the id of a Hugging Face model, such as Qwen/Qwen3-0.6B")
    worker: str = _option(
        "127.0.0.1:50061",
        "address of the worker, HOST:PORT, or unix:PATH of its --socket; for several ranks, all their addresses in "
        "order, separated by commas",
    )
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(50051, "port to listen on; 0 picks a free one")
    served_model_name: str | None = _option(
        None, "model name that clients see (default: the hub id, or the name of the directory)"
    )
    max_model_len: int | None = _option(
        None, "longest sequence, prompt and output together, in tokens (default: the checkpoint's limit)"
    )
    max_num_seqs: int = _option(256, "how many sequences can run at the same time")
    max_num_batched_tokens: int = _option(2048, "how many tokens one step can compute")
    max_decode_slowdown: float | None = _option(
        None, "how many times longer a decoding step may take because prompts are computed in it (default: no limit)"
    )
    pipeline_depth: int = _option(2, "how many steps are sent to the worker before the first of them is done")
    worker_timeout: float = _option(60.0, "how long requests wait for a lost worker before they fail, in seconds")
    worker_grace: float | None = _option(
        None,
        "after how many seconds without a worker requests fail that could as well begin elsewhere: new ones, and those "
        "without a token (default: --worker-timeout)",
    )
    drain_timeout: float = _option(30.0, "how long running requests get to finish at shutdown, in seconds")
    max_waiting_requests: int = _option(4096, "how many sequences can wait in the queue")
    max_waiting_tokens: int = _option(4_194_304, "how many prompt tokens can wait in the queue")
    max_tenant_waiting_requests: int | None = _option(
        None, "how many sequences of one tenant can wait (default: no limit)"
    )
    max_prompt_bytes: int = _option(1_048_576, "how long the text of one prompt can be, in bytes")
    max_waiting_text_bytes: int = _option(67_108_864, "how many bytes of prompts can wait to be tokenized")
    max_tenant_waiting_text_bytes: int = _option(
        16_777_216, "how many bytes of one tenant's prompts can wait to be tokenized"
    )
    policy: str = _option(
        "auto",
        "which waiting request runs next; auto is fair between tenants if there are any, else by priority",
        ("auto", *POLICIES),
    )
    preemption: str = _option(
        "auto",
        "how a preempted request's KV cache is handled: swapped, recomputed, or whichever is cheaper (auto)",
        tuple(mode.value for mode in PreemptionMode),
    )
    watermark: float = _option(0.01, "share of the device blocks to keep free when a request is admitted, below 1")
    detached_retention: float = _option(
        600.0, "how long the result of a detached request is kept after it ends, in seconds"
    )
    max_detached_requests: int = _option(4096, "how many ended detached requests are kept; the oldest is dropped first")
    max_detached_bytes: int = _option(
        268_435_456, "how many bytes of ended detached requests are kept; the oldest is dropped first"
    )
    kv_events_buffer: int = _option(10_000, "how many batches of KV events a slow subscriber can fall behind")
    max_kv_event_bytes: int = _option(
        67_108_864, "how many bytes of KV events are kept for slow subscribers; the oldest are dropped first"
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of prompts that begin alike")
    record: str | None = _option(
        None, "record all events and plans to this file, for `pagewire replay`; it contains every prompt"
    )
    log_requests: bool = _option(False, "log a line for every finished sample, not only for failed ones")
    otlp_traces_endpoint: str | None = _option(
        None, "where to send traces: http://HOST:PORT of a collector, OTLP over gRPC; needs the extra `tracing`"
    )
    metrics_host: str = _option("127.0.0.1", "address to serve /metrics on")
    metrics_port: int | None = _option(
        None,
        "HTTP port of /metrics; 0 turns it off (default: 9090, or a free one, which is logged, if 9090 is taken)",
    )
    tls_cert: str | None = _option(None, "PEM file with the server's certificate chain; turns TLS on")
    tls_key: str | None = _option(None, "PEM file with the server's private key")
    tls_client_ca: str | None = _option(
        None, "PEM file of the authority that clients' certificates must come from; turns mutual TLS on"
    )
    tenants: str | None = _option(
        None, "YAML file of tenants with their API keys, certificates and quotas; without it anyone is admitted"
    )
    health_host: str = _option("127.0.0.1", "address of --health-port")
    health_port: int = _option(
        0, "plaintext port for health probes that cannot use TLS; 0 turns it off (--port answers probes too)"
    )
    link_secret_file: str | None = _option(
        None, "file with the secret to show the worker, which has a file with the same one; read at every attempt"
    )
    worker_tls_ca: str | None = _option(
        None, "PEM file of the authority that the worker's certificate must come from; turns TLS on"
    )
    worker_tls_cert: str | None = _option(
        None, "PEM file with the certificate chain to show the worker, for mutual TLS"
    )
    worker_tls_key: str | None = _option(None, "PEM file with the private key of that certificate")
    worker_tls_name: str | None = _option(None, "name in the worker's certificate, if it differs from its host")

    @property
    def worker_addresses(self) -> list[str]:
        """Of the worker's ranks, in their order."""
        return [address.strip() for address in self.worker.split(",")]

    def validate(self) -> None:
        """Raises ValueError that names the flag at fault."""
        _check_model(self.model)
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise ValueError(f"{_flag(name)} is {value}, but must be at least {minimum}")
        if self.worker_grace is not None and self.worker_grace > self.worker_timeout:
            limit = f"at most --worker-timeout, which is {self.worker_timeout}"
            raise ValueError(f"--worker-grace is {self.worker_grace}, but must be {limit}")
        if not self.watermark < 1:
            raise ValueError(f"--watermark is {self.watermark}, but must be below 1")
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices is not None and value not in choices:
                raise ValueError(f"{_flag(option.name)} is {value!r}, but must be one of {', '.join(choices)}")
        for name in ("port", "metrics_port", "health_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ValueError(f"{_flag(name)} is {value}, but must be 0 to 65535")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint is {endpoint!r}, but must be http://HOST:PORT or https://HOST:PORT"
            )
        for address in self.worker_addresses:
            _check_worker_address(address)
        for name, needed in _TLS_NEEDS:
            _check_need(self, name, needed)


_TEXT_MINIMA = {"max_prompt_bytes": 1, "max_waiting_text_bytes": 1, "max_tenant_waiting_text_bytes": 1}
_MINIMA = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_decode_slowdown": 1,
    "pipeline_depth": 1,
    "worker_timeout": 0,
    "worker_grace": 0,
    "drain_timeout": 0,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "max_tenant_waiting_requests": 1,
    "watermark": 0,
    "detached_retention": 0,
    "max_detached_requests": 0,
    "max_detached_bytes": 0,
    "kv_events_buffer": 1,
    "max_kv_event_bytes": 0,
    **_TEXT_MINIMA,
}
_TLS_NEEDS = (
    ("tls_cert", "tls_key"),
    ("tls_key", "tls_cert"),
    ("tls_client_ca", "tls_cert"),
    ("worker_tls_cert", "worker_tls_key"),
    ("worker_tls_key", "worker_tls_cert"),
    ("worker_tls_cert", "worker_tls_ca"),
    ("worker_tls_name", "worker_tls_ca"),
)


@dataclass(frozen=True)
class FrontEndConfig:
    scheduler: str = _option("127.0.0.1:50051", "address of the scheduler, HOST:PORT")
    model: str = _option("", "the scheduler's model: its checkpoint directory, or its Hugging Face id")
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(50052, "port to listen on; 0 picks a free one")
    drain_timeout: float = _option(30.0, "how long running requests get to finish at shutdown, in seconds")
    max_pending_calls: int = _option(4096, "how many calls can be waiting for tokenization")
    tls_cert: str | None = _option(None, "PEM file with the server's certificate chain; turns TLS on")
    tls_key: str | None = _option(None, "PEM file with the server's private key")
    tls_client_ca: str | None = _option(
        None, "PEM file of the authority that clients' certificates must come from; turns mutual TLS on"
    )
    health_host: str = _option("127.0.0.1", "address that --health-port listens on")
    health_port: int = _option(
        0, "port of a plaintext health service, for probes without certificates; 0 is off (--port answers too)"
    )
    tenants: str | None = _option(
        None,
        "YAML file of the tenants that are admitted, the scheduler's; the front end then acts as an operator there",
    )
    scheduler_api_key_file: str | None = _option(
        None, "file with the API key that this front end shows the scheduler, whose operator it must be"
    )
    scheduler_tls_ca: str | None = _option(
        None, "PEM file of the authority that the scheduler's certificate must come from; turns TLS on"
    )
    scheduler_tls_cert: str | None = _option(
        None, "PEM file with the certificate chain to show the scheduler, for mutual TLS"
    )
    scheduler_tls_key: str | None = _option(None, "PEM file with the private key of that certificate")
    scheduler_tls_name: str | None = _option(None, "name in the scheduler's certificate, if it differs from its host")
    max_prompt_bytes: int = _option(1_048_576, "how long the text of one prompt can be, in bytes")
    max_waiting_text_bytes: int = _option(67_108_864, "how many bytes of prompts can wait to be tokenized")
    max_tenant_waiting_text_bytes: int = _option(
        16_777_216, "how many bytes of one tenant's prompts can wait to be tokenized"
    )

    def validate(self) -> None:
        """Raises ValueError that names the flag at fault."""
        _check_model(self.model)
        for name in ("port", "health_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}, but must be 0 to 65535")
        for name, minimum in (("drain_timeout", 0), ("max_pending_calls", 1), *_TEXT_MINIMA.items()):
            if not getattr(self, name) >= minimum:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}, but must be at least {minimum}")
        _check_address("scheduler", self.scheduler)
        for name, needed in _TLS_NEEDS:
            _check_need(self, name.replace("worker", "scheduler"), needed.replace("worker", "scheduler"))


def _check_model(model: str) -> None:
    if not model:
        raise ValueError("--model is missing: name a checkpoint directory")


def _check_worker_address(address: str) -> None:
    if not address.startswith(UNIX_SCHEME):
        _check_address("worker", address, "HOST:PORT or unix:PATH")
        return
    num_bytes = len(os.fsencode(address.removeprefix(UNIX_SCHEME)))
    if not 0 < num_bytes <= MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"--worker is {address!r}, but the path of a Unix socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes, not "
            f"{num_bytes}"
        )


def _check_address(name: str, address: str, form: str = "HOST:PORT") -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{_flag(name)} is {address!r}, but must be {form}")


def _check_need(config: object, name: str, needed: str) -> None:
    if getattr(config, name) is not None and getattr(config, needed) is None:
        raise ValueError(f"{_flag(name)} needs {_flag(needed)} too")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
