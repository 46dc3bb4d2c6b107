"""The composition root of the worker: it listens, loads, serves and stops.

The port is bound and answers before torch is imported. A port in use is therefore reported at once, and probes see a
live process that is not ready.
"""

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pagewire.common import __version__
from pagewire.common.process.child_process import announce_ready, exit_with_parent
from pagewire.common.process.event_loop import call_from_thread
from pagewire.common.process.limits import describe_address_space
from pagewire.common.process.shutdown import cancel, run_to_completion, stop_at_signals
from pagewire.common.wire.messages import CertificateValidity
from pagewire.common.wire.transport.addresses import join
from pagewire.common.wire.transport.health import Health
from pagewire.common.wire.transport.link_secret import LinkSecret
from pagewire.common.wire.transport.listening import create_server, listen, listen_on_socket
from pagewire.common.wire.transport.tls import TlsFiles, server_files
from worker_service.config import WorkerConfig
from worker_service.engine import Engine, LoadedWorker, end_at_once, exit_process
from worker_service.rpc.servicer import SERVICE_NAME, WorkerServicer
from worker_service.startup.preflight import check_worker
from worker_service.startup.progress import LoadProgress

if TYPE_CHECKING:
    from worker_service.engine.tracing import StepTracing
    from worker_service.runner.profile import StepProfile

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
_STOP_GRACE_S = 5.0
_LAST_STEP_TIMEOUT_S = 60.0


def serve(config: WorkerConfig, refuse: Callable[[str], int]) -> int:
    """Run the worker until SIGTERM or SIGINT, and return the exit status of the process. A second signal exits at once.

    `refuse` reports the reason if the worker can never start with this configuration, and returns the exit status for
    that case. Raises OSError for a failure that may be temporary, such as a port in use.
    """
    exit_with_parent()
    try:
        server = _WorkerProcess(config, refuse, check_worker(config))
    except ValueError as error:
        return refuse(str(error))
    status = asyncio.run(run_to_completion(server.run()))
    if server.engine.is_running:
        # A signal stopped the worker during loading. The loading thread would crash while the interpreter exits.
        end_at_once(status)
    return status


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Set how long idle OpenMP threads spin before they sleep: about the length of a gap between two operations.

    Call this before torch is imported. By default the threads spin for milliseconds. They then keep a core busy that
    other processes need, above all the scheduler. Without spinning, each operation would have to wake the threads up.
    An existing OMP_WAIT_POLICY or GOMP_SPINCOUNT in `environ` is respected.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "5000")


