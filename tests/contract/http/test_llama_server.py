"""llama-server's own routes: `/completion`, `/infill`, `/props`, `/slots`, `/apply-template`, `/tokenize` and aliases.

llama.cpp tests its server in tools/server/tests/unit. Its tests of these routes were ported to this module as follows.
"Text" marks a test that compares with the text of its model stories260K, which is not installed here.

| Test of llama.cpp | Ported as, or the reason why it is left out |
|---|---|
| test_completion.py: completion, its stream | `test_same_text_as_completions`, `test_counts_and_timings`; text |
| completion_stream_vs_non_stream | `test_stream_equals_whole` |
| completion_with_openai_library, its stream, its stops | `test_completions.py`; text, and llama.cpp's fingerprint |
| consistent_result_same_seed, different_result_different_seed | `test_same_text_as_completions`, `test_seeds` |
| consistent_result_different_batch_size | left out: needs a server with another batch size; see tests/sim |
| cache_vs_nocache_prompt | skipped by llama.cpp itself |
| nocache_long_input_prompt | `test_refusals` |
| json_prompt_no_mtmd, json_prompt_mtm_error_when_not_supported | `test_prompts_that_are_objects` |
| completion_with_tokens_input | `test_prompts_of_tokens_and_texts` |
| completion_parallel_slots, cancel_request | `test_slots_of_running_requests` |
| completion_unified | `test_ends_of_outputs` |
| completion_response_fields | `test_selected_fields` |
| n_probs, n_probs_stream | `test_probabilities`, `test_stream_equals_whole` |
| n_probs_post_sampling and its variant on the backend | `test_probabilities`; refused at other temperatures than 0 |
| logit_bias | `test_forms_of_logit_bias` |
| completion_prompt_cache | `test_counts_and_timings` |
| test_infill.py: without_input_extra, with_input_extra | `test_infill`; text |
| invalid_input_extra_req | `test_infill` |
| with_qwen_model | left out: downloads a model |
| test_basic.py: server_start_simple, server_models | `test_aliases` |
| server_multiple_addresses | left out: tests an option of llama-server's command line |
| server_props, server_slots | `test_properties`, `test_slots_of_running_requests`; there is no option `--no-slots` |
| load_split_model | left out: downloads a model |
| no_ui, server_model_aliases_and_tags | left out: no web page and no tags |
| test_template.py: add_generation_prompt | `test_template_is_applied` |
| reasoning, date_inside_prompt | left out: need template variables that only llama-server sets, such as `date_string` |
| test_tokenize.py: all tests | `test_tokenize_with_fields_of_llama_server` |
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from pagewire.common.wire.messages import GrammarKind
from testing.serving.http_server import (
    HttpServer,
    make_chat_checkpoint,
    noting_requests,
    serve_http,
    server_of_the_module,
)
from testing.serving.tenants import KEYS
from tests.contract.http.shared import of, shared_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

PATH = "/completion"
TEXT, TOKENS = "once upon", [5, 6, 7, 8, 9]
QUESTION = {"role": "user", "content": "hello"}
GBNF = 'root ::= "a" [0-9]+'
SCHEMA = {"type": "object"}


async def complete(server: HttpServer, path: str = PATH, **body: Any) -> Any:
    """Send a request, with a seed where the path has this field, and return the answer."""
    seed = {} if path in ("/tokenize", "/detokenize") else {"seed": 7}
    response = await server.client.post(path, json=seed | body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(server: HttpServer, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed answer. The last event of each output marks its end; there is no `[DONE]`."""
    response = await server.client.post(PATH, json={"seed": 7, "stream": True} | body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in response.text[:-2].split("\n\n")]


async def test_same_text_as_completions(server: HttpServer) -> None:
    for prompt in (TEXT, TOKENS, [TEXT, "hello"], [TOKENS, TEXT]):
        for options in ({}, {"temperature": 0.5, "top_k": 9, "n": 2}, {"top_p": 0.9, "presence_penalty": 1.5}):
            asked = {"prompt": prompt, "max_tokens": 9, **options}
            choices = (await complete(server, "/v1/completions", return_token_ids=True, **asked))["choices"]
            answer = await complete(server, return_tokens=True, **asked)
            outputs = answer if isinstance(answer, list) else [answer]
            assert [output["index"] for output in outputs] == [choice["index"] for choice in choices]
            assert [output["content"] for output in outputs] == [choice["text"] for choice in choices]
            assert [output["tokens"] for output in outputs] == [choice["token_ids"] for choice in choices]
            assert isinstance(answer, list) == (len(choices) > 1)


