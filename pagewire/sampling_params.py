"""Sampling parameters, under the name that the module has in vLLM."""

from pagewire.client.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs, StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputs", "StructuredOutputsParams"]
