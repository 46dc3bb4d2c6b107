"""From logits to tokens, for all sampling rows of a step at once.

A row goes through: logit bias, suppression of stop tokens, penalties -> log-probabilities -> temperature -> top-k ->
top-p -> min-p -> the highest of logit + Gumbel noise. Rows that ask for nothing take the highest logit and skip it all.
Rows of beams stop at the log-probabilities and report the most likely tokens. Parameters mean what they mean in vLLM.

The filters are one threshold per row: each keeps the tokens whose logit is at least some value, so tokens with equal
logits stay or go together and no result depends on how a sort orders them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.noise import gumbel_noise, noise_keys
from worker_service.step import Candidates, Logprobs, SamplingParams

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A row that asks for more than its highest logit."""

    index: int  # among the sampling rows of the step
    sampling: SamplingParams
    token_ids: NDArray[np.int32]  # all known, prompt first
    num_prompt_tokens: int
    seed: int
    sample_index: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Samples:
    """One entry per sampling row. The token of a row whose logits hold NaN is 0, and that of a beam means nothing."""

    token_ids: list[int]
    is_nan: list[bool]
    logprobs: Logprobs  # columns over the rows that are not NaN, choose a token and asked for them
    candidates: Candidates  # columns over the rows of beams that are not NaN


def sample(logits: torch.Tensor, special_rows: Sequence[SamplingRow], highest: torch.Tensor | None = None) -> Samples:
    """Choose a token per row.

    Args:
        logits: [R, vocab_size] float32, overwritten.
        special_rows: in order of index.
        highest: [R] int64, which logit of each row is, the first of equals, -1 where there is a NaN; if it is known.
    """
    if highest is None:
        highest = _highest(logits)
    if not special_rows and logits.device.type == "cpu":
        return _choose_highest(highest.tolist())
    token_ids, is_nan = highest.clamp(min=0), highest < 0
    beams = [row for row in special_rows if row.sampling.num_candidates is not None]
    choosing = [row for row in special_rows if row.sampling.num_candidates is None]
    if special_rows:
        _adjust(logits, special_rows)
        _choose(logits, choosing, token_ids)
    candidates = _collect_candidates(logits, beams, is_nan) if beams else Candidates()
    token_ids.masked_fill_(is_nan, 0)
    bad = is_nan.tolist()
    return Samples(token_ids.tolist(), bad, _collect_logprobs(logits, choosing, token_ids, bad), candidates)


def _choose_highest(highest: Sequence[int]) -> Samples:
    """`sample` of rows that ask for nothing, on a CPU, where operations of torch take longer than all else of it."""
    is_nan = [token_id < 0 for token_id in highest]
    return Samples([max(0, token_id) for token_id in highest], is_nan, Logprobs(), Candidates())


def logprob_columns(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> Logprobs:
    """Columns over N positions of the tokens chosen there and, `num_top[i]` each, the most likely ones.

    `logprobs`: [N, vocab_size]; `token_ids`: [N].
    """
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    max_top = min(max(num_top, default=0), logprobs.shape[1])
    top_logprobs, top_token_ids = logprobs.topk(max_top, dim=1)
    top_lists = zip(num_top, top_token_ids.tolist(), top_logprobs.tolist(), strict=True)
    pairs = [(ids[:num], values[:num]) for num, ids, values in top_lists]
    return Logprobs(
        chosen=tuple(chosen.squeeze(1).tolist()),
        ranks=tuple(ranks.tolist()),
        top_token_ids=tuple(token_id for ids, _ in pairs for token_id in ids),
        top_logprobs=tuple(value for _, values in pairs for value in values),
    )


def _highest(logits: torch.Tensor) -> torch.Tensor:
    """As `sample` takes it. A NaN counts as the highest of its row, so looking at the highest finds every one."""
    token_ids = _argmax(logits)
    is_nan = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).isnan()
    return token_ids.masked_fill_(is_nan, -1)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's highest value, the lowest one on a tie, that of a NaN where there is one: [R] int64."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # torch's own is ten times slower on a CPU
    return logits.argmax(dim=1)


