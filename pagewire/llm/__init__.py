"""`LLM`: offline inference in the style of vLLM, with both services in the background on this machine."""

from pagewire.client.server_info import Counter, Gauge, Metric
from pagewire.llm.llm import LLM, TextPrompt, TokensPrompt
from pagewire.llm.request_output import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    SampleOutput,
)

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Gauge",
    "Logprob",
    "Metric",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "SampleOutput",
    "TextPrompt",
    "TokensPrompt",
]
