"""The Python client, with a scripted server of the public proto."""

import asyncio
import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import pagewire
from pagewire import AsyncClient, Client, Output, SamplingParams, Session, StructuredOutputs
from pagewire.client import wire
from pagewire.client.sampling_params import INTEGER_FIELDS, STRUCTURES, UNSET
from pagewire.common.wire.sampling_rules import RANGES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving import scripted_scheduler
from testing.serving.certificates import self_signed
from testing.serving.scripted_scheduler import ScriptedScheduler, delta, serving

STORY = "".join(scripted_scheduler.WORDS)
TOKENS = (100, 101, 102, 103, 104)


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    return ScriptedScheduler()


@pytest.fixture
def url(scheduler: ScriptedScheduler) -> Iterator[str]:
    with serving(scheduler) as address:
        yield address


async def collect(url: str, *arguments: object, **options: object) -> list[Output]:
    async with AsyncClient(url) as client:
        return [output async for output in client.stream(*arguments, **options)]


async def test_deltas_come_as_they_are(url: str) -> None:
    outputs = await collect(url, "Once", SamplingParams(temperature=0))
    assert [output.token_ids for output in outputs] == [(token,) for token in TOKENS]
    assert [output.first_token for output in outputs] == [0, 1, 2, 3, 4]
    assert "".join(output.text for output in outputs) == STORY
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert [output.usage for output in outputs[:-1]] == [None] * 4
    assert outputs[-1].usage == pagewire.Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=5)
    assert outputs[0].logprobs is None
    assert outputs[0].cumulative_logprob is None


async def test_everything_asked_for_is_sent(scheduler: ScriptedScheduler, url: str) -> None:
    sampling = SamplingParams(
        n=2, temperature=0.5, top_p=0.75, top_k=-1, min_p=0.25, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, seed=2**64 - 1, stop=["a", "b"], stop_token_ids=[5, 6], ignore_eos=True, max_tokens=9,
        min_tokens=3, logprobs=0, prompt_logprobs=4, logit_bias={7: -1.5}, include_stop_str_in_output=True,
        skip_special_tokens=False,
    )  # fmt: skip
    await collect(
        url, None, sampling, prompt_token_ids=[1, 2, 3], request_id="mine", priority=-4, cache_salt="s", tenant="t",
        session=Session("chat-7", will_return=False, retention_seconds=9),
    )  # fmt: skip
    [request] = scheduler.requests
    assert request == pb.GenerateRequest(
        request_id="mine",
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        priority=-4,
        tenant="t",
        cache_salt="s",
        session_id="chat-7",
        will_return=False,
        retention_seconds=9,
        sampling=pb.SamplingParams(
            n=2, temperature=0.5, top_p=0.75, top_k=0, min_p=0.25, presence_penalty=1, frequency_penalty=-1,
            repetition_penalty=1.5, seed=2**64 - 1, stop=["a", "b"], stop_token_ids=[5, 6], ignore_eos=True,
            max_tokens=9, min_tokens=3, logprobs=0, prompt_logprobs=4, logit_bias={7: -1.5},
            include_stop_str_in_output=True, skip_special_tokens=False,
        ),
    )  # fmt: skip


async def test_beam_search_is_asked_for_without_the_default_temperature(scheduler: ScriptedScheduler, url: str) -> None:
    defaults = pb.SamplingParams(
        n=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_p=1, top_k=0, min_p=0, ignore_eos=False,
        max_tokens=16, min_tokens=0, include_stop_str_in_output=False, skip_special_tokens=True, beam_width=4,
    )  # fmt: skip
    names = {
        "heuristic": pb.EARLY_STOPPING_HEURISTIC, False: pb.EARLY_STOPPING_HEURISTIC, "first": pb.EARLY_STOPPING_FIRST,
        True: pb.EARLY_STOPPING_FIRST, "never": pb.EARLY_STOPPING_NEVER,
    }  # fmt: skip
    await collect(url, "Once", SamplingParams(beam_width=4))
    assert scheduler.requests.pop().sampling == defaults
    for early_stopping, expected in names.items():
        await collect(url, "Once", SamplingParams(beam_width=4, length_penalty=-1, early_stopping=early_stopping))
        sampling = scheduler.requests.pop().sampling
        assert (sampling.length_penalty, sampling.early_stopping) == (-1, expected)
    # Without beams, the default temperature is sent.
    await collect(url, "Once", SamplingParams())
    assert scheduler.requests.pop().sampling.temperature == 1