def _sort(logits: torch.Tensor) -> torch.Tensor:
    """Each row's values, highest first: [R, vocab_size]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=1)[:, ::-1].copy())  # here too
    return logits.sort(dim=1, descending=True).values


# Adjustments: sparse edits of the logits. Rows and tokens are gathered on the host, applied in one operation each.


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Bias, suppression and penalties, in this order, in place."""
    biases = [(row.index, row.sampling.logit_bias_token_ids, row.sampling.logit_bias_values) for row in rows]
    biases = [edit for edit in biases if edit[1]]
    if biases:
        places = _places(logits, [index for index, _, _ in biases], [ids for _, ids, _ in biases])
        values = torch.tensor([value for _, _, edit in biases for value in edit], device=logits.device)
        logits.view(-1).index_put_((places,), values, accumulate=True)
        logits.clamp_(max=_LARGEST)  # an infinite bias wins without turning differences into NaN
    suppressed = [row for row in rows if row.num_output_tokens < row.sampling.min_tokens]
    if suppressed:
        # A stop token outside the vocabulary can never be chosen: nothing to suppress.
        vocab_size = logits.shape[1]
        stops = [[token_id for token_id in row.sampling.stop_token_ids if token_id < vocab_size] for row in suppressed]
        logits.view(-1)[_places(logits, [row.index for row in suppressed], stops)] = -torch.inf
    penalized = [row for row in rows if _has_penalty(row.sampling)]
    if penalized:
        _penalize(logits, penalized)


