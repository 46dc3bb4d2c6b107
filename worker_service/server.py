"""Composition root of the worker: listens, loads, serves, stops.

The port is bound and answers before torch is imported: a taken port is told at once, and probes see a live process that
is not ready.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pagewire import __version__
from worker_service.config import WorkerConfig
from worker_service.engine import Engine, LoadedWorker, exit_process
from worker_service.listening import MAX_PROBES, connections_option, join, listen
from worker_service.rpc.credentials import server_credentials
from worker_service.rpc.link_secret import LinkSecret
from worker_service.rpc.servicer import SERVICE_NAME, WorkerServicer
from worker_service.startup.preflight import check_worker
from worker_service.startup.progress import LoadProgress
from worker_service.unix_socket import listen_on_socket

if TYPE_CHECKING:
    from worker_service.profile import ProfiledRunner
    from worker_service.tracing import StepTracing

logger = logging.getLogger(__name__)

_LIVENESS_NAME = "liveness"
_MAX_MESSAGE_BYTES = 64 << 20
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server binds the same port without a word
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
_STOP_GRACE_S = 5.0
_LAST_STEP_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


def serve(config: WorkerConfig, refuse: Callable[[str], int]) -> int:
    """Serve until SIGTERM or SIGINT; a second one exits at once. Returns the process's exit status.

    `refuse` says why the worker will not start by trying again, and gives the exit status for that. Raises OSError for
    what may change, such as a port that is taken.
    """
    parent = os.environ.get("PAGEWIRE_EXIT_WITH_PARENT")
    if parent:
        exit_with_parent(int(parent))
    try:
        check_worker(config)
        server = _Server(config, refuse)
    except ValueError as error:
        return refuse(str(error))
    status = asyncio.run(server.run())
    if server.is_computing:
        # It was told to stop while it loaded. A thread in the middle of that would crash as the interpreter ends.
        logging.shutdown()
        os._exit(status)
    return status


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP threads spin at a barrier for about as long as the gaps between operations are, then sleep.

    To be called before torch is imported. By default they spin for milliseconds, and whoever else wants a core, the
    scheduler first of all, costs a time slice per operation; without spinning every operation costs a wake-up.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "5000")


class _Server:
    def __init__(self, config: WorkerConfig, refuse: Callable[[str], int]) -> None:
        """Raises ValueError for what is asked for but is not there."""
        self._config = config
        self._refuse = refuse
        self._stop = asyncio.Event()
        self._link_secret = None if config.link_secret_file is None else LinkSecret(config.link_secret_file)
        self._tracing = _tracing(config)
        self._engine = Engine(self._load, self._tracing.step_done) if self._tracing else Engine(self._load)
        self._profile: ProfiledRunner | None = None

    @property
    def is_computing(self) -> bool:
        """Whether the engine's thread is still there."""
        return self._engine.is_running

    async def run(self) -> int:
        """The exit status. Raises OSError for what a person can put right, such as the port."""
        self._install_signal_handlers()
        server = grpc.aio.server(options=(*_SERVER_OPTIONS, connections_option()))
        servicer = WorkerServicer(
            self._engine, client_names=_names(self._config.tls_client_names), link_secret=self._link_secret
        )
        servicer.add_to(server)
        health = _Health()
        health.add_to(server)
        _enable_reflection(server)
        address = _bind(server, self._config)
        probed = grpc.aio.server(options=(*_SERVER_OPTIONS, connections_option(MAX_PROBES)))
        if self._config.health_port:
            health.add_to(probed)
            listen(probed, self._config.health_host, self._config.health_port, None, "--health-port")
        await server.start()
        await probed.start()
        try:
            await health.set(_LIVENESS_NAME, serving=True)
            await health.set_ready(False)
            if await self._until_loaded():
                servicer.set_loaded()
                await health.set_ready(True)
                print(f"ready on {address}", flush=True)
                await self._stop.wait()
                logger.info("stopping")
                await health.set_ready(False)
                await servicer.close()
                await self._stop_engine()
        except ValueError as error:
            status = self._refuse(str(error))  # before the connections are closed, which takes seconds
            self._engine.stop(_STOP_GRACE_S)  # its thread has just told, and ends
            return status
        finally:
            await servicer.close()
            await server.stop(_STOP_GRACE_S)
            await probed.stop(0)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        return 0

    def _load(self) -> LoadedWorker:
        """Runs on the engine's thread: torch is imported there too, and only there it is called."""
        limit_spinning(os.environ)
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            raise ValueError(f"torch is installed, but cannot be imported: {error}") from error
        from worker_service.models.checkpoint_files import CheckpointError
        from worker_service.startup.loader import load_worker

        try:
            loaded = load_worker(self._config, worker_id=_worker_id(), report=LoadProgress(self._tell_percent))
        except CheckpointError as error:
            raise ValueError(f"--model {self._config.model}: {error}") from error
        return self._profiled(loaded) if self._config.profile else loaded

    def _profiled(self, loaded: LoadedWorker) -> LoadedWorker:
        from worker_service.profile import ProfiledRunner

        self._profile = ProfiledRunner(loaded.runner, self._config.profile, Path(self._config.profile_dir))
        return replace(loaded, runner=self._profile)

    def _tell_percent(self, percent: int) -> None:
        self._engine.load_percent = percent

    async def _until_loaded(self) -> bool:
        """False if told to stop before. Raises what loading raised."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Exception | None] = loop.create_future()
        self._engine.start(lambda error: loop.call_soon_threadsafe(loaded.set_result, error))
        stopped = asyncio.ensure_future(self._stop.wait())
        waited: list[asyncio.Future[Any]] = [loaded, stopped]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            return False
        stopped.cancel()
        error = loaded.result()
        if error is not None:
            raise error
        return True

    async def _stop_engine(self) -> None:
        """Let the running step finish, so that the device is left idle."""
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(None, self._engine.stop, _LAST_STEP_TIMEOUT_S):
            exit_process(f"the running step has not finished in {_LAST_STEP_TIMEOUT_S:.0f} s")
        if self._profile is not None and self._profile.num_steps_left:
            logger.warning("--profile: no trace was written, %d steps too few have run", self._profile.num_steps_left)

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        self._stop.set()


def _tracing(config: WorkerConfig) -> "StepTracing | None":
    """Raises ValueError if it is asked for but not installed."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from worker_service.tracing import StepTracing
    except ImportError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); pip install 'pagewire[tracing]'"
        ) from error
    return StepTracing(config.otlp_traces_endpoint, version=__version__)


