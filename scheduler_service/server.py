"""Puts the scheduler service together, runs it, and takes it apart in order."""

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pagewire import __version__
from pagewire.transport.addresses import join
from pagewire.transport.dialling import dial
from pagewire.transport.draining import cancel, drain
from pagewire.transport.health import Health
from pagewire.transport.link_secret import LinkSecret
from pagewire.transport.listening import COMMON_OPTIONS, connections_option, listen
from pagewire.transport.process import EXIT_ERROR, EXIT_REFUSED
from pagewire.transport.signals import serve_until_signalled
from pagewire.transport.tls import server_credentials
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from scheduler_service.core.request import Request, SequenceEnd
from scheduler_service.metrics import Metrics, MetricsCollector, ServiceStats
from scheduler_service.metrics_server import MetricsServer
from scheduler_service.rpc.interception import Enter, Interception
from scheduler_service.rpc.public.detached import DetachedRequests
from scheduler_service.rpc.public.intake import Intake
from scheduler_service.rpc.public.prompt_text import TextLimits
from scheduler_service.rpc.public.request_servicer import SERVICE_NAME
from scheduler_service.rpc.public.scheduler_servicer import SchedulerServicer, ServerInfo
from scheduler_service.rpc.tenants.authentication import Anybody, Authentication
from scheduler_service.rpc.tenants.quota import Quotas
from scheduler_service.rpc.tenants.tenant_file import TenantFile
from scheduler_service.rpc.trace_context import note_trace_context, trace_context_of_call
from scheduler_service.rpc.worker.epochs import EpochsExhausted
from scheduler_service.rpc.worker.worker_link import CHANNEL_OPTIONS, FencedError, WorkerLink
from scheduler_service.serving.activity import Activity
from scheduler_service.serving.kv_event_log import KvEventLog
from scheduler_service.serving.model_info import ModelInfo, read_model_info
from scheduler_service.serving.recording import Recorder, SchedulerArguments
from scheduler_service.serving.recording_scheduler import RecordingScheduler
from scheduler_service.serving.request_log import RequestLog
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from scheduler_service.rpc.vllm.load import Load
    from scheduler_service.tracing import Tracing

logger = logging.getLogger(__name__)

EXIT_FENCED = 3
CLOSE_TIMEOUT = 2.0  # seconds for the last responses to be written
SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default gRPC cancels calls at random when more than 1,000 come at once; here the queue caps answer them.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    # A client that is gone without a word loses its requests.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Who connects and says nothing keeps a connection from others.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def serve(config: SchedulerConfig, num_log_lines_dropped: Callable[[], int]) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends at once. The exit code."""
    return asyncio.run(serve_until_signalled(partial(run, config, num_log_lines_dropped=num_log_lines_dropped)))


async def run(
    config: SchedulerConfig,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    stop_now: asyncio.Event | None = None,
    restart_worker: Callable[[int, str], None] | None = None,
    num_log_lines_dropped: Callable[[], int] = lambda: 0,
) -> int:
    """Serve until `stop`, then drain, but not beyond `stop_now`. The exit code.

    `ready` gets the server's URL once, when it first serves. `restart_worker` ends the process of a rank that
    hangs, or that another scheduler has taken, and another one takes its place; None: somebody else runs the worker.
    `num_log_lines_dropped` is for the metrics.
    """
    try:
        config.validate()
        service = _Service(config, restart_worker, num_log_lines_dropped)
    except (ValueError, OSError) as error:
        return refused(error)
    return await service.run(stop, stop_now or asyncio.Event(), ready)


def refused(error: ValueError | OSError) -> int:
    """Says why a service does not start. The exit code tells what will not change by trying again."""
    logger.critical("%s", error)
    return EXIT_REFUSED if isinstance(error, ValueError) else EXIT_ERROR


def warn_of(model: ModelInfo) -> None:
    """Say what will not work with it. Raises ValueError."""
    for line in model.warnings():
        logger.warning("%s", line)


def import_vllm() -> ModuleType | None:
    """The module that serves VllmEngine. Without its stubs everything else is served."""
    try:
        from scheduler_service.rpc.vllm import servicer
    except (ImportError, RuntimeError) as error:  # the stubs refuse an older grpcio with a RuntimeError
        logger.warning("VllmEngine is not served, gateways will not find this server: %s", error)
        return None
    return servicer


