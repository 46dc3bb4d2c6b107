"""`pagewire.LLM` with both services: results, options, threads, and shutdown."""

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import pagewire
from pagewire import LLM, BeamSearchParams, SamplingParams, installation
from pagewire.llm.llm import DEFAULT_SAMPLING
from testing.services import ENVIRON, children_of
from tests.environments import forgetting
from tests.thorough import thorough

MODEL = Path(__file__).parents[2] / "models" / "storyteller"
OPTIONS = {"num_threads": 1, "num_device_blocks": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Once upon a time", "The little dog", "Max and Lily"]
# The beginning of every test program: an LLM, and the process ids of its services.
BEGIN = f"""
import os, signal, sys
from pagewire import LLM, SamplingParams
from testing.services import children_of
long = SamplingParams(max_tokens=400, ignore_eos=True)
llm = LLM({str(MODEL)!r}, **{OPTIONS!r})
[server] = children_of(os.getpid())
print(server, *children_of(server), flush=True)
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS) as made:
        yield made


def texts_of(outputs: list[pagewire.RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_results_come_in_order_and_read_both_ways(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    alone = [llm.client.complete(prompt, GREEDY).outputs[0] for prompt in PROMPTS]
    assert texts_of(outputs) == [each.text for each in alone]
    for output, expected, prompt in zip(outputs, alone, PROMPTS, strict=True):
        assert (output["text"], output["token_ids"]) == (expected.text, list(expected.token_ids))
        assert dict(output) == {"text": expected.text, "token_ids": list(expected.token_ids)}
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (output["text"], output["token_ids"])
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
        assert (output.prompt, output.finished) == (prompt, True)
        assert output.prompt_token_ids == llm.client.tokenize(prompt)
        with pytest.raises(KeyError, match="'outputs' is none of text, token_ids"):
            output["outputs"]
    assert len({output.request_id for output in outputs}) == len(PROMPTS)


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text, token_ids = PROMPTS[0], llm.client.tokenize(PROMPTS[0])
    [expected] = texts_of(llm.generate(text, GREEDY))
    for prompt in (
        token_ids,
        {"prompt": text},
        {"prompt_token_ids": token_ids},
        {"prompt_token_ids": tuple(token_ids)},
    ):
        assert texts_of(llm.generate(prompt, GREEDY)) == [expected]
        assert texts_of(llm.generate([prompt, text], GREEDY)) == [expected, expected]
    assert texts_of(llm.generate(numpy.array(token_ids), GREEDY)) == [expected]
    assert texts_of(llm.generate(iter(numpy.array([text, text])), GREEDY)) == [expected, expected]
    [told] = llm.generate({"prompt": "told back", "prompt_token_ids": token_ids}, GREEDY)
    assert (told.prompt, told["text"]) == ("told back", expected)
    assert llm.generate(token_ids, GREEDY)[0].prompt is None
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "options", "error", "text"),
    [
        (5, {}, TypeError, "prompts must be a text, token ids, a mapping, or a list of those; got 5"),
        (["a", None], {}, TypeError, "prompt 1 of the list is None"),
        ([{}], {}, ValueError, "prompt 0 is a mapping without prompt and prompt_token_ids"),
        ([{"prompt": 5}], {}, TypeError, "prompt 0's text must be a text"),
        ([{"prompt_token_ids": "5"}], {}, TypeError, "must be a list of integers"),
        ([{"prompt_token_ids": b"5"}], {}, TypeError, "prompt 0's prompt_token_ids must be a list of integers"),
        (b"abc", {}, TypeError, "^prompts must be a text, token ids, a mapping, or a list of those; got b'abc'"),
        (bytearray(b"abc"), {}, TypeError, "^prompts must be"),
        (None, {}, TypeError, "^prompts must be"),
        ([b"abc"], {}, TypeError, "^prompts: prompt 0 of the list is b'abc', but must be a text or token ids"),
        ([[[1]]], {}, TypeError, "^prompts: prompt 0 of the list"),
        (torch.tensor([1, 2]), {}, TypeError, "^prompts: prompt 0 of the list"),
        ([torch.tensor([1, 2])], {}, TypeError, "^prompts: prompt 0 of the list"),
        (torch.tensor(1), {}, TypeError, "^prompts must be"),
        (["a", "b\ud800"], {}, TypeError, r"^prompts\[1\] has '\\ud800' at 1, half a character"),
        ("\ud800", {}, pagewire.InvalidRequest, r"^prompts\[0\] has"),
        ({"a", "b"}, {}, TypeError, "^prompts must be"),
        (["a"], {"sampling_params": "abc"}, TypeError, "^sampling_params must be pagewire.SamplingParams, got 'abc'"),
        (["a"], {"use_tqdm": GREEDY}, TypeError, "^use_tqdm must be a bool, or a class such as tqdm's; got Sampling"),
        (["a"], {"priority": torch.tensor([5])}, TypeError, r"^priority must be an integer, got tensor\(5\)"),
        (["a"], {"priority": 5}, TypeError, "^priority must be a list of integers; got 5"),
        ([{"prompt": "a", "multi_modal_data": {}}], {}, ValueError, "prompt 0's multi_modal_data is not supported"),
        (["a", "b"], {"sampling_params": [GREEDY]}, ValueError, "2 prompts and 1 sampling parameters"),
        (["a"], {"sampling_params": {"max_tokens": 4}}, TypeError, "sampling_params must be pagewire.SamplingParams"),
        (["a"], {"priority": [1, 2]}, ValueError, "1 prompts and 2 priorities"),
        (["a"], {"lora_request": 1}, ValueError, "lora_request is not supported"),
        (["a", [5000]], {}, pagewire.InvalidRequest, "^prompt 1: .*5000"),
        (["a", [7] * 3000], {}, pagewire.InvalidRequest, "^prompt 1: "),
        (
            ["a", [7] * 2040],
            {"sampling_params": SamplingParams(max_tokens=20, min_tokens=16)},
            pagewire.InvalidRequest,
            "^prompt 1: min_tokens is 16, but the output has at most 8 tokens",
        ),
    ],
)
def test_invalid_prompts_raise_clear_errors(
    llm: LLM, prompts: object, options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        llm.generate(prompts, **options)
    assert len(llm.generate("a", GREEDY)) == 1


CONVERSATION = [{"role": "user", "content": "Once"}]
# The attributes of vLLM's results, which programs read.
VLLM_REQUEST = (
    "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request encoder_prompt "
    "encoder_prompt_token_ids num_cached_tokens kv_transfer_params add"
)
VLLM_SAMPLE = (
    "index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason lora_request "
    "kv_transfer_params finished"
)


def test_results_have_what_vllms_have(llm: LLM) -> None:
    began_at = time.time()
    first, second = llm.generate(PROMPTS[:2], GREEDY)
    assert [name for name in VLLM_REQUEST.split() if not hasattr(first, name)] == []
    assert [name for name in VLLM_SAMPLE.split() if not hasattr(first.outputs[0], name)] == []
    assert first.outputs[0].finished()
    metrics = first.metrics
    assert began_at <= metrics.arrival_time <= time.time()
    assert metrics.num_generation_tokens == len(first["token_ids"]) == 12
    assert metrics.first_token_latency is not None
    assert metrics.first_token_ts is not None
    assert metrics.last_token_ts is not None
    assert 0 < metrics.first_token_latency == metrics.first_token_ts < metrics.last_token_ts
    texts = first["text"], second["text"]
    first.add(second, aggregate=True)
    assert (first["text"], len(first["token_ids"])) == ("".join(texts), 24)
    first.add(second, aggregate=False)
    assert (first["text"], len(first.outputs)) == (texts[1], 1)


def test_parameters_for_each_prompt(llm: LLM) -> None:
    samplings = [SamplingParams(temperature=0, max_tokens=3, n=2), GREEDY, SamplingParams(max_tokens=5, seed=1)]
    outputs = llm.generate(PROMPTS, samplings, priority=[2, 1, 0])
    assert [[len(sample.token_ids) for sample in output.outputs] for output in outputs] == [[3, 3], [12], [5]]
    # Without parameters, the checkpoint's own are used, with 16 tokens.
    assert len(llm.generate(PROMPTS[0])[0]["token_ids"]) <= 16


@pytest.mark.thorough
def test_tokens_beyond_the_context_are_as_many_as_fit(llm: LLM) -> None:
    max_tokens = llm.client.info().max_sequence_tokens
    [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output["token_ids"]) == max_tokens
    assert output.outputs[0].finish_reason == "length"


def test_logprobs_read_as_vllms(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0))
    [sample] = output.outputs
    assert sample.logprobs is not None
    for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert (entry[token_id].rank, len(entry)) == (1, 3)
        assert [logprob.rank for logprob in entry.values()] == [1, 2, 3]
        assert entry[token_id].decoded_token == llm.client.detokenize([token_id])
        assert entry[token_id].logprob == max(logprob.logprob for logprob in entry.values())
    assert sample.cumulative_logprob == pytest.approx(
        sum(entry[token_id].logprob for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry or ()) for entry in output.prompt_logprobs[1:]] == [[i] for i in output.prompt_token_ids[1:]]


def test_logprobs_of_given_tokens_and_of_all(llm: LLM) -> None:
    """Log-probabilities equal vLLM's, except that a token that was only listed has no rank."""
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    [output] = llm.generate([1, 5, 9], params)
    [listed] = llm.generate([1, 5, 9], params.updated(logprob_token_ids=[7, 5, 7], prompt_logprobs=None))
    every = output.outputs[0].logprobs or []
    for entry in (*(output.prompt_logprobs or ())[1:], *every):
        assert entry is not None
        assert sum(math.exp(logprob.logprob) for logprob in entry.values()) == pytest.approx(1, abs=1e-3)
    for token_id, entry, few in zip(output.outputs[0].token_ids, every, listed.outputs[0].logprobs or (), strict=True):
        assert {logprob.rank for logprob in entry.values()} == set(range(1, len(entry) + 1))
        assert list(few) == list(dict.fromkeys([token_id, 7, 5]))
        assert [few[each].logprob for each in few] == [entry[each].logprob for each in few]
        assert [few[each].rank for each in few] == [1 if each == token_id else None for each in few]


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ("abc", {}, "^messages must be"),
        ([b"abc"], {}, "^messages must be"),
        ([[5]], {}, "^messages must be"),
        ([{"role": "user", "content": "\ud800"}], {}, r"^prompt 0 of messages has '\\ud800' at"),
        (CONVERSATION, {"chat_template": 5}, "^chat_template must be a text or None, got 5"),
        (CONVERSATION, {"add_generation_prompt": "no"}, "^add_generation_prompt must be a bool, got 'no'"),
        (CONVERSATION, {"tools": "abc"}, "^tools must be a list of mappings, or None; got 'abc'"),
        (CONVERSATION, {"tools": {"type": "function"}}, "^tools must be a list of mappings"),
        (CONVERSATION, {"tools": ["look"]}, r"^tools must be a list of mappings, or None; got \['look'\]"),
        (CONVERSATION, {"tools": [print]}, "^tools must be a list of mappings"),
        (CONVERSATION, {"continue_final_message": "no"}, "^continue_final_message must be a bool, got 'no'"),
        (CONVERSATION, {"chat_template_kwargs": "abc"}, "^chat_template_kwargs must be a mapping or None, got 'abc'"),
    ],
)
def test_invalid_chats_raise_clear_errors(llm: LLM, messages: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        llm.chat(messages, GREEDY, **options)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (5, {}, "^model must be a text or a path, got 5"),
        (b"model", {}, "^model must be"),
        ("\ud800", {}, r"^model has '\\ud800' at 0"),
        (MODEL, {"seed": "x"}, "^seed must be an integer or None, got 'x'"),
        (MODEL, {"max_model_len": "\ud800"}, r"^max_model_len has '\\ud800' at 0"),
    ],
)
def test_start_errors_name_the_argument(model: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        LLM(model, **options)


def test_chats(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Once upon"}]
    [expected] = texts_of(llm.generate("Once upon", GREEDY))
    [output] = llm.chat(conversation, GREEDY)
    assert (output.prompt, output["text"]) == ("Once upon", expected)
    assert texts_of(llm.chat([conversation, conversation], GREEDY)) == [expected, expected]
    [output] = llm.chat(conversation, GREEDY, chat_template="{{ x }}", chat_template_kwargs={"x": "The little dog"})
    assert output.prompt == "The little dog"


def test_a_chat_goes_on_with_its_last_message(llm: LLM) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Once upon "}]
    options: dict[str, Any] = {"chat_template": template, "continue_final_message": True}
    outputs = llm.chat([conversation, conversation[:1]], GREEDY, add_generation_prompt=False, **options)
    assert [output.prompt for output in outputs] == ["<user>Hi\n<assistant> Once upon ", "<user>Hi"]
    with pytest.raises(ValueError, match=r"^continue_final_message continues the last message, but add_generation_pr"):
        llm.chat(conversation, GREEDY, **options)
    with pytest.raises(ValueError, match=r"^the prompt does not contain the last message as it was sent, or the"):
        llm.chat([{"role": "user", "content": ""}], GREEDY, add_generation_prompt=False, **options)


def test_no_conversations_have_no_answers(llm: LLM) -> None:
    assert llm.chat([], GREEDY) == []
    with pytest.raises(pagewire.InvalidRequest, match=r"^a conversation has no messages"):
        llm.chat([[]], GREEDY)


def test_a_chat_takes_its_arguments_in_vllms_order(llm: LLM) -> None:
    [output] = llm.chat(CONVERSATION, GREEDY, False, None, "{{ messages[0].role }}")
    assert output.prompt == CONVERSATION[0]["role"]
    for call in (llm.chat, llm.generate, llm.embed, llm.beam_search, llm.encode):
        options = {"params": BeamSearchParams(2, 4)} if call == llm.beam_search else {}
        with pytest.raises(ValueError, match=r"^lora_request is not supported"):
            call(CONVERSATION if call == llm.chat else "Once", lora_request=object(), **options)  # type: ignore[operator]


def test_tools_are_handed_to_the_chat_template(llm: LLM) -> None:
    template = "{{ messages[0].content }}{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "run")]
    conversation = [{"role": "user", "content": "Once"}]
    outputs = llm.chat([conversation] * 2, GREEDY, chat_template=template, tools=tools, priority=[1, 0])
    assert [output.prompt for output in outputs] == ["Once look run"] * 2
    assert texts_of(outputs) == texts_of(llm.generate(["Once look run"] * 2, GREEDY))
    [output] = llm.chat(conversation, GREEDY, chat_template=template, tools=None)
    assert output.prompt == "Once"


def test_beam_search_reads_as_vllms(llm: LLM) -> None:
    """The hypotheses come from the engine's search, which has its own tests."""
    prompts = [PROMPTS[0], {"prompt_token_ids": llm.client.tokenize(PROMPTS[1])}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5))
    sampling = SamplingParams(
        n=3, beam_width=3, temperature=0, max_tokens=12, length_penalty=0.5, early_stopping="never"
    )
    for output, expected, prompt in zip(outputs, llm.generate(PROMPTS[:2], sampling), PROMPTS, strict=False):
        assert len(output.sequences) == 3
        for sequence, sample in zip(output.sequences, expected.outputs, strict=True):
            assert sequence.tokens == [*expected.prompt_token_ids, *sample.token_ids]
            assert sequence.text == prompt + sample.text
            assert (sequence.cum_logprob, sequence.finish_reason) == (sample.cumulative_logprob, sample.finish_reason)
        lengths = [len(sample.token_ids) for sample in expected.outputs]
        scores = [each.cum_logprob / length**0.5 for each, length in zip(output.sequences, lengths, strict=True)]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 3
    assert [output.sequences[0].orig_prompt["prompt"] for output in outputs] == [PROMPTS[0], None]
    assert llm.beam_search([], BeamSearchParams(2, 4)) == []


def test_beams_match_structured_outputs(llm: LLM) -> None:
    params = BeamSearchParams(2, 8, structured_outputs={"choice": [" cat", " dog"]})
    [output] = llm.beam_search(PROMPTS[0], params, concurrency_limit=1, priority=[1])
    assert {sequence.text for sequence in output.sequences} <= {f"{PROMPTS[0]} cat", f"{PROMPTS[0]} dog"}


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"beam_width": 17}, ValueError, "^beam_width is 17, but must be 1 to 16"),
        ({"beam_width": None}, TypeError, "^beam_width must be an integer, got None"),
        ({"max_tokens": 0}, ValueError, "^max_tokens is 0, but must be at least 1"),
        ({"length_penalty": "long"}, TypeError, "^length_penalty must be a number or None, got 'long'"),
        ({"early_stopping": "soon"}, TypeError, "^early_stopping must be one of"),
        (
            {"structured_outputs": {"regexp": "a"}},
            TypeError,
            "structured_outputs has no field 'regexp'; did you mean regex",
        ),
    ],
)
def test_parameters_of_a_beam_search_are_checked_when_made(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})