async def test_none_leaves_a_field_unset(scheduler: ScriptedScheduler, url: str) -> None:
    await collect(url, "Once")
    await collect(url, "Once", SamplingParams(**{field.name: None for field in fields(SamplingParams)}))
    first, second = scheduler.requests
    assert first == pb.GenerateRequest(text="Once")
    assert second == pb.GenerateRequest(text="Once", sampling=pb.SamplingParams())


def test_sampling_params_have_every_field_of_the_proto() -> None:
    kinds = {field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["structured_output"].fields}
    names = {field.name for field in fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - kinds | {"structured_outputs"}
    assert kinds == {"json_schema" if kind == "json" else kind for kind in STRUCTURES}
    assert {field.name for field in fields(StructuredOutputs)} == set(STRUCTURES)


class Cat:
    @staticmethod
    def model_json_schema() -> dict[str, str]:
        return {"title": "Cat"}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"json": {"type": "object", "title": "é"}}, "json_schema", '{"type": "object", "title": "é"}'),
        ({"json": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"json": Cat}, "json_schema", '{"title": "Cat"}'),
        ({"json_object": True}, "json_object", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "no"]}, "choice", pb.Choice(texts=["yes", "no"])),
        ({"grammar": 'start: "a"', "json_object": False}, "grammar", 'start: "a"'),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag", '{"type": "structural_tag"}'),
    ],
)
async def test_structured_outputs_are_sent(
    scheduler: ScriptedScheduler, url: str, given: dict[str, Any], field: str, value: object
) -> None:
    await collect(url, "Once", SamplingParams(structured_outputs=StructuredOutputs(**given)))
    await collect(url, "Once", SamplingParams(), structured_outputs=given)
    first, second = scheduler.requests
    assert first == second
    assert first.sampling.WhichOneof("structured_output") == field
    assert getattr(first.sampling, field) == value


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, ValueError, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
        ({"regex": "a", "json": "{}"}, ValueError, "got json and regex"),
        ({"json_object": False}, ValueError, "got none"),
        ({"regexp": "a"}, TypeError, "structured_outputs has no field 'regexp'; did you mean regex?"),
        ("json", TypeError, "must be StructuredOutputs or a dict or None, got 'json'"),
        ({"json": 5}, TypeError, "json must be a JSON Schema: a dict, JSON, or a class"),
        ({"json": int}, TypeError, "json must be a JSON Schema: a dict, JSON, or a class"),
        ({"json": {"const": {1}}}, TypeError, "json cannot be written as JSON: Object of type set"),
        ({"json": {"const": float("nan")}}, ValueError, "json cannot be written as JSON"),
        ({"regex": b"a"}, TypeError, "regex must be a text"),
        ({"choice": "yes"}, TypeError, "choice must be a list of texts, at least one"),
        ({"choice": []}, TypeError, "choice must be a list of texts, at least one"),
        ({"choice": ["a", 1]}, TypeError, "choice must be a list of texts, at least one"),
        ({"json_object": 1}, TypeError, "json_object must be True"),
        ({"structural_tag": ["a"]}, TypeError, "structural_tag must be a dict or JSON"),
    ],
)
def test_wrong_structured_outputs_say_what_to_do(given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SamplingParams(structured_outputs=given)


async def test_a_grammar_that_the_wire_cannot_hold_is_an_invalid_request(url: str) -> None:
    for name, given in (("regex", "\udc80"), ("choice", ["\udc80"])):
        with pytest.raises(pagewire.InvalidRequest) as caught:
            await collect(url, "Once", structured_outputs={name: given})
        assert caught.value.field_violations[0].field.startswith(f"sampling.{name}")
        assert "has '\\udc80' at 0, half a character" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 1.0}, {"temperature": "hot"}, {"top_k": True}, {"ignore_eos": 1}, {"stop": 5}, {"stop": ["a", 5]},
        {"stop_token_ids": 5}, {"stop_token_ids": ["a"]}, {"logit_bias": [1]}, {"logit_bias": {"a": 1.0}},
        {"beam_width": 2.5}, {"length_penalty": "long"}, {"early_stopping": "soon"}, {"early_stopping": 1.0},
    ],
)  # fmt: skip
def test_types_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"sampling": SamplingParams(max_tokens=2**32)},
            "sampling.max_tokens is 4294967296, but must be 0 to 4294967295",
        ),
        ({"stop_token_ids": [1, -1]}, "sampling.stop_token_ids[1] is -1, but must be 0 to 4294967295"),
        ({"logit_bias": {2**32: 1.0}}, "sampling.logit_bias[4294967296] is 4294967296, but must be 0 to 4294967295"),
        ({"stop": ["a", "b\ud800"]}, "sampling.stop[1] has '\\ud800' at 1, half a character"),
        ({"prompt_token_ids": [5, -1]}, "token_ids.ids[1] is -1, but must be 0 to 4294967295"),
        ({"prompt": "\udfffa"}, "text has '\\udfff' at 0, half a character, which"),
        (
            {"prompt": "a\udcff"},
            "text has '\\udcff' at 1, half a character or the byte 0xff of a text that is not UTF-8",
        ),
        ({"priority": 2**31}, "priority is 2147483648, but must be -2147483648 to 2147483647"),
        ({"tenant": "\udc80"}, "tenant has '\\udc80' at 0"),
        ({"session": pagewire.Session("a", retention_seconds=-1)}, "session.retention_seconds is -1, but must be 0 to"),
    ],
)
async def test_what_the_wire_cannot_hold_is_an_invalid_request(url: str, wrong: dict[str, object], text: str) -> None:
    prompt = None if "prompt_token_ids" in wrong else wrong.pop("prompt", "Once")
    with pytest.raises(pagewire.InvalidRequest) as caught:
        await collect(url, prompt, **wrong)
    assert str(caught.value).startswith(text)
    assert caught.value.field_violations[0].field == text.split()[0]
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"tenant": 5}, {"cache_salt": 1.5}, {"request_id": 7}])
async def test_what_is_of_another_kind_names_its_argument(url: str, wrong: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(wrong))} must be an? (integer|text), got "):
        await collect(url, "Once", **wrong)


