"""10,000 mutated requests of both public services: each is served, or refused with an expected status."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.scheduler_stack import Stack, expected_tokens, make_checkpoint, request, serve
from testing.seeds import seeded
from testing.serving.front_end import FrontEnd, serve_front_end
from tests.contract.bench_stack import GoodLogitsWorker

pytestmark = pytest.mark.thorough

NUM_REQUESTS = 10_000
NUM_AT_ONCE = 16
MAX_MODEL_LEN = 32  # so that valid requests end soon
PROMPT = [5, 6, 7, 8, 9]
OURS = "/pagewire.scheduler.v1.SchedulerService/"
SHARED = OURS + "GenerateMany"
THEIRS = "/vllm.grpc.engine.VllmEngine/"

_sampling = {
    "max_tokens": 4,
    "seed": 1,
    "n": 2,
    "stop": ["x"],
    "stop_token_ids": [7],
    "logprobs": 2,
    "logit_bias": {3: 1},
}
_generate = pb.GenerateRequest(
    request_id="r", tenant="t", cache_salt="s", priority=1, token_ids={"ids": PROMPT}, sampling=_sampling,
    session_id="chat", will_return=True, retention_seconds=60,
)  # fmt: skip
_text = pb.GenerateRequest(text="once upon a time é", sampling={"max_tokens": 4, "temperature": 0.5, "top_p": 0.9})
_beam = pb.GenerateRequest(token_ids={"ids": PROMPT}, sampling={"beam_width": 3, "n": 2, "length_penalty": 0.5})
_structured = [
    pb.GenerateRequest(token_ids={"ids": PROMPT}, sampling={"max_tokens": 4, "n": 2} | grammar)
    for grammar in (
        {"json_schema": '{"type": "object", "properties": {"x": {"type": "integer"}}}', "min_tokens": 2},
        {"choice": {"texts": ["x", "once upon"]}, "ignore_eos": True},
        {"regex": "[a-z]+", "beam_width": 3},
    )
]
_resolved = pb.ResolvedRequest(
    request_id="r", tenant="t", cache_salt="s", priority=1, prompt_token_ids=PROMPT, max_tokens=4, seed=1, n=2,
    session_id="chat", will_return=True, retention_seconds=60,
    sampling={
        "temperature": 1, "top_p": 1, "repetition_penalty": 1, "stop_token_ids": [0, 7], "num_logprobs": 2,
        "logit_bias_token_ids": [3], "logit_bias_values": [1],
    },
)  # fmt: skip
_resolved_beam = pb.ResolvedRequest(
    request_id="b", prompt_token_ids=PROMPT, n=2, beam={"beam_width": 3, "length_penalty": 0.5, "early_stopping": 1},
    sampling={"top_p": 1, "repetition_penalty": 1, "stop_token_ids": [0], "num_candidates": 6},
    grammar={"kind": 3, "text": "[a-z]+", "end_token_ids": [0]},
)  # fmt: skip
# Method, whether the response is a stream, and a valid request.
GOOD: list[tuple[str, bool, Message]] = [
    (OURS + "Generate", True, _generate),
    (OURS + "Generate", True, _text),
    (OURS + "Generate", True, _beam),
    *[(OURS + "Generate", True, message) for message in _structured],
    (SHARED, True, pb.GenerateManyRequest(submit={"stream_id": 3, "request": _generate, "timeout_seconds": 1})),
    (SHARED, True, pb.GenerateManyRequest(submit={"stream_id": 3, "request": _beam, "token_only": True})),
    (SHARED, True, pb.GenerateManyRequest(submit={"stream_id": 3, "resolved": _resolved, "timeout_seconds": 1})),
    (SHARED, True, pb.GenerateManyRequest(submit={"stream_id": 3, "resolved": _resolved_beam})),
    *[(SHARED, True, pb.GenerateManyRequest(submit={"request": message})) for message in _structured],
    (SHARED, True, pb.GenerateManyRequest(stop={"stream_id": 3, "num_tokens": 1})),
    (OURS + "Embed", False, pb.EmbedRequest(request_id="r", tenant="t", priority=1, token_ids={"ids": PROMPT})),
    (OURS + "Abort", False, pb.AbortRequest(request_id="r", tenant="t")),
    (OURS + "Submit", False, pb.SubmitRequest(request=_generate, record=b"r")),
    (OURS + "Submit", False, pb.SubmitRequest(resolved=_resolved, record=b"r", stop=["x"], skip_special_tokens=True)),
    (OURS + "Attach", True, pb.AttachRequest(request_id="r", tenant="t", from_token=1, from_tokens=[1, 2])),
    (OURS + "GetResult", False, pb.GetResultRequest(request_id="r", tenant="t")),
    (OURS + "KeepRecord", False, pb.KeepRecordRequest(request_id="k", tenant="t", record=b"r")),
    (OURS + "DeleteResult", False, pb.DeleteResultRequest(request_id="r", tenant="t")),
    (OURS + "GetRequest", False, pb.GetRequestRequest(request_id="r", tenant="t")),
    (OURS + "GetBlocks", False, pb.GetBlocksRequest()),
    (OURS + "SubscribeKvEvents", True, pb.SubscribeKvEventsRequest(start_sequence_number=1)),
    (OURS + "Tokenize", False, pb.TokenizeRequest(texts=["once", "é😀"], add_special_tokens=False)),
    (OURS + "Detokenize", False, pb.DetokenizeRequest(prompts=[{"ids": PROMPT}], skip_special_tokens=False)),
    (OURS + "GetServerInfo", False, pb.GetServerInfoRequest()),
    (OURS + "GetLoads", False, pb.GetLoadsRequest()),
    (
        THEIRS + "Generate",
        True,
        vllm.GenerateRequest(
            request_id="r", tokenized={"input_ids": PROMPT}, stream=True, sampling_params=_sampling | {"min_p": 0.5}
        ),
    ),
    (THEIRS + "Generate", True, vllm.GenerateRequest(text="once", sampling_params={"max_tokens": 4, "temperature": 1})),
    (THEIRS + "Embed", False, vllm.EmbedRequest(request_id="r", tokenized={"input_ids": PROMPT})),
    (THEIRS + "HealthCheck", False, vllm.HealthCheckRequest()),
    (THEIRS + "Abort", False, vllm.AbortRequest(request_ids=["r", "q"])),
    (THEIRS + "GetModelInfo", False, vllm.GetModelInfoRequest()),
    (THEIRS + "GetServerInfo", False, vllm.GetServerInfoRequest()),
    (THEIRS + "GetLoads", False, vllm.GetLoadsRequest(dp_rank=0, include=["core"])),
    (THEIRS + "GetTokenizer", True, common.GetTokenizerRequest()),
    (THEIRS + "SubscribeKvEvents", True, common.SubscribeKvEventsRequest(start_sequence_number=1)),
    (THEIRS + "FlushCache", False, common.FlushCacheRequest(timeout_s=0.1)),
    (THEIRS + "StartProfile", False, common.StartProfileRequest(output_dir="/", num_steps=1)),
    (THEIRS + "StopProfile", False, common.StopProfileRequest()),
]
# The expected statuses. CANCELLED comes from the test, which does not read a stream to its end.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
# The only methods that may return UNIMPLEMENTED: routers learn from this status that an engine lacks the method.
MISSING = {THEIRS + "StartProfile", THEIRS + "StopProfile"}
# Methods whose requests another mutant may abort, and whose response cannot report that.
ABORTABLE = {OURS + "Embed", THEIRS + "Embed"}
INTEGERS = (0, 1, 2, 127, 128, 255, 299, 300, 2**31 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 3e38, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "[a-z", "{}", 'start: "a"', "{", "r", "q", "é😀", "a" * 129, "once upon a time", "\0")


INTEGER_TYPES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31),
}
EXTREMES = [-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
EXTREMES += [2**31 - 2, 2**32 - 2, 2**63 - 2, 2**64 - 2]


def value_for(rng: random.Random, field: FieldDescriptor) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
            return rng.choice((*INTEGERS, -1, -(2**31)))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 99))
        case _:
            return rng.choice((*INTEGERS, 2**32 - 1))


def mutate_fields(rng: random.Random, message: Message) -> None:
    """Change one random field of a message, at any depth."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        if entry["value"].message_type is None:
            getattr(message, field.name)[value_for(rng, entry["key"])] = value_for(rng, entry["value"])
    elif field.message_type is not None:
        child = getattr(message, field.name)
        if field.is_repeated:
            child = child.add()
        else:
            child.SetInParent()
        mutate_fields(rng, child)
    elif field.is_repeated:
        getattr(message, field.name).extend(value_for(rng, field) for _ in range(rng.choice((1, 2, 17, 65))))
    else:
        setattr(message, field.name, value_for(rng, field))