class _WorkerProcess:
    def __init__(self, config: WorkerConfig, refuse: Callable[[str], int], digest: bytes) -> None:
        """Read the TLS files and the secret file that the configuration names.

        Raises ValueError if a file is missing or invalid.
        """
        self._config = config
        self._digest = digest
        self._refuse = refuse
        self._tls = server_files(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._link_secret = None if config.link_secret_file is None else LinkSecret(config.link_secret_file)
        self._tracing = _tracing(config)
        self.engine = Engine(self._load, self._tracing.step_done) if self._tracing else Engine(self._load)
        self._profile: StepProfile | None = None

    async def run(self) -> int:
        """Load the model and serve schedulers until a signal arrives. Return the exit status of the process.

        Raises OSError for a failure that the operator can fix, such as a port in use.
        """
        stop = stop_at_signals(lambda number: end_at_once(128 + number))
        server = create_server(
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES), max_message_bytes=_MAX_MESSAGE_BYTES
        )
        servicer = WorkerServicer(
            self.engine,
            client_names=_names(self._config.tls_client_names),
            link_secret=self._link_secret,
            certificates=self._certificates,
        )
        servicer.add_to(server)
        health = Health(server, [SERVICE_NAME])
        address = _bind(server, self._config, self._tls)
        health.listen(self._config.health_host, self._config.health_port)
        await health.begin()
        await server.start()
        watching = [
            asyncio.create_task(files.watch())
            for files in (self._tls, None if self._link_secret is None else self._link_secret.file)
            if files is not None
        ]
        try:
            if await self._until_loaded(stop):
                servicer.set_loaded()
                await health.set_readiness(True)
                announce_ready(address)
                await stop.wait()
                logger.info("stopping")
                await health.set_readiness(False)
                await servicer.close()
                await self._stop_engine()
        except ValueError as error:
            status = self._refuse(str(error))  # before the connections are closed, which takes seconds
            self.engine.stop(_STOP_GRACE_S)  # the compute thread has just raised the error and ends
            return status
        finally:
            await servicer.close()
            await server.stop(_STOP_GRACE_S)
            await health.end()
            await cancel(watching)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        return 0

    def _certificates(self) -> tuple[CertificateValidity, ...]:
        lives = self._tls.credentials.lives if self._tls is not None else {}
        return tuple(CertificateValidity(flag, int(life.begin), int(life.end)) for flag, life in lives.items())

    def _load(self) -> LoadedWorker:
        """Import torch and load the model. Runs on the compute thread, the only thread that calls torch.

        Raises ValueError if torch cannot be imported or if the worker cannot start with this configuration.
        """
        limit_spinning(os.environ)
        report = LoadProgress(partial(setattr, self.engine, "loading"))
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            raise ValueError(
                f"torch is installed, but cannot be imported: {error}{describe_address_space()}"
            ) from error
        from pagewire.network.checkpoint_files import CheckpointError
        from worker_service.startup.loader import load_worker

        # For people: HOST:PID:RANDOM. The random part is needed because process ids are reused.
        worker_id = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        try:
            loaded = load_worker(self._config, worker_id, report, self._digest)
        except CheckpointError as error:
            raise ValueError(f"--model {self._config.model}: {error}") from error
        return self._profiled(loaded) if self._config.profile else loaded

    def _profiled(self, loaded: LoadedWorker) -> LoadedWorker:
        from worker_service.runner.profile import StepProfile

        self._profile = StepProfile(self._config.profile, Path(self._config.profile_dir))
        return replace(loaded, around_launch=self._profile.around_launch)

    async def _until_loaded(self, stop: asyncio.Event) -> bool:
        """Start the engine and wait until the model is loaded. Return False if a signal arrived earlier.

        If loading fails, its exception is raised.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Exception | None] = loop.create_future()
        self.engine.start(partial(call_from_thread, loop, loaded.set_result))
        stopped = asyncio.ensure_future(stop.wait())
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
        """Let the running step finish and stop the engine, so that the device is idle afterwards.

        If the step does not finish in time, end the process at once.
        """
        if not await asyncio.to_thread(self.engine.stop, _LAST_STEP_TIMEOUT_S):
            exit_process(f"the running step has not finished in {_LAST_STEP_TIMEOUT_S:.0f} s")
        if self._profile is not None and self._profile.num_steps_left:
            logger.warning(
                "--profile: no trace was written, because the worker stopped %d steps too early",
                self._profile.num_steps_left,
            )


def _tracing(config: WorkerConfig) -> "StepTracing | None":
    if config.otlp_traces_endpoint is None:
        return None
    from worker_service.engine.tracing import StepTracing

    return StepTracing(config.otlp_traces_endpoint, version=__version__)


def _bind(server: grpc.aio.Server, config: WorkerConfig, tls: TlsFiles | None) -> str:
    """Bind the configured port or Unix socket, and return the address that clients connect to.

    Raises OSError if it cannot be bound. The message is meant for the operator.
    """
    if config.socket is not None:
        return listen_on_socket(server, config.socket, tls, "--socket")
    port = listen(server, config.host, config.port, tls, "--port")
    return f"grpc://{join(config.host, port)}"


def _names(text: str | None) -> frozenset[str] | None:
    """Split a comma-separated list of client names, which TLS certificates of schedulers may have, into a set.

    If no list was given (None), any name is permitted, and the result is None.
    """
    return None if text is None else frozenset(name.strip() for name in text.split(","))
