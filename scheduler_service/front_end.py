"""Puts a front end together. It holds nothing that outlives its connections."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import grpc.aio

from pagewire.transport.dialling import dial
from pagewire.transport.process import EXIT_ERROR
from pagewire.transport.signals import serve_until_signalled
from scheduler_service.config import FrontEndConfig
from scheduler_service.request_service import RequestService, refused
from scheduler_service.rpc.front_end.front_end_servicer import FrontEndServicer
from scheduler_service.rpc.front_end.scheduler_link import CHANNEL_OPTIONS, SchedulerLink
from scheduler_service.rpc.public.report import decode_stats

if TYPE_CHECKING:
    from scheduler_service.rpc.vllm.load import Load
    from scheduler_service.rpc.vllm.servicer import VllmServicer

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
    """A service whose engine is the link to a scheduler elsewhere. Nothing runs before `run`."""

    def __init__(self, config: FrontEndConfig) -> None:
        """Raises ValueError and OSError, one line each."""
        self._service = service = RequestService(config, "front end")
        tenants = service.tenants
        self._channel = _scheduler_channel(config)
        self._link = SchedulerLink(
            self._channel,
            config.scheduler,
            model_digest=service.model.digest,
            eos_token_ids=service.model.eos_token_ids,
            read_metadata=lambda: _credentials(config.scheduler_api_key_file),
            tenants_revision=(lambda: tenants.revision) if tenants is not None else None,
        )
        self._servicer = FrontEndServicer(
            self._link,
            config.scheduler,
            service.model,
            service.tokenizer,
            max_pending_calls=config.max_pending_calls,
            text_limits=service.text_limits,
        )
        service.listen(self._servicer, self._make_vllm)

    def _make_vllm(self, vllm: ModuleType) -> "VllmServicer":
        link = self._link

        async def read_load() -> "Load":
            loads, worker = await link.loads(), link.capacity
            throughput = round(loads.generation_throughput, 1)
            return vllm.Load(
                decode_stats(loads), worker.block_size if worker else 0, link.server_info().max_num_seqs, throughput
            )

        return vllm.VllmServicer(link, self._servicer.intake, self._service.model, link.server_info, read_load, None)

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event, ready: Callable[[str], None]) -> int:
        try:
            return await self._service.run(self._link, failed=_failed, stop=stop, stop_now=stop_now, ready=ready)
        finally:
            await self._channel.close()


def _failed(error: BaseException | None) -> int:
    logger.critical("the front end has failed", exc_info=error)
    return EXIT_ERROR


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