def integer_fields() -> list[tuple[type[Message], FieldDescriptor]]:
    """Return all integer fields of the public proto, each with its message type."""
    kinds = [getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name]
    return [(kind, field) for kind in kinds for field in kind.DESCRIPTOR.fields if field.cpp_type in wire._INTEGERS]


def test_every_integer_is_told_its_range() -> None:
    """The client checks every integer field for its range. Protobuf itself is the reference for the range."""
    assert len(integer_fields()) > 40
    for kind, field in integer_fields():
        legal = wire._INTEGERS[field.cpp_type]
        is_list = hasattr(getattr(kind(), field.name), "extend")
        for value in (legal.low, legal.high):
            made = wire.message(kind, **{field.name: [value] if is_list else value})
            assert getattr(made, field.name) == ([value] if is_list else value)
        for value in (legal.low - 1, legal.high + 1):
            path = f"{field.name}[0]" if is_list else field.name
            with pytest.raises(pagewire.InvalidRequest, match=rf"^{re.escape(path)} is {value}, but must be {legal}$"):
                wire.message(kind, **{field.name: [value] if is_list else value})
        with pytest.raises(TypeError, match=rf"^{field.name}(\[0\])? must be an integer, got 'x'$"):
            wire.message(kind, **{field.name: ["x"] if is_list else "x"})


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_checked_at_construction(name: str) -> None:
    """The client checks the server's own ranges, and its error text equals the server's."""
    legal, is_whole = RANGES[name], name in INTEGER_FIELDS
    step = 1 if is_whole else 1e-6
    inside = [legal.low + (step if legal.excludes_low else 0), min(legal.high, 2**32 - 1)]
    for value in inside:
        assert getattr(UNSET.updated(**{name: value}), name) == value
    outside = [legal.low - 2, legal.high + step] if legal.high != math.inf else [legal.low - 1]
    outside += [legal.low] * legal.excludes_low + ([] if is_whole else [math.nan, math.inf, -math.inf])
    for value in outside:
        with pytest.raises(ValueError, match=rf"^{name} is {re.escape(str(value))}, but must be {legal}$") as caught:
            SamplingParams(**{name: value})
        assert isinstance(caught.value, pagewire.InvalidRequest)
        assert caught.value.field_violations[0].field == f"sampling.{name}"
        with pytest.raises(ValueError, match=f"^{name} is "):
            SamplingParams().updated(**{name: value})


