"""Every field that docs/http_api.md lists, generated from the request types.

A supported field must have its effect, and a field without an effect must change nothing. An unsupported field must be
refused with the documented reason. A new field fails here until it has a case.
"""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, processors

from pagewire.common.wire.messages import GrammarKind
from scheduler_service.api.http.openapi import FieldRow, field_rows
from scheduler_service.api.http.requests import INERT
from scheduler_service.api.http.routes import POSTED
from scheduler_service.core.request import Request
from scheduler_service.serving.parsed_request import ParsedRequest
from scheduler_service.serving.tenants.caller import Call
from testing.serving.http_server import (
    CHAT_TEMPLATE,
    Begun,
    HttpServer,
    make_chat_checkpoint,
    noting_requests,
    serve_http,
    steady,
)
from tests.contract.pooling import write_pooling

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OLLAMA_CHAT, GENERATE, EMBED, OLD_EMBED = "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"
RENDER, RENDER_CHAT = f"{COMPLETIONS}/render", f"{CHAT}/render"
LLAMA = "/completion"
TEXT = "once upon a time"
QUESTION = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "once "}
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": TEXT, "seed": 0, "max_tokens": 4, "request_id": "same"},
    CHAT: {"messages": [QUESTION], "seed": 0, "max_tokens": 4, "request_id": "same"},
    EMBEDDINGS: {"input": TEXT, "encoding_format": "float", "request_id": "same"},
    RENDER: {"prompt": TEXT, "seed": 0, "request_id": "same"},
    RENDER_CHAT: {"messages": [QUESTION], "seed": 0, "request_id": "same"},
    MESSAGES: {"messages": [QUESTION], "seed": 0, "max_tokens": 4, "request_id": "same"},
    RESPONSES: {"input": "hello", "seed": 0, "max_output_tokens": 4, "request_id": "same", "store": False},
    LLAMA: {"prompt": TEXT, "seed": 0, "n_predict": 4, "request_id": "same"},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [70, 71]},
    EMBED: {"input": TEXT, "request_id": "same"},
    OLD_EMBED: {"prompt": TEXT, "request_id": "same"},
    "/api/show": {},
    "/api/pull": {"stream": False},
}
for path, question in ((OLLAMA_CHAT, {"messages": [QUESTION]}), (GENERATE, {"prompt": "hello"})):
    PLAIN[path] = {**question, "options": {"seed": 0, "num_predict": 4}, "stream": False, "request_id": "same"}


@dataclass
class Outcome:
    """The result of a request: its response without the parts that vary, and the request as the server parsed it."""

    status: int
    kind: str  # the media type of the response
    answer: Any  # a string if the response is not JSON
    prompt: str = ""  # the prompt that the model gets
    call: Call | None = None
    parsed: ParsedRequest | None = None
    request: Request | None = None


@dataclass(frozen=True)
class Case:
    """A value of a field, sent together with the fields in `beside`.

    `see` reads `expected` from the outcome if the field is sent, and another value if it is not.
    """

    value: Any
    see: Callable[[Any], Any]
    expected: Any
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Harmless:
    """A value without an effect, for a field that accepts no other value."""

    value: Any
    refused: Any = None  # refused with the reason that is documented for the field
    beside: dict[str, Any] = field(default_factory=dict)


def read(place: str, value: Any, expected: Any = None, **beside: Any) -> Case:
    """Return a case whose value appears at the path `place` in the parsed request."""
    return Case(value, attrgetter(place), value if expected is None else expected, beside)


def prompted(value: Any, expected: str, **beside: Any) -> Case:
    """Return a case that changes the prompt to `expected`."""
    return Case(value, attrgetter("prompt"), expected, beside)


def answered(see: Callable[[Any], Any], value: Any, expected: Any, **beside: Any) -> Case:
    return Case(value, lambda seen: see(seen.answer), expected, beside)


def matched(value: Any, kind: str, text: str) -> Case:
    """Return a case that sets the grammar that the output must match."""
    expected = (GrammarKind[kind], text)
    return Case(value, lambda seen: (found := seen.request.grammar) and (found.kind, found.text), expected)