def test_a_beam_search_chooses_nothing_at_random(llm: LLM) -> None:
    with pytest.raises(pagewire.InvalidRequest, match=r"temperature is 0\.5, but beam search makes no random"):
        llm.beam_search("Once", BeamSearchParams(2, 4, temperature=0.5))
    with pytest.raises(TypeError, match=r"^params must be pagewire\.BeamSearchParams, got SamplingParams"):
        llm.beam_search("Once", GREEDY)  # type: ignore[arg-type]


def test_embeddings_read_as_vllms(llm: LLM) -> None:
    outputs = llm.embed([*PROMPTS, [1, 2, 3]], use_tqdm=False)
    expected = llm.client.embed([*PROMPTS, [1, 2, 3]])
    assert [output.outputs.embedding for output in outputs] == [list(each.values) for each in expected]
    assert [output.prompt_token_ids for output in outputs] == [*llm.client.tokenize(PROMPTS), [1, 2, 3]]
    assert all(output.finished for output in outputs)
    assert outputs[0].outputs.hidden_size == len(outputs[0].outputs.embedding)
    assert llm.embed([]) == []
    (alone,) = llm.embed({"prompt": PROMPTS[0]}, priority=[3])
    assert alone.outputs == outputs[0].outputs
    with pytest.raises(ValueError, match="there are 1 prompts and 2 priorities"):
        llm.embed("Once", priority=[1, 2])
    with pytest.raises(pagewire.InvalidRequest, match="the prompt has no tokens"):
        llm.embed([[]])


