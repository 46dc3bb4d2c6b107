"""The inputs and outputs of sampling, and its specification in plain torch, one row at a time.

On a GPU it is `pagewire.kernels.triton.sampler`, on a CPU `pagewire.kernels.cpu.sampler`.

A row goes through: mask, logit bias, suppression, penalties -> temperature -> top-k -> top-p -> min-p -> the highest of
logit + Gumbel noise; its log-probabilities are those before temperature and filters. Parameters mean what they mean in
vLLM. Each filter keeps the tokens whose logit is at least some value, so tokens of equal logits stay or go together. A
row of temperature 0 takes the highest logit, and the lowest id among equals.

The noise is that of `pagewire.kernels.noise`.
"""

from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor

from pagewire.kernels.noise import gumbel_noise, noise_keys

LARGEST = torch.finfo(torch.float32).max
Float32 = Annotated[Tensor, torch.float32]
Int32 = Annotated[Tensor, torch.int32]


class SamplingColumns(NamedTuple):
    """The sampling parameters of R rows: one entry per row, contiguous, on the device of the logits.

    Attributes:
        temperature: [R]; 0 takes the highest logit.
        top_k: [R]; 0: all.
        top_p: [R] in (0, 1]; 1: all.
        min_p: [R] in [0, 1]; 0: all.
        repetition_penalty, presence_penalty, frequency_penalty: [R]; 1, 0 and 0: none (Keskar et al., "CTRL", 2019,
            https://arxiv.org/abs/1909.05858). They need `token_counts`.
        seeds: [R], the 64 bits of each seed.
        sample_indexes: [R].
        num_tokens: [R], tokens before the one that is drawn: its position.
        slots: [R], each row's line of `token_counts`, no line twice; -1: none.
        num_logprobs: [R], how many tokens a row reports beside the chosen one; -1: no log-probabilities at all.
        bias_token_ids, bias_values: [R, max_biases], added to the logits; an id of -1 is vacant. An infinite bias wins.
            Or both None.
        stop_token_ids: [R, max_stops], -inf while num_tokens < min_num_tokens; an id of -1, or one outside the
            vocabulary, is vacant. Or None.
        min_num_tokens: [R], or None with `stop_token_ids`.
        masks: [M, ceil(vocab_size / 32)], which tokens a row may take: token i by bit i % 32 of number i // 32, the
            lowest bit first. All others are -inf, whatever their bias. Where all that are allowed are -inf, what is
            taken means nothing. Or None.
        mask_lines: [R], each row's line of `masks`; -1: all tokens. None with `masks`.
        logprob_token_ids: [R, max_listed], the num_logprobs[i] tokens that a row reports in place of the most likely
            ones; an id of -1 is vacant, and a row with no other reports the most likely ones. Or None.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    seeds: Annotated[Tensor, torch.int64]
    sample_indexes: Int32
    num_tokens: Int32
    slots: Int32
    num_logprobs: Int32
    bias_token_ids: Int32 | None = None
    bias_values: Float32 | None = None
    stop_token_ids: Int32 | None = None
    min_num_tokens: Int32 | None = None
    masks: Int32 | None = None
    mask_lines: Int32 | None = None
    logprob_token_ids: Int32 | None = None

    @staticmethod
    def of(lines: Tensor, seeds: Tensor, num_tokens: Tensor) -> "SamplingColumns":
        """Return columns without biases and stop tokens. `lines`: those that `FLOATS` and `INTEGERS` name, of int32,
        which hold floats bit by bit."""
        floats, integers = lines[: len(FLOATS)].view(torch.float32), lines[len(FLOATS) :]
        columns = dict(zip((*FLOATS, *INTEGERS), (*floats, *integers), strict=True))
        return SamplingColumns(**columns, seeds=seeds, num_tokens=num_tokens)


# The columns that are always there.
DTYPES: dict[str, torch.dtype] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingColumns, include_extras=True).items()
    if name not in SamplingColumns._field_defaults
}
# What a row asks for in one number.
FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype is torch.float32)
INTEGERS = tuple(name for name, dtype in DTYPES.items() if dtype is torch.int32 and name != "num_tokens")


class TokenTarget(NamedTuple):
    """Where R rows keep the tokens that are chosen, besides what is returned.

    Attributes:
        token_ids: [num_slots, max_len] int32, the rows' tokens by slot; what is chosen comes at `num_tokens` of the
            row's columns.
        slots: [R] int32, a line of `token_ids` for each row; of rows that name one line and place, any stays.
        sampled: [2, R] int32, dense: the tokens, and whether the row's logits hold NaN.
    """

    token_ids: Tensor
    slots: Tensor
    sampled: Tensor


class SampledTokens(NamedTuple):
    """One entry per row. Log-probabilities mean nothing in rows that asked for none or whose logits hold NaN.

    Attributes:
        token_ids: [R] int64; 0 where the logits hold NaN.
        is_nan: [R] bool.
        logprobs: [R] float32, of the chosen tokens.
        ranks: [R] int32, one more than the tokens with a higher logit than the chosen one.
        top_token_ids, top_logprobs: [R, max_logprobs] int32 and float32: the num_logprobs[i] most likely tokens,
            highest first and lowest id first among equals, or the row's `logprob_token_ids` in their order; entries
            after them are undefined.
    """

    token_ids: Tensor
    is_nan: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    token_counts: Tensor | None = None,
    max_logprobs: int | None = None,
    target: TokenTarget | None = None,
) -> SampledTokens:
    """Chooses a token per row, and counts it.

    Args:
        logits: [R, vocab_size] float32, overwritten.
        columns: one entry per row.
        token_counts: [num_slots, vocab_size] int32, twice the times that a token stands in the output, plus 1 if it
            stands in the prompt; the chosen tokens of rows that have a slot are added. None: no row has penalties.
        max_logprobs: at least every row's num_logprobs; None: no row reports log-probabilities.
        target: where the tokens are kept besides; None: nowhere.
    """
    num_rows, vocab_size = logits.shape
    num_top = min(max_logprobs or 0, vocab_size)
    sampled = SampledTokens(
        token_ids=logits.new_zeros(num_rows, dtype=torch.int64),
        is_nan=logits.isnan().any(1),
        logprobs=logits.new_zeros(num_rows),
        ranks=logits.new_zeros(num_rows, dtype=torch.int32),
        top_token_ids=logits.new_zeros((num_rows, num_top), dtype=torch.int32),
        top_logprobs=logits.new_zeros((num_rows, num_top)),
    )
    for row in range(num_rows):
        if sampled.is_nan[row]:
            continue
        allowed = _allowed(columns, row, vocab_size)
        _adjust(logits[row], columns, row, token_counts, allowed)
        sampled.token_ids[row] = token_id = _choose(logits[row], columns, row)
        if token_counts is not None and columns.slots[row] >= 0:
            token_counts[columns.slots[row], token_id] += 2
        if columns.num_logprobs[row] >= 0 and max_logprobs is not None:
            logprobs = logits[row].log_softmax(0)
            top = logits[row].sort(descending=True, stable=True).indices[: int(columns.num_logprobs[row])]
            if columns.logprob_token_ids is not None and columns.logprob_token_ids[row, 0] >= 0:
                top = columns.logprob_token_ids[row, : len(top)].long()
            sampled.logprobs[row] = logprobs[token_id]
            sampled.ranks[row] = (logits[row] > logits[row, token_id]).sum() + 1
            sampled.top_token_ids[row, : len(top)] = top.int()
            sampled.top_logprobs[row, : len(top)] = logprobs[top]
    if target is not None:
        target.token_ids[target.slots.long(), columns.num_tokens.long()] = sampled.token_ids.int()
        target.sampled.copy_(torch.stack([sampled.token_ids, sampled.is_nan.long()]))
    return sampled


def count_tokens(
    token_counts: Tensor, slots: Tensor, token_ids: Tensor, start_loc: Tensor, num_prompt_tokens: Tensor
) -> None:
    """Counts N sequences into their lines of `token_counts`, [num_slots, vocab_size] int32, whatever stood there.

    Args:
        slots: [N], no line twice.
        token_ids: [T], those of sequence i from start_loc[i] to start_loc[i + 1], its prompt first.
        start_loc: [N + 1].
        num_prompt_tokens: [N].
    """
    for i, slot in enumerate(slots.tolist()):
        tokens = token_ids[start_loc[i] : start_loc[i + 1]].long()
        prompt, output = tokens[: num_prompt_tokens[i]], tokens[num_prompt_tokens[i] :]
        token_counts[slot] = 2 * output.bincount(minlength=token_counts.shape[1]).int()
        token_counts[slot, prompt] += 1


def logprob_columns(
    logits: Tensor, token_ids: Tensor, num_top: int, listed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probabilities of one token of each of N rows: its log-probability, its rank, and the most likely
    tokens.

    Args:
        logits: [N, vocab_size] float32.
        token_ids: [N] int64.
        num_top: at most vocab_size.
        listed: [N, at most num_top] int32, tokens in place of the most likely ones; an id of -1 is vacant.

    Returns:
        `logprobs`, `ranks`, `top_token_ids` and `top_logprobs` as in `SampledTokens`.
    """
    logprobs = logits.log_softmax(1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1, dtype=torch.int32) + 1
    top_token_ids = most_likely(logits, num_top)
    if listed is not None:
        replaced = top_token_ids[:, : listed.shape[1]]
        replaced.copy_(torch.where(listed >= 0, listed, replaced))
    return chosen.squeeze(1), ranks, top_token_ids.int(), logprobs.gather(1, top_token_ids)


