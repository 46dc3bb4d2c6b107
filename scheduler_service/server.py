"""The assembly of the scheduler service."""

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from pagewire.common import __version__, grammars
from pagewire.common.process import garbage_collection
from pagewire.common.process.child_process import EXIT_ERROR, EXIT_REFUSED
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.link_secret import LinkSecret
from pagewire.common.wire.transport.tls import TlsFiles, link_files
from scheduler_service.api.grpc.report import WORKERS_LIMITS, encode_server
from scheduler_service.api.grpc.scheduler_servicer import SchedulerServicer
from scheduler_service.config import SchedulerConfig
from scheduler_service.core import explain
from scheduler_service.core.request import SchedulerStats
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.links.worker.worker_link import CHANNEL_OPTIONS, EpochsExhausted, FencedError, WorkerLink
from scheduler_service.metrics import Metrics, MetricsCollector, ServiceStats
from scheduler_service.metrics_server import serve_metrics
from scheduler_service.request_service import RequestService, refused
from scheduler_service.serving.activity import Activity
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.detached import DetachedRequests
from scheduler_service.serving.grammar_checks import GrammarChecks
from scheduler_service.serving.kv_events import KvEventLog
from scheduler_service.serving.recording import Recorder, record
from scheduler_service.serving.request_log import RequestLog
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tenants.quota import Quotas

if TYPE_CHECKING:
    from scheduler_service.api.vllm.report import Load
    from scheduler_service.api.vllm.servicer import VllmServicer
    from scheduler_service.tracing import Tracing

logger = logging.getLogger(__name__)

# The number of Python objects for a cached block and for a waiting request, somewhat above the measured numbers.
_OBJECTS_PER_BLOCK, _PIECES_A_REQUEST = 12, 100

EXIT_FENCED = 3


async def run(
    config: SchedulerConfig,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    stop_now: asyncio.Event | None = None,
    restart_worker: Callable[[int, str], None] | None = None,
    num_log_lines_dropped: Callable[[], int] = lambda: 0,
) -> int:
    """Run the scheduler service. When `stop` is set, refuse new requests and wait for running requests, but stop
    waiting when `stop_now` is set. Return the exit code of the process.

    `ready` is called once with the server's URL, when requests are first accepted. `restart_worker` ends the worker
    process of a rank that hangs or that another scheduler has taken over; the supervisor then starts a new one. It is
    None if the worker runs elsewhere. `num_log_lines_dropped` returns the value of a metric.
    """
    try:
        config.validate()
        scheduler = _Scheduler(config, restart_worker, num_log_lines_dropped)
    except (ValueError, OSError) as error:
        return refused(error)
    return await scheduler.run(stop, stop_now or asyncio.Event(), ready)