async def test_seeds(server: HttpServer) -> None:
    """-1 and 4294967295 request a random seed. The answer contains the seed."""
    asked = {"prompt": TEXT, "n_predict": 12}
    first = await complete(server, **asked, seed=3)
    assert first["generation_settings"]["seed"] == 3
    assert (await complete(server, **asked, seed=3))["content"] == first["content"]
    drawn = [(await complete(server, **asked, seed=seed))["generation_settings"]["seed"] for seed in (-1, 2**32 - 1)]
    assert len({3, *drawn}) == 3
    texts = [[(await complete(server, **asked, seed=seed))["content"] for _ in range(2)] for seed in drawn]
    assert [once for once, _ in texts] == [again for _, again in texts]


async def test_stream_equals_whole(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.002
    for options in ({"n_predict": 20}, {"n_predict": 9, "n_cmpl": 2}, {"n_predict": 200, "stop": ["a", "he"]}):
        asked = {"prompt": [TEXT, "hello"], "n_probs": 2, "timings_per_token": True, **options}
        events = await stream(server, **asked)
        for whole in await complete(server, return_tokens=True, **asked):
            *parts, last = [event for event in events if event["index"] == whole["index"]]
            assert [part["stop"] for part in parts] == [False] * len(parts)
            assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
            assert "".join(part["content"] for part in parts) == whole["content"]
            for column in ("tokens", "completion_probabilities"):
                assert [each for part in parts for each in part.get(column, ())] == whole[column]
            assert parts[-1]["timings"]["predicted_n"] == whole["tokens_predicted"]
            same = ("prompt", "stop_type", "stopping_word", "truncated", "has_new_line", "tokens_predicted", "model")
            assert {name: last[name] for name in same} == {name: whole[name] for name in same}
            assert whole["generation_settings"] | {"stream": True} == last["generation_settings"]
    server.stack.worker.step_seconds = 0


async def test_ends_of_outputs(server: HttpServer) -> None:
    limited = await complete(server, prompt=TEXT, n_predict=5)
    assert (limited["stop_type"], limited["tokens_predicted"], limited["truncated"]) == ("limit", 5, False)
    text = limited["content"][-1]
    stopped = await complete(server, prompt=TEXT, n_predict=5, stop=[text])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text)
    assert stopped["content"] == limited["content"].partition(text)[0]
    token = (await complete(server, prompt=TEXT, n_predict=5, return_tokens=True))["tokens"][2]
    ended = await complete(server, prompt=TEXT, n_predict=5, stop_token_ids=[token])
    assert (ended["stop_type"], ended["stopping_word"], ended["tokens_predicted"]) == ("eos", "", 3)
    # A limit that does not fit is reduced; the model's limit is 256 tokens.
    for n_predict in (None, -1, 1000):
        cut = await complete(server, prompt=TOKENS, n_predict=n_predict, ignore_eos=True)
        assert (cut["stop_type"], cut["truncated"], cut["tokens_predicted"]) == ("limit", True, 251)
    none = await complete(server, prompt=TOKENS, n_predict=0, n_probs=1, return_tokens=True)
    assert (none["content"], none["tokens"], none["tokens_predicted"], none["stop_type"]) == ("", [], 0, "limit")
    assert "completion_probabilities" not in none
    (event,) = await stream(server, prompt=TOKENS, n_predict=0)
    assert event["stop"]


async def test_counts_and_timings(server: HttpServer) -> None:
    prompt = [*range(40, 80)]
    for num_cached in (0, 36):  # ten blocks of 4 tokens, of which the last is computed again
        answer = await complete(server, prompt=prompt, n_predict=4, ignore_eos=True)
        timings = answer["timings"]
        assert (answer["tokens_evaluated"], answer["tokens_cached"]) == (40, num_cached)
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (num_cached, 40 - num_cached, 4)
        assert min(timings["prompt_ms"], timings["predicted_ms"]) > 0
        assert timings["predicted_per_second"] == pytest.approx(4000 / timings["predicted_ms"])


