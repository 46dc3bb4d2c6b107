"""The output of one sample: a reader that empties the buffer, at any speed, gets the same output as a kept buffer."""

import asyncio
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc.generate_response import encode_delta, whole_response
from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs
from scheduler_service.serving.checkpoint.tokenizer import DecodedText, Tokenizer
from scheduler_service.serving.output import OutputReader, SampleRecord
from testing.scheduler_stack import EOS, VOCAB_SIZE
from testing.seeds import seeded


def entries(rng: random.Random, token_ids: list[int]) -> list[TokenLogprobs]:
    # Numbers that 32-bit floats represent exactly, and whose sums are exact.
    return [TokenLogprobs(id, -rng.randrange(64) / 8, 1, ((id, -0.5), (3, -1.0))) for id in token_ids]


def news(rng: random.Random, reason: EndReason) -> list[dict[str, Any]]:
    """Return updates of one sample: the prompt's logprobs, then a few tokens at a time, then the end.

    The end is part of the last update with tokens, or an update of its own.
    """
    token_ids = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randrange(60))]
    end = SequenceEnd(0, reason, 5, 0, len(token_ids), None, "", 0.0, None, None)
    found: list[dict[str, Any]] = [{"token_ids": [], "prompt_logprobs": entries(rng, [5] * rng.randrange(9))}]
    first = 0
    while first < len(token_ids):
        some = token_ids[first : first + rng.randrange(1, 9)]
        found.append({"token_ids": some, "logprobs": entries(rng, some)})
        first += len(some)
    if rng.random() < 0.5:
        return [*found[:-1], found[-1] | {"end": end}]
    return [*found, {"token_ids": [], "end": end}]


def encoded(reader: OutputReader) -> list[pb.GenerateResponse]:
    return [encode_delta("id", delta) for delta in reader.take()]


def read_some(reader: OutputReader, rng: random.Random, received: list[pb.GenerateResponse]) -> None:
    """Read the available deltas, or leave some of them for the next call."""
    for delta in reader.take():
        received.append(encode_delta("id", delta))
        if rng.random() < 0.3:
            return


def joined(responses: list[pb.GenerateResponse]) -> tuple[object, ...]:
    whole = pb.GenerateResponse()
    for response in responses:
        if response.token_ids:
            assert response.first_token == len(whole.token_ids)
        whole.MergeFrom(response)
    text = "".join(response.text for response in responses)
    return list(whole.token_ids), text, list(whole.logprobs), list(whole.prompt_logprobs), whole.cumulative_logprob


@pytest.mark.parametrize(("stop", "text"), [(" ", "a"), ("\ufffd", "a "), (" \ufffd", "a"), ("b", "a \ufffd")])
@pytest.mark.parametrize("ends_by_token", [False, True])
def test_half_a_character_at_the_end_hides_no_stop_text(
    checkpoint: Path, stop: str, text: str, ends_by_token: bool
) -> None:
    tokenizer = Tokenizer(checkpoint / "tokenizer.json")
    vocab = HuggingFaceTokenizer.from_file(str(checkpoint / "tokenizer.json"))
    token_ids = [vocab.token_to_id(name) for name in ("a", "Ġ", "ð")]
    decoder = tokenizer.text_decoder((), stop=[stop], min_tokens=0, include_stop_text=False, skip_special_tokens=False)
    output = SampleRecord(0, decoder, is_kept=True)
    reason, token = (EndReason.STOP, EOS) if ends_by_token else (EndReason.LENGTH, None)
    token_ids += [EOS] if ends_by_token else []
    output.add(token_ids, end=SequenceEnd(0, reason, 5, 0, len(token_ids), token, "", 0.0, None, None))
    output.process_output()
    whole = asyncio.run(whole_response("id", output))
    assert whole.text == text
    has_stop = stop != "b"
    is_stop = has_stop or ends_by_token
    assert whole.finish_reason == (pb.FINISH_REASON_STOP if is_stop else pb.FINISH_REASON_LENGTH)
    assert whole.stop_text == (stop if has_stop else "")
    assert whole.HasField("stop_token_id") == (ends_by_token and not has_stop)
    assert whole.usage.completion_tokens == (2 if stop == " " else 4 if ends_by_token and not has_stop else 3)


class WordDecoder:
    """A decoder that decodes every token to a separate word."""

    def push(self, token_ids: list[int]) -> DecodedText:
        return DecodedText("".join(f" {token_id:06}" for token_id in token_ids), None, len(token_ids))

    def flush(self) -> DecodedText:
        return DecodedText("", None)


def test_unread_output_needs_a_few_bytes_a_token() -> None:
    output = SampleRecord(0, WordDecoder(), is_kept=True)
    num_tokens = 20_000
    tracemalloc.start()
    for position in range(num_tokens):
        output.add([position])
        output.process_output()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(asyncio.run(whole_response("id", output)).text) == 7 * num_tokens
    assert taken < 30 * num_tokens


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("reason", [EndReason.LENGTH, EndReason.NAN_LOGITS])
def test_a_reader_gets_everything_once_and_in_order(checkpoint: Path, seed: int, reason: EndReason) -> None:
    rng = seeded(seed)
    tokenizer = Tokenizer(checkpoint / "tokenizer.json")
    buffers = [
        SampleRecord(
            0,
            tokenizer.text_decoder((5, 6), stop=[], min_tokens=0, include_stop_text=False, skip_special_tokens=True),
            with_logprobs=True,
            is_kept=is_kept,
        )
        for is_kept in (False, True)
    ]
    reader = OutputReader(buffers[0], max_tokens=rng.randrange(1, 9))
    received: list[pb.GenerateResponse] = []
    for new in news(rng, reason):
        for buffer in buffers:
            buffer.add(**new)
            buffer.process_output()
        if rng.random() < 0.6:
            read_some(reader, rng, received)
    received += encoded(reader)
    whole = asyncio.run(whole_response("id", buffers[1]))
    assert joined(received) == joined([whole])
    assert list(reader.take()) == []
    ends = [response.HasField("usage") for response in received]
    assert ends == [False] * (len(ends) - 1) + [True] if reason is EndReason.LENGTH else not any(ends)
    # A second reader of the kept buffer gets the same output.
    assert joined(encoded(OutputReader(buffers[1], max_tokens=3))) == joined([whole])
