"""Sampling parameters, under the module name that vLLM uses."""

from pagewire.client.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs, StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputs", "StructuredOutputsParams"]
