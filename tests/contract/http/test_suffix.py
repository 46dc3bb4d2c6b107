"""Completions with a suffix: the model generates the text between the prompt and the suffix."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from testing.scheduler_stack import expected_tokens
from testing.seeds import seeded
from testing.serving.http_server import HttpServer, joined, make_chat_checkpoint, serve_http

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/completions"
EOS = 0
CONTROLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
PLAIN = {"prompt": "once upon", "suffix": " time", "seed": 0, "max_tokens": 20, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "coder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(CONTROLS))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(model: Path) -> AsyncIterator[HttpServer]:
    async with serve_http(model) as server:
        yield server


def composed(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the tokens of the prompt that asks for the text between prefix and suffix."""
    return tokenizer.encode(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>").ids


async def test_a_suffix_is_part_of_the_prompt(server: HttpServer, tokenizer: Tokenizer) -> None:
    """The answer is equal to the answer for the composed token ids."""
    rng = seeded()
    for _ in range(4):
        prefixes = ["".join(rng.choices([*"once upn", "\n", "  ", "é"], k=rng.randrange(9))) for _ in range(3)]
        suffix = "".join(rng.choices([*"a time", "\n", " ", "😀"], k=rng.randrange(1, 9)))
        prompts = [composed(tokenizer, prefix, suffix) for prefix in prefixes]
        asked = {"max_tokens": 9, "n": 2, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
        wanted = (await server.complete(prompt=prompts, **asked))["choices"]
        given = await server.complete(prompt=prefixes, suffix=suffix, **asked)
        assert given["choices"] == wanted
        assert [choice["prompt_token_ids"] for choice in wanted[::2]] == prompts
        assert given["usage"]["prompt_tokens"] == sum(map(len, prompts))
        single = await server.complete(prompt=prefixes[0], suffix=suffix, **asked)
        assert single["choices"] == wanted[:2]
    rendered = (await server.post(f"{PATH}/render", prompt=prefixes, suffix=suffix)).json()
    assert [each["token_ids"] for each in rendered] == prompts
    await server.stack.until_idle()


async def test_streamed_is_as_whole(server: HttpServer) -> None:
    (whole,) = (await server.complete(**PLAIN))["choices"]
    server.stack.worker.step_seconds = 0.002
    events = await server.events(PATH, **PLAIN)
    server.stack.worker.step_seconds = 0
    parts = joined(event["choices"] for event in events)
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert joined(part["token_ids"] for part in parts) == whole["token_ids"]


async def test_tokens_between_files_end_the_text(server: HttpServer, tokenizer: Tokenizer) -> None:
    """The text ends with a padding token or a token between files, unless the request ignores end tokens."""
    prompt = composed(tokenizer, "once upon", " time")
    ends = {tokenizer.token_to_id(text) for text in CONTROLS[3:]}
    for seed in range(1000):
        wanted = expected_tokens(prompt, 40, seed=seed)
        if ends & {*wanted} and EOS not in wanted:
            break
    length = next(place for place, token_id in enumerate(wanted) if token_id in ends)
    asked = PLAIN | {"seed": seed, "max_tokens": 40}
    (choice,) = (await server.complete(**asked))["choices"]
    assert choice["token_ids"] == wanted[: length + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert not any(text in choice["text"] for text in CONTROLS[3:])
    (choice,) = (await server.complete(**asked, stop_token_ids=[wanted[0]]))["choices"]
    assert (choice["token_ids"], choice["stop_reason"]) == (wanted[:1], wanted[0])
    (choice,) = (await server.complete(**asked, ignore_eos=True))["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (wanted, "length")
    (choice,) = (await server.complete(**asked | {"prompt": prompt, "suffix": ""}))["choices"]
    assert choice["token_ids"] == wanted, "other completions do not end there"


async def test_what_a_suffix_excludes(server: HttpServer) -> None:
    for word, other in (
        ("echo", {"echo": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
        ("token ids", {"prompt": [5, 6]}),
        ("token ids", {"prompt": ["once", [5, 6]]}),
    ):
        error = await server.refusal(PATH, **PLAIN | other)
        assert error["param"] == "suffix"
        assert word in error["message"]
    long = await server.refusal(PATH, **PLAIN | {"suffix": "xy" * 300})
    assert (long["param"], long["code"]) == ("suffix", "context_length_exceeded")
    assert (await server.refusal(PATH, **PLAIN | {"prompt": []}))["param"] == "prompt"