def test_encode_embeds(llm: LLM) -> None:
    outputs = llm.encode([*PROMPTS, [1, 2, 3]], pooling_task="embed", use_tqdm=False)
    expected = llm.embed([*PROMPTS, [1, 2, 3]])
    assert all(isinstance(output, pagewire.PoolingRequestOutput) for output in outputs)
    for output, each in zip(outputs, expected, strict=True):
        assert torch.equal(output.outputs.data, torch.tensor(each.outputs.embedding))
        assert (output.prompt_token_ids, output.finished) == (each.prompt_token_ids, True)
    assert len(llm.encode(PROMPTS[0])) == 1
    with pytest.raises(ValueError, match=r"^pooling_task='classify' is not supported: the checkpoint specifies"):
        llm.encode(PROMPTS, pooling_task="classify")
    with pytest.raises(ValueError, match=r"^pooling_params=\{'dimensions': 8\} is not supported"):
        llm.encode(PROMPTS, {"dimensions": 8})  # type: ignore[arg-type]


@pytest.mark.thorough
def test_default_parameters_are_vllms_with_the_checkpoints_choices(llm: LLM, tmp_path: Path) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    directory = tmp_path / "chosen"
    shutil.copytree(MODEL, directory)
    chosen = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **chosen}))
    with LLM(directory, seed=3, **OPTIONS) as other:
        params = other.get_default_sampling_params()
        assert params == SamplingParams(**chosen)
        [expected, found] = (
            texts_of(other.generate(PROMPTS, replace(each, seed=7))) for each in (params, DEFAULT_SAMPLING)
        )
        assert expected == found
    with pytest.raises(pagewire.StartError, match="this LLM is closed"):
        other.get_default_sampling_params()