class _Health:
    """The standard health service where grpcio-health-checking is installed, else nothing."""

    def __init__(self) -> None:
        self._servicer: Any = None
        with contextlib.suppress(ImportError):
            from grpc_health.v1 import health

            self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        if self._servicer is None:
            return
        from grpc_health.v1 import health_pb2_grpc

        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, ready: bool) -> None:
        for name in ("", SERVICE_NAME):
            await self.set(name, serving=ready)

    async def set(self, name: str, *, serving: bool) -> None:
        if self._servicer is None:
            return
        from grpc_health.v1 import health_pb2

        states = health_pb2.HealthCheckResponse
        await self._servicer.set(name, states.SERVING if serving else states.NOT_SERVING)


def _enable_reflection(server: grpc.aio.Server) -> None:
    with contextlib.suppress(ImportError):
        from grpc_reflection.v1alpha import reflection

        names = [SERVICE_NAME, reflection.SERVICE_NAME]
        with contextlib.suppress(ImportError):
            from grpc_health.v1 import health

            names.append(health.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)


def _bind(server: grpc.aio.Server, config: WorkerConfig) -> str:
    """The address that is bound. Raises OSError, with a text for people, if it cannot be."""
    credentials = None
    if config.tls_cert is not None and config.tls_key is not None:
        credentials = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
    if config.socket is not None:
        return listen_on_socket(server, config.socket, credentials, "--socket")
    port = listen(server, config.host, config.port, credentials, "--port")
    return f"grpc://{join(config.host, port)}"


def _worker_id() -> str:
    """Which process this is, for people: HOST:PID:RANDOM. Process ids come back, so there is something random in it."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def _names(text: str | None) -> frozenset[str] | None:
    """Names that commas separate, None for any."""
    return None if text is None else frozenset(name.strip() for name in text.split(","))


def exit_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, a process id, ends, however that ends. Linux only."""
    if sys.platform != "linux":
        logger.warning("PAGEWIRE_EXIT_WITH_PARENT works on Linux only: this process may outlive its parent")
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before
        os._exit(1)