async def test_prompts_of_tokens_and_texts(server: HttpServer) -> None:
    hello = (await complete(server, "/tokenize", content="hello"))["tokens"]
    with noting_requests() as begun:
        await complete(server, prompt=[5, "hello", 6, 7, TEXT], n_predict=1)
        await complete(server, prompt=["hello", [5, "hello"], [6]], n_predict=1)
    prompts = [list(request.prompt_token_ids) for _, _, request in begun]
    once = (await complete(server, "/tokenize", content=TEXT))["tokens"]
    assert prompts == [[5, *hello, 6, 7, *once], hello, [5, *hello], [6]]


async def test_prompts_that_are_objects(server: HttpServer) -> None:
    """Clients of multimodal models send each prompt as an object."""
    plain = await complete(server, prompt=[TEXT, TOKENS], n_predict=4)
    objects = await complete(server, prompt=[{"prompt_string": TEXT, "multimodal_data": []}, TOKENS], n_predict=4)
    assert [output["content"] for output in objects] == [output["content"] for output in plain]
    one = await complete(server, prompt={"prompt_string": TEXT}, n_predict=4)
    assert one["content"] == plain[0]["content"]
    with_image = {"prompt_string": TEXT, "multimodal_data": ["MEDIA"]}
    assert (await server.refusal(PATH, prompt=with_image))["param"] == "prompt"


async def test_forms_of_logit_bias(server: HttpServer) -> None:
    (once,) = (await complete(server, "/tokenize", content="once"))["tokens"]
    for given, expected in (
        ([[5, 1.5], ["once", -2]], {5: 1.5, once: -2}),
        ([[5, False], [once, 3], ["once", 4]], {5: -100, once: 7}),
        ([["once", -99], ["once", False]], {once: -100}),
        ({"5": 1.5, "once": False}, {5: 1.5, once: -100}),
        ([], {}),
    ):
        settings = (await complete(server, prompt=TEXT, n_predict=1, logit_bias=given))["generation_settings"]
        assert {entry["token"]: entry["bias"] for entry in settings["logit_bias"]} == expected
    for wrong in (
        [[5, True]],
        [[5]],
        [[5, 101]],
        [[1000, 1]],
        {"5": "x"},
        {"9" * 256: 1},
        {"9" * 5000: 1},
        [["a" * 257, 1]],
    ):
        assert (await server.refusal(PATH, prompt=TEXT, logit_bias=wrong))["param"].startswith("logit_bias")