def test_metrics_have_vllms_names_and_shapes(llm: LLM) -> None:
    def counted(kind: type) -> dict[str, float]:
        return {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, kind)}

    before = counted(pagewire.llm.Counter)
    [output] = llm.generate("Once there were metrics", GREEDY)
    after, gauges = counted(pagewire.llm.Counter), counted(pagewire.llm.Gauge)
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] == len(output["token_ids"])
    assert after["vllm:prompt_tokens"] - before["vllm:prompt_tokens"] == len(output.prompt_token_ids)
    assert after["vllm:prefix_cache_queries"] >= after["vllm:prefix_cache_hits"]
    assert 0 <= gauges["vllm:kv_cache_usage_perc"] <= 1
    assert all(metric.labels == {"model_name": "storyteller", "engine": "0"} for metric in llm.get_metrics())
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    told = [f"| `{name}` | gauge" for name in gauges] + [f"| `{name}_total` | counter" for name in after]
    assert [line for line in told if line not in page] == []


def test_progress_bar_is_shown_on_terminals_or_on_request(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    bars: list[int] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            bars.append(total)

        def update(self, num: int) -> None:
            bars.append(num)

        def close(self) -> None:
            bars.append(0)

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert bars == [3, 1, 1, 1, 0]
    llm.generate(PROMPTS, GREEDY)
    llm.generate(PROMPTS, GREEDY, False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_equal_seeds_give_equal_outputs(llm: LLM) -> None:
    """Programs with equal seeds give equal outputs; the prompts of one program do not share a seed."""
    sampling = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (5, 5, 6):
        with LLM(MODEL, seed=seed, **OPTIONS) as seeded:
            runs.append(texts_of(seeded.generate(["Once"] * 4, sampling)) + texts_of(seeded.generate("Once", sampling)))
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) > 1


def test_threads_and_event_loops(llm: LLM) -> None:
    expected = texts_of(llm.generate(PROMPTS, GREEDY))

    async def inside_a_loop() -> list[str]:
        return texts_of(llm.generate(PROMPTS, GREEDY))

    assert asyncio.run(inside_a_loop()) == expected
    results: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: results.append(texts_of(llm.generate(PROMPTS, GREEDY)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


@pytest.mark.thorough
def test_the_thread_that_made_it_may_end(llm: LLM) -> None:
    expected = texts_of(llm.generate(PROMPTS, GREEDY))
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(LLM(MODEL, **OPTIONS)))
    thread.start()
    thread.join()
    assert texts_of(made[0].generate(PROMPTS, GREEDY)) == expected
    [closing] = [threading.Thread(target=made[0].close)]
    closing.start()
    closing.join()
    says_so(made[0], "^this LLM is closed")


def says_so(llm: LLM, text: str) -> None:
    """Check that every method that needs the services raises StartError with this text, also the second time."""
    for _ in range(2):
        for ask in (
            lambda: llm.generate(PROMPTS, GREEDY),
            lambda: llm.chat([{"role": "user", "content": "Once"}], GREEDY),
            lambda: llm.embed(PROMPTS),
            lambda: llm.generate([]),
            lambda: llm.embed([]),
            lambda: llm.client.info(),
        ):
            with pytest.raises(pagewire.StartError, match=text):
                ask()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)  # there is no event to wait for: the processes are no longer children


def begun(program: str) -> "tuple[subprocess.Popen[str], list[int]]":
    """Start a program that has created an LLM; return its process and the process ids of its services."""
    command = [sys.executable, "-c", BEGIN + program]
    process = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2, process.communicate()
    assert all(map(is_running, pids))
    return process, pids


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("print(len(llm.generate('Once'))); raise RuntimeError", 1),
        *thorough(
            ("with llm: print(len(llm.generate('Once')))", 0),
            ("print(len(llm.generate('Once'))); del llm", 0),
            ("print(len(llm.generate('Once'))); sys.exit(3)", 3),
            ("print(len(llm.generate('Once')))\nif not os.fork(): sys.exit()\nos.wait(); llm.generate('Once')", 0),
            ("llm.generate('Once')\nif not os.fork(): print(len(llm.generate('Once')))\nelse: os.wait()", 0),
        ),
    ],
)
def test_the_services_end_with_the_program(program: str, code: int) -> None:
    process, pids = begun(program)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "1\n"), err
    assert ("Traceback" in err) == ("RuntimeError" in program)
    assert "Exception ignored" not in err
    wait_until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, *thorough(signal.SIGTERM)])
