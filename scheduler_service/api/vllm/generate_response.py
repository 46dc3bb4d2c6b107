"""Translation of output deltas into VllmEngine's responses: chunks with tokens, and one `complete` per sample.

Chunks are sent only if the client streams. A chunk has exactly one token, even if several tokens are ready. The router
reads at most one part of a tool call per chunk and loses the rest or treats it as text. The server cannot know which
streams may contain tool calls.
"""

from array import array
from collections.abc import Iterator, Sequence

from smg_grpc_proto import vllm_engine_pb2

from scheduler_service.core.request import Request, SequenceEnd, TokenLogprobs
from scheduler_service.serving.output import Delta


class ResponseTranslator:
    """A translator of one request's output to VllmEngine's response messages. It stores the output tokens of each
    sample, because the last message of a sample repeats them."""

    def __init__(self, message: vllm_engine_pb2.GenerateRequest, request: Request) -> None:
        """Create the translator for the output of one request. `message` is the client's message, and `request` is the
        request that was parsed from it."""
        self._sampling = sampling = message.sampling_params
        self._is_streaming = message.stream
        self._prompt_token_ids = request.prompt_token_ids
        self._with_logprobs = sampling.HasField("logprobs")
        self._token_ids = [array("I") for _ in range(request.n)]
        self._logprobs = [vllm_engine_pb2.OutputLogProbs() for _ in range(request.n)]
        self._prompt_logprobs: vllm_engine_pb2.InputLogProbs | None = None
        if sampling.HasField("prompt_logprobs"):
            self._prompt_logprobs = vllm_engine_pb2.InputLogProbs(token_ids=request.prompt_token_ids[:1])
            self._prompt_logprobs.token_logprobs.add()  # the first token has no log-probability
            if sampling.prompt_logprobs:
                self._prompt_logprobs.top_logprobs.add()

    def translate(self, delta: Delta) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yield VllmEngine's response messages for new output of a sample."""
        self._take_prompt_logprobs(delta.prompt_logprobs)
        self._token_ids[delta.sample_index].extend(delta.token_ids)
        if self._is_streaming:
            for position in range(len(delta.token_ids)):
                yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(delta, position))
        elif self._with_logprobs:
            self._add_logprobs(delta.logprobs, self._logprobs[delta.sample_index])
        if delta.end is not None:
            yield vllm_engine_pb2.GenerateResponse(
                complete=self._complete(delta.sample_index, delta.end, delta.stop_text)
            )

    def _chunk(self, delta: Delta, position: int) -> vllm_engine_pb2.GenerateStreamChunk:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=(delta.token_ids[position],),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=1,
            index=delta.sample_index,
        )
        if self._with_logprobs:
            self._add_logprobs(delta.logprobs[position : position + 1], chunk.output_logprobs)
        if self._prompt_logprobs is not None:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs)
            self._prompt_logprobs = None  # only the first chunk has them
        return chunk

    def _complete(self, index: int, end: SequenceEnd, stop_text: str | None) -> vllm_engine_pb2.GenerateComplete:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids[index],
            finish_reason=end.reason.value,
            prompt_tokens=end.num_prompt_tokens,
            completion_tokens=end.num_output_tokens,
            cached_tokens=end.num_cached_tokens,
            index=index,
        )
        if not self._is_streaming:
            if self._with_logprobs:
                complete.output_logprobs.CopyFrom(self._logprobs[index])
            if self._prompt_logprobs is not None:
                complete.input_logprobs.CopyFrom(self._prompt_logprobs)
        if stop_text is not None:
            complete.matched_stop_str = stop_text
        elif end.stop_token_id is not None and end.stop_token_id in self._sampling.stop_token_ids:
            complete.matched_token_id = end.stop_token_id
        return complete

    def _take_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        if self._prompt_logprobs is None:
            return
        for entry in entries:
            self._prompt_logprobs.token_ids.append(entry.token_id)
            self._prompt_logprobs.token_logprobs.add(value=entry.logprob)
            if self._sampling.prompt_logprobs:
                _add_top(entry, self._prompt_logprobs.top_logprobs.add())

    def _add_logprobs(self, entries: Sequence[TokenLogprobs], logprobs: vllm_engine_pb2.OutputLogProbs) -> None:
        for entry in entries:
            logprobs.token_ids.append(entry.token_id)
            logprobs.token_logprobs.append(entry.logprob)
            if self._sampling.logprobs:
                _add_top(entry, logprobs.top_logprobs.add())


def _add_top(entry: TokenLogprobs, top: vllm_engine_pb2.TopLogProbs) -> None:
    top.token_ids.extend(token_id for token_id, _ in entry.top)
    top.values.extend(logprob for _, logprob in entry.top)