async def test_probabilities(server: HttpServer) -> None:
    answer = await complete(server, prompt=TEXT, n_predict=3, n_probs=4, return_tokens=True, temperature=0)
    for token_id, entry in zip(answer["tokens"], answer["completion_probabilities"], strict=True):
        assert entry["id"] == token_id
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (top["logprob"] for top in entry["top_logprobs"]), reverse=True
        )
        for each in (entry, *entry["top_logprobs"]):
            assert each["token"] == bytes(each["bytes"]).decode(errors="ignore")
            assert each["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 4
    after = await complete(server, prompt=TEXT, n_predict=3, n_probs=4, temperature=0, post_sampling_probs=True)
    for entry in after["completion_probabilities"]:
        assert (entry["prob"], [top["prob"] for top in entry["top_probs"]]) == (1, [1])
    error = await server.refusal(PATH, prompt=TEXT, n_probs=4, temperature=1, post_sampling_probs=True)
    assert error["param"] == "post_sampling_probs"


async def test_selected_fields(server: HttpServer) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/cache_n", "content/x", "nothing"]
    asked = {"prompt": TEXT, "n_predict": 3}
    answer = await complete(server, **asked, response_fields=fields)
    text = (await complete(server, **asked, response_fields=[]))["content"]
    assert answer == {"content": text, "generation_settings/n_predict": 3, "timings/cache_n": answer["timings/cache_n"]}
    *parts, last = await stream(server, **asked, response_fields=["stop"])
    assert "".join(part["content"] for part in parts) == text
    assert last == {"stop": True}


async def test_grammars_reach_the_worker(server: HttpServer) -> None:
    chat = {"messages": [QUESTION]}
    for path, asked in (
        (PATH, {"prompt": TEXT}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", chat),
    ):
        for options, kind, text in (
            ({"grammar": GBNF}, GrammarKind.GRAMMAR, GBNF),
            ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ):
            await complete(server, path, max_tokens=1, **asked, **options)
            added = server.stack.worker.grammars[-1]
            assert (added.kind, added.text) == (kind, text)
        error = await server.refusal(path, **asked, grammar=GBNF, json_schema=SCHEMA)
        assert "grammar" in error["message"]
        assert "json_schema" in error["message"]
        assert (await server.refusal(path, **asked, grammar='root ::= "'))["param"] == "grammar"
    assert (await complete(server, prompt=TEXT, n_predict=1, grammar=""))["generation_settings"]["grammar"] == ""


async def test_samplers_that_are_not_listed_are_off(server: HttpServer) -> None:
    asked = {"prompt": TEXT, "n_predict": 1, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25}
    off = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    for samplers in ([], ["top_k"], ["penalties", "dry", "top_p", "temperature"], ["min_p", "infill"]):
        settings = (await complete(server, **asked, samplers=samplers))["generation_settings"]
        assert {name: settings[name] for name in off} == {
            name: asked[name] if name in samplers else value for name, value in off.items()
        }


async def test_refusals(server: HttpServer) -> None:
    for field, asked in {
        "prompt": {"prompt": "a" * 2000},
        "n_predict": {"n_predict": -2},
        "n_cmpl": {"n_cmpl": 17},
        "n_probs": {"n_probs": 21},
        "repeat_last_n": {"repeat_penalty": 1.1, "repeat_last_n": 64},
        "repetition_penalty": {"repeat_penalty": 0},
        **{name: {name: value} for name, value in (("mirostat", 2), ("dry_multiplier", 0.8), ("typical_p", 0.9))},
        **{name: {name: value} for name, value in (("xtc_probability", 0.5), ("return_progress", True))},
        **{name: {name: value} for name, value in (("top_n_sigma", 1), ("min_keep", 2), ("lora", [{"id": 0}]))},
    }.items():
        error = await server.refusal(PATH, **{"prompt": TEXT} | asked)
        assert error["param"].partition("[")[0] == field
    for prompt in ([], [[]], "", ["x", []], [["x"], 5, "x"], [5, [6]], [5, []]):
        assert (await server.refusal(PATH, prompt=prompt))["param"].startswith("prompt")
    many = [part for token_id in range(1000) for part in (token_id % 9, "x")]
    assert (await server.refusal(PATH, prompt=many))["param"] == "prompt"
    neutral = {"mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0, "dry_base": 1.75, "typical_p": 1, "n_keep": -1}
    neutral |= {"cache_prompt": False, "id_slot": 3, "top_n_sigma": -1, "xtc_threshold": 0.1, "repeat_last_n": 64}
    assert await complete(server, prompt=TEXT, n_predict=1, **neutral)
    for path in ("/slots/0", "/props", "/lora-adapters", "/embedding", "/rerank", "/v1/reranking"):
        error = await server.refusal(path, 501)
        assert error["type"] == "not_supported_error"
        assert "supported" in error["message"] or "cannot" in error["message"]


async def test_infill(tmp_path: Path) -> None:
    """The prompt is the one of `/v1/completions` with a suffix. Other files precede it."""
    model = make_chat_checkpoint(tmp_path / "coder")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": tokenizer.get_vocab_size()}))
    asked = {"input_prefix": "once ", "prompt": "upon", "input_suffix": " time", "n_predict": 6}
    async with serve_http(model) as server:
        filled = await complete(server, "/infill", **asked)
        same = await complete(server, "/v1/completions", prompt="once upon", suffix=" time", max_tokens=6)
        assert filled["content"] == same["choices"][0]["text"]
        assert filled["prompt"] == "<|fim_prefix|>once upon<|fim_suffix|> time<|fim_middle|>"
        other = await complete(server, "/infill", **asked, input_extra=[{"filename": "a.h", "text": "hello"}])
        assert "a.h" in other["prompt"].partition("<|fim_prefix|>")[0]
        for wrong in ({}, {"filename": "a"}, {"filename": 1, "text": "a"}, {"filename": 1, "text": 2}):
            error = await server.refusal("/infill", **asked, input_extra=[wrong])
            assert error["param"].startswith("input_extra[0]")
        assert (await server.refusal("/infill", input_prefix="a"))["param"] == "input_suffix"


async def test_infill_needs_its_tokens(server: HttpServer) -> None:
    assert (await server.refusal("/infill", input_prefix="a", input_suffix="b"))["param"] == "input_suffix"


async def test_properties(server: HttpServer) -> None:
    answer = (await server.client.get("/props")).json()
    assert (answer["model_path"], answer["total_slots"]) == ("chatty", 64)
    defaults = answer["default_generation_settings"]
    assert defaults["n_ctx"] == 256
    settings = (await complete(server, prompt=TEXT))["generation_settings"]
    assert {name: settings[name] for name in defaults["params"] if name != "seed"} == {
        name: value for name, value in defaults["params"].items() if name != "seed"
    }
    assert "messages" in answer["chat_template"]


async def test_slots_of_running_requests(server: HttpServer) -> None:
    async def busy() -> list[dict[str, Any]]:
        slots = (await server.client.get("/slots")).json()
        assert [slot["id"] for slot in slots] == list(range(64))
        return [slot for slot in slots if slot["is_processing"]]

    while await busy():  # requests of other tests
        pass
    server.stack.worker.step_seconds = 0.01
    asked = {"prompt": TOKENS, "n_predict": 200, "ignore_eos": True, "stream": True, "n_cmpl": 2}
    async with server.client.stream("POST", PATH, json=asked) as response:
        await anext(response.aiter_lines())
        running = await busy()
        assert len(running) == 2
        for slot in running:
            assert slot["next_token"]["n_decoded"] + slot["next_token"]["n_remain"] == 200
            assert slot["n_ctx"] == 256
    server.stack.worker.step_seconds = 0
    while await busy():  # the front end ends its requests after the scheduler
        pass
    assert (await server.client.get("/slots?fail_on_no_slot=1")).status_code == 200


async def test_slots_are_for_operators(model: Path, tmp_path: Path) -> None:
    async with shared_server(model, tmp_path) as server:
        assert (await server.client.get("/slots", headers=of("acme"))).status_code == 403
        assert (await server.client.get("/slots", headers=of("root"))).status_code == 200
        assert (await server.client.get("/props")).status_code == 401
        assert (await server.client.get("/props", headers={"x-api-key": KEYS["acme"]})).status_code == 200


async def test_template_is_applied(server: HttpServer) -> None:
    for options, expected in (
        ({}, "<user>hello\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>hello\n"),
        ({"chat_template_kwargs": {"mood": "kind"}}, "<user>hello\n<assistant>kind"),
    ):
        assert await complete(server, "/apply-template", messages=[QUESTION], **options) == {"prompt": expected}


async def test_tokenize_with_fields_of_llama_server(server: HttpServer) -> None:
    text = "hello é"
    tokens = (await complete(server, "/tokenize", content=text))["tokens"]
    assert (await complete(server, "/detokenize", tokens=tokens))["content"] == text
    pieces = (await complete(server, "/tokenize", content=text, with_pieces=True))["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    spelled = [piece["piece"] for piece in pieces]
    assert any(isinstance(piece, list) for piece in spelled)
    assert b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in spelled).decode() == text
    for wrong in ({}, {"content": text, "prompt": text}):
        assert (await server.refusal("/tokenize", **wrong))["param"] == "prompt"


async def test_aliases(server: HttpServer) -> None:
    for path in ("/health", "/v1/health"):
        assert (await server.client.get(path)).json() == {"status": "ok"}
    assert (await server.client.get("/models")).json() == (await server.client.get("/v1/models")).json()
    asked = {"messages": [QUESTION], "max_tokens": 4}
    paths = ("/chat/completions", "/v1/chat/completions")
    first, second = [(await complete(server, path, **asked))["choices"] for path in paths]
    assert first == second
    assert (await complete(server, "/completions", prompt=TEXT))["content"]
    response = await complete(server, "/responses", input="hello", store=False)
    assert response["object"] == "response"
