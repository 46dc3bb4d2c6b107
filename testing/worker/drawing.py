"""Sampling on the host for tests: the requests of rows are stored in a `SamplingTable` and sampled from its columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.common.wire.messages import Candidates, Logprobs, RowOpening, RowStatus, SamplingParams
from pagewire.kernels.cpu.sampler import CpuSampler, TokenHistory, TorchSampler
from worker_service.rows.reading import ValueReader
from worker_service.rows.sampling import SamplingTable


@dataclass(frozen=True)
class SamplingRow:
    """A row that requests more than its highest logit."""

    index: int
    sampling: SamplingParams
    token_ids: NDArray[np.int32]  # all known tokens, prompt first
    num_prompt_tokens: int
    seed: int
    sample_index: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True)
class Draws:
    """The samples, with one entry per row.

    The token of a row with NaN logits is 0. The token of a row with beams is undefined.
    """

    token_ids: list[int]
    is_nan: list[bool]
    logprobs: Logprobs  # columns over the rows without NaN that choose a token and request log probabilities
    candidates: Candidates  # columns over the rows with beams and without NaN


def draw(logits: torch.Tensor, special: Sequence[SamplingRow], sampler: CpuSampler | TorchSampler) -> Draws:
    """Sample one token per row. Rows that are not in `special` have default parameters."""
    num_rows, vocab_size = logits.shape
    table = SamplingTable(num_rows, vocab_size)
    rows = [SamplingRow(i, SamplingParams(), np.array([1], np.int32), 1, 0, 0) for i in range(num_rows)]
    for row in special:
        rows[row.index] = row
    for row in rows:
        table.open(
            RowOpening(row.index, row.index, (), row.num_prompt_tokens, 0, (), row.sampling, row.seed, row.sample_index)
        )
    step = table.of_step(np.arange(num_rows), np.array([len(row.token_ids) for row in rows]))
    history = TokenHistory(
        np.zeros((num_rows, max(len(row.token_ids) for row in rows)), np.int32),
        np.array([row.num_prompt_tokens for row in rows]),
    )
    for tokens, row in zip(history.token_ids, rows, strict=True):
        tokens[: len(row.token_ids)] = row.token_ids
    sampled = sampler.sample(logits := logits.clone(), table.columns(step), history, step.max_reported)
    samples = step.read(ValueReader.of(step.results(sampled, logits)))
    is_nan = [status is RowStatus.NAN_LOGITS for status in samples.statuses] or [False] * num_rows
    return Draws(sampled.token_ids.tolist(), is_nan, samples.logprobs, samples.candidates)
