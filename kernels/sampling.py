"""The inputs and outputs of sampling, and its specification in plain torch, one row at a time.

`pagewire.kernels.triton.sampler` implements it for GPUs, `pagewire.kernels.cpu.sampler` for CPUs.

The steps for each row are: mask, logit bias, suppression, penalties -> temperature -> top-k -> top-p -> min-p -> the
highest sum of logit and Gumbel noise. Log-probabilities are computed before temperature and filters. The parameters
mean the same as in vLLM. Each filter keeps the tokens whose logit is at least a threshold, so it keeps or drops tokens
of equal logits together. A row with temperature 0 chooses the highest logit, and the lowest id among equals.

`pagewire.kernels.noise` defines the noise.
"""

from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor

from pagewire.kernels.noise import gumbel_noise, noise_keys

LARGEST = torch.finfo(torch.float32).max
Float32 = Annotated[Tensor, torch.float32]
Int32 = Annotated[Tensor, torch.int32]


class SamplingColumns(NamedTuple):
    """The sampling parameters of R rows, one running sequence each. Each column is a contiguous tensor with one entry
    per row, on the device of the logits.

    Attributes:
        temperature: [R]; 0 chooses the highest logit.
        top_k: [R]; 0 means no filter.
        top_p: [R] in (0, 1]; 1 means no filter.
        min_p: [R] in [0, 1]; 0 means no filter.
        repetition_penalty, presence_penalty, frequency_penalty: [R]; 1, 0 and 0 mean no penalty (Keskar et al., "CTRL",
            2019, https://arxiv.org/abs/1909.05858). Penalties need `token_counts`.
        seeds: [R], the 64 bits of each seed.
        sample_indexes: [R].
        num_tokens: [R], the number of tokens that precede the sampled token, which is its position.
        slots: [R], the line of each row in `token_counts`, without duplicates. -1 means that the row has no line.
        num_logprobs: [R], the number of tokens that a row reports besides the chosen token; -1 means no
            log-probabilities.
        bias_token_ids, bias_values: [R, max_biases], values that are added to the logits. An id of -1 marks an unused
            entry. A sum above the largest finite float32 is clamped to it, so an infinite bias makes its token the most
            likely. Or both None.
        stop_token_ids: [R, max_stops], tokens whose logit is -inf while num_tokens < min_num_tokens. An id of -1 or
            outside the vocabulary marks an unused entry. Or None.
        min_num_tokens: [R], or None with `stop_token_ids`.
        masks: [M, ceil(vocab_size / 32)], the tokens that a row may choose: token i is bit i % 32 of number i // 32,
            lowest bit first. The logits of all other tokens are -inf, even if they have a bias. If all allowed tokens
            are -inf, the chosen token is undefined. Or None.
        mask_lines: [R], the line of each row in `masks`; -1 means that all tokens are allowed. None with `masks`.
        logprob_token_ids: [R, max_listed], the num_logprobs[i] tokens that a row reports instead of the most likely
            tokens. An id of -1 marks an unused entry, and a row without used entries reports the most likely tokens. Or
            None.
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
        """Build the sampling parameters of N rows (running sequences) from lines of a table. Logit biases, stop tokens
        and masks are left at their defaults.

        `lines` is int32 with one line per parameter, in the order of `FLOATS` and `INTEGERS`. A float is stored as the
        int32 number with the same bits.
        """
        floats, integers = lines[: len(FLOATS)].view(torch.float32), lines[len(FLOATS) :]
        columns = dict(zip((*FLOATS, *INTEGERS), (*floats, *integers), strict=True))
        return SamplingColumns(**columns, seeds=seeds, num_tokens=num_tokens)


# The columns that are never None.
DTYPES: dict[str, torch.dtype] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingColumns, include_extras=True).items()
    if name not in SamplingColumns._field_defaults
}
# The columns that a row's parameters fill with one number each.
FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype is torch.float32)
INTEGERS = tuple(name for name, dtype in DTYPES.items() if dtype is torch.int32 and name != "num_tokens")


class TokenTarget(NamedTuple):
    """Memory to which the sampler writes the chosen tokens of R rows, in addition to the returned `SampledTokens`. The
    next step can read the tokens there without waiting for the host.

    Attributes:
        token_ids: [num_slots, max_len] int32, the rows' tokens by slot. A chosen token is written to position
            `num_tokens` of the row.
        slots: [R] int32, the line of each row in `token_ids`. If several rows name the same line and position, any of
            their tokens remains.
        sampled: [2, R] int32, dense: the chosen tokens, and whether the row's logits contain NaN.
    """

    token_ids: Tensor
    slots: Tensor
    sampled: Tensor


class SampledTokens(NamedTuple):
    """The results of sampling: for each row, the chosen token and the log-probabilities that the row requested.

    Log-probabilities are undefined in rows that do not report them and in rows whose logits contain NaN.

    Attributes:
        token_ids: [R] int64; 0 if the logits contain NaN.
        is_nan: [R] bool, whether the logits contain NaN.
        logprobs: [R] float32, the log-probabilities of the chosen tokens.
        ranks: [R] int32, one more than the number of tokens with a higher logit than the chosen token.
        top_token_ids, top_logprobs: [R, max_logprobs] int32 and float32. These are the num_logprobs[i] most likely
            tokens, highest first and lowest id first among equals, or the row's `logprob_token_ids` in their order. The
            entries after them are undefined.
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
    """Sample the next token of each row (one running sequence) from its logits, and add the token to the token counts.

    Args:
        logits: [R, vocab_size] float32, overwritten.
        columns: one entry per row.
        token_counts: [num_slots, vocab_size] int32: twice the number of times that the output contains the token, plus
            1 if the prompt contains it. The chosen tokens of rows with a slot are added. None means that no row has
            penalties.
        max_logprobs: at least every row's num_logprobs; None means that no row reports log-probabilities.
        target: memory for the chosen tokens in addition to the result; None means no such memory.

    Returns:
        The chosen tokens and their log-probabilities.
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
    """Count how often each token occurs in N sequences, for repetition, presence and frequency penalties. The counts
    are stored in `token_counts`, [num_slots, vocab_size] int32. Each sequence has one line (its slot), whose previous
    counts are replaced.

    Args:
        slots: [N], the line of each sequence, without duplicates.
        token_ids: [T]; the tokens of sequence i are start_loc[i] to start_loc[i + 1], its prompt first.
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
    """For one chosen token in each of N rows (sequences), return its log-probability and its rank. Also return the most
    likely tokens of each row with their log-probabilities.

    Args:
        logits: [N, vocab_size] float32.
        token_ids: [N] int64.
        num_top: number of most likely tokens, at most vocab_size.
        listed: [N, at most num_top] int32, tokens to report instead of the most likely tokens; an id of -1 marks an
            unused entry.

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
    """Return the ids of the `num_top` tokens with the highest logits in each row, [N, num_top], in descending order of
    the logits. Tokens with equal logits are in ascending order of their ids.

    If logits are equal, `topk` may return any of the tokens, depending on k. Therefore the function requests one token
    more than it needs. If the logit of this token equals the logit of the last needed token, it searches the whole row
    for the lowest ids with this logit.
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
    if not _host_knows(logits):  # finding the affected rows would wait for the device
        return _lowest_of_equals(logits, token_ids, last)
    for row in (values[:, -1] == found.values[:, -1]).nonzero().squeeze(1).tolist():
        token_ids[row] = _lowest_of_equals(*(each[row : row + 1] for each in (logits, token_ids, last)))
    return token_ids


