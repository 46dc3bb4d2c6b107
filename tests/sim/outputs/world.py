"""The services of a simulation, assembled as in `server.py` and `front_end.py`."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakValueDictionary

from pagewire.common.chat.chat_output import ChatRules
from pagewire.common.wire.messages import Pooling, SamplingParams
from pagewire.network.pooling_config import PoolingChoice
from scheduler_service.api.authentication import Authenticator
from scheduler_service.api.grpc.report import encode_server
from scheduler_service.api.grpc.request_servicer import FrontEndServicer, RequestServicer
from scheduler_service.api.grpc.scheduler_servicer import SchedulerServicer
from scheduler_service.core.request import EndReason, Request, SequenceEnd
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.links.scheduler.scheduler_link import SchedulerLink
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.availability import Availability
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.detached import DetachedRequests
from scheduler_service.serving.grammar_checks import GrammarChecks
from scheduler_service.serving.observer import Observer
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tenants.quota import Quotas
from scheduler_service.serving.tenants.tenant_file import Quota
from tests.sim.outputs.http_network import make_server
from tests.sim.outputs.network import Dialler, Network, Port
from tests.sim.outputs.request import EOS
from tests.sim.outputs.scenario import MAX_MODEL_LEN, Scenario
from tests.sim.outputs.toy_tokenizer import ToyTokenizer
from tests.sim.outputs.virtual_loop import LoopClock
from tests.sim.outputs.worker import Worker
from tests.sim.scenario import VOCAB_SIZE

_CLOSE_TIMEOUT = 2.0
MODEL = ModelInfo(
    name="toy",
    directory=Path(),
    model_type="toy",
    architectures=(),
    digest=b"m",
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=(EOS,),
    bos_token_id=None,
    pad_token_id=None,
    sampling_defaults=SamplingParams(),
    ignored_settings="",
    template_file=None,
    chat_refusals=(),
    special_tokens={},
    tokenizer_path=Path("toy"),
    has_standard_tokenizer_files=True,
    embedding=PoolingChoice(Pooling.LAST),
)


class Service:
    """A port with its servicer and its engine."""

    def __init__(
        self,
        servicer: RequestServicer,
        engine: StepLoop | SchedulerLink,
        authenticator: Authenticator,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.servicer = servicer
        self._engine = engine
        self.requests: WeakValueDictionary[str, ActiveRequest] = WeakValueDictionary()  # by name
        servicer.intake.begin = self._watched(servicer.intake.begin)  # type: ignore[method-assign]
        self.port = Port(authenticator, on_error)
        servicer.add_to(self.port)
        self.is_stopping = False
        self._tasks = [asyncio.create_task(self._follow(engine.availability)), asyncio.create_task(engine.run())]

    def _watched(self, begin: Callable[..., Awaitable[ActiveRequest]]) -> Any:
        """Return `begin` wrapped so that the active requests are recorded."""

        async def watched(*args: Any, **options: Any) -> ActiveRequest:
            active = await begin(*args, **options)
            self.requests[active.request.request_id] = active
            return active

        return watched

    async def _follow(self, availability: Availability) -> None:
        while True:
            await availability.changed.wait()
            availability.changed.clear()
            self.servicer.announce()

    async def stop(self, patience: float) -> None:
        """Stop accepting requests, and end the remaining ones after `patience` seconds.

        Checks that none of the service's tasks has failed.
        """
        self.is_stopping = True
        try:
            async with asyncio.timeout(patience):
                await self._engine.drain()
        except TimeoutError:
            pass
        self._engine.end_all("the service has shut down")
        self.servicer.close()
        await asyncio.sleep(_CLOSE_TIMEOUT)
        self.port.stop()
        for task in self._tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Witness(Observer):
    """An observer that checks that each sample ends once in the core."""

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self.reasons: dict[str, set[EndReason]] = {}  # by the request's name

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        assert end.sequence_id not in self._ended, "S6: two ends"
        self._ended.add(end.sequence_id)
        self.reasons.setdefault(request.request_id, set()).add(end.reason)


class World:
    def __init__(self, scenario: Scenario, on_error: Callable[[BaseException], None]) -> None:
        seed, clock = scenario.seed, LoopClock()
        self.witness = Witness()
        self.step_loop = StepLoop(
            Scheduler(scenario.options),
            (self.witness,),
            worker_timeout=120.0,
            worker_grace=scenario.worker_grace,
            clock=clock,
        )
        self.worker = Worker(self.step_loop, scenario.capacity, scenario.step_seconds, Random(f"worker {seed}"))
        self.detached = DetachedRequests(
            retention=scenario.retention, max_bytes=scenario.max_bytes, max_ended=scenario.max_ended
        )
        limits = TextLimits()
        quota = Quota(max_requests=scenario.max_requests)
        quotas = Quotas(lambda tenant: quota, lambda: self.step_loop.availability.capacity)
        authenticator = Authenticator(None)
        servicer = SchedulerServicer(
            self.step_loop,
            authenticator,
            MODEL,
            ToyTokenizer(Random(f"tokenizer {seed}")),
            encode_server(
                MODEL,
                version="0",
                served_model_names=["toy"],
                instance_id="i",
                options=scenario.options,
                has_tenants=False,
            ),
            self.detached,
            lambda: 0.0,
            dict,
            max_pending_calls=100,
            text_limits=limits,
            grammars=GrammarChecks(MODEL, lambda seconds, is_good: None),
            retention_limit=lambda tenant: 3600,
            # With a quota, outputs do not wait in ready lists, where they would not be counted.
            quotas=None if scenario.max_requests is None else quotas,
        )
        self.server = Service(servicer, self.step_loop, authenticator, on_error)
        self.direct = Network(self.server.port, scenario.client_weather, f"direct {seed}")
        self.between = Network(self.server.port, scenario.link_weather, f"link {seed}")
        dialler: Any = Dialler(self.between)
        self.link = SchedulerLink(dialler, "scheduler", model=MODEL, clock=clock)
        authenticator = Authenticator(None)
        front_end = FrontEndServicer(
            self.link,
            self.link.availability.server_info,
            self.link.forwarder.forward,
            authenticator,
            "scheduler",
            MODEL,
            ToyTokenizer(Random(f"front end {seed}")),
            text_limits=limits,
            chats=ChatRules(),
        )
        self.front_end = Service(front_end, self.link, authenticator, on_error)
        self.before = Network(self.front_end.port, scenario.client_weather, f"front end {seed}")
        self.http = make_server(front_end, self.link) if scenario.http_tasks else None
