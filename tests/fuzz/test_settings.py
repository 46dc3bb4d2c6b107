"""The settings of a campaign, and a short campaign with all of them."""

import argparse
import random
from dataclasses import replace

import pytest

from testing.kernels.compiler import skip_without_compiler
from testing.serving.received import Received, Sample
from tests.fuzz.__main__ import FIRST_KILLS, num_kills_of_round, parser
from tests.fuzz.drawn_request import draw_requests, draw_turns
from tests.fuzz.fuzz_round import run_round
from tests.fuzz.memory import CacheShape, Lengths
from tests.fuzz.report import Report
from tests.fuzz.setting import Setting, parse_count, parse_families, parse_memory, parse_weights

KNOWN = ("llama", "gpt_oss", "gemma3_text")


def test_families_are_named_one_or_several():
    assert parse_families("llama", KNOWN) == ("llama",)
    assert parse_families("gpt_oss,gemma3", KNOWN) == ("gpt_oss", "gemma3_text")


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (
            lambda text: parse_families(text, KNOWN),
            "llama,lama",
            "family 'lama' is not known; use gemma3_text, gpt_oss, llama",
        ),
        (lambda text: parse_families(text, KNOWN), "", "family '' is not known; use gemma3_text, gpt_oss, llama"),
        (parse_memory, "0", "'0' is not a share; use a number above 0 and up to 10, such as 0.33"),
        (parse_memory, "nan", "'nan' is not a share; use a number above 0 and up to 10, such as 0.33"),
        (parse_memory, "half", "'half' is not a share; use a number above 0 and up to 10, such as 0.33"),
        (parse_weights, "int8,fp4", "format 'fp4' is not known; use float32, bfloat16, int8, int4"),
        (parse_count, "-1", "'-1' is not a count; use a whole number from 0"),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        parse(text)
    assert str(refusal.value) == message


def test_the_flags_of_a_fault_select_the_same_round():
    setting = Setting(("llama",), 0.33, 3, ("float32", "int8"))
    found = parser().parse_args(["--memory", "0.33", "--kills", "3", "--weights", "float32,int8"])
    assert setting.flags == " --family llama --memory 0.33 --kills 3 --weights float32,int8"
    assert (found.memory, found.kills, found.family, found.weights) == (0.33, 3, (), ("float32", "int8"))
    assert Setting().flags == ""


def test_the_kills_are_divided_among_the_rounds():
    assert num_kills_of_round(10, 1) == 10
    assert [num_kills_of_round(10, 4), num_kills_of_round(7, 3), num_kills_of_round(4, 2)] == [3, 3, 2]
    assert [num_kills_of_round(10, 2.5), num_kills_of_round(3, -0.1), num_kills_of_round(0, 0.0)] == [4, 3, 0]
    assert [num_kills_of_round(100, None), num_kills_of_round(1, None)] == [FIRST_KILLS, 1]


def test_blocks_are_counted_in_each_layer_group():
    request = Lengths(num_prompt=100, num_output=20, max_output=60, num_rows=1)
    full = CacheShape(block_size=8, windows=(0,), chunk=16, max_rows=16)
    assert full.num_blocks(request, 20) == 15
    # A window of 20 and a chunk of 16 touch 35 positions, in at most six blocks.
    mixed = CacheShape(block_size=8, windows=(0, 20), chunk=16, max_rows=16)
    assert mixed.num_blocks(request, 20) == 15 + 6
    assert mixed.num_needed([request], 10) == 210
    assert mixed.num_needed([request], 40) == 16 * 21, "only 16 rows run at once"
    assert mixed.num_device_blocks([request], 10, 0.5) == 105
    assert mixed.num_device_blocks([request], 10, 0.01) == 20 + 6, "a request must fit alone"


def test_samples_share_the_blocks_of_the_prompt():
    shape = CacheShape(block_size=8, windows=(0,), chunk=16, max_rows=16)
    request = Lengths(num_prompt=64, num_output=8, max_output=8, num_rows=3)
    assert shape.num_blocks(request, 8) == 8 + 3 * (1 + 1)
    assert replace(shape, has_states=True).num_blocks(request, 8) == 3 * (9 + 1), "admission counts them all for beams"


def test_a_turn_begins_with_the_conversation():
    print("seed 1")
    requests = draw_requests(random.Random(1), 60)
    turns = draw_turns(random.Random(1), requests)
    assert len(turns) > 3
    for turn in turns:
        previous = [*requests, *turns][turn.follows]
        whole = turn.after_turn(previous, [7, 8])
        assert whole.arguments["prompt_token_ids"][: -len(turn.arguments["prompt_token_ids"])] == [
            *previous.arguments["prompt_token_ids"],
            7,
            8,
        ]


def test_lengths_are_those_of_the_longest_sample():
    request = next(each for each in draw_requests(random.Random(2), 60) if not each.is_embedding and each.num_rows == 3)
    received = Received({0: Sample([1, 2]), 1: Sample([1, 2, 3])})
    max_tokens = request.arguments["sampling"].options["max_tokens"]
    assert Lengths.of(request, 5, received) == Lengths(5, 3, max_tokens, 3)


def test_a_cache_that_is_large_enough_is_noticed():
    assert Report(1).unused() == ["preemption", "swap"]
    assert Report(1, num_preemptions=2).unused() == ["swap"]
    assert not Report(1, num_preemptions=2, num_swaps=1).unused()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "mistral"])
async def test_kills_and_a_third_of_the_memory_change_no_token(family):
    skip_without_compiler()
    setting = Setting((family,), 0.33, 2)
    print(f"seed 5{setting.flags}")
    report = await run_round(5, 60, setting)
    print(report)
    assert not report.faults, "\n".join(report.faults)
    assert report.num_kills == 2
    assert not report.unused()
