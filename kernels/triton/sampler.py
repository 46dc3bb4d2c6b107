"""Sampling on the device, from logits to tokens. Specification: `pagewire.kernels.sampling.sample`, with the same
draws.

A step has two launches and reads the logits once, plus a small part again for rows with filters:

1. *scan*: several programs share a row, one chunk each. Each program applies the penalties and finds the highest logit
   and the best score (logit / temperature + noise) of its chunk. It also stores the highest logit of every group of 64
   tokens.
2. *choose*: one program per row combines the row's chunks. The filters of a row amount to one threshold, which is
   searched only in the groups that can contain it. If the best token overall is above the threshold, it is also the
   best token that the filters keep. Otherwise the program searches the groups whose highest logit is above the
   threshold.

Biases and stop tokens need a launch before these, log-probabilities a launch after them, each only if a row uses them.
Launch grids depend only on the shapes of the tensors, so a CUDA graph can contain the launches.
"""

from collections import namedtuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import noise, sampling
from pagewire.kernels.sampling import DTYPES, SampledTokens, SamplingColumns, TokenTarget
from pagewire.kernels.triton.launching import Strided, check_tensor

MAX_VOCAB_SIZE = 2**20  # one program loads the highest logit of every group
GROUP_SIZE = 64  # tokens; a power of two
TILE_GROUPS = 32  # groups that a program of the scan reads at a time
TILE_TOKENS = 2048  # tokens that a program of the choice reads at a time
MIN_PROGRAMS = 1024  # of the scan, if there are enough tokens: about eight per multiprocessor of a large GPU
_SCAN_WARPS = 8
_ROW_WARPS = 8

_GROUP_SIZE = tl.constexpr(GROUP_SIZE)
_TILE_GROUPS = tl.constexpr(TILE_GROUPS)
_TILE_TOKENS = tl.constexpr(TILE_TOKENS)
_MASK_TOKENS = 4096  # tokens of a mask per program
_EDIT_TOKENS = 64  # tokens that a program edits at a time
_LISTED_TOKENS = tl.constexpr(128)  # listed tokens that a program reports at a time
_NUM_EDGES = tl.constexpr(8)  # bounds of the intervals that one pass of `_search_threshold` distinguishes
_LARGEST = tl.constexpr(sampling.LARGEST)
_GOLDEN = tl.constexpr(noise.GOLDEN)
_TOKEN_MULTIPLIER = tl.constexpr(noise.TOKEN_MULTIPLIER)
_FMIX_FIRST = tl.constexpr(noise.FMIX_FIRST)
_FMIX_SECOND = tl.constexpr(noise.FMIX_SECOND)
_LN_2 = tl.constexpr(0.6931471805599453)
_MAX_INT = tl.constexpr(2**31 - 1)
_MIN_INT = tl.constexpr(-(2**31))
_MIN_KEY = tl.constexpr(-2139095041)  # the key of -inf
_SLACK = tl.constexpr(1e-3)  # far above the rounding of a score


# The results of the scan for each chunk of a row, [R, num_chunks, 3] each: the highest logit, and the logit and the
# noise of the best score (float32); the ids of both tokens, and whether the chunk contains NaN (int32).
_Chunks = namedtuple("_Chunks", "found ids")
# The groups of each row's tokens, [R, num_groups] each: the highest logit; the sum of exp((logit - highest) /
# temperature), only for rows with top-p (float32); and a list of selected groups (int32).
_Groups = namedtuple("_Groups", "highest masses selected num_groups")
# A `TokenTarget` whose token ids are `Strided`.
_Target = namedtuple("_Target", "token_ids slots sampled")


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    token_counts: Tensor | None = None,
    max_logprobs: int | None = None,
    target: TokenTarget | None = None,
) -> SampledTokens:
    """Sample the next token of each row (one running sequence) from its logits on the GPU. Add the token to the token
    counts, and return the tokens and their log-probabilities.

    The draws equal the draws of the specification, `pagewire.kernels.sampling.sample`, with two exceptions: the two
    best scores of a row differ by less than 1e-5, or the probability before the last token that top-p keeps is within
    rounding of top-p.

    Args:
        logits: [R, vocab_size] float32, the last dimension dense; overwritten.
        columns: one entry per row.
        token_counts: [num_slots, vocab_size] int32, the last dimension dense: twice the number of times that the output
            contains the token, plus 1 if the prompt contains it. The chosen tokens of rows with a slot are added. None
            means that no row has penalties.
        max_logprobs: at least every row's num_logprobs; None means that no row reports log-probabilities.
        target: memory for the chosen tokens in addition to the result, as specified; None means no such memory.

    Raises:
        ValueError: a shape, dtype or stride is not supported.
    """
    _check(logits, columns, token_counts, max_logprobs, target)
    num_rows, vocab_size = logits.shape
    num_top = min(max_logprobs or 0, vocab_size)
    sampled = SampledTokens(
        token_ids=logits.new_empty(num_rows, dtype=torch.int64),
        is_nan=logits.new_empty(num_rows, dtype=torch.bool),
        logprobs=logits.new_empty(num_rows),
        ranks=logits.new_empty(num_rows, dtype=torch.int32),
        top_token_ids=logits.new_empty((num_rows, num_top), dtype=torch.int32),
        top_logprobs=logits.new_empty((num_rows, num_top)),
    )
    if num_rows == 0:
        return sampled
    _apply_masks(logits, columns)
    _edit(logits, columns)
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    group_highest = logits.new_empty((num_rows, num_groups))
    _choose(logits, columns, token_counts, group_highest, sampled, target)
    if max_logprobs is not None:
        max_listed = 0 if columns.logprob_token_ids is None else columns.logprob_token_ids.shape[1]
        _logprobs_kernel[(num_rows,)](
            Strided.of(logits),
            vocab_size,
            group_highest,
            num_groups,
            columns.num_logprobs,
            columns.logprob_token_ids,
            max_listed,
            sampled,
            num_top,
            NUM_GROUPS=triton.next_power_of_2(num_groups),
            num_warps=_ROW_WARPS,
        )
    return sampled