def mutate_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.randrange(1, 9))
        match rng.randrange(6):
            case 0:
                del changed[start:end]
            case 1:
                changed[start:start] = rng.randbytes(end - start + 1)
            case 2:
                changed[start:start] = changed[start:end]
            case 3:
                del changed[start:]
            case 4:
                changed[start:] = other[: rng.randrange(len(other) + 1)]
            case 5 if start < len(changed):
                changed[start] ^= 1 << rng.randrange(8)
    return bytes(changed)


def mutant(rng: random.Random) -> tuple[str, bool, bytes]:
    method, is_stream, good = rng.choice(GOOD)
    if rng.random() < 0.4:
        return method, is_stream, mutate_bytes(rng, good.SerializeToString(), rng.choice(GOOD)[2].SerializeToString())
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(rng.randrange(1, 4)):
        mutate_fields(rng, message)
    return method, is_stream, message.SerializeToString()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose end token is in its tokenizer, so that grammars are supported."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "with_end", eos_token_id=0)


Setter = Callable[[Message, int], None]


def integer_fields(descriptor: Descriptor) -> Iterator[tuple[str, tuple[int, int], Setter]]:
    """Yield the path, range and setter of every integer field of a message, at any depth."""
    for field in descriptor.fields:
        name, kind = field.name, field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            yield from map_fields(field)
        elif kind is not None and not kind.full_name.startswith("google."):
            for path, bounds, set_value in integer_fields(kind):
                yield f"{name}.{path}", bounds, within(field, set_value)
        elif field.cpp_type in INTEGER_TYPES:
            yield name, INTEGER_TYPES[field.cpp_type], partial(set_integer, field)


