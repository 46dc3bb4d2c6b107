"""The Tokenize and Detokenize RPCs of scheduler and front end, compared with the tokenizer itself."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from testing.scheduler_stack import VOCAB_SIZE, make_checkpoint, request, serve
from testing.serving.front_end import serve_both

TEXTS = ("once upon a time", "", "é😀 <end>", "hello\nworld")
SPECIAL_TOKENS = {"bos_token": "<end>", "eos_token": "<end>"}


async def check(stub: pb_grpc.SchedulerServiceStub, tokenizer: Tokenizer) -> None:
    for flag, adds in ((None, True), (True, True), (False, False)):
        answer = await stub.Tokenize(pb.TokenizeRequest(texts=TEXTS, add_special_tokens=flag))
        expected = [tokenizer.encode(text, add_special_tokens=adds).ids for text in TEXTS]
        assert [list(prompt.ids) for prompt in answer.prompts] == expected
    for flag, skips in ((None, True), (True, True), (False, False)):
        asked = pb.DetokenizeRequest(prompts=answer.prompts, skip_special_tokens=flag)
        expected = [tokenizer.decode(list(prompt.ids), skip_special_tokens=skips) for prompt in answer.prompts]
        assert (await stub.Detokenize(asked)).texts == expected
    assert expected == list(TEXTS)
    assert dict((await stub.GetServerInfo(pb.GetServerInfoRequest())).special_tokens) == SPECIAL_TOKENS
    assert await stub.Tokenize(pb.TokenizeRequest()) == pb.TokenizeResponse()
    with pytest.raises(grpc.aio.AioRpcError, match=rf"prompts\[1\].ids\[0\] is the token id {VOCAB_SIZE}") as refused:
        await stub.Detokenize(pb.DetokenizeRequest(prompts=[pb.TokenIds(ids=[1]), pb.TokenIds(ids=[VOCAB_SIZE])]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_scheduler_and_a_front_end_tokenize(special_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(special_checkpoint / "tokenizer.json"))
    async with serve_both(special_checkpoint) as (stack, front):
        await check(stack.stub, tokenizer)
        await check(front.stub, tokenizer)


async def test_tokens_are_those_of_a_prompt(special_checkpoint: Path) -> None:
    async with serve(special_checkpoint) as stack:
        prompt = (await stack.stub.Tokenize(pb.TokenizeRequest(texts=["once upon"]))).prompts[0]
        from_text = await stack.generate(request("once upon", max_tokens=9))
        assert (await stack.generate(request(list(prompt.ids), max_tokens=9))).token_ids == from_text.token_ids


async def test_without_a_tokenizer_there_is_nothing_to_ask(tmp_path: Path) -> None:
    async with serve(make_checkpoint(tmp_path / "bare", with_tokenizer=False)) as stack:
        for call in (
            stack.stub.Tokenize(pb.TokenizeRequest(texts=["a"])),
            stack.stub.Detokenize(pb.DetokenizeRequest(prompts=[pb.TokenIds(ids=[1])])),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="has no tokenizer") as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