def most_likely(logits: Tensor, num_top: int) -> Tensor:
    """Return the ids of the highest logits of each row, highest first and lowest id first among equals: [N, num_top].

    `topk` takes any of equals, and which ones depends on how many are asked for. So it is asked for one more, and only
    where that one equals the last the ids of equals are looked for among all.
    """
    if num_top == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices
    num_found = num_top + 1
    found = logits.topk(num_found, dim=1)
    values, token_ids = found.values[:, :num_top], found.indices[:, :num_top]
    token_ids = _in_order(values, token_ids)
    if num_top == 0:
        return token_ids
    last = values[:, -1:]
    if not _host_knows(logits):  # to ask a device which rows these are is to wait for it
        return _lowest_of_equals(logits, token_ids, last)
    for row in (values[:, -1] == found.values[:, -1]).nonzero().squeeze(1).tolist():
        token_ids[row] = _lowest_of_equals(*(each[row : row + 1] for each in (logits, token_ids, last)))
    return token_ids


def _host_knows(tensor: Tensor) -> bool:
    """Whether what a tensor holds can be asked for at no cost."""
    return tensor.is_cpu


def _in_order(values: Tensor, token_ids: Tensor) -> Tensor:
    """The ids of some values of each row, highest value first and lowest id first among equals: [N, num]."""
    token_ids, order = token_ids.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    return token_ids.gather(1, order)