def count_tokens(
    token_counts: Tensor, slots: Tensor, token_ids: Tensor, start_loc: Tensor, num_prompt_tokens: Tensor
) -> None:
    """Count how often each token occurs in N new sequences, for repetition, presence and frequency penalties. Each
    sequence has one line (its slot) in `token_counts`, whose previous counts are replaced.

    Args:
        token_counts: [num_slots, vocab_size] int32, the last dimension dense.
        slots: [N] int32 or int64, the line of each sequence, without duplicates.
        token_ids: [T] int32 or int64; the tokens of sequence i are start_loc[i] to start_loc[i + 1], its prompt first.
        start_loc: [N + 1] int32 or int64.
        num_prompt_tokens: [N] int32 or int64.

    Raises:
        ValueError: a shape or dtype is not supported.
    """
    check_tensor("token_counts", token_counts, ("num_slots", "vocab_size"), torch.int32, is_strided=True)
    if len(start_loc) != len(slots) + 1 or len(num_prompt_tokens) != len(slots):
        raise ValueError(
            f"there are {len(slots)} slots, {len(start_loc)} starts and {len(num_prompt_tokens)} prompt lengths; "
            "pass one more start than slots, and one prompt length per slot"
        )
    if len(slots) == 0:
        return
    token_counts.index_fill_(0, slots.long(), 0)
    tile_size = 256
    num_tiles = max(1, triton.cdiv(len(token_ids), tile_size))  # only the device knows the length of a sequence
    _count_kernel[(num_tiles, len(slots))](
        Strided.of(token_counts),
        slots,
        token_ids,
        start_loc,
        num_prompt_tokens,
        TILE_SIZE=tile_size,
        num_warps=2,
    )


def _check(
    logits: Tensor,
    columns: SamplingColumns,
    token_counts: Tensor | None,
    max_logprobs: int | None,
    target: TokenTarget | None,
) -> None:
    check_tensor("logits", logits, ("R", "vocab_size"), torch.float32, is_strided=True)
    num_rows, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {vocab_size} tokens; the sampler supports 1 to {MAX_VOCAB_SIZE}")
    for name, dtype in DTYPES.items():
        check_tensor(name, getattr(columns, name), (num_rows,), dtype)
    for ids_name, other_name in (("bias_token_ids", "bias_values"), ("stop_token_ids", "min_num_tokens")):
        if (getattr(columns, ids_name) is None) != (getattr(columns, other_name) is None):
            raise ValueError(f"only one of {ids_name} and {other_name} is given; pass both or neither")
        check_tensor(ids_name, getattr(columns, ids_name), (num_rows, "n"), torch.int32)
    max_biases = 0 if columns.bias_token_ids is None else columns.bias_token_ids.shape[1]
    check_tensor("bias_values", columns.bias_values, (num_rows, max_biases), torch.float32)
    check_tensor("min_num_tokens", columns.min_num_tokens, (num_rows,), torch.int32)
    check_tensor("token_counts", token_counts, ("num_slots", vocab_size), torch.int32, is_strided=True)
    check_tensor("logprob_token_ids", columns.logprob_token_ids, (num_rows, "n"), torch.int32)
    if max_logprobs is not None and max_logprobs < 0:
        raise ValueError(f"max_logprobs is {max_logprobs}; make it at least 0, or None for no log-probabilities")
    if target is not None:
        check_tensor("token_ids", target.token_ids, ("num_slots", "max_len"), torch.int32, is_strided=True)
        check_tensor("slots", target.slots, (num_rows,), torch.int32)
        check_tensor("sampled", target.sampled, (2, num_rows), torch.int32)


def _apply_masks(logits: Tensor, columns: SamplingColumns) -> None:
    """Set the logits of all tokens that a row's grammar mask forbids to -inf. Logits that are NaN are kept, so that the
    scan kernel finds them later."""
    if columns.masks is None or columns.mask_lines is None:
        return
    num_rows, vocab_size = logits.shape
    _mask_kernel[(num_rows, triton.cdiv(vocab_size, _MASK_TOKENS))](
        Strided.of(logits),
        vocab_size,
        columns.masks,
        columns.masks.shape[1],
        columns.mask_lines,
        TILE_SIZE=_MASK_TOKENS,
    )