def set_integer(field: FieldDescriptor, message: Message, value: int) -> None:
    if field.is_repeated:
        getattr(message, field.name)[:] = [value]
    else:
        setattr(message, field.name, value)


def within(field: FieldDescriptor, set_value: Setter) -> Setter:
    def set_in_child(message: Message, value: int) -> None:
        child = getattr(message, field.name)
        set_value((child[0] if child else child.add()) if field.is_repeated else child, value)

    return set_in_child


def map_fields(field: FieldDescriptor) -> Iterator[tuple[str, tuple[int, int], Setter]]:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if key.cpp_type in INTEGER_TYPES:
        bounds = INTEGER_TYPES[key.cpp_type]
        yield f"{field.name}.key", bounds, lambda message, number: getattr(message, field.name).update({number: 1})
    assert value.cpp_type not in INTEGER_TYPES, "no map has integers for values yet"


def extreme_requests() -> Iterator[tuple[str, str, bool, bytes]]:
    """Yield a description, method, response type (stream or not) and serialized message for each extreme request."""
    for method, is_stream, good in GOOD:
        for path, (low, end), set_value in integer_fields(good.DESCRIPTOR):
            for value in EXTREMES:
                if low <= value < end:
                    message = type(good)()
                    message.CopyFrom(good)
                    set_value(message, value)
                    yield f"{method} {path} = {value}", method, is_stream, message.SerializeToString()


async def send(stack: Stack | FrontEnd, method: str, is_stream: bool, data: bytes) -> grpc.StatusCode:
    """Send a request. Return its status, which is OK for a stream that has begun."""
    if method == SHARED:
        return await send_shared(stack, data)
    if not is_stream:
        call = stack.channel.unary_unary(method)(data, timeout=2)
        return await call.code()
    call = stack.channel.unary_stream(method)(data, timeout=2)
    try:
        await call.read()
    except grpc.aio.AioRpcError:
        return await call.code()
    call.cancel()
    return grpc.StatusCode.OK


