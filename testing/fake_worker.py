"""A worker that speaks the real protocol and whose tokens are a hash of all preceding tokens.

The hash comes from the simulated worker of the core's tests. This module adds the session, and faults on demand.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Self

import grpc.aio

from pagewire.common.grammars import version
from pagewire.common.wire.messages import AddedGrammar, GrammarReport, Logprobs, RowStatus, StepPlan, StepResult
from pagewire.common.wire.worker_wire import decode_request, encode_response
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.core.simulated_worker import SimulatedWorker

HEARTBEAT_INTERVAL = 0.2


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A fake worker on one port. It can be killed and restarted on the same port."""

    def __init__(self, model_digest: bytes, **capacity: object) -> None:
        self.capacity = {
            "worker_id": "fake",
            "model_digest": model_digest,
            "vocab_size": 300,
            "max_model_len": 256,
            "block_size": 4,
            "num_device_blocks": 400,
            "block_bytes": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "fake",
            "num_host_blocks": 0,
            "swap_bandwidth": 1e9,
            "layer_groups": (worker_pb2.LayerGroup(),),
            "tensor_parallel_rank": 0,
            "tensor_parallel_size": 1,
            "quantization": "",
            "tables_digest": "",
            "grammar_version": version(),
            "gates_grammars": False,
        } | capacity
        self.port = 0
        self.step_seconds = 0.0
        self.is_silent = False  # sends nothing more, like a stopped process
        self.holds_moves = False  # delays moves until the next heartbeat, which reports them
        self.epochs: list[int] = []  # accepted epochs
        self.holder = ""
        self.last_epoch = 0
        self.refused_epochs: list[int] = []
        self.refusals: list[worker_pb2.Refusal] = []  # refusals for the next hellos
        self.num_steps = 0
        self.bad_sequences: dict[int, RowStatus] = {}  # sequences whose rows fail, with their statuses
        self.traceparents: list[str] = []  # of allocated rows
        self.grammars: list[AddedGrammar] = []  # added grammars
        self.opened_grammar_ids: list[int] = []  # of allocated rows
        self.bad_grammars: dict[str, str] = {}  # texts of grammars that cannot be prepared, with the reasons
        self.reports_grammars = asyncio.Event()  # while unset, no grammar is reported as ready
        self.reports_grammars.set()
        self.certificates: list[worker_pb2.CertificateLife] = []  # certificates that heartbeats report
        self.garbage = b""  # bytes of an unknown field, appended to the next result

    @classmethod
    async def started(cls, checkpoint: Path, **capacity: object) -> Self:
        """Return a started worker for a checkpoint, with the model's context length, on a free port."""
        info = read_model_info(str(checkpoint))
        worker = cls(info.digest, **({"max_model_len": info.max_model_len} | capacity))
        await worker.start()
        return worker

    async def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self.port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        await self._server.start()

    async def kill(self) -> None:
        """Stop the server and forget all epochs, as a killed process does."""
        self.last_epoch, self.holder = 0, ""
        await self._server.stop(0)

    async def Execute(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        hello = (await context.read()).hello
        if self.refusals:
            await context.write(worker_pb2.ExecuteResponse(refusal=self.refusals.pop()))
            return
        if hello.epoch <= self.last_epoch:
            self.refused_epochs.append(hello.epoch)
            refusal = worker_pb2.Refusal(
                reason=worker_pb2.Refusal.REASON_STALE_EPOCH,
                epoch=self.last_epoch,
                instance_id=self.holder,
                message=f"epoch {hello.epoch} is not above {self.last_epoch}",
            )
            await context.write(worker_pb2.ExecuteResponse(refusal=refusal))
            return
        self._writing = asyncio.Lock()  # a stream accepts one write at a time
        self.last_epoch, self.holder = hello.epoch, hello.instance_id
        self.epochs.append(hello.epoch)
        await context.write(worker_pb2.ExecuteResponse(ready=worker_pb2.WorkerCapacity(**self.capacity)))
        worker = self._simulated_worker()
        # tasks that run concurrently with the steps
        beside = {asyncio.create_task(self._beat(hello.epoch, worker, context))}
        try:
            await self._serve(hello.epoch, worker, context, beside)
        finally:
            for task in beside:
                task.cancel()

    def _simulated_worker(self) -> SimulatedWorker:
        return SimulatedWorker(
            num_blocks=self.capacity["num_device_blocks"],
            block_size=self.capacity["block_size"],
            vocab_size=self.capacity["vocab_size"],
            max_num_seqs=self.capacity["max_num_seqs"],
            max_num_batched_tokens=self.capacity["max_num_batched_tokens"],
            num_host_blocks=self.capacity["num_host_blocks"],
            windows=tuple(group.sliding_window for group in self.capacity["layer_groups"]),
            num_states=self.capacity.get("num_device_states", 0),
            num_host_states=self.capacity.get("num_host_states", 0),
            poisoned=frozenset({self.capacity["vocab_size"] - 1}),
            reads_grammars=False,
            bad_sequences=self.bad_sequences,
        )

    async def _serve(
        self, epoch: int, worker: SimulatedWorker, context: grpc.aio.ServicerContext, beside: set[asyncio.Task[None]]
    ) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            plan = decode_request(request)
            self.opened_grammar_ids += [opening.grammar_id for opening in plan.openings]
            self.grammars += plan.added_grammars
            beside |= {asyncio.create_task(self._report(epoch, grammar, context)) for grammar in plan.added_grammars}
            self.traceparents += [opening.traceparent for opening in plan.openings]
            await asyncio.sleep(self.step_seconds)
            if self.last_epoch != epoch:
                await context.abort(grpc.StatusCode.ABORTED, "another scheduler took over")
            result = execute(worker, plan, apply_moves=not self.holds_moves)
            self.num_steps += 1
            if self.is_silent:
                await asyncio.Event().wait()
            await self._send(encode_response(result), context)

    async def _report(self, epoch: int, grammar: AddedGrammar, context: grpc.aio.ServicerContext) -> None:
        await self.reports_grammars.wait()
        report = GrammarReport(epoch, grammar.grammar_id, self.bad_grammars.get(grammar.text, ""))
        await self._send(encode_response(report), context)

    async def _send(self, response: worker_pb2.ExecuteResponse, context: grpc.aio.ServicerContext) -> None:
        if self.garbage:
            response = worker_pb2.ExecuteResponse.FromString(response.SerializeToString() + self.garbage)
            self.garbage = b""
        async with self._writing:
            await context.write(response)

    async def _beat(self, epoch: int, worker: SimulatedWorker, context: grpc.aio.ServicerContext) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            if not self.is_silent:
                step = worker.finish_moves(len(worker.pending))
                heartbeat = worker_pb2.Heartbeat(epoch=epoch, last_moved_step=step, certificates=self.certificates)
                async with self._writing:
                    await context.write(worker_pb2.ExecuteResponse(heartbeat=heartbeat))


def execute(worker: SimulatedWorker, plan: StepPlan, *, apply_moves: bool = True) -> StepResult:
    """Return the result of the simulated step, with the top tokens that the simulated worker leaves out."""
    lengths = {slot: len(row.token_ids) for slot, row in worker.rows.items()}
    lengths |= {opening.slot: len(opening.token_ids) for opening in plan.openings}
    forked = [lengths[slot] for slot in plan.fork_source_slots]
    lengths |= dict(zip(plan.fork_target_slots, forked, strict=True))
    for slot in plan.append_token_slots:
        lengths[slot] += 1
    result = worker.execute(plan, apply_moves)
    sampled = [row for slot, row in sorted(worker.rows.items()) if len(row.token_ids) > lengths[slot]]
    asked = [row.opening.sampling for row in sampled if row.opening.sampling.num_logprobs is not None]
    tops = [sampling.logprob_token_ids or range(sampling.num_logprobs or 0) for sampling in asked]
    prompts = []
    for chunk in result.prompt_logprobs:
        top = range(worker.rows[chunk.slot].opening.sampling.num_prompt_logprobs or 0)
        prompts.append(replace(chunk, logprobs=with_top(chunk.logprobs, [top] * len(chunk.logprobs.chosen))))
    return replace(result, logprobs=with_top(result.logprobs, tops), prompt_logprobs=tuple(prompts), duration_us=1000)


def with_top(logprobs: Logprobs, tops: Iterable[Sequence[int]]) -> Logprobs:
    """Return the log probabilities with top tokens. A token's log probability decreases with its id."""
    top_token_ids = tuple(chain.from_iterable(tops))
    top_logprobs = tuple(-1.0 - token_id for token_id in top_token_ids)
    return replace(logprobs, top_token_ids=top_token_ids, top_logprobs=top_logprobs)