def _lowest_of_equals(logits: Tensor, token_ids: Tensor, last: Tensor) -> Tensor:
    """The most likely tokens of each row, of which those that equal the last may be others: [N, num_top].

    `last`: [N, 1], the logits of the last.
    """
    vocab_size, num_top = logits.shape[1], token_ids.shape[1]
    all_ids, places = (torch.arange(size, device=logits.device) for size in (vocab_size, num_top))
    equals = torch.where(logits == last, all_ids.int(), vocab_size).topk(num_top, dim=1, largest=False).values.long()
    is_above = logits.gather(1, token_ids) > last
    equals = equals.gather(1, (places - is_above.sum(1, keepdim=True)).clamp_(min=0))
    # Where a logit is no number, nothing equals it, and the ids mean nothing.
    return torch.where(is_above, token_ids, equals).clamp_(max=vocab_size - 1)


def _allowed(columns: SamplingColumns, row: int, vocab_size: int) -> Tensor:
    """[vocab_size] bool, the tokens that a row may take."""
    if columns.masks is None or columns.mask_lines is None or columns.mask_lines[row] < 0:
        return torch.ones(vocab_size, dtype=torch.bool)
    token_ids = torch.arange(vocab_size)
    return (columns.masks[columns.mask_lines[row]].cpu()[token_ids // 32] >> token_ids % 32 & 1).bool()


def _adjust(logits: Tensor, columns: SamplingColumns, row: int, token_counts: Tensor | None, allowed: Tensor) -> None:
    """Mask, bias, suppression and penalties, in this order, in place: [vocab_size]."""
    vocab_size = len(logits)
    allowed = allowed.to(logits.device)
    logits[~allowed] = -torch.inf
    if columns.bias_token_ids is not None and columns.bias_values is not None:
        is_bias = columns.bias_token_ids[row] >= 0
        is_bias &= allowed[columns.bias_token_ids[row].long()]
        ids = columns.bias_token_ids[row][is_bias].long()
        logits.index_put_((ids,), columns.bias_values[row][is_bias], accumulate=True)
        logits[ids] = logits[ids].clamp(max=LARGEST)  # an infinite bias must not turn differences into NaN
    if columns.stop_token_ids is not None and columns.min_num_tokens is not None:
        ids = columns.stop_token_ids[row]
        if columns.num_tokens[row] < columns.min_num_tokens[row]:
            logits[ids[(ids >= 0) & (ids < vocab_size)].long()] = -torch.inf
    if token_counts is not None and columns.slots[row] >= 0:
        counts = token_counts[columns.slots[row]]
        repetition = columns.repetition_penalty[row]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        num_outputs = counts >> 1
        subtrahend = columns.presence_penalty[row] * (num_outputs > 0) + columns.frequency_penalty[row] * num_outputs
        logits.copy_(torch.where(counts > 0, repeated - subtrahend, logits))


def _choose(logits: Tensor, columns: SamplingColumns, row: int) -> int:
    highest = logits.max()
    temperature = columns.temperature[row]
    if temperature == 0 or highest.isinf():
        return int((logits == highest).nonzero()[0])
    scaled = (logits - highest) / temperature
    threshold = lowest_kept(scaled, int(columns.top_k[row]), float(columns.top_p[row]), columns.min_p[row])
    one = slice(row, row + 1)
    key = noise_keys(columns.seeds[one], columns.sample_indexes[one].long(), columns.num_tokens[one].long())
    scores = (scaled + gumbel_noise(key, len(logits))[0]).masked_fill(scaled < threshold, -torch.inf)
    return int((scores == scores.max()).nonzero()[0])


def lowest_kept(scaled: Tensor, top_k: int, top_p: float, min_p: Tensor) -> Tensor:
    """The lowest value that the filters keep, as float32. `scaled`: [vocab_size], the highest is 0."""
    threshold = min_p.log()
    kept = scaled.sort(descending=True).values[: top_k or None]
    if top_p < 1:
        probabilities = kept.double().exp()
        before = probabilities.cumsum(0) - probabilities
        kept = kept[before < top_p * probabilities.sum()]
    return torch.maximum(threshold, kept[-1])
