"""A scheduler's link to its worker: it connects to each rank of the worker and runs one epoch after another.

Any unexpected event ends the epoch. The step loop is then informed through `worker_lost`, and the next epoch begins.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import grpc
import grpc.aio

from pagewire.common.process.shutdown import cancel
from pagewire.common.wire.messages import (
    PROTOCOL_VERSION,
    CertificateValidity,
    Hello,
    Refusal,
    RefusalReason,
    WorkerCapacity,
    WorkerProtocolError,
    WorkerStarting,
)
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.link_secret import LinkSecret
from pagewire.common.wire.transport.tls import Life
from pagewire.common.wire.transport.wrong_port import RightPort
from pagewire.common.wire.worker_wire import Response, encode_request
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2_grpc
from scheduler_service.links.reconnection import LINK_OPTIONS, Backoff, Ended, Outage, Outdated
from scheduler_service.links.worker.worker_session import (
    RankSession,
    Session,
    SessionEnded,
    WorkerUnusable,
    read,
    write,
)
from scheduler_service.serving.step_loop import PlanExchange

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS = (
    *LINK_OPTIONS,
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Despite its name, this option is the timeout of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 1000),
)
_PORT = RightPort.of_link(
    "worker",
    give="give the port of a worker in --worker, which is 50061 unless its --port says otherwise",
    strangers="a scheduler's port, a front end's or another service's",
)
_READY_TIMEOUT = 120.0  # seconds; a worker reports its start, answers or gives up within 30 s
_EPOCH_SHIFT = 20
_MAX_EPOCH = 2**64 - 1
_MAX_LEAD_S = 24 * 3600.0  # how far another scheduler's clock may be ahead


class FencedError(Exception):
    """Raised if another scheduler has taken over this scheduler's worker. The other scheduler has connected with a
    higher epoch number, so the worker refuses this scheduler."""


class EpochsExhausted(Exception):
    """Raised if the next connection to the worker cannot have a higher epoch number than before, because the largest
    64-bit number has been reached."""


class Epochs:
    """The source of the epoch numbers with which this scheduler connects to its worker. Each connection has a new,
    higher number, because a worker obeys only the scheduler with the highest number.

    The numbers begin at the start time in milliseconds of Unix time, shifted left by 20 bits, and increase by 1. So a
    scheduler process that starts later has higher numbers.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Derive the first epoch number from the current time. `clock` returns the Unix time in seconds."""
        self._clock = clock
        self._last = int(clock() * 1000) << _EPOCH_SHIFT

    def next(self) -> int:
        """Return an epoch number that is higher than all numbers returned before, and than all numbers of other
        schedulers that were passed to `raise_above`. Raise EpochsExhausted if the largest 64-bit number has been
        reached."""
        if self._last >= _MAX_EPOCH:
            raise EpochsExhausted(
                f"there is no epoch above {self._last}, which is {self._last >> _EPOCH_SHIFT} ms of Unix time; set "
                "this machine's clock"
            )
        self._last += 1
        return self._last

    def raise_above(self, epoch: int) -> bool:
        """Use only numbers above another scheduler's `epoch` from now on, and return True. If `epoch` is more than a
        day ahead of this machine's clock, ignore it and return False."""
        if epoch >> _EPOCH_SHIFT > int((self._clock() + _MAX_LEAD_S) * 1000):
            return False
        self._last = max(self._last, epoch)
        return True


