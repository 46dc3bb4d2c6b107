"""Rules about sampling parameters alone: the client checks them at construction, with the server's error messages."""

import json
import math
import random
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pagewire
from pagewire import SamplingParams
from pagewire.client.sampling_params import INTEGER_FIELDS
from pagewire.common.wire.sampling_rules import (
    LOGPROB_NUMBERS,
    MAX_ENTRIES,
    MAX_GRAMMAR_BYTES,
    MAX_STOP_TEXT_CHARS,
    RANGES,
)
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc.generate_request import read_request
from scheduler_service.serving.checkpoint.model_info import ModelInfo, read_model_info
from scheduler_service.serving.refusal import RefusedError
from scheduler_service.serving.tenants.caller import Call, Caller
from testing.scheduler_stack import make_checkpoint
from testing.seeds import seeded

EARLY_STOPPING = {
    "heuristic": pb.EARLY_STOPPING_HEURISTIC, False: pb.EARLY_STOPPING_HEURISTIC, "first": pb.EARLY_STOPPING_FIRST,
    True: pb.EARLY_STOPPING_FIRST, "never": pb.EARLY_STOPPING_NEVER,
}  # fmt: skip
STRUCTURES = [
    *({kind: text} for kind in ("json", "regex", "grammar", "structural_tag") for text in ("", "{}")),
    {"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, {"json": {"title": "é" * (MAX_GRAMMAR_BYTES // 2)}},
    {"choice": ["x" * MAX_GRAMMAR_BYTES]}, {"choice": ["a", "b"]}, {"json_object": True},
    {"choice": ["x"] * (MAX_ENTRIES["choice"] + 1)},
]  # fmt: skip
LISTS = {
    "stop": ["", "x", ["x"], ["x", ""], ["x" * (MAX_STOP_TEXT_CHARS + 1)], ["x"] * (MAX_ENTRIES["stop"] + 1), []],
    "stop_token_ids": [[], [1], [1] * (MAX_ENTRIES["stop_token_ids"] + 1)],
    "logprob_token_ids": [[1], [1] * (MAX_ENTRIES["logprob_token_ids"] + 1)],
    "logit_bias": [{}, {1: 100}, {1: -100.5}, {2: math.nan}, dict.fromkeys(range(MAX_ENTRIES["logit_bias"] + 1), 1)],
    "early_stopping": list(EARLY_STOPPING),
    "length_penalty": [1.0, -0.5, 0, math.inf, math.nan],
    "structured_outputs": STRUCTURES,
}


def value_of(name: str, rng: random.Random) -> Any:
    """Return a random value of a field's type, often legal and often just outside the limits.

    Floats are exactly representable in 32 bits, so sending does not change them.
    """
    if rng.random() < 0.1:
        return None
    if name in LISTS:
        return rng.choice(LISTS[name])
    legal = RANGES[name]
    inside = [legal.low + 1, min(legal.high, legal.low + rng.randint(1, 4))]
    outside = [legal.low - 1, legal.low - 2]
    if name not in LOGPROB_NUMBERS:  # whether logprobs of all tokens are allowed depends on the model
        outside.append(legal.low)
    if legal.high != math.inf:
        outside.append(legal.high + 1)
    if name not in INTEGER_FIELDS:
        outside += [legal.high + 0.5, math.nan, math.inf]
    return rng.choice(outside if rng.random() < 0.1 else inside)


def draw(rng: random.Random) -> dict[str, Any]:
    names = [*RANGES, *LISTS]
    beam = ["beam_width"] if rng.random() < 0.5 else []
    return {name: value_of(name, rng) for name in {*beam, *rng.sample(names, rng.randint(0, 4))}}


def message_of(drawn: dict[str, Any]) -> pb.SamplingParams:
    """Return the message that another client would send. Raises ValueError for values that no message can contain."""
    given = {field.name: field.default for field in fields(SamplingParams)} | drawn
    if drawn.get("beam_width") is not None and "temperature" not in drawn:
        del given["temperature"]
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "early_stopping" in given:
        given["early_stopping"] = EARLY_STOPPING[given["early_stopping"]]
    for kind, value in given.pop("structured_outputs", {}).items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        given["json_schema" if kind == "json" else kind] = {"texts": value} if kind == "choice" else text
    return pb.SamplingParams(**given)


def servers_refusal(drawn: dict[str, Any], model: ModelInfo) -> tuple[str, str] | None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), sampling=message_of(drawn))
    try:
        parsed = read_request(message, Call(Caller(None)), model)
        parsed.fit([1], model, 2**40, None)
    except RefusedError as refusal:
        return refusal.field, str(refusal)
    return None


def refusal_when_made(drawn: dict[str, Any]) -> tuple[str, str] | None:
    try:
        SamplingParams(**drawn)
    except pagewire.InvalidRequest as error:
        return error.field_violations[0].field, str(error)
    return None


def test_parameters_are_refused_when_made_if_the_server_would(tmp_path: Path) -> None:
    model = read_model_info(str(make_checkpoint(tmp_path / "model")))
    rng = seeded()
    refused: Counter[str] = Counter()
    for _ in range(6000):
        drawn = draw(rng)
        found = refusal_when_made(drawn)
        refused[found[0].partition("[")[0] if found else ""] += 1
        try:
            expected = servers_refusal(drawn, model)
        except ValueError:  # below 0, or above the range of the field
            assert found is not None, drawn
        else:
            assert found == expected, drawn
    told = {name.removeprefix("sampling.") for name in refused}
    assert told >= {*RANGES, *LISTS, "json_schema", "regex", "choice", ""} - {"structured_outputs"}
    assert refused[""] > 500


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"min_tokens": 17}, "min_tokens is 17, but the output has at most 16 tokens; lower min_tokens"),
        ({"beam_width": 2, "n": 3}, "n is 3, but must be at most the beam_width of 2"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature is 0.5, but beam search makes no random choices"),
        ({"beam_width": 2, "stop": "x"}, "stop is set, but beam search has no stop texts"),
        ({"length_penalty": 2}, "length_penalty is set, but without beam_width there is no beam search"),
        ({"top_p": 1.5}, "top_p is 1.5, but must be above 0 and at most 1"),
        ({"temperature": 100.000001}, "temperature is 100.000001, but must be 0 to 100"),
        ({"temperature": -0.10000000149011612}, "temperature is -0.1, but must be 0 to 100"),
    ],
)
def test_a_refusal_names_the_field(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        SamplingParams(**wrong)
    with pytest.raises(pagewire.InvalidRequest, match=f"^{text}"):
        SamplingParams().updated(**wrong)


def test_what_is_left_to_the_server_is_not_judged() -> None:
    assert SamplingParams(min_tokens=99, max_tokens=None).min_tokens == 99
    assert SamplingParams(beam_width=2, n=None).temperature == 1
    assert SamplingParams(beam_width=2).updated(top_p=None).beam_width == 2
