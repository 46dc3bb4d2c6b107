"""Checks of `pagewire.kernels.triton.sampler` against its specification, and its benchmarks."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import sampling
from pagewire.kernels.noise import gumbel_noise, noise_keys
from pagewire.kernels.sampling import SampledTokens, SamplingColumns, TokenTarget
from pagewire.kernels.triton import sampler
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase, Goal
from testing.kernel_checks.decode_attention import strided

MAX_GAP = 1e-5  # largest difference of two scores or log-probabilities whose order rounding may change
MAX_LOGPROBS = 5
PADDING = 5  # columns after a row, which must be neither read nor written


@dataclass(frozen=True)
class Row:
    """The sampling parameters of one row, and its tokens so far."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_logprobs: int = -1
    logprob_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = (1, 2, 2, 3, 3, 3)
    num_prompt_tokens: int = 2
    seed: int = 0
    sample_index: int = 0

    @property
    def num_reported(self) -> int:
        return len(self.logprob_token_ids) or self.num_logprobs

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


# The relevant values of each field. The first value turns the feature off.
LEVELS: dict[str, tuple[object, ...]] = {
    "temperature": (1.0, 0.0, 1.7, 0.3),
    "top_k": (0, 1, 7, 40),
    "top_p": (1.0, 0.2, 0.9),
    "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.8, 0.6),
    "presence_penalty": (0.0, 1.5),
    "frequency_penalty": (0.0, -0.7),
    "bias": ((), ((0, 4.0), (9, -2.5)), ((5, float("inf")), (6, float("-inf")))),
    "stop_token_ids": ((), (2, 7, 2**30), tuple(range(80, 240, 2))),
    "min_tokens": (0, 4, 5),
    "num_logprobs": (-1, 0, MAX_LOGPROBS),
    "logprob_token_ids": ((), (9,), (4, 0, 7)),
}


def single_rows() -> list[Row]:
    """Return a row for each value of each field, with all other fields off."""
    return [Row(**{name: value}, seed=7) for name, values in LEVELS.items() for value in values[1:]]


def paired_rows(seed: int) -> list[Row]:
    """Return rows such that every pair of values of two fields occurs together in at least one row."""
    generator = random.Random(seed)
    fields = list(LEVELS)
    missing = {
        ((first, i), (second, j))
        for first, second in itertools.combinations(fields, 2)
        for i in range(len(LEVELS[first]))
        for j in range(len(LEVELS[second]))
    }
    rows = []
    while missing:
        tried = [{name: generator.randrange(len(LEVELS[name])) for name in fields} for _ in range(50)]
        tried.append({**tried[0], **dict(min(missing))})
        covered = [set(itertools.combinations(choice.items(), 2)) & missing for choice in tried]
        best = max(range(len(tried)), key=lambda i: len(covered[i]))
        missing -= covered[best]
        values = {name: LEVELS[name][i] for name, i in tried[best].items()}
        rows.append(Row(**values, seed=generator.getrandbits(64), sample_index=generator.randrange(9)))
    return rows