def _has_penalty(sampling: SamplingParams) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def _penalize(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition over prompt and output (Keskar et al., CTRL, 2019); presence and frequency over the output."""
    token_ids, multipliers, subtrahends = [], [], []
    for row in rows:
        seen = np.unique(row.token_ids)
        output, counts = np.unique(row.output_token_ids, return_counts=True)
        subtrahend = np.zeros(len(seen), np.float32)
        sampling = row.sampling
        subtrahend[np.searchsorted(seen, output)] = sampling.presence_penalty + sampling.frequency_penalty * counts
        token_ids.append(seen)
        multipliers.append(np.full(len(seen), sampling.repetition_penalty, np.float32))
        subtrahends.append(subtrahend)
    places = _places(logits, [row.index for row in rows], token_ids)
    penalty = torch.from_numpy(np.concatenate(multipliers)).to(logits.device)
    values = logits.view(-1)[places]
    values = torch.where(values > 0, values / penalty, values * penalty)
    logits.view(-1)[places] = values - torch.from_numpy(np.concatenate(subtrahends)).to(logits.device)


def _places(logits: torch.Tensor, indexes: Sequence[int], token_ids: Sequence[Sequence[int] | NDArray]) -> torch.Tensor:
    """Places in the flat logits of some tokens of some rows: [sum of lengths] int64."""
    rows = np.repeat(np.array(indexes, np.int64), [len(ids) for ids in token_ids])
    flat = np.concatenate([np.asarray(ids, np.int64) for ids in token_ids])
    return torch.from_numpy(rows * logits.shape[1] + flat).to(logits.device)


# Choice


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor) -> None:
    """Put the special rows' choices into `token_ids` [R]."""
    greedy = [row.index for row in rows if row.sampling.temperature == 0.0]
    if greedy:
        indexes = torch.tensor(greedy, device=logits.device)
        token_ids[indexes] = _argmax(logits[indexes])
    random = [row for row in rows if row.sampling.temperature > 0.0]
    if random:
        indexes = torch.tensor([row.index for row in random], device=logits.device)
        token_ids[indexes] = _draw(logits[indexes], random)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw from the filtered distribution of each row: [R] int64. `logits` [R, vocab_size] is overwritten."""
    # With the highest at 0 no temperature, however small, can overflow.
    logits -= logits.amax(1, keepdim=True).clamp_(min=-_LARGEST)
    logits /= _column([row.sampling.temperature for row in rows], logits.device)
    filtered = [i for i, row in enumerate(rows) if _has_filter(row.sampling)]
    if filtered:
        indexes = torch.tensor(filtered, device=logits.device)
        kept = logits[indexes]
        threshold = _threshold(kept, [rows[i].sampling for i in filtered])
        logits[indexes] = kept.masked_fill_(kept < threshold, -torch.inf)
    keys = noise_keys(
        *_integers([row.seed & 0xFFFFFFFF for row in rows], [row.seed >> 32 for row in rows], logits.device),
        *_integers([row.sample_index for row in rows], [len(row.token_ids) for row in rows], logits.device),
    )
    return _argmax(logits.add_(gumbel_noise(keys, logits.shape[1])))


def _has_filter(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _threshold(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """The lowest logit that each row's filters keep: [R, 1]. The highest of each row is 0."""
    vocab_size = logits.shape[1]
    # log(0) is -inf: keeps all
    threshold = _column([sampling.min_p for sampling in samplings], logits.device).log_()
    if all(sampling.top_k == 0 and sampling.top_p == 1.0 for sampling in samplings):
        return threshold
    max_kept = [min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings]
    num_sorted = max(max_kept)
    highest = logits.topk(num_sorted, dim=1).values if num_sorted < vocab_size else _sort(logits)
    # A running sum, not a softmax: what a row keeps must not depend on how many values its neighbours need.
    probabilities = highest.exp()
    running = probabilities.cumsum(1)
    last = torch.tensor(max_kept, device=logits.device).unsqueeze(1) - 1
    top_p = _column([sampling.top_p for sampling in samplings], logits.device)
    before = running - probabilities
    num_kept = (before < top_p * running.gather(1, last)).sum(1, keepdim=True).clamp_(min=1)
    num_kept = torch.where(top_p < 1.0, num_kept, vocab_size)
    lowest = highest.gather(1, torch.minimum(num_kept - 1, last))
    return torch.maximum(threshold, lowest)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _integers(first: Sequence[int], second: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.tensor([first, second], dtype=torch.int64, device=device)
    return pair[0], pair[1]


def _collect_logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor, is_nan: Sequence[bool]
) -> Logprobs:
    """Of the adjusted logits, before temperature and filters."""
    asking = [row for row in rows if row.sampling.num_logprobs is not None and not is_nan[row.index]]
    if not asking:
        return Logprobs()
    indexes = torch.tensor([row.index for row in asking], device=logits.device)
    num_top = [row.sampling.num_logprobs or 0 for row in asking]
    return logprob_columns(logits[indexes].log_softmax(1), token_ids[indexes], num_top)


def _collect_candidates(logits: torch.Tensor, beams: Sequence[SamplingRow], is_nan: torch.Tensor) -> Candidates:
    """The most likely tokens of the rows of beams by the adjusted logits, before temperature and filters.

    A row that has no log-probabilities, as where a logit is infinite, becomes NaN in `is_nan` [R].
    """
    indexes = torch.tensor([row.index for row in beams], device=logits.device)
    nums = [min(row.sampling.num_candidates or 0, logits.shape[1]) for row in beams]
    logprobs, token_ids = logits[indexes].log_softmax(1).topk(max(nums), dim=1)
    is_nan[indexes] |= logprobs[:, 0].isnan()  # a NaN counts as the highest
    columns = zip(nums, is_nan[indexes].tolist(), token_ids.tolist(), logprobs.tolist(), strict=True)
    good = [(ids[:num], values[:num]) for num, bad, ids, values in columns if not bad]
    return Candidates(
        token_ids=tuple(token_id for ids, _ in good for token_id in ids),
        logprobs=tuple(value for _, values in good for value in values),
    )
