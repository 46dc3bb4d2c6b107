"""Tables that translate between dataclasses and messages: supported fields, and errors for invalid tables."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from enum import Enum
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message

from pagewire.client import wire
from pagewire.client.completion import Output, Result
from pagewire.client.server_info import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.common.wire.transport.translation import decoder, encoder, enum_names, unknown_field
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from tests.contract.drawn_data import drawn_message


@dataclass(frozen=True)
class Holder:
    request_id: str | None
    num_blocks: int


def test_what_is_not_set_is_none() -> None:
    decode, encode = decoder(Holder, pb.BlockHolder), encoder(Holder, pb.BlockHolder)
    assert decode(pb.BlockHolder(num_blocks=3)) == Holder(None, 3)
    assert decode(pb.BlockHolder(request_id="", num_blocks=0)) == Holder("", 0)
    assert encode(Holder(None, 3)) == pb.BlockHolder(num_blocks=3)
    assert encode(Holder("", 0)) == pb.BlockHolder(request_id="", num_blocks=0)


def test_a_field_that_one_side_lacks_is_noticed() -> None:
    more = make_dataclass("More", [("request_id", str), ("num_blocks", int), ("colour", str)])
    less = make_dataclass("Less", [("num_blocks", int)])
    for data_type, name in ((more, "colour"), (less, "request_id")):
        for make in (decoder, encoder):
            with pytest.raises(TypeError, match=f"BlockHolder differ in the fields {name}"):
                make(data_type, pb.BlockHolder)
        decoder(data_type, pb.BlockHolder, apart=(name,))
        with pytest.raises(TypeError, match="BlockHolder differ in the fields num_blocks"):
            decoder(data_type, pb.BlockHolder, apart=(name, "num_blocks"))


def test_separate_fields_are_passed_as_arguments() -> None:
    more = make_dataclass("More", [("colour", str), ("num_blocks", int)], frozen=True)
    decode = decoder(more, pb.BlockHolder, apart=("colour", "request_id"))
    assert decode(pb.BlockHolder(num_blocks=3), colour="red") == more("red", 3)
    encode = encoder(more, pb.BlockHolder, apart=("colour", "request_id"))
    assert encode(more("red", 3)) == pb.BlockHolder(num_blocks=3)


def test_enums_are_translated_by_number() -> None:
    class Reason(Enum):
        STALE_EPOCH = 1

    refusal = make_dataclass("Refusal", [("reason", Reason)], frozen=True)
    apart = ("epoch", "instance_id", "message")
    decode = decoder(refusal, worker_pb2.Refusal, apart=apart)
    assert decode(worker_pb2.Refusal(reason=worker_pb2.Refusal.REASON_STALE_EPOCH)) == refusal(Reason.STALE_EPOCH)
    for number in (0, 2, 99):
        with pytest.raises(ValueError, match=f"{number} is not a valid"):
            decode(worker_pb2.Refusal(reason=number))


def test_values_of_an_enum_are_named_without_their_prefix() -> None:
    assert enum_names(pb.EarlyStopping.DESCRIPTOR) == {1: "heuristic", 2: "first", 3: "never"}
    assert enum_names(worker_pb2.Refusal.Reason.DESCRIPTOR)[3] == "future_epoch"


def test_unknown_fields_are_found_within_messages() -> None:
    unknown = worker_pb2.Logprobs.FromString(b"\x98\x06\x01")
    result = worker_pb2.StepResult(prompt_logprobs=[worker_pb2.PromptLogprobs(), {"logprobs": unknown}])
    expected = "pagewire.worker.v1.Logprobs has a field that this version does not know, number 99"
    assert unknown_field(result) == expected
    assert unknown_field(worker_pb2.StepResult(step=1)) is None


# The decoders of the client, with their types. The dictionary names fields whose name or form differs in the message.
ANSWERS: list[tuple[Any, type[Any], type[Message], dict[str, Any]]] = [
    (wire.decode_loads, Loads, pb.GetLoadsResponse, {}),
    (wire.decode_block_map, BlockMap, pb.GetBlocksResponse, {}),
    (wire.decode_server_info, ServerInfo, pb.GetServerInfoResponse, {"model_digest": lambda m: m.model_digest.hex()}),
    (wire.decode_report, RequestReport, pb.GetRequestResponse, {"state": lambda m: wire.REQUEST_STATES[m.state]}),
    (
        wire.decode_output,
        Output,
        pb.GenerateResponse,
        {"finish_reason": lambda m: wire.FINISH_REASONS[m.finish_reason], "stop_reason": lambda m: m.stop_text},
    ),
    (
        wire.decode_result,
        Result,
        pb.GetResultResponse,
        {
            "state": lambda m: wire.RESULT_STATES[m.state],
            "outputs": lambda m: tuple(map(wire.decode_output, m.outputs)),
            "error": None,
        },
    ),
]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("decode", "data_type", "message_type", "others"), ANSWERS, ids=[answer[1].__name__ for answer in ANSWERS]
)
def test_a_client_is_told_every_field(
    decode: Any, data_type: type[Any], message_type: type[Message], others: dict[str, Any], seed: int
) -> None:
    print(f"seed {seed}")
    message = drawn_message(message_type, Random(seed))
    if isinstance(message, pb.GetResultResponse):
        message.failure.code = 14
    decoded = decode(message)
    for field in fields(data_type):
        found = getattr(decoded, field.name)
        if field.name not in others:
            assert plain(found) == plain(getattr(message, field.name)), field.name
        elif others[field.name] is not None:
            assert found == others[field.name](message), field.name
    absent = decode(
        message_type(**{name: getattr(message, name) for name in ("state", "finish_reason") if name in others})
    )
    assert all(
        getattr(absent, field.name) in (None, "", 0, (), {}, False)
        for field in fields(data_type)
        if field.name not in others
    )


def plain(value: Any) -> Any:
    """Return a message or a dataclass as nested lists of its field values."""
    if isinstance(value, str | bytes | int | float | None):
        return value
    if isinstance(value, pb.TokenLogprobs):  # its columns repeat the tokens in `top`, and may have more
        columns = zip(value.top_token_ids, value.top_logprobs, strict=False)
        return [value.token_id, value.logprob, value.rank, [*plain(value.top), *map(list, columns)]]
    if isinstance(value, Message):
        return [plain(getattr(value, field.name)) for field in value.DESCRIPTOR.fields]
    if hasattr(value, "__dataclass_fields__"):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return dict(value)
    return [plain(item) for item in value]
