"""Tokenization, prompt rendering and embeddings over HTTP."""

import base64
import math
import struct
from pathlib import Path

import pytest
from openai.types import CreateEmbeddingResponse
from tokenizers import Tokenizer

from pagewire.common.wire.messages import Pooling
from testing.core.simulated_worker import reference_embedding
from testing.scheduler_stack import VOCAB_SIZE
from testing.serving.http_server import HttpServer, make_chat_checkpoint, server_of_the_module
from tests.contract.pooling import write_pooling

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

TEXT = "once upon a time"
QUESTION = {"role": "user", "content": "hello"}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty")
    write_pooling(path, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    (path / "config_sentence_transformers.json").write_text('{"prompts": {"x": "x"}, "default_prompt_name": null}')
    return path


async def test_tokens_of_a_text_and_back(server: HttpServer, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoding = tokenizer.encode(TEXT)
    answer = (await server.post("/tokenize", prompt=TEXT, return_token_strs=True)).json()
    expected = {"count": len(encoding), "max_model_len": 256, "tokens": encoding.ids, "token_strs": encoding.tokens}
    assert answer == expected
    assert (await server.post("/detokenize", tokens=encoding.ids)).json() == {"prompt": TEXT, "content": TEXT}
    chat = (await server.post("/tokenize", messages=[QUESTION])).json()
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False) == "<user>hello\n<assistant>"
    assert chat["token_strs"] is None
    for field, path, asked in (
        ("prompt", "/tokenize", {}),
        ("messages", "/tokenize", {"messages": [], "continue_final_message": True}),
        ("prompt", "/tokenize", {"prompt": "x", "messages": [QUESTION]}),
        ("tokens[1]", "/detokenize", {"tokens": [1, VOCAB_SIZE]}),
        ("tokens[0]", "/detokenize", {"tokens": [-1]}),
    ):
        assert (await server.refusal(path, **asked))["param"] == field


async def test_prompts_are_rendered(server: HttpServer) -> None:
    (first, second) = (await server.post("/v1/completions/render", prompt=[TEXT, "hello"])).json()
    assert first["token_ids"] == (await server.post("/tokenize", prompt=TEXT)).json()["tokens"]
    assert second["model"] == "chatty"
    chat = (await server.post("/v1/chat/completions/render", messages=[QUESTION])).json()
    answer = await server.chat("hello", return_token_ids=True, max_tokens=1)
    assert chat["token_ids"] == answer["prompt_token_ids"]


async def test_embeddings(server: HttpServer) -> None:
    numbers = list(struct.unpack("<2f", reference_embedding(PROMPT, Pooling.LAST)))
    answer = (await server.post("/v1/embeddings", input=PROMPT)).json()
    CreateEmbeddingResponse.model_validate(answer)
    assert [each["embedding"] for each in answer["data"]] == [numbers]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 4
    several = (await server.post("/v1/embeddings", input=[PROMPT, [1], PROMPT])).json()
    assert [each["index"] for each in several["data"]] == [0, 1, 2]
    assert several["data"][2]["embedding"] == numbers != several["data"][1]["embedding"]
    assert several["usage"]["prompt_tokens"] == 9
    texts = await server.openai.embeddings.create(model="chatty", input=["once", "upon", "a"])  # as base64
    assert len(texts.data) == 3
    one = (await server.post("/v1/embeddings", input="upon")).json()["data"][0]["embedding"]
    assert texts.data[1].embedding == pytest.approx(one)


async def test_embeddings_of_texts_with_named_prompts(server: HttpServer) -> None:
    """The checkpoint has the prompt x, and no default."""
    plain = (await server.post("/v1/embeddings", input=["xonce upon a time", "upon"])).json()["data"]
    named = (await server.post("/v1/embeddings", input=["once upon a time", "upon"], prompt_name="x")).json()["data"]
    assert named[0] == plain[0]
    assert named[1]["embedding"] != plain[1]["embedding"]
    for asked in ({"input": "a", "prompt_name": "y"}, {"input": PROMPT, "prompt_name": "x"}):
        assert (await server.refusal("/v1/embeddings", **asked))["param"] == "prompt_name"
    refusal = await server.refusal("/v1/embeddings", messages=[QUESTION], prompt_name="x")
    assert refusal["message"].startswith("prompt_name applies to input, and the chat template renders messages")


async def test_embeddings_in_other_forms(server: HttpServer) -> None:
    answer = (await server.post("/v1/embeddings", input=PROMPT, encoding_format="base64")).json()
    assert base64.b64decode(answer["data"][0]["embedding"]) == reference_embedding(PROMPT, Pooling.LAST)
    (number,) = (await server.post("/v1/embeddings", input=PROMPT, dimensions=1)).json()["data"][0]["embedding"]
    assert math.isclose(abs(number), 1)
    for field, asked in {
        "dimensions": {"dimensions": 3},
        "encoding_format": {"encoding_format": "hex"},
        "input": {"input": []},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": -2},
    }.items():
        assert (await server.refusal("/v1/embeddings", **({"input": PROMPT} | asked)))["param"] == field
    for bad in ([300], "x" * 4000, ["x", ""]):
        assert (await server.refusal("/v1/embeddings", input=bad))["param"] == "input"
    await server.stack.until_idle()