def test_a_killed_program_leaves_no_services(number: signal.Signals) -> None:
    process, pids = begun("llm.generate(['Once'] * 50, long)")
    process.send_signal(number)
    assert process.wait(30) == -number
    wait_until_gone(pids)
    process.communicate()


def test_ctrl_c_ends_the_requests_and_nothing_else() -> None:
    program = """
import threading, time
def interrupt():
    while not llm.client.loads().num_running:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
try:
    threading.Thread(target=interrupt).start()
    llm.generate(['Once'] * 500, long, use_tqdm=False)
except KeyboardInterrupt:
    while llm.client.loads().num_running:
        time.sleep(0.01)
    print("interrupted", len(llm.generate('Once')), flush=True)
raise KeyboardInterrupt
"""
    process, pids = begun(program)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted 1\n", err
    assert process.returncode == -signal.SIGINT
    assert err.strip().splitlines()[-1] == "KeyboardInterrupt"
    wait_until_gone(pids)


def test_missing_services_are_reported() -> None:
    before = set(children_of(os.getpid()))
    with LLM(MODEL, **OPTIONS) as llm:
        [server] = set(children_of(os.getpid())) - before
        os.kill(server, signal.SIGKILL)
        wait_until_gone([server])
        says_so(llm, r"^the services of this LLM have ended \(signal SIGKILL\)")


