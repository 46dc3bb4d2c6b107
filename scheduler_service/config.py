"""The options of the scheduler service. `pagewire.options` turns every field into a flag, a variable and a YAML key."""

from dataclasses import dataclass, field, fields
from typing import Any

from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.policy import POLICIES


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class SchedulerConfig:
    model: str = _option("", "checkpoint directory; the scheduler reads its config, tokenizer and generation config")
    worker: str = _option(
        "127.0.0.1:50061",
        "address of the worker, HOST:PORT; of several ranks all, in their order, separated by commas",
    )
    host: str = _option("127.0.0.1", "address to bind")
    port: int = _option(50051, "port to bind; 0 takes a free one")
    served_model_name: str | None = _option(None, "name of the model for clients; the directory's name if unset")
    max_model_len: int | None = _option(None, "prompt and output tokens of one sequence; the checkpoint's if unset")
    max_num_seqs: int = _option(256, "sequences that run at the same time")
    max_num_batched_tokens: int = _option(2048, "tokens of one step")
    max_decode_slowdown: float | None = _option(
        None, "times as long as without them that prompts may make a step which also decodes; no limit if unset"
    )
    pipeline_depth: int = _option(2, "steps the worker may have ahead of the scheduler")
    worker_timeout: float = _option(60.0, "seconds that requests wait for a missing worker")
    drain_timeout: float = _option(30.0, "seconds that running requests have to finish at shutdown")
    max_waiting_requests: int = _option(4096, "sequences that may wait")
    max_waiting_tokens: int = _option(4_194_304, "prompt tokens that may wait")
    max_tenant_waiting_requests: int | None = _option(None, "sequences of one tenant that may wait; no limit if unset")
    policy: str = _option("priority", "who is served first among those that wait", POLICIES)
    preemption: str = _option(
        "auto",
        "what becomes of the KV cache of a victim: moved to host blocks, recomputed, or whichever is cheaper",
        tuple(mode.value for mode in PreemptionMode),
    )
    watermark: float = _option(0.01, "share of the device blocks that stay free when a request is admitted, below 1")
    detached_retention: float = _option(600.0, "seconds that a detached request is kept after its end")
    max_detached_requests: int = _option(4096, "ended detached requests that are kept; the oldest goes first")
    kv_events_buffer: int = _option(10_000, "batches of KV events that subscribers may fall behind")
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of equal prefixes")
    record: str | None = _option(None, "file for all events and plans, for `pagewire replay`; it holds every prompt")
    log_requests: bool = _option(False, "log a line for every sample that ends, not only for those that fail")
    otlp_traces_endpoint: str | None = _option(
        None, "collector of traces, http://HOST:PORT for OTLP over gRPC; needs the extra tracing"
    )
    metrics_host: str = _option("127.0.0.1", "address to bind for /metrics")
    metrics_port: int | None = _option(
        None, "port of /metrics over HTTP; 0 is off; if unset 9090, or a free one (logged) where that is taken"
    )
    tls_cert: str | None = _option(None, "certificate chain of the public port, PEM file")
    tls_key: str | None = _option(None, "private key of the public port, PEM file")
    tls_client_ca: str | None = _option(None, "clients must present a certificate of this authority, PEM file")
    tenants: str | None = _option(None, "YAML file of tenants, their API keys, certificates and quotas; see the README")
    health_host: str = _option("127.0.0.1", "address to bind for --health-port")
    health_port: int = _option(
        0, "port of a plaintext health service, for probes that know no certificates; 0 is off, --port answers too"
    )
    worker_tls_ca: str | None = _option(None, "the worker must present a certificate of this authority, PEM file")
    worker_tls_cert: str | None = _option(None, "certificate chain shown to the worker, PEM file")
    worker_tls_key: str | None = _option(None, "private key of that certificate, PEM file")
    worker_tls_name: str | None = _option(None, "name in the worker's certificate, where it is not its host")

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
            _check_address("worker", address)
        for name, needed in _TLS_NEEDS:
            _check_need(self, name, needed)


_MINIMA = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_decode_slowdown": 1,
    "pipeline_depth": 1,
    "worker_timeout": 0,
    "drain_timeout": 0,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "max_tenant_waiting_requests": 1,
    "watermark": 0,
    "detached_retention": 0,
    "max_detached_requests": 0,
    "kv_events_buffer": 1,
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
    model: str = _option("", "checkpoint directory, the scheduler's; config, tokenizer and generation config are read")
    host: str = _option("127.0.0.1", "address to bind")
    port: int = _option(50052, "port to bind; 0 takes a free one")
    drain_timeout: float = _option(30.0, "seconds that running requests have to finish at shutdown")
    max_pending_calls: int = _option(4096, "calls that may be tokenized at the same time")
    tls_cert: str | None = _option(None, "certificate chain of the public port, PEM file")
    tls_key: str | None = _option(None, "private key of the public port, PEM file")
    tls_client_ca: str | None = _option(None, "clients must present a certificate of this authority, PEM file")
    scheduler_tls_ca: str | None = _option(None, "the scheduler must present a certificate of this authority, PEM file")
    scheduler_tls_cert: str | None = _option(None, "certificate chain shown to the scheduler, PEM file")
    scheduler_tls_key: str | None = _option(None, "private key of that certificate, PEM file")
    scheduler_tls_name: str | None = _option(None, "name in the scheduler's certificate, where it is not its host")

    def validate(self) -> None:
        """Raises ValueError that names the flag at fault."""
        _check_model(self.model)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}, but must be 0 to 65535")
        for name, minimum in (("drain_timeout", 0), ("max_pending_calls", 1)):
            if not getattr(self, name) >= minimum:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}, but must be at least {minimum}")
        _check_address("scheduler", self.scheduler)
        for name, needed in _TLS_NEEDS:
            _check_need(self, name.replace("worker", "scheduler"), needed.replace("worker", "scheduler"))


def _check_model(model: str) -> None:
    if not model:
        raise ValueError("--model is missing: name a checkpoint directory")


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{_flag(name)} is {address!r}, but must be HOST:PORT")


def _check_need(config: object, name: str, needed: str) -> None:
    if getattr(config, name) is not None and getattr(config, needed) is None:
        raise ValueError(f"{_flag(name)} needs {_flag(needed)} too")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