def test_biases_are_checked_at_construction() -> None:
    assert SamplingParams(top_k=-1).top_k == -1
    for value in (-101, 100.5, math.nan):
        with pytest.raises(ValueError, match=rf"^logit_bias\[7\] is {value}, but must be -100 to 100$"):
            SamplingParams(logit_bias={5: 100, 7: value})


async def test_one_prompt_is_needed(url: str) -> None:
    for prompts in ({}, {"prompt": "a", "prompt_token_ids": [1]}):
        with pytest.raises(TypeError, match="either prompt or prompt_token_ids"):
            await collect(url, **prompts)


async def test_logprobs_and_stop_reasons(scheduler: ScriptedScheduler, url: str) -> None:
    entry = pb.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top=[pb.TopLogprob(token_id=5, logprob=-0.5)])
    columns = pb.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=[5], top_logprobs=[-0.5])
    stopped = delta(0, 0, [5], "x", last=True)
    stopped.MergeFrom(pb.GenerateResponse(logprobs=[entry], cumulative_logprob=-0.5))
    stopped.finish_reason, stopped.stop_token_id = pb.FINISH_REASON_STOP, 0
    by_text = delta(1, 0, [6], "y", last=True)
    by_text.finish_reason, by_text.stop_text = pb.FINISH_REASON_ABORT, "END"
    prompt = pb.GenerateResponse(prompt_logprobs=[entry, columns])
    scheduler.script = lambda request, context: iter([prompt, stopped, by_text])
    async with AsyncClient(url) as client:
        completion = await client.complete("Once", SamplingParams(n=2, logprobs=1, prompt_logprobs=1))
    expected = pagewire.TokenLogprobs(5, -0.5, 1, ((5, -0.5),))
    first, second = completion.outputs
    assert (first.logprobs, first.cumulative_logprob, first.stop_reason) == ((expected,), -0.5, 0)
    assert (second.logprobs, second.stop_reason, second.finish_reason) == (None, "END", "abort")
    assert completion.prompt_logprobs == (expected, expected)


def test_synchronous_twin(url: str) -> None:
    with Client(url) as client:
        result = client.complete("Once", SamplingParams(n=3))
        deltas = list(client.stream("Once", SamplingParams(max_tokens=5)))
    assert [output.text for output in result.outputs] == [STORY] * 3
    assert [output.token_ids for output in result.outputs] == [TOKENS] * 3
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert result.usage == pagewire.Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=15)
    assert result.ttft_s is not None
    assert 0 < result.ttft_s <= result.total_s
    assert "".join(output.text for output in deltas) == STORY