def _host_knows(tensor: Tensor) -> bool:
    """Return whether a tensor is in CPU memory, so that Python can read its values without waiting for a GPU."""
    return tensor.is_cpu


def _in_order(values: Tensor, token_ids: Tensor) -> Tensor:
    """Sort the given token ids of each row, [N, num], in descending order of `values`. Tokens with equal values are in
    ascending order of their ids."""
    token_ids, order = token_ids.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    return token_ids.gather(1, order)


def _lowest_of_equals(logits: Tensor, token_ids: Tensor, last: Tensor) -> Tensor:
    """Correct the end of each row's list of most likely tokens. If several tokens have the lowest listed logit, the
    list must contain those with the lowest ids. Return the list, [N, num_top].

    `last` [N, 1] contains the logit of the last token in each list.
    """
    vocab_size, num_top = logits.shape[1], token_ids.shape[1]
    all_ids, places = (torch.arange(size, device=logits.device) for size in (vocab_size, num_top))
    equals = torch.where(logits == last, all_ids.int(), vocab_size).topk(num_top, dim=1, largest=False).values.long()
    is_above = logits.gather(1, token_ids) > last
    equals = equals.gather(1, (places - is_above.sum(1, keepdim=True)).clamp_(min=0))
    # If a logit is NaN, no token equals it, and the ids are undefined.
    return torch.where(is_above, token_ids, equals).clamp_(max=vocab_size - 1)


def _allowed(columns: SamplingColumns, row: int, vocab_size: int) -> Tensor:
    """Return a mask of the tokens that a row may choose, [vocab_size] bool. All tokens are allowed if the row has no
    mask."""
    if columns.masks is None or columns.mask_lines is None or columns.mask_lines[row] < 0:
        return torch.ones(vocab_size, dtype=torch.bool)
    token_ids = torch.arange(vocab_size)
    return (columns.masks[columns.mask_lines[row]].cpu()[token_ids // 32] >> token_ids % 32 & 1).bool()


def _adjust(logits: Tensor, columns: SamplingColumns, row: int, token_counts: Tensor | None, allowed: Tensor) -> None:
    """Edit a row's logits [vocab_size] in place before sampling. Apply the mask, the logit bias, the suppression of
    stop tokens and the penalties, in this order."""
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
    """Return the lowest value that the top-k, top-p and min-p filters keep, as a float32 tensor. The caller must drop
    all tokens with a lower value.

    `scaled` [vocab_size] contains the logits divided by the temperature, with a highest value of 0.
    """
    threshold = min_p.log()
    kept = scaled.sort(descending=True).values[: top_k or None]
    if top_p < 1:
        probabilities = kept.double().exp()
        before = probabilities.cumsum(0) - probabilities
        kept = kept[before < top_p * probabilities.sum()]
    return torch.maximum(threshold, kept[-1])