async def send_shared(stack: Stack | FrontEnd, data: bytes) -> grpc.StatusCode:
    """Send a message on a new GenerateMany RPC and read the RPC to its end. Return its status.

    Failures of single requests are messages of the stream. Their statuses are checked here.
    """
    call = stack.channel.stream_stream(SHARED)(timeout=2)
    try:
        await call.write(data)
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            for failure in pb.GenerateManyResponse.FromString(answer).failures:
                code = next(code for code in grpc.StatusCode if code.value[0] == failure.code)
                assert code in ALLOWED, f"{data!r}: {failure}"
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        pass  # errors of gRPC for an RPC that the server ended while the client was writing
    return await call.code()


@pytest.mark.parametrize("seed", [1])
async def test_mutated_requests_are_served_or_refused_as_what_they_are(checkpoint: Path, seed: int) -> None:
    rng = seeded(seed)
    worker = GoodLogitsWorker(read_model_info(str(checkpoint)).digest, max_model_len=MAX_MODEL_LEN)
    await worker.start()
    codes: Counter[tuple[str, grpc.StatusCode]] = Counter()
    async with serve(checkpoint, worker=worker, max_detached_bytes=1000, max_waiting_requests=64) as stack:
        mutants = iter([mutant(rng) for _ in range(NUM_REQUESTS)])

        async def send_some() -> None:
            for method, is_stream, data in mutants:
                code = await send(stack, method, is_stream, data)
                is_missing = code is grpc.StatusCode.UNIMPLEMENTED and method in MISSING
                is_aborted = code is grpc.StatusCode.CANCELLED and method in ABORTABLE
                assert code in ALLOWED or is_missing or is_aborted, f"{method} {data!r}: {code}"
                codes[method, code] += 1

        await asyncio.gather(*(send_some() for _ in range(NUM_AT_ONCE)))
        assert codes.total() == NUM_REQUESTS
        for method, _, _ in GOOD:
            assert sum(count for (each, _), count in codes.items() if each == method) > 100, method
        assert codes[OURS + "Generate", grpc.StatusCode.OK] > 50
        assert codes[OURS + "Generate", grpc.StatusCode.INVALID_ARGUMENT] > 50
        assert codes[OURS + "Embed", grpc.StatusCode.OK] > 20
        assert len(worker.grammars) > 100
        await stack.until_idle()
        result = await stack.generate(request(PROMPT, max_tokens=9))
        assert result.token_ids[0] == expected_tokens(PROMPT, 9)
        assert len(worker.epochs) == 1, "no mutant has cost the worker's session"


@asynccontextmanager
async def scheduler_or_front_end(checkpoint: Path, *, is_front_end: bool) -> AsyncIterator[Stack | FrontEnd]:
    worker = GoodLogitsWorker(read_model_info(str(checkpoint)).digest, max_model_len=MAX_MODEL_LEN)
    await worker.start()
    async with serve(checkpoint, worker=worker, max_detached_bytes=1000) as stack:
        if not is_front_end:
            yield stack
            return
        async with serve_front_end(checkpoint, stack.url) as front:
            yield front


@pytest.mark.parametrize("is_front_end", [False, True], ids=["scheduler", "front end"])
async def test_no_integer_is_too_extreme_for_an_answer(checkpoint: Path, is_front_end: bool) -> None:
    """No extreme integer causes an unexpected status. Each extreme value is sent in a request of its own."""
    sent = list(extreme_requests())
    assert len({name.rpartition(" = ")[0] for name, *_ in sent}) > 50
    async with scheduler_or_front_end(checkpoint, is_front_end=is_front_end) as stack:
        todo = iter(sent)
        num_refused = 0

        async def send_some() -> None:
            nonlocal num_refused
            for name, method, is_stream, data in todo:
                code = await send(stack, method, is_stream, data)
                is_missing = code is grpc.StatusCode.UNIMPLEMENTED and (is_front_end or method in MISSING)
                assert code in ALLOWED or is_missing, f"{name}: {code}"
                num_refused += code is grpc.StatusCode.INVALID_ARGUMENT

        await asyncio.gather(*(send_some() for _ in range(NUM_AT_ONCE)))
        assert num_refused > 100
        result = await stack.generate(request(PROMPT, max_tokens=9))
        assert result.token_ids[0] == expected_tokens(PROMPT, 9)