async def test_asynchronous_complete_equals_the_synchronous_one(url: str) -> None:
    async with AsyncClient(url) as client:
        result = await client.complete(prompt_token_ids=[1])
    with Client(url) as client:
        assert client.complete(prompt_token_ids=[1]).outputs == result.outputs


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([delta(0, 0, [1]), delta(0, 2, [3], last=True)], "token 2 where 1 is next"),
        ([delta(0, 0, [1]), delta(0, 0, [1], last=True)], "token 0 where 1 is next"),
        ([delta(0, 0, [1], last=True), delta(0, 1, [2])], "after its last"),
        ([delta(1, 0, [1], last=True)], "not asked for"),
        ([delta(0, 0, [1])], "without the end of sample 0"),
        ([], "without the end of sample 0"),
    ],
)
async def test_a_broken_stream_is_an_error(
    scheduler: ScriptedScheduler, url: str, script: list[pb.GenerateResponse], text: str
) -> None:
    scheduler.script = lambda request, context: iter(script)
    with pytest.raises(pagewire.InternalError, match=text):
        await collect(url, "Once")
    with Client(url) as client, pytest.raises(pagewire.InternalError, match=text):
        client.complete("Once")


@pytest.mark.parametrize(
    ("code", "error_type"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, pagewire.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, pagewire.NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, pagewire.AlreadyExists),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, pagewire.ResourceExhausted),
        (grpc.StatusCode.UNAVAILABLE, pagewire.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, pagewire.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, pagewire.Cancelled),
        (grpc.StatusCode.INTERNAL, pagewire.InternalError),
        (grpc.StatusCode.PERMISSION_DENIED, pagewire.PagewireError),
    ],
)
async def test_statuses_become_typed_errors(
    scheduler: ScriptedScheduler, url: str, code: grpc.StatusCode, error_type: type[pagewire.PagewireError]
) -> None:
    details = (scripted_scheduler.field_violation("sampling.top_p", "is 2"), scripted_scheduler.retry_after(1.5))

    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        scripted_scheduler.abort(context, code, "the reason", *details)
        yield from ()

    scheduler.script = refuse
    with pytest.raises(error_type, match="the reason") as caught:
        await collect(url, "Once")
    with Client(url) as client, pytest.raises(error_type) as caught_synchronously:
        client.complete("Once")
    for error in (caught.value, caught_synchronously.value):
        assert type(error) is error_type
        assert error.code is code
        assert error.field_violations == (pagewire.FieldViolation("sampling.top_p", "is 2"),)
        assert error.retry_delay == 1.5


async def test_no_server_listens() -> None:
    with pytest.raises(pagewire.Unavailable, match=r"no server answers at 127\.0\.0\.1:1 "):
        await collect("127.0.0.1:1", "Once")


async def test_leaving_the_loop_cancels_the_call(scheduler: ScriptedScheduler, url: str) -> None:
    scheduler.script = scripted_scheduler.never_end
    async with AsyncClient(url) as client:
        async with contextlib.aclosing(client.stream("Once")) as outputs:
            async for output in outputs:
                if output.first_token >= 3:
                    break
        assert await asyncio.to_thread(scheduler.ended.wait, 5)


async def test_cancelling_the_task_cancels_the_call(scheduler: ScriptedScheduler, url: str) -> None:
    scheduler.script = scripted_scheduler.never_end
    started = asyncio.Event()

    async def read(client: AsyncClient) -> None:
        async for _ in client.stream("Once"):
            started.set()

    async with AsyncClient(url) as client:
        reading = asyncio.create_task(read(client))
        await started.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(scheduler.ended.wait, 5)


def test_closing_the_synchronous_stream_cancels_the_call(scheduler: ScriptedScheduler, url: str) -> None:
    scheduler.script = scripted_scheduler.never_end
    with Client(url) as client:
        outputs = client.stream("Once")
        next(outputs)
        outputs.close()
        assert scheduler.ended.wait(5)


async def test_timeout_is_the_deadline_of_the_call(scheduler: ScriptedScheduler, url: str) -> None:
    scheduler.script = scripted_scheduler.never_end
    with pytest.raises(pagewire.DeadlineExceeded, match="the timeout passed"):
        await collect(url, "Once", timeout=0.3)
    [remaining] = scheduler.time_remaining
    assert remaining is not None
    # gRPC rounds a deadline up when sending it, by at most 1 in its third digit.
    assert 0 < remaining <= 0.303


