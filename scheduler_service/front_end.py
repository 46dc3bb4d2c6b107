"""Puts a front end together, runs it, and takes it apart in order. It holds nothing that outlives its connections."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from pagewire.transport.addresses import join
from pagewire.transport.dialling import dial
from pagewire.transport.draining import cancel, drain
from pagewire.transport.health import Health
from pagewire.transport.listening import connections_option
from pagewire.transport.process import EXIT_ERROR
from pagewire.transport.signals import serve_until_signalled
from scheduler_service.config import FrontEndConfig
from scheduler_service.rpc.front_end.front_end_servicer import FrontEndServicer
from scheduler_service.rpc.front_end.scheduler_link import CHANNEL_OPTIONS, SchedulerLink
from scheduler_service.rpc.interception import Interception
from scheduler_service.rpc.public.prompt_text import TextLimits
from scheduler_service.rpc.public.report import decode_stats
from scheduler_service.rpc.public.request_servicer import SERVICE_NAME
from scheduler_service.rpc.tenants.authentication import Anybody, Authentication
from scheduler_service.rpc.tenants.tenant_file import TenantFile
from scheduler_service.rpc.trace_context import note_trace_context
from scheduler_service.server import (
    CLOSE_TIMEOUT,
    SERVER_OPTIONS,
    bind,
    import_vllm,
    refused,
    warn_of,
)
from scheduler_service.serving.model_info import ModelInfo, read_model_info
from scheduler_service.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from scheduler_service.rpc.vllm.load import Load

logger = logging.getLogger(__name__)


def serve(config: FrontEndConfig) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends at once. The exit code."""
    return asyncio.run(serve_until_signalled(partial(run, config)))


async def run(
    config: FrontEndConfig, *, stop: asyncio.Event, ready: Callable[[str], None], stop_now: asyncio.Event | None = None
) -> int:
    """Serve until `stop`, then drain, but not beyond `stop_now`. The exit code.

    `ready` gets the front end's URL once, when it first serves.
    """
    try:
        config.validate()
        front_end = _FrontEnd(config)
    except (ValueError, OSError) as error:
        return refused(error)
    return await front_end.run(stop, stop_now or asyncio.Event(), ready)


class _FrontEnd:
    """All parts, connected. Nothing runs before `run`."""

    def __init__(self, config: FrontEndConfig) -> None:
        """Raises ValueError and OSError, one line each."""
        model = read_model_info(config.model)
        warn_of(model)
        self._config = config
        self._tokenizer = Tokenizer(model.tokenizer_path) if model.tokenizer_path else None
        self._availability_changed = asyncio.Event()
        tenants = TenantFile(config.tenants) if config.tenants else None
        self._channel = _scheduler_channel(config)
        self._link = SchedulerLink(
            self._channel,
            config.scheduler,
            model_digest=model.digest,
            eos_token_ids=model.eos_token_ids,
            on_availability_changed=self._availability_changed.set,
            read_metadata=lambda: _credentials(config.scheduler_api_key_file),
            tenants_revision=(lambda: tenants.revision) if tenants is not None else None,
        )
        self._authentication = Authentication(tenants) if tenants is not None else None
        callers = self._authentication or Anybody()
        interceptors = [Interception([callers.enter, note_trace_context])]
        self._server = grpc.aio.server(interceptors=interceptors, options=(*SERVER_OPTIONS, connections_option()))
        self._servicer = FrontEndServicer(
            self._link,
            config.scheduler,
            model,
            self._tokenizer,
            max_pending_calls=config.max_pending_calls,
            text_limits=TextLimits(
                config.max_prompt_bytes, config.max_waiting_text_bytes, config.max_tenant_waiting_text_bytes
            ),
        )
        self._servicer.add_to(self._server)
        self._health = Health(self._server, [SERVICE_NAME, *self._add_vllm(model)])
        self._url = f"grpc://{join(config.host, bind(self._server, config))}"
        self._health.listen(config.health_host, config.health_port, SERVER_OPTIONS)

    def _add_vllm(self, model: ModelInfo) -> list[str]:
        """Serve VllmEngine too; its name, if it can be served."""
        vllm = import_vllm()
        if vllm is None:
            return []

        async def read_load() -> "Load":
            loads, worker = await self._link.loads(), self._link.capacity
            throughput = round(loads.generation_throughput, 1)
            max_num_seqs = self._link.server_info().max_num_seqs
            return vllm.Load(decode_stats(loads), worker.block_size if worker else 0, max_num_seqs, throughput)

        servicer = vllm.VllmServicer(self._link, self._servicer.intake, model, self._link.server_info, read_load, None)
        servicer.add_to(self._server)
        return [vllm.SERVICE_NAME]

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event, ready: Callable[[str], None]) -> int:
        await self._health.begin()
        await self._server.start()
        watching = [self._authentication.watch()] if self._authentication is not None else []
        reporting = self._health.follow(
            self._availability_changed,
            lambda: self._link.is_serving,
            self._servicer.announce,
            lambda: ready(self._url),
        )
        parts: list[asyncio.Task[Any]] = [
            asyncio.create_task(part) for part in (self._link.run(), reporting, *watching)
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
            if stopping not in done:
                logger.critical("the front end has failed", exc_info=done.pop().exception())
                return EXIT_ERROR
            await drain(self._link.drain(), stop_now, self._config.drain_timeout)
            return 0
        finally:
            self._link.end_all("the front end has shut down; send the request to another one")
            self._servicer.close()
            await self._server.stop(0 if stop_now.is_set() else CLOSE_TIMEOUT)
            await self._health.end()
            await cancel([stopping, *parts])
            await self._channel.close()
            if self._tokenizer is not None:
                self._tokenizer.close()


def _credentials(api_key_file: str | None) -> list[tuple[str, str]]:
    """The metadata that shows the scheduler who this is, read for every connection: keys change. Raises OSError."""
    if api_key_file is None:
        return []
    return [("authorization", f"Bearer {Path(api_key_file).read_text(encoding='utf-8').strip()}")]


def _scheduler_channel(config: FrontEndConfig) -> grpc.aio.Channel:
    return dial(
        config.scheduler,
        CHANNEL_OPTIONS,
        ca=config.scheduler_tls_ca,
        cert=config.scheduler_tls_cert,
        key=config.scheduler_tls_key,
        name=config.scheduler_tls_name,
    )