def make_columns(rows: Sequence[Row], device: torch.device) -> SamplingColumns:
    def floats(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32, device=device)

    def integers(numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    def padded(lists: Sequence[Sequence[object]], vacant: object) -> list[list[object]]:
        width = max(map(len, lists))
        return [[*entries, *[vacant] * (width - len(entries))] for entries in lists]

    has_bias, has_stops = any(row.bias for row in rows), any(row.stop_token_ids for row in rows)
    has_listed = any(row.logprob_token_ids for row in rows)
    values = padded([[value for _, value in row.bias] for row in rows], 9.9)
    return SamplingColumns(
        temperature=floats("temperature"),
        top_k=integers([row.top_k for row in rows]),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        repetition_penalty=floats("repetition_penalty"),
        presence_penalty=floats("presence_penalty"),
        frequency_penalty=floats("frequency_penalty"),
        seeds=torch.tensor([row.seed - (row.seed >> 63 << 64) for row in rows], dtype=torch.int64, device=device),
        sample_indexes=integers([row.sample_index for row in rows]),
        num_tokens=integers([len(row.token_ids) for row in rows]),
        slots=integers([len(rows) - i if row.has_penalty else -1 for i, row in enumerate(rows)]),
        num_logprobs=integers([row.num_reported for row in rows]),
        bias_token_ids=integers(padded([[i for i, _ in row.bias] for row in rows], -1)) if has_bias else None,
        bias_values=torch.tensor(values, dtype=torch.float32, device=device) if has_bias else None,
        stop_token_ids=integers(padded([row.stop_token_ids for row in rows], -1)) if has_stops else None,
        min_num_tokens=integers([row.num_prompt_tokens + row.min_tokens for row in rows]) if has_stops else None,
        logprob_token_ids=integers(padded([row.logprob_token_ids for row in rows], -1)) if has_listed else None,
    )


def make_counts(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Tensor:
    """Return token counts as a view of wider lines, whose other columns must not be read.

    Each row has a line, in random order, and one line belongs to no row.
    """
    counts = torch.full((len(rows) + 1, vocab_size + 3), 2**30, dtype=torch.int32, device=device)[:, :vocab_size]
    columns = make_columns(rows, device)
    penalized = [i for i, row in enumerate(rows) if row.has_penalty]
    if penalized:
        tokens = [rows[i].token_ids for i in penalized]
        starts = [0, *itertools.accumulate(map(len, tokens))]
        lengths = torch.tensor([rows[i].num_prompt_tokens for i in penalized], device=device)
        flat = torch.tensor([token for ids in tokens for token in ids], device=device)
        sampling.count_tokens(counts, columns.slots[penalized], flat, torch.tensor(starts, device=device), lengths)
    return counts


def random_logits(seed: int, num_rows: int, vocab_size: int, deviation: float, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn((num_rows, vocab_size), generator=generator, device=device) * deviation


def check_rows(
    device: torch.device,
    rows: Sequence[Row],
    vocab_size: int,
    *,
    deviation: float = 3.0,
    is_tied: bool = False,
    is_masked: bool = False,
    seed: int,
) -> None:
    """Check rows of random logits.

    `is_tied`: logits are rounded to bfloat16, so that many are equal. `is_masked`: rows may choose only some tokens.
    """
    logits = random_logits(seed, len(rows), vocab_size, deviation, device)
    masks = make_masks(seed, len(rows), vocab_size, device) if is_masked else {}
    logits = logits.bfloat16().float() if is_tied else logits
    check_sample(logits, rows, f"vocabulary {vocab_size}, seed {seed}", **masks)


def make_masks(seed: int, num_rows: int, vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """Return four masks and the mask line of each row.

    The masks allow one token, about a hundredth, half, and nearly all of the tokens. Some rows have no mask.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([[0.0], [0.01], [0.5], [0.97]])
    is_allowed = torch.rand(len(shares), vocab_size, generator=generator) < shares
    is_allowed[:, seed % vocab_size] = True
    bits = torch.zeros(len(shares), -(-vocab_size // 32) * 32, dtype=torch.int64)
    bits[:, :vocab_size] = is_allowed
    words = (bits.view(len(shares), -1, 32) << torch.arange(32)).sum(2)
    masks = (words - (words >> 31 << 32)).to(torch.int32)
    lines = torch.randint(-1, len(shares), (num_rows,), generator=generator, dtype=torch.int32)
    return {"masks": masks.to(device), "mask_lines": lines.to(device)}


def check_sample(logits: Tensor, rows: Sequence[Row], case: str, **masks: Tensor) -> SampledTokens:
    """Compare the draws, counts and log-probabilities of some rows with the specification. Return the result of the
    kernel."""
    columns = make_columns(rows, logits.device)._replace(**masks)
    max_logprobs = max(row.num_reported for row in rows)
    reported = None if max_logprobs < 0 else max_logprobs
    counts = make_counts(rows, logits.shape[1], logits.device) if any(row.has_penalty for row in rows) else None
    expected_logits, expected_counts = logits.clone(), None if counts is None else counts.clone()
    expected = sampling.sample(expected_logits, columns, expected_counts, reported)
    # Rows of a wider matrix, like the output of a matrix multiplication with a padded vocabulary.
    wide = torch.cat((logits, torch.full((len(logits), PADDING), torch.nan, device=logits.device)), dim=1)
    target = make_target(columns)
    actual = sampler.sample(wide[:, :-PADDING], columns, counts, reported, target)
    check_target(target, columns, actual)
    assert wide[:, -PADDING:].isnan().all(), f"something was written behind a row: {case}"
    assert torch.equal(actual.is_nan, expected.is_nan), f"{actual.is_nan} is NaN, not {expected.is_nan}: {case}"
    for i in (actual.token_ids != expected.token_ids).nonzero().flatten().tolist():
        gap = _score_gap(expected_logits[i], columns, i, int(actual.token_ids[i]), int(expected.token_ids[i]))
        assert gap < MAX_GAP, f"row {i} drew {actual.token_ids[i]}, not {expected.token_ids[i]}: {rows[i]}, {case}"
    drew_equal = actual.token_ids == expected.token_ids
    if counts is not None and expected_counts is not None and drew_equal.all():
        assert torch.equal(counts, expected_counts), f"tokens were counted otherwise: {case}"
    for i, row in enumerate(rows):
        if row.num_reported >= 0 and not expected.is_nan[i] and drew_equal[i]:
            _check_logprobs(
                actual, expected, expected_logits[i], i, min(row.num_reported, logits.shape[1]), f"{row}, {case}"
            )
    return actual


def make_target(columns: SamplingColumns) -> TokenTarget:
    """Return a target whose rows are lines of a wider table, in reverse order. One line belongs to no row."""
    num_rows, device = len(columns.seeds), columns.seeds.device
    width = int(columns.num_tokens.max()) + 2
    table = torch.full((num_rows + 1, width + 3), -9, dtype=torch.int32, device=device)[:, :width]
    slots = torch.arange(num_rows, 0, -1, dtype=torch.int32, device=device)
    return TokenTarget(table, slots, torch.full((2, num_rows), -9, dtype=torch.int32, device=device))


def check_target(target: TokenTarget, columns: SamplingColumns, sampled: SampledTokens) -> None:
    """Check that the tokens are at the right positions, and that no other entry was written."""
    assert torch.equal(target.sampled[0].long(), sampled.token_ids)
    assert torch.equal(target.sampled[1] != 0, sampled.is_nan)
    expected = torch.full_like(target.token_ids, -9)
    expected[target.slots.long(), columns.num_tokens.long()] = sampled.token_ids.int()
    assert torch.equal(target.token_ids, expected)


def _score_gap(logits: Tensor, columns: SamplingColumns, row: int, actual: int, expected: int) -> float:
    """Return the difference of the scores of two tokens; infinite if the filters drop the actual token."""
    if columns.temperature[row] == 0:
        return float(logits[expected] - logits[actual])
    scaled = (logits - logits.max()) / columns.temperature[row]
    one = slice(row, row + 1)
    keys = noise_keys(columns.seeds[one], columns.sample_indexes[one].long(), columns.num_tokens[one].long())
    noise = gumbel_noise(keys, len(logits))[0]
    threshold = sampling.lowest_kept(scaled, int(columns.top_k[row]), float(columns.top_p[row]), columns.min_p[row])
    scores = (scaled.double() + noise).masked_fill(scaled < threshold, -torch.inf)
    return float(scores[expected] - scores[actual])


def _check_logprobs(
    actual: SampledTokens, expected: SampledTokens, logits: Tensor, row: int, num_top: int, case: str
) -> None:
    assert torch.allclose(actual.logprobs[row], expected.logprobs[row], rtol=1e-5, atol=MAX_GAP, equal_nan=True), case
    assert actual.ranks[row] == expected.ranks[row], f"rank {actual.ranks[row]}, not {expected.ranks[row]}: {case}"
    values, expected_values = actual.top_logprobs[row, :num_top], expected.top_logprobs[row, :num_top]
    assert torch.allclose(values, expected_values, rtol=1e-5, atol=MAX_GAP), f"{values}, not {expected_values}: {case}"
    ids, expected_ids = actual.top_token_ids[row, :num_top].long(), expected.top_token_ids[row, :num_top].long()
    assert len(ids.unique()) == num_top, f"{ids} names a token twice: {case}"
    is_other = ids != expected_ids
    gaps = (logits[ids] - logits[expected_ids])[is_other].abs()
    assert (gaps < MAX_GAP).all(), f"{ids}, not {expected_ids}: {case}"
    assert (gaps > 0).all(), f"{ids}, not {expected_ids}, the lowest of equals first: {case}"


def check_count_tokens(
    device: torch.device, num_sequences: int, max_tokens: int, vocab_size: int, *, seed: int
) -> None:
    generator = random.Random(seed)
    lengths = [generator.randint(1, max_tokens) for _ in range(num_sequences)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    token_ids = torch.tensor([generator.randrange(vocab_size) for _ in range(sum(lengths))], device=device)
    num_prompt_tokens = torch.tensor([generator.randint(0, length) for length in lengths], device=device)
    slots = torch.tensor(generator.sample(range(num_sequences + 2), num_sequences), device=device)
    expected = torch.full((num_sequences + 2, vocab_size), -7, dtype=torch.int32, device=device)
    actual = expected.clone()
    sampling.count_tokens(expected, slots, token_ids, starts, num_prompt_tokens)
    sampler.count_tokens(actual, slots.int(), token_ids.int(), starts, num_prompt_tokens)
    assert torch.equal(actual, expected), f"{num_sequences} sequences were counted otherwise, seed {seed}"


def device_cases() -> Iterator[DeviceCase]:
    for seed in range(3):
        rows = [dataclasses.replace(row, num_prompt_tokens=2) for row in (*single_rows(), *paired_rows(seed))]
        for vocab_size, deviation, is_tied in ((151_936, 3.0, False), (128_256, 1.0, True), (50_257, 6.0, False)):
            yield DeviceCase(
                f"sampler: {len(rows)} kinds of rows, vocabulary {vocab_size}, deviation {deviation}, seed {seed}",
                functools.partial(
                    check_rows, rows=rows, vocab_size=vocab_size, deviation=deviation, is_tied=is_tied, seed=seed
                ),
            )
    common = {"plain": Row(), "top_k": Row(top_k=50, top_p=0.95), "top_p": Row(top_p=0.95), "min_p": Row(min_p=0.02)}
    for (name, row), num_rows in itertools.product(common.items(), (1, 7, 256, 1024)):
        rows = [dataclasses.replace(row, seed=2**63 + 977 * i, sample_index=i) for i in range(num_rows)]
        for deviation in (0.5, 3.0):
            yield DeviceCase(
                f"sampler: {num_rows} rows with {name}, deviation {deviation}",
                functools.partial(check_rows, rows=rows, vocab_size=151_936, deviation=deviation, seed=num_rows),
            )
    yield DeviceCase(
        "count_tokens",
        functools.partial(check_count_tokens, num_sequences=40, max_tokens=9000, vocab_size=50_257, seed=1),
    )


NUM_BENCH_ROWS, BENCH_VOCAB_SIZE, BENCH_DEVIATION = 256, 151_936, 3.0
BENCH_ROWS = {
    "greedy": Row(temperature=0.0),
    "temperature": Row(),
    "top-k 50, top-p 0.95": Row(temperature=0.8, top_k=50, top_p=0.95),
    "top-p 0.95": Row(temperature=0.8, top_p=0.95),
    "min-p 0.05": Row(temperature=0.8, min_p=0.05),
}
BENCH_ROWS_WITHOUT_GOAL = {
    "top-p 0.95 at temperature 1.5": Row(temperature=1.5, top_p=0.95),
    "penalties": Row(presence_penalty=0.1, frequency_penalty=0.1),
    "5 log-probabilities": Row(num_logprobs=MAX_LOGPROBS),
}


def bench_cases() -> Iterator[BenchCase]:
    """Yield benchmarks. The goal is half of the copy bandwidth: twice the time of reading the logits once."""
    bytes_moved = NUM_BENCH_ROWS * BENCH_VOCAB_SIZE * 4
    for rows, goals in ((BENCH_ROWS, (Goal(0.5),)), (BENCH_ROWS_WITHOUT_GOAL, ())):
        for name, row in rows.items():
            make = functools.partial(_make_bench, row)
            yield BenchCase(f"sampler: {NUM_BENCH_ROWS} rows, {name}", make, bytes_moved=bytes_moved, goals=goals)
    name = f"sampler of plain torch: {NUM_BENCH_ROWS} rows, top-p 0.95"
    yield BenchCase(name, _make_torch_bench, bytes_moved=bytes_moved)


def _make_bench(row: Row, device: torch.device) -> Sequence[Callable[[], object]]:
    rows = [dataclasses.replace(row, seed=i * 2**33 + i) for i in range(NUM_BENCH_ROWS)]
    columns = make_columns(rows, device)
    counts = make_counts(rows, BENCH_VOCAB_SIZE, device) if row.has_penalty else None
    reported = None if row.num_logprobs < 0 else row.num_logprobs
    return [functools.partial(sampler.sample, logits, columns, counts, reported) for logits in _bench_logits(device)]


def _bench_logits(device: torch.device) -> list[Tensor]:
    return [random_logits(seed, NUM_BENCH_ROWS, BENCH_VOCAB_SIZE, BENCH_DEVIATION, device) for seed in range(3)]


def _make_torch_bench(device: torch.device) -> Sequence[Callable[[], object]]:
    def draw(logits: Tensor) -> Tensor:
        values, ids = (logits / 0.8).sort(dim=1, descending=True)
        probabilities = values.softmax(1)
        kept = probabilities.masked_fill(probabilities.cumsum(1) - probabilities >= 0.95, 0.0)
        return ids.gather(1, (kept / torch.empty_like(kept).exponential_()).argmax(1, keepdim=True))

    return [functools.partial(draw, logits) for logits in _bench_logits(device)]


_LOGITS = {"logits": strided("fp32", 2), "vocab_size": "i32"}
_COUNTS = strided("i32", 2)
_FLOATS, _INTEGERS = dict.fromkeys(sampling.FLOATS, "*fp32"), dict.fromkeys(sampling.INTEGERS, "*i32")
_COLUMNS = SamplingColumns(**_FLOATS, **_INTEGERS, seeds="*i64", num_tokens="*i32")
_SAMPLED = SampledTokens("*i64", "*i1", "*fp32", "*i32", "*i32", "*fp32")
_ROWS = {**_LOGITS, "columns": _COLUMNS}
_CHOICE = {
    **_ROWS,
    "groups": sampler._Groups("*fp32", "*fp32", "*i32", "i32"),
    "chunks": sampler._Chunks("*fp32", "*i32"),
}
_SCAN = {**_CHOICE, "chunk_tiles": "i32"}


def compile_cases() -> Iterator[CompileCase]:
    choose = {**_CHOICE, "sampled": _SAMPLED, "num_chunks": "i32"}
    target = sampler._Target(strided("i32", 2), "*i32", "*i32")
    choose_alone, choose = {**choose, "counts": None, "target": None}, {**choose, "counts": _COUNTS, "target": target}
    report = {**_LOGITS, "sampled": _SAMPLED, "num_top": "i32", "num_logprobs": "*i32", "max_listed": "i32"}
    report |= {"group_highest": "*fp32", "num_groups": "i32", "listed": None}
    listed = {**report, "listed": "*i32"}
    edit = {**_ROWS, "max_biases": "i32", "max_stops": "i32", "num_words": "i32"}
    stops = {**edit, "columns": _COLUMNS._replace(stop_token_ids="*i32", min_num_tokens="*i32")}
    biases = {**edit, "columns": _COLUMNS._replace(bias_token_ids="*i32", bias_values="*fp32")}
    mask = {**_LOGITS, "masks": "*i32", "num_words": "i32", "mask_lines": "*i32"}
    masked = {**biases, "columns": biases["columns"]._replace(masks="*i32", mask_lines="*i32")}
    tokens = dict.fromkeys(("slots", "token_ids", "start_loc", "num_prompt_tokens"), "*i32")
    for name, kernel, signature, constexprs, num_warps in (
        ("scan", sampler._scan_kernel, {**_SCAN, "counts": None}, {}, 8),
        ("scan with penalties", sampler._scan_kernel, {**_SCAN, "counts": _COUNTS}, {}, 8),
        ("choose", sampler._choose_kernel, choose_alone, {"NUM_CHUNKS": 128}, 8),
        ("choose and keep", sampler._choose_kernel, choose, {"NUM_CHUNKS": 128}, 8),
        ("choose of a large vocabulary", sampler._choose_kernel, choose, {"NUM_CHUNKS": 512}, 8),
        ("log-probabilities", sampler._logprobs_kernel, report, {"NUM_GROUPS": 4096}, 8),
        ("listed log-probabilities", sampler._logprobs_kernel, listed, {"NUM_GROUPS": 4096}, 8),
        ("stop tokens", sampler._edit_kernel, stops, {"TILE_SIZE": 64}, 1),
        ("biases", sampler._edit_kernel, biases, {"TILE_SIZE": 64}, 1),
        ("masked biases", sampler._edit_kernel, masked, {"TILE_SIZE": 64}, 1),
        ("masks", sampler._mask_kernel, mask, {"TILE_SIZE": 4096}, 4),
        ("count_tokens", sampler._count_kernel, {"counts": _COUNTS, **tokens}, {"TILE_SIZE": 256}, 2),
    ):
        divisible = ("strides", "vocab_size")
        yield CompileCase(f"sampler: {name}", kernel, signature, constexprs, num_warps, 3, divisible)