async def test_abort_info_and_loads(scheduler: ScriptedScheduler, url: str) -> None:
    async with AsyncClient(url) as client:
        await client.abort("known", tenant="t")
        assert scheduler.requests == [pb.AbortRequest(request_id="known", tenant="t")]
        with pytest.raises(pagewire.NotFound, match="unheard"):
            await client.abort("unheard")
        info = await client.info()
        assert (info.served_model_name, info.max_model_len, info.chat_template, info.worker) == (
            "storyteller", 512, None, None,
        )  # fmt: skip
        scheduler.info.worker.num_device_blocks = 200
        scheduler.info.chat_template = ""
        info = await client.info()
        assert info.chat_template == ""
        assert info.worker is not None
        assert info.worker.num_device_blocks == 200
        assert (await client.loads()).num_held_blocks == 50


def test_server_data_has_every_field_of_the_proto() -> None:
    pairs = [
        (pagewire.ServerInfo, pb.GetServerInfoResponse),
        (pagewire.WorkerInfo, pb.WorkerInfo),
        (pagewire.Loads, pb.GetLoadsResponse),
        (pagewire.Usage, pb.Usage),
        (pagewire.TokenLogprobs, pb.TokenLogprobs),
    ]
    parts_of_top = {pagewire.TokenLogprobs: ["top_token_ids", "top_logprobs"]}  # `top` in the message
    apart = {pagewire.ServerInfo: ["front_end_protocol"]}  # a client does not need it
    for data_type, message in pairs:
        others = parts_of_top.get(data_type, []) + apart.get(data_type, [])
        names = [*(field.name for field in fields(data_type)), *others]
        assert names == list(message.DESCRIPTOR.fields_by_name)


async def test_the_client_connects_at_first_use_and_after_close(url: str) -> None:
    client, blocking = AsyncClient(url), Client(url)
    for _ in range(2):
        assert (await asyncio.to_thread(blocking.complete, "Once")).outputs[0].text == STORY
        assert (await client.complete("Once")).outputs[0].text == STORY
        assert (await client.loads()).num_running == 3
        await asyncio.to_thread(blocking.close)
        await client.aclose()


def test_each_event_loop_has_a_connection_of_its_own(url: str) -> None:
    client = AsyncClient(url)
    texts = [asyncio.run(client.complete("Once")).outputs[0].text for _ in range(3)]
    assert texts == [STORY] * 3


@pytest.mark.parametrize(
    "use",
    [
        "client.complete('Once')",
        "asyncio.run(AsyncClient(url).complete('Once'))",
        "asyncio.run(AsyncClient(url).complete('Once')), client.complete('Once')",
        "next(client.stream('Once'))",
        "stream = client.stream('Once'); next(stream)",
        "threading.Thread(target=lambda: list(client.stream('Once'))).start()",
    ],
)
def test_a_process_ends_quietly_without_closing(url: str, use: str) -> None:
    program = f"import asyncio, threading; from pagewire import *; url = {url!r}; client = Client(url); {use}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""