class _Scheduler:
    """The scheduler service with all its parts, such as the step loop and the link to the worker. The constructor
    creates the parts, and `run` serves requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        restart_worker: Callable[[int, str], None] | None,
        num_log_lines_dropped: Callable[[], int],
    ) -> None:
        """Create all parts of the service and bind its ports. Raise ValueError or OSError, with a message of one line,
        if an option or a file is invalid or a port cannot be bound."""
        link_tls = link_files("worker", config.worker_tls_ca, config.worker_tls_cert, config.worker_tls_key)
        self._service = service = RequestService(config, "server", link_tls)
        self._config = config
        self._metrics = Metrics()
        self._num_log_lines_dropped = num_log_lines_dropped
        options = _core_options(config, service.model)
        self._recorder = Recorder(config.record, options) if config.record else None
        scheduler = Scheduler(options)
        self._info = info = encode_server(
            service.model,
            version=__version__,
            served_model_names=config.served_model_names or [service.model.name],
            instance_id=secrets.token_hex(8),
            options=options,
            has_tenants=service.tenants is not None,
        )
        self._tracing = _tracing(config, info.served_model_name)
        self._kv_event_log = KvEventLog(max_bytes=config.max_kv_event_bytes)
        self._grammars = GrammarChecks(service.model, self._metrics.grammar_checked, service.tokenizer_json)
        observers = [self._metrics, RequestLog(logs_all=config.log_requests), self._grammars]
        self._step_loop = StepLoop(
            record(scheduler, self._recorder) if self._recorder else scheduler,
            observers if self._tracing is None else [*observers, self._tracing],
            worker_timeout=config.worker_timeout,
            worker_grace=config.worker_grace,
            kv_event_log=self._kv_event_log,
        )
        garbage_collection.discount(self._count_retained_objects)
        self._activity = Activity(self._stats, time.monotonic, garbage_collection.collect_hidden)
        self._worker_link = self._make_worker_link(link_tls, restart_worker)
        self._detached = DetachedRequests(retention=config.detached_retention, max_bytes=config.max_detached_bytes)
        self._servicer = self._make_servicer()
        service.listen(self._servicer, self._make_vllm, config.socket)
        if self._recorder is not None:
            self._recorder.open()
        collector = MetricsCollector(self._metrics, self._stats, info.served_model_name, self._service_stats)
        self._metrics_server = serve_metrics(collector, config)

    def _make_worker_link(self, tls: TlsFiles | None, restart_worker: Callable[[int, str], None] | None) -> WorkerLink:
        config, info = self._config, self._info
        secret = None if config.link_secret_file is None else LinkSecret(config.link_secret_file)
        if secret is not None:
            self._service.watched.append(secret.file)
        self._diallers = [
            Dialler(
                address,
                CHANNEL_OPTIONS,
                tls=tls,
                name=config.worker_tls_name,
                uses_http_proxy=config.worker_http_proxy,
            )
            for address in config.worker_addresses
        ]
        return WorkerLink(
            self._diallers,
            self._step_loop.exchange,
            instance_id=info.instance_id,
            model_digest=self._service.model.digest,
            pipeline_depth=config.core.pipeline_depth,
            limits={name: getattr(info, name) for name in WORKERS_LIMITS},
            on_plan_sent=self._metrics.plan_sent,
            restart_worker=restart_worker,
            secret=secret,
        )

    def _make_servicer(self) -> SchedulerServicer:
        service, availability = self._service, self._step_loop.availability
        return SchedulerServicer(
            self._step_loop,
            service.authenticator,
            service.model,
            service.tokenizer,
            self._info,
            self._detached,
            lambda: self._activity.generation_throughput,
            self._metrics.latencies,
            max_pending_calls=self._config.core.max_waiting_requests,
            text_limits=service.text_limits,
            grammars=self._grammars,
            retention_limit=self._retention_limit,
            quotas=None if service.tenants is None else Quotas(service.tenants.quota, lambda: availability.capacity),
        )

    def _retention_limit(self, tenant: str) -> int:
        """Return the longest time, in seconds, for which a tenant's request may ask to keep its cached blocks."""
        tenants = self._service.tenants
        own = None if tenants is None else tenants.quota(tenant).max_retention_seconds
        return self._config.max_retention_seconds if own is None else own

    def _stats(self) -> SchedulerStats:
        return explain.stats(self._step_loop.state)

    def _count_retained_objects(self) -> int:
        """Estimate the number of Python objects in the prefix cache and in waiting requests. The schedule of the
        garbage collector does not count these objects."""
        state = self._step_loop.state
        num_blocks = state.worker.cache.index.num_cached_blocks + state.worker.cache.index.num_cached_host_blocks
        return _OBJECTS_PER_BLOCK * num_blocks + _PIECES_A_REQUEST * state.waiting.num_sequences

    def _service_stats(self) -> ServiceStats:
        step_loop = self._step_loop
        return ServiceStats(
            capacity=step_loop.availability.capacity,
            num_worker_losses=step_loop.availability.num_worker_losses,
            num_epochs=step_loop.availability.num_epochs,
            num_kv_events=step_loop.kv_events.num_events,
            num_log_lines_dropped=self._num_log_lines_dropped(),
            waiting_text_bytes=self._servicer.intake.turns.waiting.num_bytes,
            detached_bytes=self._detached.num_bytes,
            kv_event_bytes=self._kv_event_log.num_bytes,
            num_unread_failures=self._servicer.num_unread_failures,
            waiting_grammar_bytes=self._grammars.num_waiting_bytes,
            num_grammar_verdicts=self._grammars.num_verdicts,
            tokens=step_loop.token_counts(),
            certificate_validity=self._service.certificate_validity() | self._worker_link.certificate_validity(),
        )

    def _make_vllm(self, vllm: ModuleType) -> "VllmServicer":
        step_loop, servicer, availability = self._step_loop, self._servicer, self._step_loop.availability

        def load() -> "Load":
            block_size = availability.capacity.block_size if availability.capacity else 0
            throughput = round(self._activity.generation_throughput, 1)
            return vllm.Load(self._stats(), block_size, self._config.core.max_num_seqs, throughput)

        async def read_load() -> "Load":
            return load()

        return vllm.VllmServicer(
            servicer.intake, self._service.authenticator, servicer.server_info, read_load, (step_loop, load)
        )

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event, ready: Callable[[str], None]) -> int:
        gc.callbacks.append(self._metrics.collection)
        try:
            await self._grammars.start()
            return await self._service.run(
                self._step_loop,
                self._worker_link.run(),
                self._activity.run(),
                failed=_failed,
                stop=stop,
                stop_now=stop_now,
                ready=ready,
            )
        finally:
            gc.callbacks.remove(self._metrics.collection)
            self._grammars.close()
            for dialler in self._diallers:
                await dialler.close()
            if self._metrics_server is not None:
                self._metrics_server.close()
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)


def _failed(error: BaseException | None) -> int:
    """Log that a part of the scheduler service has ended unexpectedly, and why. Return the exit code of the process."""
    if isinstance(error, FencedError):
        logger.error("%s; this scheduler ends", error)
        return EXIT_FENCED
    if isinstance(error, EpochsExhausted):
        logger.critical("%s", error)
        return EXIT_REFUSED
    logger.critical("the scheduler has failed", exc_info=error)
    return EXIT_ERROR


def _core_options(config: SchedulerConfig, model: ModelInfo) -> SchedulerOptions:
    """Return the options of the scheduler core. Values that are not configured come from the model. Raise ValueError if
    the configured maximum length is larger than the model's maximum length."""
    max_model_len = config.core.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ValueError(
            f"--max-model-len is {max_model_len}, but the checkpoint allows {model.max_model_len}; lower it"
        )
    grammar_version = "" if model.grammar_refusal else grammars.version()
    return replace(config.core, max_model_len=max_model_len, grammar_version=grammar_version)


def _tracing(config: SchedulerConfig, model_name: str) -> "Tracing | None":
    if config.otlp_traces_endpoint is None:
        return None
    from scheduler_service.tracing import Tracing

    return Tracing(
        config.otlp_traces_endpoint,
        model_name=model_name,
        version=__version__,
    )