class _Service:
    """All parts, connected. Nothing runs before `run`."""

    def __init__(
        self,
        config: SchedulerConfig,
        restart_worker: Callable[[int, str], None] | None,
        num_log_lines_dropped: Callable[[], int],
    ) -> None:
        """Raises ValueError and OSError, one line each."""
        model = read_model_info(config.model)
        warn_of(model)
        self._config = config
        self._tokenizer = Tokenizer(model.tokenizer_path) if model.tokenizer_path else None
        self._metrics = Metrics()
        self._num_log_lines_dropped = num_log_lines_dropped
        self._availability_changed = asyncio.Event()
        max_model_len = _max_model_len(config, model)
        arguments = _scheduler_arguments(config, max_model_len)
        self._recorder = Recorder(config.record, arguments) if config.record else None
        scheduler = arguments.build()
        info = _server_info(config, model, max_model_len)
        self._tracing = _tracing(config, info)
        self._kv_event_log = KvEventLog(config.kv_events_buffer, config.max_kv_event_bytes)
        self._step_loop = StepLoop(
            RecordingScheduler(scheduler, self._recorder) if self._recorder else scheduler,
            self._metrics,
            worker_timeout=config.worker_timeout,
            worker_grace=config.worker_grace,
            kv_event_log=self._kv_event_log,
            on_availability_changed=self._availability_changed.set,
            **_request_observers(config, self._tracing),
        )
        self._activity = Activity(self._step_loop.stats, time.monotonic)
        self._channels = [_worker_channel(config, address) for address in config.worker_addresses]
        self._worker_link = WorkerLink(
            self._channels,
            self._step_loop,
            instance_id=info.instance_id,
            model_digest=model.digest,
            pipeline_depth=config.pipeline_depth,
            on_plan_sent=self._metrics.plan_sent,
            restart_worker=restart_worker,
            secret=None if config.link_secret_file is None else LinkSecret(config.link_secret_file),
        )
        tenants = TenantFile(config.tenants) if config.tenants else None
        self._authentication = Authentication(tenants) if tenants is not None else None
        interceptors = _interceptors(self._authentication or Anybody(), self._tracing)
        self._server = grpc.aio.server(options=(*SERVER_OPTIONS, connections_option()), interceptors=interceptors)
        self._detached = _detached_requests(config)
        self._servicer = self._make_servicer(model, info, tenants)
        self._servicer.add_to(self._server)
        service_names = [SERVICE_NAME, *self._add_vllm(self._servicer.intake, model, info)]
        self._health = Health(self._server, service_names)
        self._url = f"grpc://{join(config.host, bind(self._server, config))}"
        self._health.listen(config.health_host, config.health_port, SERVER_OPTIONS)
        if self._recorder is not None:
            self._recorder.open()
        self._metrics_server = self._serve_metrics(info.served_model_name)

    def _make_servicer(self, model: ModelInfo, info: ServerInfo, tenants: TenantFile | None) -> SchedulerServicer:
        return SchedulerServicer(
            self._step_loop,
            model,
            self._tokenizer,
            info,
            self._detached,
            lambda: self._activity.generation_throughput,
            Quotas(tenants.quota, lambda: self._step_loop.capacity) if tenants is not None else None,
        )

    def _serve_metrics(self, model_name: str) -> MetricsServer | None:
        """Raises OSError."""
        if self._config.metrics_port == 0:
            return None
        collector = MetricsCollector(self._metrics, self._step_loop.stats, model_name, self._service_stats)
        return MetricsServer(collector, self._config.metrics_host, self._config.metrics_port)

    def _service_stats(self) -> ServiceStats:
        texts = self._servicer.intake.texts
        return ServiceStats(
            num_log_lines_dropped=self._num_log_lines_dropped(),
            waiting_text_bytes=texts.num_waiting_bytes if texts is not None else 0,
            detached_bytes=self._detached.num_bytes,
            kv_event_bytes=self._kv_event_log.num_bytes,
            num_unread_failures=self._servicer.num_unread_failures,
        )

    def _add_vllm(self, intake: Intake, model: ModelInfo, info: ServerInfo) -> list[str]:
        """Serve VllmEngine too; its name, if it can be served."""
        vllm = import_vllm()
        if vllm is None:
            return []

        def load() -> "Load":
            capacity = self._step_loop.capacity
            throughput = round(self._activity.generation_throughput, 1)
            return vllm.Load(
                self._step_loop.stats(), capacity.block_size if capacity else 0, info.max_num_seqs, throughput
            )

        async def read_load() -> "Load":
            return load()

        cache = (self._step_loop, load)
        servicer = vllm.VllmServicer(self._step_loop, intake, model, self._servicer.server_info, read_load, cache)
        servicer.add_to(self._server)
        return [vllm.SERVICE_NAME]

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event, ready: Callable[[str], None]) -> int:
        gc.callbacks.append(self._metrics.collection)
        await self._health.begin()
        await self._server.start()
        parts: list[asyncio.Task[Any]] = [
            asyncio.create_task(part)
            for part in (
                self._step_loop.run(),
                self._worker_link.run(),
                self._activity.run(),
                self._health.follow(
                    self._availability_changed,
                    lambda: self._step_loop.is_serving,
                    self._servicer.announce,
                    lambda: ready(self._url),
                ),
                *([self._authentication.watch()] if self._authentication is not None else []),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
            if stopping not in done:
                return self._failed(done.pop())
            await drain(self._step_loop.drain(), stop_now, self._config.drain_timeout)
            return 0
        finally:
            gc.callbacks.remove(self._metrics.collection)
            self._step_loop.end_all("the server has shut down; send the request to another one")
            self._servicer.close()
            await self._server.stop(0 if stop_now.is_set() else CLOSE_TIMEOUT)
            await self._health.end()
            await cancel([stopping, *parts])
            for channel in self._channels:
                await channel.close()
            if self._metrics_server is not None:
                self._metrics_server.close()
            if self._tokenizer is not None:
                self._tokenizer.close()
            if self._recorder is not None:
                self._recorder.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    def _failed(self, part: asyncio.Task[Any]) -> int:
        """A part of the service ended, which none does by itself."""
        error = part.exception()
        if isinstance(error, FencedError):
            logger.error("%s; this scheduler ends", error)
            return EXIT_FENCED
        if isinstance(error, EpochsExhausted):
            logger.critical("%s", error)
            return EXIT_REFUSED
        logger.critical("the scheduler has failed", exc_info=error)
        return EXIT_ERROR


def _max_model_len(config: SchedulerConfig, model: ModelInfo) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ValueError(
            f"--max-model-len is {config.max_model_len}, but the checkpoint allows {model.max_model_len}; lower it"
        )
    return config.max_model_len


def _scheduler_arguments(config: SchedulerConfig, max_model_len: int) -> SchedulerArguments:
    return SchedulerArguments(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        pipeline_depth=config.pipeline_depth,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_tenant_waiting_requests=config.max_tenant_waiting_requests,
        enable_prefix_caching=config.enable_prefix_caching,
        watermark=config.watermark,
        policy=_policy(config),
        preemption=config.preemption,
        max_decode_slowdown=config.max_decode_slowdown,
    )


def _policy(config: SchedulerConfig) -> str:
    """By priority alone, a tenant could have itself served before all others, for ever."""
    if config.policy != "auto":
        return config.policy
    return "fair" if config.tenants else "priority"


def _tracing(config: SchedulerConfig, info: ServerInfo) -> "Tracing | None":
    """Raises ValueError if it is asked for but not installed."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from scheduler_service.tracing import Tracing
    except ImportError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); pip install 'pagewire[tracing]'"
        ) from error
    return Tracing(
        config.otlp_traces_endpoint,
        model_name=info.served_model_name,
        version=info.version,
        read_context=trace_context_of_call,
    )


def _detached_requests(config: SchedulerConfig) -> DetachedRequests:
    return DetachedRequests(
        retention=config.detached_retention,
        max_ended=config.max_detached_requests,
        max_bytes=config.max_detached_bytes,
    )


def _request_observers(config: SchedulerConfig, tracing: "Tracing | None") -> dict[str, Any]:
    """What hears of every request, and of every sample's end: arguments of the step loop."""
    log = RequestLog(logs_all=config.log_requests)
    if tracing is None:
        return {"on_sequence_ended": log.ended}

    def ended(request: Request, end: SequenceEnd, now: float) -> None:
        log.ended(request, end, now)
        tracing.sequence_ended(request, end, now)

    return {"begin_trace": tracing.begin, "on_submitted": tracing.submitted, "on_sequence_ended": ended}


def _interceptors(callers: Authentication | Anybody, tracing: "Tracing | None") -> list[grpc.aio.ServerInterceptor]:
    """What stands before a call: who calls comes first."""
    enters: list[Enter] = [callers.enter]
    if tracing is not None:
        enters.append(note_trace_context)
    return [Interception(enters)]


def _server_info(config: SchedulerConfig, model: ModelInfo, max_model_len: int) -> ServerInfo:
    return ServerInfo(
        version=__version__,
        served_model_name=config.served_model_name or model.name,
        instance_id=secrets.token_hex(8),
        chat_template=model.chat_template,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pipeline_depth=config.pipeline_depth,
        max_pending_calls=config.max_waiting_requests,
        has_tenants=config.tenants is not None,
        text_limits=TextLimits(
            config.max_prompt_bytes, config.max_waiting_text_bytes, config.max_tenant_waiting_text_bytes
        ),
        model_digest=model.digest,
        special_tokens=model.special_tokens,
    )


def bind(server: grpc.aio.Server, config: SchedulerConfig | FrontEndConfig) -> int:
    """The port that was bound. Raises OSError."""
    credentials = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
    return listen(server, config.host, config.port, credentials, "--port")


def _worker_channel(config: SchedulerConfig, address: str) -> grpc.aio.Channel:
    return dial(
        address,
        CHANNEL_OPTIONS,
        ca=config.worker_tls_ca,
        cert=config.worker_tls_cert,
        key=config.worker_tls_key,
        name=config.worker_tls_name,
    )