@pytest.mark.parametrize("sampling", [None, SamplingParams(max_tokens=16, top_p=0.5, seed=1)])
async def test_sampling_fields_by_name(scheduler: ScriptedScheduler, url: str, sampling: SamplingParams | None) -> None:
    """Sampling fields by name change the given parameters. Parameters that are not given are left to the server."""
    client = AsyncClient(url)
    await collect(url, "Once", sampling, max_tokens=4, stop=["x"])
    await asyncio.to_thread(Client(url).complete, "Once", sampling, max_tokens=4, stop=["x"])
    await client.complete("Once", sampling, max_tokens=4, stop=["x"])
    expected = (
        SamplingParams(**{field.name: None for field in fields(SamplingParams)}) if sampling is None else sampling
    )
    assert len(scheduler.requests) == 3
    await collect(url, "Once", replace(expected, max_tokens=4, stop=["x"]))
    assert all(request == scheduler.requests[3] for request in scheduler.requests)
    await client.aclose()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("Once",), {"max_token": 4}, "did you mean max_tokens"),
        (("Once",), {"colour": 4}, "'colour' is neither a sampling parameter nor another argument"),
        (("Once",), {"max_tokens": "four"}, "max_tokens must be an integer"),
        (("Once", {"max_tokens": 4}), {}, r"sampling must be SamplingParams, such as SamplingParams\(max_tokens=4\)"),
        ((7,), {}, "prompt must be a text; pass token ids as prompt_token_ids"),
        (([1, 2, 3],), {}, "prompt must be a text; pass token ids as prompt_token_ids"),
        ((["a", "b"],), {}, "lists of prompts only to complete, chat and embed"),
        ((), {"prompt_token_ids": [[1, 2]]}, "must be a list of integers, of one prompt"),
        ((), {"prompt_token_ids": "12"}, "must be a list of integers, of one prompt"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments: tuple[object, ...], options: dict[str, object], text: str) -> None:
    """Wrong arguments raise an error in the call itself, not when the first output is read."""
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match=text):
            kind("127.0.0.1:1").stream(*arguments, **options)
    with pytest.raises(TypeError, match=text):
        Client("127.0.0.1:1").submit(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (([1, 2, 3],), {}, "prompt 0 of the list is 1, but .* the token ids of one prompt go into prompt_token_ids"),
        ((["a", None],), {}, "prompt 1 of the list is None, but must be a text or token ids"),
        ((["a"],), {"request_id": "x"}, "are for one prompt"),
        ((["a"],), {"prompt_token_ids": [1]}, "are for one prompt"),
        (("a", [SamplingParams()]), {}, "needs a list of prompts"),
    ],
)
def test_wrong_lists_say_what_to_do(arguments: tuple[object, ...], options: dict[str, object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Client("127.0.0.1:1").complete(*arguments, **options)
    with pytest.raises(TypeError, match=text):
        asyncio.run(AsyncClient("127.0.0.1:1").complete(*arguments, **options))


@pytest.mark.parametrize("form", ["{}", "grpc://{}", "grpc://{}/", "dns:///{}", "ipv4:{}"])
def test_forms_of_a_url(url: str, form: str) -> None:
    with Client(form.format(url)) as client:
        assert client.complete("Once").outputs[0].text == STORY


@pytest.mark.parametrize(
    "url", ["", "localhost", "http://localhost:1", "::1:50051", "a:b", "grpc://host", "a:0", "a:70000", " a:1", "a b:1"]
)
def test_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client(url)


def test_tls_and_mutual_tls(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    certificate = self_signed("127.0.0.1")
    pair = [(certificate.key, certificate.cert)]
    ca, key = certificate.write(tmp_path, "server")
    with serving(scheduler, grpc.ssl_server_credentials(pair)) as address:
        with Client(f"grpcs://{address}", tls_ca=ca) as client:
            assert client.complete("Once").outputs[0].text == STORY
        with Client(address, tls_ca=ca) as client:
            assert client.complete("Once").outputs[0].text == STORY
        with Client(address) as client, pytest.raises(pagewire.Unavailable):
            client.complete("Once", timeout=5)
    mutual = grpc.ssl_server_credentials(pair, root_certificates=certificate.cert, require_client_auth=True)
    with serving(scheduler, mutual) as address:
        with Client(address, tls_ca=ca, tls_cert=ca, tls_key=key) as client:
            assert client.complete("Once").outputs[0].text == STORY
        with Client(address, tls_ca=ca) as client, pytest.raises(pagewire.Unavailable):
            client.complete("Once", timeout=5)
    with pytest.raises(ValueError, match="tls_key"):
        Client("127.0.0.1:1", tls_cert=ca)


def test_importing_the_client_is_light() -> None:
    heavy = ("torch", "numpy", "tokenizers", "transformers", "prometheus_client", "jinja2", "yaml", "scheduler_service")
    program = f"import sys, pagewire; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