def _edit(logits: Tensor, columns: SamplingColumns) -> None:
    num_rows, vocab_size = logits.shape
    max_biases = 0 if columns.bias_token_ids is None else columns.bias_token_ids.shape[1]
    max_stops = 0 if columns.stop_token_ids is None else columns.stop_token_ids.shape[1]
    if max_biases == max_stops == 0:
        return
    num_words = 0 if columns.masks is None else columns.masks.shape[1]
    _edit_kernel[(num_rows,)](
        Strided.of(logits),
        vocab_size,
        columns,
        max_biases,
        max_stops,
        num_words,
        TILE_SIZE=_EDIT_TOKENS,
        num_warps=1,
    )


def _choose(
    logits: Tensor,
    columns: SamplingColumns,
    token_counts: Tensor | None,
    group_highest: Tensor,
    sampled: SampledTokens,
    target: TokenTarget | None,
) -> None:
    """Choose a token for each row: launch the kernel that scans the logits, and then the kernel that chooses. The
    kernels write the highest logit of each group of tokens to `group_highest` [R, num_groups], the chosen tokens to
    `sampled`, and, if `target` is given, also to the memory of `target`."""
    num_rows, vocab_size = logits.shape
    num_groups = group_highest.shape[1]
    num_tiles = triton.cdiv(num_groups, TILE_GROUPS)
    chunk_tiles = triton.cdiv(num_tiles, max(1, min(num_tiles, MIN_PROGRAMS // num_rows)))
    num_chunks = triton.cdiv(num_tiles, chunk_tiles)
    masses, selected = torch.empty_like(group_highest), torch.empty_like(group_highest, dtype=torch.int32)
    groups = _Groups(group_highest, masses, selected, num_groups)
    shape = (num_rows, num_chunks, 3)
    chunks = _Chunks(logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32))
    counts = None if token_counts is None else Strided.of(token_counts)
    kept = None if target is None else _Target(Strided.of(target.token_ids), target.slots, target.sampled)
    # Columns that have already been applied must not cause other variants of these kernels to be compiled.
    columns = columns._replace(**SamplingColumns._field_defaults)
    _scan_kernel[(num_chunks, num_rows)](
        Strided.of(logits),
        vocab_size,
        counts,
        columns,
        groups,
        chunks,
        chunk_tiles,
        num_warps=_SCAN_WARPS,
    )
    _choose_kernel[(num_rows,)](
        Strided.of(logits),
        vocab_size,
        counts,
        columns,
        groups,
        chunks,
        num_chunks,
        sampled,
        kept,
        NUM_CHUNKS=triton.next_power_of_2(num_tiles),
        num_warps=_ROW_WARPS,
    )


# Noise


@triton.jit
def _fmix32(value):
    value = (value ^ (value >> 16)) * _FMIX_FIRST
    value = (value ^ (value >> 13)) * _FMIX_SECOND
    return value ^ (value >> 16)


@triton.jit
def _noise_key(columns, row):
    seed = tl.load(columns.seeds + row)
    key = _fmix32(tl.load(columns.num_tokens + row).to(tl.uint32) ^ _GOLDEN)
    key = _fmix32(key ^ tl.load(columns.sample_indexes + row).to(tl.uint32))
    key = _fmix32(key ^ (seed >> 32).to(tl.uint32))
    return _fmix32(key ^ seed.to(tl.uint32))


@triton.jit
def _distance_to_1(key, ids):
    """Return 1 - u for each token, where u is the uniform random number from which the token's Gumbel noise is
    computed. u is (k + 0.5) / 2**23, where k has 23 random bits, and 1 - u is as exact as u."""
    bits = _fmix32(key ^ (ids.to(tl.uint32) * _TOKEN_MULTIPLIER)) >> 9
    return ((bits ^ 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)


@triton.jit
def _gumbel(distance):
    return -tl.log(-tl.log(1.0 - distance))


# Edits


@triton.jit
def _mask_kernel(logits, vocab_size, masks, num_words, mask_lines, TILE_SIZE: tl.constexpr):
    """Triton kernel that sets the logits of disallowed tokens to -inf. Each program processes TILE_SIZE tokens of one
    row."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(mask_lines + row).to(tl.int64)
    if line < 0:
        return
    ids = tl.program_id(1) * TILE_SIZE + tl.arange(0, TILE_SIZE)
    is_token = ids < vocab_size
    words = tl.load(masks + line * num_words + ids // 32, is_token, 0)
    places = logits.data + row * logits.strides[0] + ids
    is_taken = is_token & (((words >> (ids % 32)) & 1) == 0)
    values = tl.load(places, is_taken, 0.0)
    tl.store(places, float("-inf"), is_taken & (values == values))


@triton.jit(do_not_specialize=["max_biases", "max_stops"])
def _edit_kernel(
    logits,
    vocab_size,
    columns,
    max_biases,
    max_stops,
    num_words,
    TILE_SIZE: tl.constexpr,
):
    """Triton kernel that edits the logits of one row per program. It adds the row's logit biases, and sets the logits
    of its stop tokens to -inf while the output is shorter than the minimum."""
    row = tl.program_id(0).to(tl.int64)
    line = logits.data + row * logits.strides[0]
    if columns.bias_token_ids is not None:
        for begin in range(0, max_biases, TILE_SIZE):
            index = begin + tl.arange(0, TILE_SIZE)
            ids = tl.load(columns.bias_token_ids + row * max_biases + index, index < max_biases, -1)
            values = tl.load(columns.bias_values + row * max_biases + index, index < max_biases, 0.0)
            mask = (ids >= 0) & (ids < vocab_size)
            if columns.masks is not None:
                mask_line = tl.load(columns.mask_lines + row).to(tl.int64)
                words = tl.load(columns.masks + tl.maximum(mask_line, 0) * num_words + ids // 32, mask, 0)
                mask = mask & (((tl.where(mask_line < 0, -1, words) >> (ids % 32)) & 1) != 0)
            tl.atomic_add(line + ids, values, mask)
            tl.debug_barrier()
            # An infinite bias must not turn differences into NaN.
            tl.store(line + ids, _LARGEST, mask & (tl.load(line + ids, mask, 0.0) > _LARGEST))
            tl.debug_barrier()
    if columns.stop_token_ids is not None:
        is_early = tl.load(columns.num_tokens + row) < tl.load(columns.min_num_tokens + row)
        for begin in range(0, tl.where(is_early, max_stops, 0), TILE_SIZE):
            index = begin + tl.arange(0, TILE_SIZE)
            ids = tl.load(columns.stop_token_ids + row * max_stops + index, index < max_stops, -1)
            mask = (ids >= 0) & (ids < vocab_size)
            values = tl.load(line + ids, mask, 0.0)
            tl.store(line + ids, float("-inf"), mask & (values == values))  # NaN is kept, so that the scan finds it


@triton.jit
def _count_kernel(counts, slots, token_ids, start_loc, num_prompt_tokens, TILE_SIZE: tl.constexpr):
    """Triton kernel that counts tokens for penalties. Each program counts TILE_SIZE tokens of one sequence."""
    sequence = tl.program_id(1)
    start, end = tl.load(start_loc + sequence), tl.load(start_loc + sequence + 1)
    index = tl.program_id(0) * TILE_SIZE + tl.arange(0, TILE_SIZE)
    mask = index < end - start
    ids = tl.load(token_ids + start + index, mask, 0)
    places = counts.data + tl.load(slots + sequence).to(tl.int64) * counts.strides[0] + ids
    is_prompt = index < tl.load(num_prompt_tokens + sequence)
    tl.atomic_or(places, 1, mask & is_prompt)
    tl.atomic_add(places, 2, mask & (index >= tl.load(num_prompt_tokens + sequence)))


# Scan


# The number of rows of a step determines chunk_tiles and must not trigger a recompilation.
@triton.jit(do_not_specialize=["chunk_tiles"])
def _scan_kernel(logits, vocab_size, counts, columns, groups, chunks, chunk_tiles):
    """Triton kernel that reads all logits once. Each program scans `chunk_tiles` tiles of one row. It applies the
    penalties. It then writes the highest logit and the best score (logit / temperature + noise) of the logits that it
    scanned."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    line, num_groups = logits.data + row * logits.strides[0], groups.num_groups
    temperature, top_k = tl.load(columns.temperature + row), tl.load(columns.top_k + row)
    has_masses = (tl.load(columns.top_p + row) < 1.0) & ((top_k <= 0) | (top_k >= vocab_size))
    key = _noise_key(columns, row)
    highest, highest_id = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    best_logit, best_noise, best_id = highest, tl.full([], 0.0, tl.float32), highest_id
    is_nan = tl.zeros([_TILE_GROUPS], tl.int32)
    for tile in range(chunk * chunk_tiles, (chunk + 1) * chunk_tiles):
        group = tl.arange(0, _TILE_GROUPS) + tile * _TILE_GROUPS
        ids = group[:, None] * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)[None, :]
        values = tl.load(line + ids, ids < vocab_size, float("-inf"))
        if counts is not None:
            values = _penalize(values, ids, vocab_size, row, line, counts, columns)
        tops = tl.reduce(values, 1, _highest_or_nan)
        is_nan |= (tops != tops).to(tl.int32)
        tl.store(groups.highest + row * num_groups + group, tops, group < num_groups)
        tile_highest = tl.max(tops, 0)
        if tile_highest > highest:
            highest_id = tl.min(tl.where(values == tile_highest, ids, _MAX_INT))
            highest = tile_highest
        if temperature > 0.0:
            if has_masses:
                masses = tl.sum(tl.exp(_nearly_scaled(values, tops[:, None], temperature)), 1)
                tl.store(groups.masses + row * num_groups + group, masses, group < num_groups)
            best = (best_logit, best_noise, best_id)
            best_logit, best_noise, best_id = _best_score(
                values, ids, line, tile, vocab_size, key, highest, temperature, best
            )
    place = row * tl.num_programs(0) + chunk
    _store_3(chunks.found + place * 3, highest, best_logit, best_noise)
    _store_3(chunks.ids + place * 3, highest_id, best_id, tl.max(is_nan))


@triton.jit
def _highest_or_nan(first, second):
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_3(target, first, second, third):
    tl.store(target, first)
    tl.store(target + 1, second)
    tl.store(target + 2, third)


@triton.jit
def _penalize(values, ids, vocab_size, row, line, counts, columns):
    """Apply the repetition, presence and frequency penalties to logits. Return the new logits, and also write them to
    memory, where later kernels read them."""
    slot, repetition = tl.load(columns.slots + row), tl.load(columns.repetition_penalty + row)
    presence, frequency = tl.load(columns.presence_penalty + row), tl.load(columns.frequency_penalty + row)
    if (slot >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)):
        mask = ids < vocab_size
        num_times = tl.load(counts.data + slot.to(tl.int64) * counts.strides[0] + ids, mask, 0)
        repeated = tl.where(values > 0.0, tl.div_rn(values, repetition + tl.zeros_like(values)), values * repetition)
        num_outputs = (num_times >> 1).to(tl.float32)
        subtrahend = tl.where(num_outputs > 0.0, presence, 0.0) + frequency * num_outputs
        values = tl.where(num_times > 0, repeated - subtrahend, values)
        tl.store(line + ids, values, mask & (num_times > 0))
    return values


@triton.jit
def _scaled(values, highest, temperature):
    """Return (values - highest) / temperature for logits, rounded exactly as the specification requires. `highest`, the
    highest logit, must broadcast to `values`."""
    # If all values are -inf, the results are -inf.
    distances = values - tl.maximum(highest, -_LARGEST)
    return tl.div_rn(distances, temperature + tl.zeros_like(distances))


@triton.jit
def _nearly_scaled(values, highest, temperature):
    """Return approximately (values - highest) / temperature for logits. A multiplication replaces the division, so it
    is cheaper than `_scaled`, but the last bits differ."""
    factor = tl.minimum(1.0 / temperature, _LARGEST)  # 0 times infinity would be NaN
    return (values - tl.maximum(highest, -_LARGEST)) * factor


@triton.jit
def _best_score(values, ids, line, tile, vocab_size, key, highest, temperature, best):
    """Return the token with the best score (logit / temperature + noise) in a tile of logits and the preceding tiles,
    as (logit, noise, id).

    Usually only the first tiles of a program contain a better score. To find these tiles cheaply, an upper bound on the
    scores of each tile is computed first. Logarithms are computed only if the bound is high enough. The bound uses two
    facts. The noise is at most -log(1 - u). The bits of a number, read as an integer, give a piecewise linear function
    that is at most its log2. A tile that may contain a better score is read again in parts, so that this rare case does
    not need registers in the common case.
    """
    best_logit, best_noise, best_id = best
    best_score = _scaled(best_logit, highest, temperature) + best_noise
    bits = _distance_to_1(key, ids).to(tl.int32, bitcast=True).to(tl.float32)
    bounds = _nearly_scaled(values, highest, temperature) + (127 * _LN_2 - bits * (_LN_2 * 2.0**-23))
    if tl.max(bounds) + _SLACK > best_score:
        tl.debug_barrier()  # the penalties must have been written
        first, end = tile * _TILE_GROUPS * _GROUP_SIZE, (tile + 1) * _TILE_GROUPS * _GROUP_SIZE
        for start in range(first, tl.minimum(end, vocab_size), _TILE_GROUPS * _GROUP_SIZE // 8):
            part = start + tl.arange(0, _TILE_GROUPS * _GROUP_SIZE // 8)
            logits = tl.load(line + part, part < vocab_size, float("-inf"))
            noise = _gumbel(_distance_to_1(key, part))
            scores = _scaled(logits, highest, temperature) + noise
            part_score = tl.max(scores, 0)
            if part_score > best_score:
                best_score = part_score
                best_id = tl.min(tl.where(scores == part_score, part, _MAX_INT), 0)
                best_logit = tl.max(tl.where(part == best_id, logits, float("-inf")), 0)
                best_noise = tl.max(tl.where(part == best_id, noise, float("-inf")), 0)
    return best_logit, best_noise, best_id


# Choice


@triton.jit(do_not_specialize=["num_chunks"])
def _choose_kernel(
    logits, vocab_size, counts, columns, groups, chunks, num_chunks, sampled, target, NUM_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Triton kernel that chooses the next token of one row per program. Its input is the results of `_scan_kernel`, one
    for each chunk of the row. NUM_CHUNKS is a power of two and at least num_chunks."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(columns.temperature + row), tl.load(columns.top_k + row)
    top_p, min_p = tl.load(columns.top_p + row), tl.load(columns.min_p + row)
    index = tl.arange(0, NUM_CHUNKS)
    places, mask = (row * num_chunks + index) * 3, index < num_chunks
    tops = tl.load(chunks.found + places, mask, float("-inf"))
    highest = tl.max(tops, 0)
    token_id = tl.min(tl.where(mask & (tops == highest), tl.load(chunks.ids + places, mask, 0), _MAX_INT), 0)
    is_bad = tl.max(tl.load(chunks.ids + places + 2, mask, 0), 0) > 0
    if (temperature > 0.0) & (highest < float("inf")) & (highest > float("-inf")) & (not is_bad):
        values = tl.load(chunks.found + places + 1, mask, float("-inf"))
        scaled = _scaled(values, highest, temperature)
        scores = scaled + tl.load(chunks.found + places + 2, mask, 0.0)
        is_best = mask & (scores == tl.max(scores, 0))
        token_id = tl.min(tl.where(is_best, tl.load(chunks.ids + places + 1, mask, 0), _MAX_INT), 0)
        best = tl.max(tl.where(is_best, scaled, float("-inf")), 0)
        offset, num_groups = row * groups.num_groups, groups.num_groups
        of_row = (groups.highest + offset, groups.masses + offset, num_groups)
        tokens = (logits.data + row * logits.strides[0], groups.selected + offset, vocab_size, highest, temperature)
        threshold = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))
        if (top_p < 1.0) | ((top_k > 0) & (top_k < vocab_size)):
            threshold = tl.maximum(threshold, _lowest_kept(tokens, of_row, top_k, top_p))
        if best < threshold:
            token_id = _best_kept(tokens, of_row, threshold, _noise_key(columns, row))
    token_id = tl.where(is_bad, 0, token_id)
    tl.store(sampled.token_ids + row, token_id.to(tl.int64))
    tl.store(sampled.is_nan + row, is_bad)
    if target is not None:
        line = target.token_ids.data + tl.load(target.slots + row).to(tl.int64) * target.token_ids.strides[0]
        tl.store(line + tl.load(columns.num_tokens + row), token_id)
        tl.store(target.sampled + row, token_id)
        tl.store(target.sampled + tl.num_programs(0) + row, is_bad.to(tl.int32))
    if counts is not None:
        slot = tl.load(columns.slots + row)
        if (slot >= 0) & (not is_bad):
            count = counts.data + slot.to(tl.int64) * counts.strides[0] + token_id
            tl.store(count, tl.load(count) + 2)


@triton.jit
def _order_key(values):
    """Convert float32 numbers to int32 keys that have the same order, so that thresholds can be searched among
    integers. NaN has no valid key. `_from_order_key` is the inverse function."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_order_key(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _lowest_kept(rows, groups, top_k, top_p):
    """Return the lowest scaled logit of a row that the top-k filter and then the top-p filter keep. The caller must
    drop all tokens with a lower logit."""
    vocab_size, num_groups = rows[2], groups[2]
    by_mass = (top_k <= 0) | (top_k >= vocab_size)
    least = tl.full([], _MIN_KEY, tl.int32)
    total, target = tl.full([], 0.0, tl.float32), top_k.to(tl.float32)
    # Find the groups that can contain the result. With top-k: the k groups with the highest maxima contain k tokens
    # that are not below these maxima. With top-p alone: the groups that contain more than top-p are a guess.
    if by_mass:
        _, total = _weigh_above(rows, groups, 0, least - 1, True)
        target = (0.5 + 0.5 * top_p) * total
    if by_mass | (top_k <= num_groups):
        least = _search_threshold(rows, groups, 0, least, target, by_mass, True)
    num_selected = _select(rows, groups, _from_order_key(least))
    if not by_mass:
        least = _search_threshold(rows, groups, num_selected, least, target, False, False)
    low = tl.where(by_mass, least - 1, least)
    count, mass = _weigh_above(rows, groups, num_selected, low, False)
    if not by_mass:
        # Among equal tokens at the threshold, only the tokens that complete k count.
        total = mass + (target - count) * tl.exp(_from_order_key(least))
    elif mass < top_p * total:  # the guess was wrong: search all groups
        least = tl.full([], _MIN_KEY, tl.int32)
        num_selected = _select(rows, groups, _from_order_key(least))
    if top_p < 1.0:
        target = top_p * total
        least = _search_threshold(rows, groups, num_selected, least, target, True, False)
    return _from_order_key(least)


@triton.jit
def _select(rows, groups, threshold):
    """Find the groups of 64 tokens whose highest scaled logit is at least `threshold`.

    Write their numbers into the list of the row in ascending order. Return the number of groups found.
    """
    _, selected, _, highest, temperature = rows
    tops, _, num_groups = groups
    num_selected = tl.full([], 0, tl.int32)
    tl.debug_barrier()  # other threads may still read the old list
    for start in range(0, num_groups, _TILE_TOKENS):
        index = start + tl.arange(0, _TILE_TOKENS)
        mask = index < num_groups
        is_in = mask & (_scaled(tl.load(tops + index, mask, float("-inf")), highest, temperature) >= threshold)
        places = num_selected + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(selected + places, index, is_in)
        num_selected += tl.sum(is_in.to(tl.int32), 0)
    tl.debug_barrier()
    return num_selected


@triton.jit
def _read_tokens(rows, start, num_selected):
    """Load a tile of tokens from the groups listed by `_select`. Return three tensors of [_TILE_TOKENS]: the token ids,
    the scaled logits, and whether each token exists."""
    line, selected, vocab_size, highest, temperature = rows
    places = start + tl.arange(0, _TILE_TOKENS)
    mask = places < num_selected * _GROUP_SIZE
    ids = tl.load(selected + places // _GROUP_SIZE, mask, 0) * _GROUP_SIZE + places % _GROUP_SIZE
    mask &= ids < vocab_size
    return ids, _scaled(tl.load(line + ids, mask, float("-inf")), highest, temperature), mask


@triton.jit
def _read_weights(rows, groups, start, num_selected, by_mass, OF_GROUPS: tl.constexpr):
    """Load one tile of entries for the search of a threshold. The entries are groups of 64 tokens if OF_GROUPS is true,
    else the tokens of the selected groups. Return their sort keys and their weights, [_TILE_TOKENS] each.

    An entry that does not exist has a lower key than all others. If `by_mass` is true, the weight of an entry is
    exp(scaled logit), summed over the tokens of a group. Otherwise each weight is 1.
    """
    if OF_GROUPS:
        tops, masses, num_groups = groups
        index = start + tl.arange(0, _TILE_TOKENS)
        mask = index < num_groups
        scaled = _scaled(tl.load(tops + index, mask, float("-inf")), rows[3], rows[4])
        factors = tl.load(masses + index, index < tl.where(by_mass, num_groups, 0), 1.0)
    else:
        _, scaled, mask = _read_tokens(rows, start, num_selected)
        factors = tl.full([_TILE_TOKENS], 1.0, tl.float32)
    return tl.where(mask, _order_key(scaled), _MIN_INT), tl.where(by_mass, tl.exp(scaled) * factors, 1.0)


@triton.jit
def _num_entries(groups, num_selected, OF_GROUPS: tl.constexpr):
    num_entries = num_selected * _GROUP_SIZE
    if OF_GROUPS:
        num_entries = groups[2]
    return num_entries


@triton.jit
def _weigh_above(rows, groups, num_selected, key, OF_GROUPS: tl.constexpr):
    """For all entries (groups or tokens) whose sort key is above `key`, return their number, and the sum of exp(scaled
    logit)."""
    counts, masses = tl.zeros([_TILE_TOKENS], tl.float32), tl.zeros([_TILE_TOKENS], tl.float32)
    for start in range(0, _num_entries(groups, num_selected, OF_GROUPS), _TILE_TOKENS):
        keys, weights = _read_weights(rows, groups, start, num_selected, True, OF_GROUPS)
        counts += tl.where(keys > key, 1.0, 0.0)
        masses += tl.where(keys > key, weights, 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _search_threshold(rows, groups, num_selected, low, target, by_mass, OF_GROUPS: tl.constexpr):
    """Search the threshold of a top-k or top-p filter. Return the lowest sort key, not below `low`, for which all
    entries (groups or tokens) with higher keys together weigh less than `target`.

    The search starts with two bounds. Each pass divides the range between the bounds at several keys (edges), and sums
    the weights of the entries above each edge. The target is reached between two neighbouring edges. The entries next
    to these edges are the new bounds. Keys are integers, so the search ends for any values.
    """
    least, most = low, tl.full([], 0, tl.int32)  # the key of the highest entry
    index = tl.arange(0, _NUM_EDGES)
    low -= 1
    is_open = True
    while is_open:
        span = most.to(tl.int64) - low.to(tl.int64)
        edges = (low.to(tl.int64) + span * index // (_NUM_EDGES - 1)).to(tl.int32)
        weights_above = tl.zeros([_NUM_EDGES], tl.float32)
        nearest_above = tl.full([_NUM_EDGES], _MAX_INT, tl.int32)
        nearest_below = tl.full([_NUM_EDGES], _MIN_INT, tl.int32)
        for start in range(0, _num_entries(groups, num_selected, OF_GROUPS), _TILE_TOKENS):
            keys, weights = _read_weights(rows, groups, start, num_selected, by_mass, OF_GROUPS)
            is_above = keys[None, :] > edges[:, None]
            weights_above += tl.sum(tl.where(is_above, weights[None, :], 0.0), 1)
            nearest_above = tl.minimum(nearest_above, tl.min(tl.where(is_above, keys[None, :], _MAX_INT), 1))
            nearest_below = tl.maximum(nearest_below, tl.max(tl.where(is_above, _MIN_INT, keys[None, :]), 1))
        # No entry is above the last edge. If the entries above the first edge do not reach the target, all entries are
        # kept.
        reaches = (weights_above >= target) & (index < _NUM_EDGES - 1)
        is_reached = tl.max(reaches.to(tl.int32), 0) > 0
        least = tl.max(tl.where(reaches, nearest_above, _MIN_INT), 0)
        most = tl.min(tl.where(reaches, _MAX_INT, nearest_below), 0)
        least = tl.where(is_reached, least, tl.min(nearest_above, 0))
        is_open = is_reached & (least < most)
        low = least - 1
    return least


@triton.jit
def _best_kept(rows, groups, threshold, key):
    """Return the id of the token with the best score (scaled logit + noise) among the tokens whose scaled logit is at
    least `threshold`."""
    num_selected = _select(rows, groups, threshold)
    best_score, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, num_selected * _GROUP_SIZE, _TILE_TOKENS):
        ids, scaled, mask = _read_tokens(rows, start, num_selected)
        scores = tl.where(mask & (scaled >= threshold), scaled + _gumbel(_distance_to_1(key, ids)), float("-inf"))
        tile_score = tl.max(scores, 0)
        if tile_score > best_score:
            best_id = tl.min(tl.where(scores == tile_score, ids, _MAX_INT), 0)
            best_score = tile_score
    return best_id


# Log-probabilities


@triton.jit(do_not_specialize=["max_listed", "num_top"])
def _logprobs_kernel(
    logits,
    vocab_size,
    group_highest,
    num_groups,
    num_logprobs,
    listed,
    max_listed,
    sampled,
    num_top,
    NUM_GROUPS: tl.constexpr,
):
    """Triton kernel that computes log-probabilities, for one row per program. It reports the chosen token, and either
    the most likely tokens or, if given, the tokens in `listed`.

    `listed` is [R, max_listed] token ids, or None. NUM_GROUPS is num_groups rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    num_wanted = tl.load(num_logprobs + row)
    if (num_wanted < 0) | (tl.load(sampled.is_nan + row) != 0):
        return
    line = logits.data + row * logits.strides[0]
    groups = tl.arange(0, NUM_GROUPS)
    is_group = groups < num_groups
    tops = tl.load(group_highest + row * num_groups + groups, is_group, float("-inf"))
    highest, chosen = tl.max(tops, 0), tl.load(line + tl.load(sampled.token_ids + row))
    sums, num_higher = tl.zeros([_TILE_TOKENS], tl.float32), tl.zeros([_TILE_TOKENS], tl.int32)
    for start in range(0, vocab_size, _TILE_TOKENS):
        ids = start + tl.arange(0, _TILE_TOKENS)
        values = tl.load(line + ids, ids < vocab_size, float("-inf"))
        sums += tl.exp(values - highest)
        num_higher += (values > chosen).to(tl.int32)
    log_sum = tl.log(tl.sum(sums, 0))
    tl.store(sampled.logprobs + row, chosen - highest - log_sum)
    tl.store(sampled.ranks + row, tl.sum(num_higher, 0) + 1)
    if listed is not None:
        for start in range(0, max_listed, _LISTED_TOKENS):
            places = start + tl.arange(0, _LISTED_TOKENS)
            listed_ids = tl.load(listed + row * max_listed + places, places < max_listed, -1)
            values = tl.load(line + listed_ids, listed_ids >= 0, float("-inf"))
            tl.store(sampled.top_token_ids + row * num_top + places, listed_ids, listed_ids >= 0)
            tl.store(sampled.top_logprobs + row * num_top + places, values - highest - log_sum, listed_ids >= 0)
        num_wanted = tl.where(tl.load(listed + row * max_listed) >= 0, 0, num_wanted)
    keys = tl.where(is_group, _order_key(tops), _MIN_INT)  # of the highest token of each group that is not reported yet
    taken_ids = tl.full([NUM_GROUPS], -1, tl.int32)  # the last reported id among tokens with this key
    for place in range(0, tl.minimum(num_wanted, num_top)):
        key = tl.max(keys, 0)
        group = tl.min(tl.where(keys == key, groups, _MAX_INT), 0)
        taken_id = tl.max(tl.where(groups == group, taken_ids, -1), 0)
        ids = group * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)
        token_keys = _order_key(tl.load(line + ids, ids < vocab_size, float("-inf")))
        token_keys = tl.where(ids < vocab_size, token_keys, _MIN_INT)
        taken_id = tl.min(tl.where((token_keys == key) & (ids > taken_id), ids, _MAX_INT), 0)
        tl.store(sampled.top_token_ids + row * num_top + place, taken_id)
        tl.store(sampled.top_logprobs + row * num_top + place, _from_order_key(key) - highest - log_sum)
        is_left = (token_keys < key) | ((token_keys == key) & (ids > taken_id))
        next_key = tl.max(tl.where(is_left, token_keys, _MIN_INT), 0)
        taken_ids = tl.where(groups == group, tl.where(next_key == key, taken_id, -1), taken_ids)
        keys = tl.where(groups == group, next_key, keys)
