"""Our GenerateResponses as VllmEngine's: tokens as chunks if they are wanted, and one `complete` for each sample.

A chunk is one token, even where several have waited: of each chunk the gateway reads one part of a call of a tool, and
loses what else stands there, or makes text of it. Which streams may have calls it does not tell.
"""

from array import array
from collections.abc import Iterator, Sequence

from smg_grpc_proto import vllm_engine_pb2

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import Request

_FINISH_REASONS = {
    scheduler_pb2.FINISH_REASON_STOP: "stop",
    scheduler_pb2.FINISH_REASON_LENGTH: "length",
    scheduler_pb2.FINISH_REASON_ABORT: "abort",
}


class ResponseTranslator:
    """The responses of one call. Output tokens are kept until the end of their sample, since `complete` repeats
    them."""

    def __init__(self, message: vllm_engine_pb2.GenerateRequest, request: Request) -> None:
        """`request` is what was made of the call's `message`."""
        self._sampling = sampling = message.sampling_params
        self._is_streaming = message.stream
        self._prompt_token_ids = request.prompt_token_ids
        self._with_logprobs = sampling.HasField("logprobs")
        self._token_ids = [array("I") for _ in range(request.n)]
        self._logprobs = [vllm_engine_pb2.OutputLogProbs() for _ in range(request.n)]
        self._prompt_logprobs: vllm_engine_pb2.InputLogProbs | None = None
        if sampling.HasField("prompt_logprobs"):
            self._prompt_logprobs = vllm_engine_pb2.InputLogProbs(token_ids=request.prompt_token_ids[:1])
            self._prompt_logprobs.token_logprobs.add()  # nothing comes before the first token
            if sampling.prompt_logprobs > 0:
                self._prompt_logprobs.top_logprobs.add()

    def translate(self, response: scheduler_pb2.GenerateResponse) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yield what is to be sent for one of our responses."""
        self._take_prompt_logprobs(response.prompt_logprobs)
        self._token_ids[response.index].extend(response.token_ids)
        if self._is_streaming:
            for position in range(len(response.token_ids)):
                yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(response, position))
        elif self._with_logprobs:
            self._add_logprobs(response.logprobs, self._logprobs[response.index])
        if response.HasField("usage"):
            yield vllm_engine_pb2.GenerateResponse(complete=self._complete(response))

    def _chunk(self, response: scheduler_pb2.GenerateResponse, position: int) -> vllm_engine_pb2.GenerateStreamChunk:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=(response.token_ids[position],),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=1,
            index=response.index,
        )
        if self._with_logprobs:
            self._add_logprobs(response.logprobs[position : position + 1], chunk.output_logprobs)
        if self._prompt_logprobs is not None:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs)
            self._prompt_logprobs = None  # the first chunk alone has them
        return chunk

    def _complete(self, response: scheduler_pb2.GenerateResponse) -> vllm_engine_pb2.GenerateComplete:
        index, usage = response.index, response.usage
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids[index],
            finish_reason=_FINISH_REASONS[response.finish_reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            index=index,
        )
        if not self._is_streaming:
            if self._with_logprobs:
                complete.output_logprobs.CopyFrom(self._logprobs[index])
            if self._prompt_logprobs is not None:
                complete.input_logprobs.CopyFrom(self._prompt_logprobs)
        match response.WhichOneof("stop"):
            case "stop_text":
                complete.matched_stop_str = response.stop_text
            case "stop_token_id" if response.stop_token_id in self._sampling.stop_token_ids:
                complete.matched_token_id = response.stop_token_id
        return complete

    def _take_prompt_logprobs(self, entries: Sequence[scheduler_pb2.TokenLogprobs]) -> None:
        if self._prompt_logprobs is None:
            return
        for entry in entries:
            self._prompt_logprobs.token_ids.append(entry.token_id)
            self._prompt_logprobs.token_logprobs.add(value=entry.logprob)
            if self._sampling.prompt_logprobs > 0:
                _add_top(entry, self._prompt_logprobs.top_logprobs.add())

    def _add_logprobs(
        self, entries: Sequence[scheduler_pb2.TokenLogprobs], logprobs: vllm_engine_pb2.OutputLogProbs
    ) -> None:
        for entry in entries:
            logprobs.token_ids.append(entry.token_id)
            logprobs.token_logprobs.append(entry.logprob)
            if self._sampling.logprobs > 0:
                _add_top(entry, logprobs.top_logprobs.add())


def _add_top(entry: scheduler_pb2.TokenLogprobs, top: vllm_engine_pb2.TopLogProbs) -> None:
    top.token_ids.extend(candidate.token_id for candidate in entry.top)
    top.values.extend(candidate.logprob for candidate in entry.top)