class WorkerLink:
    """The connection of a scheduler to its worker, with one gRPC stream to each rank (worker process). If the
    connection is lost, the link connects again."""

    def __init__(
        self,
        diallers: Sequence[Dialler],
        exchange: PlanExchange,
        *,
        instance_id: str,
        model_digest: bytes,
        pipeline_depth: int,
        on_plan_sent: Callable[[int], None] = lambda num_bytes: None,
        restart_worker: Callable[[int, str], None] | None = None,
        secret: LinkSecret | None = None,
        limits: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the link of a scheduler to its worker; `run` then connects it. `diallers` connect to the ranks
        (processes) of the worker, in rank order. `on_plan_sent` is called with the size of every plan in bytes.

        `restart_worker` ends the worker process of a rank, after which a new process starts. Its arguments are the rank
        and the reason: the rank hangs, or another scheduler has connected to it. It is None if another program runs the
        worker.

        `secret` authenticates the scheduler to the ranks. `limits` contains the scheduler's values of limits that the
        worker has too, by name; the lower value of a limit applies. `clock` returns the Unix time in seconds, from
        which epoch numbers are derived.
        """
        self._diallers = diallers
        self._exchange = exchange
        self._instance_id = instance_id
        self._model_digest = model_digest
        self._pipeline_depth = pipeline_depth
        self._limits = limits or {}
        self._told_limits: dict[str, int] = {}  # the worker's limits in the last warning
        self._on_plan_sent = on_plan_sent
        self._restart_worker = restart_worker
        self._secret = secret
        self._epochs = Epochs(clock)
        self._outages = [
            Outage(
                "the worker" if rank is None else f"rank {rank} of the worker",
                logger,
                _PORT,
                partial(exchange.availability.worker_missing, rank=rank),
            )
            for rank in (range(len(diallers)) if len(diallers) > 1 else (None,))
        ]
        self._first_capacities: dict[int, WorkerCapacity] = {}  # by rank
        self._certificates: dict[int, tuple[CertificateValidity, ...]] = {}  # by rank

    async def run(self) -> None:
        """Connect to the worker, and connect again whenever the connection is lost, until cancelled. Each connection is
        an epoch. Raise FencedError if another scheduler has taken over the worker, and EpochsExhausted if there is no
        higher epoch number."""
        backoff = Backoff()
        while True:
            ended = await self._run_epoch()
            if ended.was_held:
                for outage in self._outages:
                    outage.end()
                self._exchange.worker_lost(
                    f"rank {ended.rank}: {ended.reason}" if len(self._outages) > 1 else ended.reason
                )
            else:
                self._outages[ended.rank].tell(ended.reason, is_calm=ended.is_calm)
            await backoff.wait(ended)

    async def _run_epoch(self) -> Ended:
        """Connect to the worker once: open the streams to all of its ranks, wait until one stream ends, and close the
        others. Return the reason why the first stream ended."""
        session = Session(self._exchange, self._epochs.next(), self._on_plan_sent, len(self._diallers))
        holds = [asyncio.create_task(self._run_stream(rank)) for rank in session.ranks]
        try:
            await asyncio.wait(holds, return_when=asyncio.FIRST_COMPLETED)
            rank, ended = next((rank, hold.result()) for rank, hold in enumerate(holds) if hold.done())
            return ended._replace(rank=rank, was_held=all(each.is_ready for each in session.ranks))
        finally:
            await cancel(holds)

    async def _run_stream(self, session: RankSession) -> Ended:
        """Connect to one rank of the worker and exchange messages with it until its stream ends. Return the reason of
        the end. Raise FencedError if another scheduler has taken over the worker."""
        rank, epoch = session.rank, session.session.epoch
        stub = worker_pb2_grpc.WorkerServiceStub(await self._diallers[rank].channel())
        execute = partial(stub.Execute, metadata=self._secret.metadata() if self._secret else ())
        call = execute(wait_for_ready=True)
        try:
            hello = encode_request(Hello(PROTOCOL_VERSION, self._instance_id, epoch, self._pipeline_depth))
            await self._outages[rank].connect(write(call, hello), self._diallers[rank], execute)
            # wait_for of Python 3.11 loses a cancellation that arrives with the answer, so it is not used.
            async with asyncio.timeout(_READY_TIMEOUT) as patience:
                while isinstance(answer := await read(call), WorkerStarting):
                    self._outages[rank].tell(answer, is_calm=True)
                    patience.reschedule(asyncio.get_running_loop().time() + _READY_TIMEOUT)
            capacity = self._admit(rank, answer)
            logger.info(
                "worker %s has joined in epoch %d: %s, %s, %d blocks of %d tokens",
                capacity.worker_id,
                epoch,
                capacity.device,
                capacity.dtype,
                capacity.num_device_blocks,
                capacity.block_size,
            )
            self._tell_lower_limits(capacity)
            await session.hold(call, capacity, partial(self._certificates.__setitem__, rank))
        except TimeoutError:
            return self._give_up_rank(rank, f"the worker has not answered Hello in {_READY_TIMEOUT:.0f} s")
        except WorkerUnusable as error:
            return self._give_up_rank(rank, str(error))
        except (SessionEnded, WorkerProtocolError, Outdated) as error:
            return Ended(str(error), is_calm=isinstance(error, Outdated))
        except grpc.aio.AioRpcError as error:
            return _describe(error, session)
        finally:
            call.cancel()

    def certificate_validity(self) -> dict[str, Life]:
        """Return the validity periods of the worker's TLS certificates, as its ranks last reported them in heartbeats.

        A key is a text of the word "worker", the rank, and the command line flag that names the certificate's file.
        """
        return {
            f"worker {rank} {life.flag}": Life(life.begin, life.end)
            for rank, lives in self._certificates.copy().items()  # a copy, because other threads call this method
            for life in lives
        }

    def _tell_lower_limits(self, capacity: WorkerCapacity) -> None:
        """Log a warning if the worker has lower limits than this scheduler, for example for the number of sequences.
        Log nothing if the last warning was the same."""
        lower = {name: getattr(capacity, name) for name in self._limits if getattr(capacity, name) < self._limits[name]}
        if lower and lower != self._told_limits:
            logger.warning(
                "the worker has lower limits, which apply: %s; start both with the same limits",
                "; ".join(f"--{name.replace('_', '-')} {lower[name]}, here {self._limits[name]}" for name in lower),
            )
        self._told_limits = lower

    def _give_up_rank(self, rank: int, reason: str) -> Ended:
        if self._restart_worker is not None:
            self._restart_worker(rank, reason)
        return Ended(reason)

    def _admit(self, rank: int, answer: Response) -> WorkerCapacity:
        """Check the answer of a rank of the worker to the scheduler's Hello message. Return the worker's capacity if it
        matches this scheduler.

        Raise SessionEnded if the rank refused, or serves another model, rank or configuration. Raise WorkerUnusable or
        FencedError if another scheduler is connected to the worker, and WorkerProtocolError for an unexpected message.
        """
        if isinstance(answer, Refusal):
            self._take_refusal(answer)
            raise SessionEnded(f"refused: {answer.message}")
        if not isinstance(answer, WorkerCapacity):
            raise WorkerProtocolError(f"the worker answered Hello with {type(answer).__name__}")
        if answer.model_digest != self._model_digest:
            raise SessionEnded(
                f"the worker serves another model (digest {answer.model_digest.hex()[:16]}, here "
                f"{self._model_digest.hex()[:16]}); start both with the same --model"
            )
        if (answer.tensor_parallel_rank, answer.tensor_parallel_size) != (rank, len(self._diallers)):
            raise SessionEnded(
                f"the worker is rank {answer.tensor_parallel_rank} of {answer.tensor_parallel_size}, here it is rank "
                f"{rank} of {len(self._diallers)}; name the addresses of all ranks in --worker, in their order"
            )
        first = self._first_capacities.setdefault(rank, answer)
        for name in ("vocab_size", "block_size", "quantization", "tables_digest"):
            if getattr(answer, name) != getattr(first, name):
                now, before = (getattr(capacity, name) or "none" for capacity in (answer, first))
                raise SessionEnded(
                    f"the worker restarted with {name} {now} instead of {before}; restart the scheduler too"
                )
        return answer

    def _take_refusal(self, refusal: Refusal) -> None:
        """React to a worker's refusal of this scheduler. If the worker refused because this scheduler's epoch number
        was too low, use higher numbers from now on, or give up the worker by an exception. Do nothing for other
        refusals.

        Raise FencedError or WorkerUnusable if another scheduler has connected to the worker. Raise WorkerUnusable if
        the worker's epoch number is more than a day ahead of this machine's clock.
        """
        if refusal.reason is not RefusalReason.STALE_EPOCH:
            return
        if self._first_capacities and refusal.instance_id != self._instance_id:
            reason = f"scheduler {refusal.instance_id} has taken the worker in epoch {refusal.epoch}"
            # A worker process that this scheduler started belongs to it alone, so it is restarted.
            raise WorkerUnusable(reason) if self._restart_worker is not None else FencedError(reason)
        if not self._epochs.raise_above(refusal.epoch):
            raise WorkerUnusable(
                f"the worker is held in epoch {refusal.epoch}, more than a day ahead of this scheduler's clock; "
                "restart the worker, or set the clocks of both"
            )


def _describe(error: grpc.aio.AioRpcError, session: RankSession) -> Ended:
    """Convert the gRPC error that ended the stream of a rank to the reason for the log. If the worker ended the stream
    with UNAVAILABLE because it is stopping, use the worker's own reason."""
    if not session.is_ready and error.code() is grpc.StatusCode.UNAVAILABLE:
        return Ended(str(error.details()), is_calm=True)
    if not session.is_ready and error.code() is grpc.StatusCode.INTERNAL:
        # gRPC reports INTERNAL for any end before Hello has been sent. The next attempt may report the reason.
        return Ended("the worker ended the stream before Hello", is_calm=True)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Ended(f"refused: {error.details()}")
    return Ended(f"the stream broke ({error.code().name}: {error.details()})")
