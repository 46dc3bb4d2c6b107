"""A port that takes requests, the scheduler's or a front end's: put together, run, and taken apart in order."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pagewire.common.process.child_process import EXIT_ERROR, EXIT_REFUSED
from pagewire.common.process.shutdown import cancel, drain
from pagewire.common.process.watched_files import WatchedFiles
from pagewire.common.wire.transport.addresses import join
from pagewire.common.wire.transport.health import Health
from pagewire.common.wire.transport.listening import (
    create_server,
    give_way,
    listen,
    listen_on_socket,
    max_open_connections,
)
from pagewire.common.wire.transport.tls import Life, TlsFiles, server_files
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from scheduler_service.doors.entrance import Entrance, ending
from scheduler_service.doors.scheduler.request_servicer import SERVICE_NAME, RequestServicer
from scheduler_service.links.scheduler.scheduler_link import SchedulerLink
from scheduler_service.serving.availability import Availability
from scheduler_service.serving.checkpoint.model_info import ModelInfo, read_model
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tenants.tenant_file import TenantFile

if TYPE_CHECKING:
    from scheduler_service.doors.vllm.servicer import VllmServicer

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 2.0  # seconds for the last responses to be written
_SERVER_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that is gone without a word loses its requests.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Who connects and says nothing keeps a connection from others.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def refused(error: ValueError | OSError) -> int:
    """Say why a service does not start. The exit code tells what will not change by trying again."""
    logger.critical("%s", error)
    return EXIT_REFUSED if isinstance(error, ValueError) else EXIT_ERROR


def warn_of(model: ModelInfo) -> None:
    """Say what will not work with it."""
    for line in model.warnings():
        logger.warning("%s", line)


class RequestService:
    """The model that is served, its tokenizer, the tenants, and the gRPC server with its health.

    Nothing runs before `run`.
    """

    def __init__(
        self, config: SchedulerConfig | FrontEndConfig, name: str, link_tls: TlsFiles | None, num_ports: int = 1
    ) -> None:
        """`name` is what its messages call the service, and `link_tls` are the files of its link to another one.
        `num_ports` share the connections that the process may have. Raises ValueError and OSError, one line each."""
        self._config = config
        self._name = name
        self.tls = server_files(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._tls_files = [files for files in (self.tls, link_tls) if files is not None]
        self.watched: list[TlsFiles | WatchedFiles[Any]] = list(self._tls_files)  # while it runs
        self.model, files = read_model(config.model)
        warn_of(self.model)
        self.tokenizer_json = None if files is None else files.tokenizer_json()  # until the service runs
        self.tokenizer = None if files is None else Tokenizer(files.path, self.tokenizer_json)
        self.text_limits = TextLimits(config.max_prompt_bytes, config.max_waiting_text_bytes)
        self.tenants = TenantFile(config.tenants) if config.tenants else None
        self.entrance = Entrance(self.tenants)
        self._server = create_server(
            *_SERVER_OPTIONS,
            enter=self.entrance.enter,
            ending=ending,
            max_connections=max_open_connections() // num_ports,
        )

    def listen(
        self,
        servicer: RequestServicer,
        make_vllm: Callable[[ModuleType], "VllmServicer"],
        operator_socket: str | None = None,
    ) -> None:
        """Bind the ports for the servicer, and for that of VllmEngine, which is made from its module if it can be
        imported; and the Unix socket of operators. Raises OSError."""
        config = self._config
        self._servicer = servicer
        if self.tenants is not None:
            self.tenants.listeners += [self.entrance.end_strangers, servicer.intake.revoke]
            self.watched.append(self.tenants.file)
        servicer.add_to(self._server)
        service_names = [SERVICE_NAME]
        vllm = _import_vllm()
        if vllm is not None:
            make_vllm(vllm).add_to(self._server)
            service_names.append(vllm.SERVICE_NAME)
        self._health = Health(self._server, service_names)
        port = listen(self._server, config.host, config.port, self.tls, "--port")
        if operator_socket is not None:
            listen_on_socket(self._server, operator_socket, None, "--socket", marks_calls=True)
        self._url = f"grpc://{join(config.host, port)}"
        self._health.listen(config.health_host, config.health_port)

    def certificate_lives(self) -> dict[str, Life]:
        """Return when the certificates in use are good, by the flag of their file."""
        return {flag: life for files in self._tls_files for flag, life in files.credentials.lives.items()}

    async def run(
        self,
        engine: StepLoop | SchedulerLink,
        *parts: Coroutine[Any, Any, None],
        failed: Callable[[BaseException | None], int],
        stop: asyncio.Event,
        stop_now: asyncio.Event,
        ready: Callable[[str], None],
    ) -> int:
        """Serve until `stop`, then drain, but not beyond `stop_now`. The exit code.

        `parts` run beside the engine, and none of them ends by itself: if one does, `failed` gets its error, and gives
        the exit code. `ready` gets the URL once, when requests are first served.
        """
        self.tokenizer_json = None  # which takes much memory
        availability: Availability = engine.availability
        await self._health.begin()
        await self._server.start()
        give_way()
        following = self._health.follow(
            availability.changed, lambda: availability.is_serving, self._servicer.announce, lambda: ready(self._url)
        )
        watching = [files.watch() for files in self.watched]
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(part) for part in (engine.run(), *parts, following, *watching)
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if stopping not in done:
                return failed(done.pop().exception())
            await drain(engine.drain(), stop_now, self._config.drain_timeout)
            return 0
        finally:
            engine.end_all(f"the {self._name} has shut down; send the request to another one")
            self._servicer.close()
            await self._server.stop(0 if stop_now.is_set() else _CLOSE_TIMEOUT)
            await self._health.end()
            await cancel([stopping, *tasks])
            self._servicer.intake.turns.close()
            if self.tokenizer is not None:
                self.tokenizer.close()


def _import_vllm() -> ModuleType | None:
    """Return the module that serves VllmEngine, or None. Everything else is served without its stubs."""
    try:
        from scheduler_service.doors.vllm import servicer
    except (ImportError, RuntimeError) as error:  # the stubs refuse an older grpcio with a RuntimeError
        logger.log(
            logging.INFO if isinstance(error, ModuleNotFoundError) else logging.WARNING,
            "VllmEngine, by which routers reach schedulers, is not served without pagewire[router]: %s",
            error,
        )
        return None
    return servicer