@pytest.mark.thorough
def test_closing_ends_what_runs_in_another_thread() -> None:
    llm = LLM(MODEL, **OPTIONS)
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(PROMPTS * 50, SamplingParams(max_tokens=400, ignore_eos=True))
        except BaseException as error:
            failures.append(error)

    running = threading.Thread(target=generate)
    running.start()
    while not llm.client.loads().num_running:
        time.sleep(0.01)
    llm.close()
    running.join()
    (failure,) = failures
    assert isinstance(failure, pagewire.StartError)
    assert str(failure).startswith("this LLM is closed")


def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(pagewire.StartError) as caught:
        LLM(tmp_path / "none")
    assert "there is no directory" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(pagewire.StartError, match=r"--dtype.*'float17'.*float32") as caught:
        LLM(MODEL, dtype="float17")
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_llm_ignores_server_options_in_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("tenants: /nowhere\ntls-cert: /nowhere\nhealth-port: 1\nmax-model-len: 40\n")
    monkeypatch.setenv("PAGEWIRE_CONFIG", str(file))
    monkeypatch.setenv("PAGEWIRE_TLS_KEY", "/nowhere")
    with LLM(MODEL, **OPTIONS) as llm:
        assert llm.client.info().max_sequence_tokens == 40


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(f"import sys\nsys.modules['torch'] = None\n{forgetting('torch')}")
    environ = {**ENVIRON, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRON['PYTHONPATH']}"}
    program = f"import pagewire\ntry: pagewire.LLM({str(MODEL)!r})\nexcept ImportError as error: print(error)"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    line = rf"torch is not installed: \S+ -m pip install 'pagewire\[serve\]'({re.escape(installation.FOR_CPUS)})?\n"
    assert re.fullmatch(line, printed.stdout)
