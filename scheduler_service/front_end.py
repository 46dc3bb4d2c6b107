"""The assembly of the front end service, which keeps no state beyond its connections."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from pagewire.common.option_limits import listed
from pagewire.common.process.child_process import EXIT_ERROR
from pagewire.common.process.watched_files import NamedFile, WatchedFiles
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.host_names import HostNames
from pagewire.common.wire.transport.tls import Life, link_files
from scheduler_service.api.authentication import Authenticator
from scheduler_service.api.grpc.report import decode_stats
from scheduler_service.api.grpc.request_servicer import FrontEndServicer
from scheduler_service.config import FrontEndConfig
from scheduler_service.links.scheduler.scheduler_link import CHANNEL_OPTIONS, SchedulerLink
from scheduler_service.metrics import FrontEndCollector, FrontEndStats
from scheduler_service.metrics_server import exposition, serve_metrics
from scheduler_service.request_service import RequestService, refused

if TYPE_CHECKING:
    from scheduler_service.api.http.transport.http_server import HttpServer
    from scheduler_service.api.vllm.report import Load
    from scheduler_service.api.vllm.servicer import VllmServicer

logger = logging.getLogger(__name__)

_KEY_FLAG = "--scheduler-api-key-file"


async def run(
    config: FrontEndConfig,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    stop_now: asyncio.Event | None = None,
    num_log_lines_dropped: Callable[[], int] = lambda: 0,
) -> int:
    """Run a front end, which accepts requests and sends them to a scheduler. When `stop` is set, refuse new requests
    and wait for running requests, but stop waiting when `stop_now` is set. Return the process's exit code. `ready` is
    called once with the URL, when requests are first accepted. `num_log_lines_dropped` returns the value of a
    metric."""
    try:
        config.validate()
        link_tls = link_files("scheduler", config.scheduler_tls_ca, config.scheduler_tls_cert, config.scheduler_tls_key)
        service = RequestService(config, "front end", link_tls, num_ports=2 if config.http.http_port else 1)
        dialler = Dialler(
            config.scheduler,
            CHANNEL_OPTIONS,
            tls=link_tls,
            name=config.scheduler_tls_name,
            uses_http_proxy=config.scheduler_http_proxy,
        )
        tenants, key = service.tenants, _api_key(config.scheduler_api_key_file)
        own_key = _as_metadata((config.api_key or "").split(",")[0])
        service.watched += [key] if key is not None else []
        link = SchedulerLink(
            dialler,
            config.scheduler,
            model=service.model,
            read_metadata=(lambda: key.current) if key is not None else (lambda: own_key),
            tenants_revision=(lambda: tenants.revision) if tenants is not None else str,
        )
        servicer = FrontEndServicer(
            link,
            link.availability.server_info,
            link.forwarder.forward,
            service.authenticator,
            config.scheduler,
            service.model,
            service.tokenizer,
            text_limits=service.text_limits,
            chats=config.http.chats,
        )
        service.listen(servicer, partial(_make_vllm, link, servicer, service.authenticator))
        read_stats = partial(_stats, link, servicer, service.certificate_validity, num_log_lines_dropped)
        collector = FrontEndCollector(read_stats)
        http_server = _make_http(config, link, servicer, service, collector) if config.http.http_port else None
        metrics = serve_metrics(collector, config)
    except (ValueError, OSError) as error:
        return refused(error)
    try:
        parts = [http_server.run()] if http_server is not None else []
        return await service.run(
            link, *parts, failed=_failed, stop=stop, stop_now=stop_now or asyncio.Event(), ready=ready
        )
    finally:
        await dialler.close()
        if metrics is not None:
            metrics.close()


def _stats(
    link: SchedulerLink,
    servicer: FrontEndServicer,
    certificate_validity: Callable[[], dict[str, Life]],
    num_log_lines_dropped: Callable[[], int],
) -> FrontEndStats:
    return FrontEndStats(
        model_name=link.availability.served_model_names()[0],
        is_connected=link.availability.is_connected,
        num_running=link.num_running,
        num_ended=dict(link.num_ended),
        num_failed=link.num_failed,
        num_generation_tokens=link.counts.num_kept,
        waiting_text_bytes=servicer.intake.turns.waiting.num_bytes,
        num_unread_failures=servicer.num_unread_failures,
        num_log_lines_dropped=num_log_lines_dropped(),
        certificate_validity=certificate_validity(),
    )


def _make_vllm(
    link: SchedulerLink, servicer: FrontEndServicer, authenticator: Authenticator, vllm: ModuleType
) -> "VllmServicer":
    async def read_load() -> "Load":
        loads, worker = await link.loads(), link.availability.capacity
        throughput = round(loads.generation_throughput, 1)
        block_size, max_num_seqs = worker.block_size if worker else 0, link.availability.server_info().max_num_seqs
        return vllm.Load(decode_stats(loads), block_size, max_num_seqs, throughput)

    return vllm.VllmServicer(servicer.intake, authenticator, link.availability.server_info, read_load, None)


def _make_http(
    config: FrontEndConfig,
    link: SchedulerLink,
    servicer: FrontEndServicer,
    service: RequestService,
    collector: FrontEndCollector,
) -> "HttpServer":
    """Create the HTTP server of the OpenAI-compatible API and bind its port. Raise OSError if the port cannot be
    bound."""
    from scheduler_service.api.http.call_admission import CallAdmission, Origins
    from scheduler_service.api.http.routes import Routes
    from scheduler_service.api.http.transport.http_server import HttpServer

    http, intake = config.http, servicer.intake
    admission = CallAdmission(
        HostNames(http.http_host, listed(http.allowed_hosts), "--allowed-hosts"),
        Origins(listed(http.allowed_origins), "--allowed-origins"),
        service.tenants,
        intake,
        link.availability.served_model_names,
        accepts_any_model_name=http.any_model_name,
    )
    routes = Routes(
        intake,
        link.forwarder.forward,
        admission,
        partial(exposition, collector),
        num_slots=lambda: link.availability.server_info().max_num_seqs,
        is_lenient=http.lenient,
    )
    return HttpServer(http.http_host, http.http_port or 0, service.tls, admission, routes)


def _failed(error: BaseException | None) -> int:
    logger.critical("the front end has failed", exc_info=error)
    return EXIT_ERROR


def _api_key(path: str | None) -> WatchedFiles[Sequence[tuple[str, str]]] | None:
    """Read the API key with which the front end authenticates to the scheduler, from a file that is watched for
    changes. Return it as gRPC metadata, or None if no file is configured. Raise OSError if the file cannot be read, and
    ValueError if it does not contain a key."""

    def parse(content: bytes) -> Sequence[tuple[str, str]]:
        key = content.strip().decode(errors="replace")
        if not (key and key.isascii() and key.isprintable()):
            raise ValueError(f"{_KEY_FLAG} is {path}, which contains no key: one line of ASCII text")
        return _as_metadata(key)

    return None if path is None else WatchedFiles([NamedFile(_KEY_FLAG, path)], parse)


def _as_metadata(key: str) -> Sequence[tuple[str, str]]:
    """Return the gRPC metadata with which a client presents its API key. An empty key returns no metadata."""
    return (("authorization", f"Bearer {key}"),) if key else ()
