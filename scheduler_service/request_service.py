"""The gRPC service that accepts requests, in a scheduler or a front end: setup, operation and orderly shutdown."""

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
    listen,
    listen_on_socket,
    lower_grpc_pool_priority,
    max_open_connections,
)
from pagewire.common.wire.transport.tls import Life, TlsFiles, server_files
from scheduler_service.api.authentication import Authenticator, ending
from scheduler_service.api.grpc.request_servicer import SERVICE_NAME, RequestServicer
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from scheduler_service.links.scheduler.scheduler_link import SchedulerLink
from scheduler_service.serving.availability import Availability
from scheduler_service.serving.checkpoint.model_info import ModelInfo, read_model
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tenants.tenant_file import ApiKeys, TenantFile

if TYPE_CHECKING:
    from scheduler_service.api.vllm.servicer import VllmServicer

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 2.0  # seconds for the last responses to be written
_SERVER_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    # The requests of a client that vanished without closing its connection are aborted.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A client that connects and sends nothing occupies a connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def refused(error: ValueError | OSError) -> int:
    """Log the error that keeps a service from starting, and return the exit code of the process. ValueError and OSError
    have different exit codes, because a restart cannot correct an invalid configuration."""
    logger.critical("%s", error)
    return EXIT_REFUSED if isinstance(error, ValueError) else EXIT_ERROR


def warn_of(model: ModelInfo) -> None:
    """Log a warning for each feature that does not work with the served model, such as text prompts without a
    tokenizer."""
    for line in model.warnings():
        logger.warning("%s", line)


class RequestService:
    """The parts that a scheduler and a front end have in common: the served model, its tokenizer, the tenants, and the
    gRPC server with its health service.

    The constructor loads and creates these parts, and `run` serves requests.
    """

    def __init__(
        self, config: SchedulerConfig | FrontEndConfig, name: str, link_tls: TlsFiles | None, num_ports: int = 1
    ) -> None:
        """Load the model's files and create the gRPC server.

        `name` is the name of the service in messages, such as "front end". `link_tls` contains the TLS files of the
        connection to the worker or scheduler. `num_ports` is the number of ports that share the process's limit on
        connections. Raise ValueError or OSError, with a message of one line, if a file is invalid or cannot be read.
        """
        self._config = config
        self._name = name
        self.tls = server_files(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._tls_files = [files for files in (self.tls, link_tls) if files is not None]
        self.watched: list[TlsFiles | WatchedFiles[Any]] = list(self._tls_files)  # while the service runs
        self.model, files = read_model(config.model, config.chat_template)
        warn_of(self.model)
        self.tokenizer_json = None if files is None else files.tokenizer_json()  # until the service runs
        self.tokenizer = None if files is None else Tokenizer(files.path, self.tokenizer_json, self.model)
        self.text_limits = TextLimits(config.max_prompt_bytes, config.max_waiting_text_bytes)
        self.tenants = TenantFile(config.tenants) if config.tenants else None
        if config.api_key:
            self.tenants = ApiKeys(config.api_key)
        self.authenticator = Authenticator(self.tenants)
        self._server = create_server(
            *_SERVER_OPTIONS,
            enter=self.authenticator.enter,
            ending=ending,
            max_connections=max_open_connections() // num_ports,
        )

    def listen(
        self,
        servicer: RequestServicer,
        make_vllm: Callable[[ModuleType], "VllmServicer"],
        operator_socket: str | None = None,
    ) -> None:
        """Register the gRPC services, and bind the port and the operators' Unix socket. Raise OSError if a port or the
        socket cannot be bound.

        `make_vllm` creates the VllmEngine service. Its argument is the module that implements the service. It is called
        only if this module can be imported.
        """
        config = self._config
        self._servicer = servicer
        if self.tenants is not None:
            self.tenants.listeners += [self.authenticator.end_unknown_callers, servicer.intake.revoke]
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

    def certificate_validity(self) -> dict[str, Life]:
        """Return the validity periods of the TLS certificates in use. A key is the command line flag that names the
        certificate's file."""
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
        """Serve requests until `stop` is set. Then refuse new requests and wait for running requests, but stop waiting
        after the configured drain timeout or when `stop_now` is set. Return the exit code of the process.

        `parts` are coroutines that run together with the engine until they are cancelled. If a part or the engine ends
        earlier, `failed` is called with its error and returns the exit code. `ready` is called once with the server's
        URL, when requests are first accepted.
        """
        self.tokenizer_json = None  # frees much memory
        availability: Availability = engine.availability
        await self._health.begin()
        await self._server.start()
        lower_grpc_pool_priority()
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
    """Import and return the module that implements the VllmEngine service. Return None if the package with its gRPC
    stubs is missing, which no other part of the server needs."""
    try:
        from scheduler_service.api.vllm import servicer
    except (ImportError, RuntimeError) as error:  # the stubs raise RuntimeError with an older grpcio
        logger.log(
            logging.INFO if isinstance(error, ModuleNotFoundError) else logging.WARNING,
            "VllmEngine, the service for routers, is not served without pagewire[router]: %s",
            error,
        )
        return None
    return servicer