def sampled(name: str, value: Any, expected: Any = None) -> Case:
    return read(f"request.sampling.{name}", value, expected)


def has_in_grammar(text: str) -> Callable[[Outcome], bool]:
    return lambda seen: (
        seen.request is not None and seen.request.grammar is not None and text in seen.request.grammar.text
    )


def num_beams(seen: Outcome) -> int:
    assert seen.request is not None
    return 0 if seen.request.beam is None else seen.request.beam.beam_width


def length_penalty(seen: Outcome) -> float:
    assert seen.request is not None
    assert seen.request.beam is not None
    return seen.request.beam.length_penalty


PROMPT = prompted("hello", "<end>hello")
SUFFIX = prompted(" hello", f"<end><|fim_prefix|>{TEXT}<|fim_suffix|> hello<|fim_middle|>")
TIMEOUT = read("status", 1e-6, 504)
PROMPTS = {
    "timeout": TIMEOUT,
    "model": read("status", "other", 404),
    "truncate_prompt_tokens": prompted(2, " a time"),
    "truncation_side": prompted("right", "<end>", truncate_prompt_tokens=1),
    "add_special_tokens": prompted(False, TEXT),
}
QUEUED: dict[str, Case | Harmless] = {
    "prompt_cache_options": Harmless({"mode": "implicit"}),
    "tenant": read("request.tenant", "somebody"),
    "rid": read("request.request_id", "mine", request_id=None),
    "priority": read("request.priority", -3),
    "cache_salt": read("request.cache_salt", "salt"),
    "session_id": read("request.session_id", "talk"),
    "will_return": read("request.will_return", True),
    "retention_seconds": read("request.retention_seconds", 5),
}
GENERATION = QUEUED | {
    "stream_interval": Harmless(1, 2),
    "request_id": read("request.request_id", "mine"),
    "n": read("request.n", 3),
    "temperature": sampled("temperature", 0.5),
    "top_p": sampled("top_p", 0.5),
    "min_p": sampled("min_p", 0.25),
    "presence_penalty": sampled("presence_penalty", 1.5),
    "frequency_penalty": sampled("frequency_penalty", -1.5),
    "repetition_penalty": sampled("repetition_penalty", 1.25),
    "min_tokens": sampled("min_tokens", 2),
    "ignore_eos": Case(True, lambda seen: len(seen.request.sampling.stop_token_ids), 0),
    "stop_token_ids": Case([70], lambda seen: 70 in seen.request.sampling.stop_token_ids, True),
    "logit_bias": sampled("logit_bias_values", {"70": 2.5}, (2.5,)),
    "include_stop_str_in_output": read("parsed.include_stop_text", True),
    "skip_special_tokens": read("parsed.skip_special_tokens", False),
    "prompt_logprobs": sampled("num_prompt_logprobs", 2),
    "beam_width": Case(3, num_beams, 3),
    "length_penalty": Case(2.5, length_penalty, 2.5, {"beam_width": 2}),
    "top_k": sampled("top_k", 5),
    "seed": read("request.seed", -5, 2**64 - 5),
    "stop": read("parsed.stop", ["xyz", "zyx"], ("xyz", "zyx")),
    "stream": read("kind", True, "text/event-stream"),
    "stream_options": answered(lambda answer: '"usage":{' in answer, {"include_usage": True}, True, stream=True),
    "detached": answered(lambda answer: answer.get("state"), True, "running", request_id=None),
    "response_format": matched({"type": "json_object"}, "JSON_OBJECT", ""),
    "structured_outputs": matched({"choice": ["AB"]}, "CHOICE", '["AB"]'),
    "guided_json": matched({"type": "object"}, "JSON_SCHEMA", '{"type":"object"}'),
    "guided_regex": matched("[a-z]+", "REGEX", "[a-z]+"),
    "guided_choice": matched(["AB"], "CHOICE", '["AB"]'),
    "regex": matched("[a-z]+", "REGEX", "[a-z]+"),
    "ebnf": matched('start: "a"', "GRAMMAR", 'start: "a"'),
    "guided_grammar": matched('start: "a"', "GRAMMAR", 'start: "a"'),
    "grammar": matched('start: "a"', "GRAMMAR", 'start: "a"'),
    "json_schema": matched({"type": "object"}, "JSON_SCHEMA", '{"type":"object"}'),
    "allowed_token_ids": matched([71, 70], "GRAMMAR", "start: <[70,71]> start"),
    "bad_words": matched(["cat"], "GRAMMAR", 'start: TEXT\nANY: /(?s:.*)/\nTEXT: ANY & ~(ANY ("cat") ANY)'),
    "use_beam_search": Case(True, num_beams, 2, {"n": 2}),
    "return_token_ids": answered(lambda answer: len(answer["choices"][0]["token_ids"] or ()), True, 4),
    "max_tokens": read("request.max_tokens", 7),
}
TEMPLATE = {
    "chat_template": prompted("short", "hello"),
    "chat_template_kwargs": prompted({"mood": "kind"}, "<user>hello\n<assistant>kind"),
    "add_generation_prompt": prompted(False, "<user>hello\n"),
    "continue_final_message": prompted(
        True, "<user>hello\n<assistant>once ", messages=[QUESTION, ANSWER], add_generation_prompt=False
    ),
}
CHAT_PROMPTS = TEMPLATE | {
    "timeout": TIMEOUT,
    "messages": prompted([ANSWER], "<assistant>once \n<assistant>"),
    "documents": prompted([{"text": "x"}], "x,", chat_template="told"),
    "reasoning_effort": prompted("low", ",low", chat_template="told"),
    "verbosity": prompted("low", ",low", chat_template="told"),
    "enable_thinking": prompted(False, "<user>hello\n<assistant>False"),
    "thinking": prompted({"type": "disabled"}, "<user>hello\n<assistant>False"),
    "model": PROMPTS["model"],
    "truncate_prompt_tokens": prompted(1, ">"),
    "truncation_side": prompted("right", "<", truncate_prompt_tokens=1),
    "add_special_tokens": prompted(True, "<end><user>hello\n<assistant>"),
}
TOOLED = {"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template": "tooled"}
CALLED = {"type": "function", "name": "f"}
USED = {"name": "f", "input_schema": {"type": "object"}}
NEUTRAL = {
    "include_reasoning": Harmless(False),
    "separate_reasoning": Harmless(False),
    "function_call": Harmless("none", "sometimes"),
    "modalities": Harmless(["text"], ["audio"]),
}
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "include_stop_str_in_output", "skip_special_tokens"),
)
OLLAMA: dict[str, Case | Harmless] = (
    PROMPTS
    | QUEUED
    | {name: CHAT_PROMPTS[name] for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")}
    | {
        "request_id": GENERATION["request_id"],
        "stream": read("kind", True, "application/x-ndjson"),
        "format": matched({"type": "object"}, "JSON_SCHEMA", '{"type":"object"}'),
        "options": read("request.max_tokens", {"num_predict": 7}, 7),
        "think": prompted(False, "<user>hello\n<assistant>False"),
        "logprobs": sampled("num_logprobs", True, 0),
        "top_logprobs": Case(2, attrgetter("request.sampling.num_logprobs"), 2, {"logprobs": True}),
        "keep_alive": Harmless("5m"),
    }
)
CASES: dict[str, dict[str, Case | Harmless]] = {
    OLLAMA_CHAT: OLLAMA
    | {
        "messages": prompted([ANSWER], "<assistant>once "),
        "tools": Case([{"type": "function", "function": {"name": "f"}}], has_in_grammar("triggered_tags"), True),
    },
    GENERATE: OLLAMA
    | {
        "prompt": prompted("bye", "<user>bye\n<assistant>"),
        "suffix": prompted(" hello", "<end><|fim_prefix|>hello<|fim_suffix|> hello<|fim_middle|>"),
        "system": prompted("be", "<system>be\n<user>hello\n<assistant>"),
        "raw": prompted(True, "<end>hello"),
    },
    EMBED: PROMPTS
    | QUEUED
    | {
        "request_id": GENERATION["request_id"],
        "input": PROMPT,
        "truncate": read("status", False, 400, input=TEXT * 100),
        "dimensions": answered(lambda answer: len(answer["embeddings"][0]), 1, 1),
        "keep_alive": Harmless(-1),
    },
    OLD_EMBED: PROMPTS | QUEUED | {"request_id": GENERATION["request_id"], "prompt": PROMPT, "keep_alive": Harmless(0)},
    "/api/show": {"model": PROMPTS["model"], "name": PROMPTS["model"]},
    "/api/pull": {"model": PROMPTS["model"], "name": PROMPTS["model"], "stream": OLLAMA["stream"]},
    COMPLETIONS: PROMPTS
    | GENERATION
    | {
        "prompt": PROMPT,
        "thinking_token_budget": Harmless(-1, 5),
        "logprobs": sampled("num_logprobs", 3),
        "logprob_token_ids": read("request.sampling.logprob_token_ids", [7, 5], (7, 5), logprobs=0),
        "echo": answered(lambda answer: answer["choices"][0]["text"].startswith(TEXT), True, True),
        "best_of": read("request.n", 3),
        "suffix": SUFFIX,
        "return_tokens_as_token_ids": answered(
            lambda answer: answer["choices"][0]["logprobs"]["tokens"][0][:9], True, "token_id:", logprobs=0
        ),
    },
    CHAT: CHAT_PROMPTS
    | GENERATION
    | NEUTRAL
    | {
        "tools": Case(TOOLED["tools"], has_in_grammar("triggered_tags"), True, {"chat_template": "tooled"}),
        "tool_choice": Case("required", has_in_grammar("tags_with_separator"), True, TOOLED),
        "parallel_tool_calls": Case(False, has_in_grammar('"stop_after_first": true'), True, TOOLED),
        "thinking_token_budget": Case(7, has_in_grammar('"max_tokens": 7'), True, {"chat_template": "thoughtful"}),
        "max_completion_tokens": read("request.max_tokens", 3),
        "logprobs": sampled("num_logprobs", True, 0),
        "logprob_token_ids": read("request.sampling.logprob_token_ids", [7, 5], (7, 5), logprobs=True),
        "top_logprobs": Case(2, attrgetter("request.sampling.num_logprobs"), 2, {"logprobs": True}),
        "echo": answered(
            lambda answer: answer["choices"][0]["message"]["content"].startswith("once "),
            True,
            True,
            messages=[QUESTION, ANSWER],
            continue_final_message=True,
        ),
        "return_tokens_as_token_ids": answered(
            lambda answer: answer["choices"][0]["logprobs"]["content"][0]["token"][:9], True, "token_id:", logprobs=True
        ),
    },
    EMBEDDINGS: PROMPTS
    | QUEUED
    | {
        "request_id": read("request.request_id", "mine"),
        "input": PROMPT,
        "encoding_format": answered(lambda answer: type(answer["data"][0]["embedding"]), "base64", str),
        "dimensions": answered(lambda answer: len(answer["data"][0]["embedding"]), 1, 1),
        "prompt_name": prompted("greeting", f"<end>hello {TEXT}"),
        "padding": Harmless("do_not_pad", "max_length"),
        "embed_dtype": Harmless("float32", "float16"),
        "endianness": Harmless("little", "big"),
        "use_activation": Harmless(True, False),
        "normalize": Harmless(True, False),
    }
    | {
        name: prompted(value, expected, input=None, **{"messages": [QUESTION]} | beside)
        for name, value, expected, beside in (
            ("messages", [ANSWER], "<assistant>once \n", {}),
            ("chat_template", "short", "hello", {}),
            ("chat_template_kwargs", {"mood": "kind"}, "<user>hello\nkind", {}),
            ("add_generation_prompt", True, "<user>hello\n<assistant>", {}),
            (
                "continue_final_message",
                True,
                "<user>hello\n<assistant>once ",
                {"messages": [QUESTION, ANSWER]},
            ),
        )
    },
    MESSAGES: PROMPTS
    | QUEUED
    | {
        name: GENERATION[name]
        for name in ("request_id", "max_tokens", "temperature", "top_p", "top_k", "seed", "stream")
    }
    | {name: CHAT_PROMPTS[name] for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")}
    | {
        "messages": prompted([ANSWER], "<assistant>once "),
        "system": prompted("be", "<system>be\n<user>hello\n<assistant>"),
        "stop_sequences": read("parsed.stop", ["xyz", "zyx"], ("xyz", "zyx")),
        "chat_template_kwargs": CHAT_PROMPTS["chat_template_kwargs"],
        "thinking": prompted({"type": "disabled"}, "<user>hello\n<assistant>False"),
        "output_config": prompted({"effort": "low"}, "<user>hello\n<assistant>low"),
        "output_format": matched(
            {"type": "json_schema", "schema": {"type": "object"}}, "JSON_SCHEMA", '{"type":"object"}'
        ),
        "tools": Case([USED], has_in_grammar("triggered_tags"), True),
        "tool_choice": Case({"type": "any"}, has_in_grammar("tags_with_separator"), True, {"tools": [USED]}),
        "context_management": Harmless({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "diagnostics": Harmless({"previous_message_id": None}),
    },
    RESPONSES: PROMPTS
    | QUEUED
    | {name: GENERATION[name] for name in (*SAMPLING, "request_id", "stop", "stream", "structured_outputs")}
    | {name: CHAT_PROMPTS[name] for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")}
    | {
        "input": prompted([{"role": "assistant", "content": "once "}], "<assistant>once \n<assistant>"),
        "instructions": prompted("be", "<system>be\n<user>hello\n<assistant>"),
        "max_output_tokens": read("request.max_tokens", 7),
        "reasoning": prompted({"effort": "low"}, "<user>hello\n<assistant>low"),
        "text": matched({"format": {"type": "json_object"}}, "JSON_OBJECT", ""),
        "tools": Case([CALLED], has_in_grammar("triggered_tags"), True),
        "tool_choice": Case("required", has_in_grammar("tags_with_separator"), True, {"tools": [CALLED]}),
        "parallel_tool_calls": Case(False, has_in_grammar('"stop_after_first": true'), True, {"tools": [CALLED]}),
        "metadata": answered(lambda answer: answer["metadata"], {"a": "b"}, {"a": "b"}),
        "truncation": Harmless("auto"),
        "include": Case(["message.output_text.logprobs"], attrgetter("request.sampling.num_logprobs"), 0),
        "top_logprobs": Case(2, attrgetter("request.sampling.num_logprobs"), 2),
        "max_tool_calls": answered(lambda answer: answer["max_tool_calls"], 3, 3),
        "prompt_cache_key": answered(lambda answer: answer["prompt_cache_key"], "key", "key"),
        "safety_identifier": answered(lambda answer: answer["safety_identifier"], "me", "me"),
        "user": answered(lambda answer: answer["user"], "me", "me"),
        "access_programs": Harmless({"cyber": "standard"}),
        "store": answered(lambda answer: answer["store"], True, True, request_id="kept"),
        "background": answered(lambda answer: answer["status"], True, "queued", store=True, request_id=None),
        "previous_response_id": read("status", "resp_x", 400),
        "chat_template_kwargs": CHAT_PROMPTS["chat_template_kwargs"],
    },
    LLAMA: PROMPTS
    | QUEUED
    | {name: GENERATION[name] for name in (*SAMPLING, "request_id", "stop", "stream", "grammar", "json_schema")}
    | {
        "prompt": PROMPT,
        "n_predict": read("request.max_tokens", 7),
        "n_cmpl": read("request.n", 3),
        "repeat_last_n": read("status", 64, 400, repetition_penalty=1.25),
        "logit_bias": sampled("logit_bias_values", [[70, 2.5], ["once", False]], (2.5, -100.0)),
        "samplers": Case(["penalties"], attrgetter("request.sampling.top_k"), 0, {"top_k": 5}),
        "n_probs": sampled("num_logprobs", 3),
        "post_sampling_probs": answered(
            lambda answer: "prob" in answer["completion_probabilities"][0], True, True, n_probs=1, temperature=0
        ),
        "return_tokens": answered(lambda answer: len(answer["tokens"]), True, 4),
        "timings_per_token": answered(lambda answer: answer.count('"timings":{') > 1, True, True, stream=True),
        "response_fields": answered(lambda answer: answer, ["stop", "timings/none"], {"stop": True}),
        "n_keep": Harmless(-1),
        "n_indent": Harmless(4),
        "t_max_predict_ms": Harmless(1000),
    },
    RENDER: PROMPTS
    | {"prompt": PROMPT, "suffix": SUFFIX}
    | {"request_id": answered(lambda answer: answer[0]["request_id"], "mine", "mine")}
    | {"rid": answered(lambda answer: answer[0]["request_id"], "mine", "mine", request_id=None)},
    RENDER_CHAT: CHAT_PROMPTS
    | {"request_id": answered(lambda answer: answer["request_id"], "mine", "mine")}
    | {"rid": answered(lambda answer: answer["request_id"], "mine", "mine", request_id=None)},
    "/tokenize": {
        name: Case(case.value, case.see, case.expected, {"prompt": None, "messages": [QUESTION]} | case.beside)
        for name, case in TEMPLATE.items()
    }
    | {
        "messages": prompted([QUESTION], "<user>hello\n<assistant>", prompt=None),
        "tools": prompted([{"type": "function"}], ",function", prompt=None, messages=[QUESTION], chat_template="told"),
        "model": PROMPTS["model"],
        "prompt": PROMPT,
        "add_special_tokens": PROMPTS["add_special_tokens"],
        "return_token_strs": answered(lambda answer: (answer["token_strs"] or ("",))[0], True, "<end>"),
        "content": prompted("hello", "hello", prompt=None),
        "add_special": answered(lambda answer: answer["tokens"][0], True, 0, prompt=None, content=TEXT),
        "with_pieces": answered(lambda answer: type(answer["tokens"][0]), True, dict, prompt=None, content=TEXT),
        "parse_special": Harmless(True, False),
    },
    "/detokenize": {
        "model": PROMPTS["model"],
        "tokens": answered(lambda answer: answer["prompt"], [0], "<end>"),
    },
}
# A rendered prompt is not computed, so sampling fields only have to be valid.
for shown, computed in ((RENDER, COMPLETIONS), (RENDER_CHAT, CHAT)):
    CASES[shown] = (
        {
            name: Harmless(case.value, beside=case.beside) if isinstance(case, Case) else case
            for name, case in CASES[computed].items()
        }
        | {"detached": Harmless(True)}
        | CASES[shown]
    )
# Requests that count tokens or compact a conversation have the types of other requests.
ROWS = [
    (route.path, row)
    for route in POSTED
    if route.path
    not in (
        f"{MESSAGES}/count_tokens",
        f"{RESPONSES}/input_tokens",
        f"{RESPONSES}/compact",
        "/apply-template",
        "/infill",
    )
    for row in field_rows(route.request)
]
OPENAI = {COMPLETIONS, CHAT, EMBEDDINGS}
EXAMPLES = {"string": "x", "boolean": True, "object": {"a": "b"}, "list of strings": ["x"], "integer": 1}
EXAMPLES["string or object"] = "x"
EXAMPLES["any JSON"] = {"a": "b"}


@dataclass
class ApiServer:
    server: HttpServer
    tokenizer: Tokenizer
    begun: list[Begun]

    async def send(self, path: str, body: dict[str, Any], *, by_openai: bool) -> Outcome:
        self.begun.clear()
        response = await (self._by_openai(path, body) if by_openai else self.server.post(path, **body))
        kind = response.headers["content-type"].partition(";")[0]
        answer = json.loads(response.text, object_hook=steady) if kind == "application/json" else response.text
        seen = Outcome(response.status_code, kind, answer, "", *(self.begun[0] if self.begun else ()))
        token_ids = seen.request.prompt_token_ids if seen.request is not None else _tokens(answer)
        seen.prompt = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return seen

    async def _by_openai(self, path: str, body: dict[str, Any]) -> Any:
        """Send the request through OpenAI's client, with all fields as `extra_body`."""
        client = self.server.openai
        creates = {COMPLETIONS: client.completions, CHAT: client.chat.completions, EMBEDDINGS: client.embeddings}
        name = {COMPLETIONS: "prompt", CHAT: "messages", EMBEDDINGS: "input"}[path]
        create: Any = creates[path].with_raw_response.create
        try:
            return (await create(model="chatty", **{name: body[name]}, extra_body=body)).http_response
        except openai.APIStatusError as error:
            return error.response


def _tokens(answer: Any) -> list[int]:
    first = answer[0] if isinstance(answer, list) else answer
    found = (first.get("token_ids") or first.get("tokens") or []) if isinstance(first, dict) else []
    return [each["id"] if isinstance(each, dict) else each for each in found]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    named = {
        "short": "{{ messages[0].content }}",
        "tooled": "{{ messages[0].content }}{# <tool_call> #}",
        "thoughtful": "{{ messages[0].content }}{# <think> </think> #}",
        "told": "{% if documents %}{{ documents[0].text }}{% endif %},{{ reasoning_effort }}{{ verbosity }}"
        "{% if tools %}{{ tools[0].type }}{% endif %}",
    }
    model = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty", **named)
    variables = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}"
    (model / "chat_template.jinja").write_text(f"{CHAT_TEMPLATE}{variables}{{# <tool_call> #}}")
    write_pooling(model, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"greeting": "hello "}}')
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    special = ("<end>", tokenizer.token_to_id("<end>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[special])
    tokenizer.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    with noting_requests() as begun:
        async with serve_http(model) as server:
            yield ApiServer(server, tokenizer, begun)


def ways(path: str) -> list[bool]:
    """Return whether to send the request through OpenAI's client: both ways, where the client supports the path."""
    return [False, True] if path in OPENAI else [False]


def cases(*, served: bool) -> Any:
    chosen = [(path, row) for path, row in ROWS if bool(row.takes) is served]
    return pytest.mark.parametrize(("path", "row"), chosen, ids=lambda value: getattr(value, "name", value))


@cases(served=True)
async def test_a_field_does_what_it_says(door: ApiServer, path: str, row: FieldRow) -> None:
    case = Harmless(EXAMPLES[row.takes]) if row.note == INERT else CASES[path][row.name]
    beside = PLAIN[path] | case.beside
    for by_openai in ways(path):
        without = await door.send(path, beside, by_openai=by_openai)
        with_it = await door.send(path, beside | {row.name: case.value}, by_openai=by_openai)
        if isinstance(case, Case):
            assert case.see(with_it) == case.expected, with_it
            assert case.see(without) != case.expected, without
        else:
            assert with_it.status == 200, with_it
            assert (with_it.answer, with_it.request) == (without.answer, without.request)
            if case.refused is not None:
                await _is_refused(door, path, row, case.refused, by_openai=by_openai)


# Values that request an effect of an unsupported field. The default is a non-empty list.
NOT_SERVED: dict[str, Any] = {name: {"a": 1} for name in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")}
NOT_SERVED["template"] = "x"
FLAGS = ("watermarking", "return_token_offsets", "return_prompt_text", "enable_response_messages", "truncate", "shift")
NOT_SERVED |= dict.fromkeys(FLAGS, True)


@cases(served=False)
async def test_a_field_that_is_not_served_says_why(door: ApiServer, path: str, row: FieldRow) -> None:
    for by_openai in ways(path):
        await _is_refused(door, path, row, NOT_SERVED.get(row.name, ["x"]), by_openai=by_openai)
        unset = await door.send(path, PLAIN[path] | {row.name: None}, by_openai=by_openai)
        assert unset.status == 200


async def _is_refused(door: ApiServer, path: str, row: FieldRow, value: Any, *, by_openai: bool) -> None:
    seen = await door.send(path, PLAIN[path] | {row.name: value}, by_openai=by_openai)
    assert (seen.status, seen.request) == (400, None)
    error = seen.answer["error"]
    if isinstance(error, str):  # of Ollama's API
        error = {"param": error.partition(" ")[0], "message": error}
    assert error["param"].partition("[")[0] == row.name
    assert error["message"].endswith(f" ({row.note})")


async def test_every_case_is_of_a_field() -> None:
    named = {(path, name) for path, cases_of_path in CASES.items() for name in cases_of_path}
    assert named <= {(path, row.name) for path, row in ROWS}


async def test_fields_within_fields_are_refused_as_others_are(door: ApiServer) -> None:
    for field_name, inner, message in (
        ("stream_options", {"include_usages": True}, "is not a field of this request; did you mean include_usage?"),
        (
            "structured_outputs",
            {"whitespace_pattern": " "},
            "is ' ', but must be null (specify it in the schema, with x-guidance)",
        ),
        ("structured_outputs", {"choice": "A"}, "is 'A', but must be a list of strings or null"),
    ):
        error = await door.server.refusal(COMPLETIONS, **PLAIN[COMPLETIONS] | {field_name: inner})
        assert error["param"] == f"{field_name}.{next(iter(inner))}"
        assert error["message"].endswith(message)


@pytest.mark.asyncio(loop_scope="function")
async def test_fields_that_are_not_known_are_ignored_where_that_is_asked_for(tmp_path: Path) -> None:
    structure = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "other": 1}, "another": 2}
    asked = {"prompt": TEXT, "prompts": 1, "response_format": structure, "stream": True, "stream_options": {"more": 1}}
    async with serve_http(make_chat_checkpoint(tmp_path / "chatty"), front={"lenient": True}) as server:
        assert await server.events(COMPLETIONS, **asked)
        assert server.stack.worker.grammars[-1].text == '{"type":"object"}'
        described = (await server.client.get("/openapi.json")).json()["components"]["schemas"]
        assert described["CompletionRequest"]["properties"].keys() >= PLAIN[COMPLETIONS].keys()
        for name in ("CompletionRequest", "StreamOptions"):
            assert "additionalProperties" not in described[name]
        tool = {"type": "function", "function": {"name": "f", "more": 1}, "other": 2}
        chat = {"messages": [QUESTION], "tools": [tool], "tool_choice": "none", "max_tokens": 1}
        assert (await server.chat(**chat))["choices"]
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "x", "more": 1}],
            "other": 2,
        }
        assert (await server.post(RESPONSES, input=[item], store=False)).status_code == 200
        block = {"type": "text", "text": "x", "more": 1}
        asked_of_messages = {"messages": [{"role": "user", "content": [block], "other": 2}], "max_tokens": 1}
        assert (await server.post(MESSAGES, **asked_of_messages)).status_code == 200
        response = await server.post("/completion", prompt=TEXT, max_tokens=2, repeat_penalty=1.5, ignored=1)
        settings = response.json()["generation_settings"]
        assert (settings["n_predict"], settings["repeat_penalty"]) == (2, 1.5)
        wrong_item = item | {"content": [{"type": "input_text", "text": 1}]}
        assert (await server.refusal(RESPONSES, input=[wrong_item]))["param"] == "input[0].content[0].text"
        for name, wrong in {"temperature": "hot", "suffix": "x", "response_format": {"type": "json_schema"}}.items():
            error = await server.refusal(COMPLETIONS, **asked | {name: wrong})
            assert error["param"].startswith(name)
