"""A VllmEngine client for a scheduler's public port."""

from dataclasses import dataclass, field

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from testing.scheduler_stack import Stack


def stub_of(stack: Stack) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(stack.channel)


def request(
    prompt: list[int] | str, *, stream: bool = False, request_id: str = "", **sampling: object
) -> vllm_engine_pb2.GenerateRequest:
    """Return a request. Greedy sampling is not needed: the fake worker's tokens depend on prompt, seed
    and sample only.
    """
    message = vllm_engine_pb2.GenerateRequest(
        request_id=request_id, stream=stream, sampling_params={"seed": 0, "skip_special_tokens": True} | sampling
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokenized.input_ids.extend(prompt)
    return message


@dataclass
class Output:
    """All messages of one RPC, checked on arrival. `streamed` and `completes` are keyed by the sample's index."""

    chunks: list[vllm_engine_pb2.GenerateStreamChunk] = field(default_factory=list)
    streamed: dict[int, list[int]] = field(default_factory=dict)
    completes: dict[int, vllm_engine_pb2.GenerateComplete] = field(default_factory=dict)

    def add(self, response: vllm_engine_pb2.GenerateResponse) -> None:
        if response.HasField("chunk"):
            chunk = response.chunk
            assert chunk.index not in self.completes, "a chunk after the end"
            assert chunk.completion_tokens == len(chunk.token_ids) > 0
            self.chunks.append(chunk)
            self.streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
        else:
            complete = response.complete
            assert complete.index not in self.completes, "two ends"
            assert complete.completion_tokens == len(complete.output_ids)
            if self.chunks:
                assert self.streamed.get(complete.index, []) == list(complete.output_ids)
            self.completes[complete.index] = complete

    @property
    def complete(self) -> vllm_engine_pb2.GenerateComplete:
        (complete,) = self.completes.values()
        return complete


async def generate(stack: Stack, message: vllm_engine_pb2.GenerateRequest, **call: float) -> Output:
    output = Output()
    async for response in stub_of(stack).Generate(message, **call):
        output.add(response)
    return output


async def error_of(stack: Stack, message: vllm_engine_pb2.GenerateRequest) -> grpc.aio.AioRpcError | None:
    try:
        await generate(stack, message)
    except grpc.aio.AioRpcError as error:
        return error
    return None
