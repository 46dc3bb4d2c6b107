"""`pagewire.kernels.triton.sampler` compared with its specification, and the specification with the CPU sampler."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import triton.language as tl

from pagewire.common.wire.messages import SamplingParams
from pagewire.kernels import sampling
from pagewire.kernels.cpu.sampler import TorchSampler
from pagewire.kernels.triton import sampler
from testing.kernel_checks.sampler import (
    MAX_LOGPROBS,
    Row,
    check_count_tokens,
    check_rows,
    check_sample,
    check_target,
    make_columns,
    make_counts,
    make_target,
    paired_rows,
    random_logits,
    single_rows,
)
from testing.worker.drawing import SamplingRow, draw

FILTERED = (Row(top_k=7, seed=1), Row(top_p=0.9, seed=2), Row(top_k=40, top_p=0.5, min_p=0.02, seed=3))


@pytest.fixture
def small_tiles(monkeypatch):
    """Use small tiles, so that a vocabulary of a thousand has several tiles per chunk and chunks per row."""
    for name, size in {"GROUP_SIZE": 16, "TILE_GROUPS": 8, "TILE_TOKENS": 256}.items():
        monkeypatch.setattr(sampler, name, size)  # for the launchers
        monkeypatch.setattr(sampler, f"_{name}", tl.constexpr(size))  # for the kernels
    monkeypatch.setattr(sampler, "MIN_PROGRAMS", 8)


# The specification


def on_cpu(index: int, row: Row) -> SamplingRow:
    shared = {field.name for field in dataclasses.fields(SamplingParams)} & {*vars(row)}
    params = {
        name: getattr(row, name) for name in shared if name != "num_logprobs"
    }  # the number of listed tokens counts, if there are any
    return SamplingRow(
        index,
        SamplingParams(
            **params,
            logit_bias_token_ids=tuple(token_id for token_id, _ in row.bias),
            logit_bias_values=tuple(value for _, value in row.bias),
            num_logprobs=None if row.num_reported < 0 else row.num_reported,
        ),
        np.array(row.token_ids, np.int32),
        row.num_prompt_tokens,
        row.seed,
        row.sample_index,
    )


@pytest.mark.parametrize("deviation", [0.5, 3.0])
@pytest.mark.parametrize("vocab_size", [10, 61, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_the_specification_draws_what_the_workers_sampler_draws(seed, vocab_size, deviation):
    print("seed", seed)
    rows = [*single_rows(), *paired_rows(seed)]
    logits = random_logits(seed, len(rows), vocab_size, deviation, torch.device("cpu"))
    columns, counts = make_columns(rows, logits.device), make_counts(rows, vocab_size, logits.device)
    specified = sampling.sample(logits.clone(), columns, counts, MAX_LOGPROBS)
    samples = draw(logits, [on_cpu(i, row) for i, row in enumerate(rows)], TorchSampler())
    assert specified.token_ids.tolist() == samples.token_ids
    reported = [i for i, row in enumerate(rows) if row.num_reported >= 0]
    assert specified.logprobs[reported].tolist() == pytest.approx(samples.logprobs.chosen, abs=1e-5)
    assert specified.ranks[reported].tolist() == list(samples.logprobs.ranks)
    top = [(i, min(rows[i].num_reported, vocab_size)) for i in reported]
    values = [value for i, num in top for value in specified.top_logprobs[i, :num].tolist()]
    assert values == pytest.approx(samples.logprobs.top_logprobs, abs=1e-5)  # in any order there if equal


def test_counts_are_of_the_sequence_and_of_what_it_drew():
    rows = [Row(presence_penalty=0.1, token_ids=(3, 3, 4, 3, 3, 5), num_prompt_tokens=3), Row()]
    columns, counts = make_columns(rows, torch.device("cpu")), make_counts(rows, 8, torch.device("cpu"))
    assert counts[2].tolist() == [0, 0, 0, 5, 1, 2, 0, 0]
    drawn = int(sampling.sample(torch.zeros(2, 8), columns, counts).token_ids[0])
    expected = [0, 0, 0, 5, 1, 2, 0, 0]
    expected[drawn] += 2
    assert counts[2].tolist() == expected
    assert counts[:2].eq(2**30).all()


def test_the_specification_keeps_tokens_where_they_belong():
    rows = [Row(seed=i, token_ids=(1,) * (i + 1)) for i in range(3)]
    columns, logits = make_columns(rows, torch.device("cpu")), random_logits(23, 3, 50, 1.0, torch.device("cpu"))
    logits[1, 7] = torch.nan
    target = make_target(columns)
    check_target(target, columns, sampling.sample(logits, columns, target=target))


# The kernels


def test_every_parameter_alone(device):
    check_rows(device, single_rows(), 300, seed=11)


@pytest.mark.parametrize("part", range(3))
def test_every_two_parameters_together(device, small_tiles, part):
    check_rows(device, paired_rows(5)[part::3], 500, seed=12)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 2047, 2048, 2049, 4097])
def test_vocabularies_on_the_edges_of_groups_and_tiles(device, vocab_size):
    rows = [Row(seed=3), Row(top_k=7, top_p=0.8, num_logprobs=3, seed=4)]
    check_rows(device, rows, vocab_size, seed=vocab_size)


@pytest.mark.parametrize("is_masked", [False, True])
def test_more_biases_than_a_program_edits_at_a_time(device, is_masked):
    many = tuple((3 * i, 0.25 * i - 9.0) for i in range(70))
    check_rows(device, [Row(bias=many, seed=1), Row(bias=many[:3], seed=2), Row()], 300, is_masked=is_masked, seed=18)


@pytest.mark.parametrize("vocab_size", [31, 33, 500, 4097])
def test_masked_rows(device, small_tiles, vocab_size):
    check_rows(device, paired_rows(6)[::2], vocab_size, is_masked=True, seed=17)


@pytest.mark.parametrize("deviation", [0.01, 1.0, 8.0])
def test_flat_and_peaked_distributions(device, small_tiles, deviation):
    check_rows(device, FILTERED, 1000, deviation=deviation, seed=13)


def test_many_equal_logits(device, small_tiles):
    rows = (Row(top_k=7, top_p=0.5), Row(top_p=0.01), Row(temperature=0.0, num_logprobs=5), Row(min_p=1.0))
    check_rows(device, rows, 400, deviation=0.1, is_tied=True, seed=14)
    check_sample(torch.zeros((len(rows), 100), device=device), rows, "all are equal")


@pytest.mark.parametrize("num_programs", [1, 3, 10**6])
def test_however_a_row_is_split(device, small_tiles, monkeypatch, num_programs):
    monkeypatch.setattr(sampler, "MIN_PROGRAMS", num_programs)
    check_rows(device, [Row(seed=5), Row(temperature=0.0), Row(top_p=0.7, seed=6)], 800, deviation=0.3, seed=15)


def test_a_first_guess_of_the_groups_that_is_wrong(device, small_tiles):
    """One token dominates each of a few groups, and the nucleus needs the many small tokens everywhere."""
    logits = torch.zeros((2, 1600), device=device)
    logits[:, ::160] = 4.0
    check_sample(logits, [Row(top_p=0.6, seed=8), Row(top_p=0.99, seed=9)], "few high ones in a flat field")


def test_top_p_is_a_share_of_what_top_k_keeps(device):
    """Of the four tokens that top-k keeps, top-p 0.6 keeps the first three if they are nearly equal.

    If the third and fourth are among many equal tokens, top-p 0.45 keeps the first two.
    """
    falling, ending = torch.arange(20) * -0.01, torch.tensor([0.0, -0.01, *[-0.02] * 5, *[-9.0] * 13])
    draws_third = [seed for seed in range(50) if drawn(falling, Row(top_k=4, top_p=0.6, seed=seed)) == 2][:2]
    draws_equal = [seed for seed in range(50) if drawn(ending, Row(top_k=4, seed=seed)) >= 2][:2]
    rows = [Row(top_k=4, top_p=0.6, seed=seed) for seed in draws_third]
    rows += [Row(top_k=4, top_p=0.45, seed=seed) for seed in draws_equal]
    sampled = check_sample(torch.stack([falling, falling, ending, ending]).to(device), rows, "nearly equal tokens")
    assert sampled.token_ids.tolist()[:2] == [2, 2]
    assert max(sampled.token_ids.tolist()[2:]) < 2


def drawn(logits, row):
    return int(sampling.sample(logits[None].clone(), make_columns([row], logits.device)).token_ids)


def test_a_tile_is_skipped_only_where_it_holds_nothing_better(device, small_tiles, monkeypatch):
    monkeypatch.setattr(sampler, "MIN_PROGRAMS", 1)
    check_rows(device, [Row(seed=seed) for seed in range(10)], 500, deviation=0.3, seed=22)


def test_rows_that_draw_what_their_filters_drop(device, small_tiles):
    """The token with the best score is filtered out, so the sampler looks for a second one among the kept tokens."""
    rows = [Row(top_k=2, seed=seed) for seed in range(4)] + [Row(min_p=0.9, seed=seed) for seed in range(3)]
    logits = random_logits(16, len(rows), 1500, 0.2, device)
    unfiltered = [dataclasses.replace(row, top_k=0, min_p=0.0) for row in rows]
    drawn = sampling.sample(logits.clone(), make_columns(unfiltered, device)).token_ids
    sampled = check_sample(logits, rows, "seed 16")
    assert (sampled.token_ids != drawn).sum() >= 4


def test_maximal_noise_cannot_draw_a_token_too_far_below(device):
    """Token 993 has the highest possible noise, 16.6. Of the other tokens 428 has the highest, 6.7."""
    logits = torch.zeros((2, 1000), device=device)
    logits[:, 993] = torch.tensor([-9.0, -11.0])
    sampled = check_sample(logits, [Row(seed=1036)] * 2, "seed 1036")
    assert sampled.token_ids.tolist() == [993, 428]


def test_of_equal_scores_in_several_tiles_the_first_is_drawn(device, small_tiles):
    """Tokens 620 and 852 have equal noise. Token 440 has more, but is filtered out."""
    logits = torch.zeros((1, 1000), device=device)
    logits[0, 440] = -0.5
    sampled = check_sample(logits, [Row(min_p=0.9, seed=2632)], "seed 2632")
    assert sampled.token_ids.tolist() == [620]


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0, 1e30])
def test_infinite_logits(device, temperature):
    logits = random_logits(17, 4, 200, 3.0, device)
    logits[0, 7:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 60:70] = torch.inf
    logits[3] *= 1e37
    for row in (Row(temperature), Row(temperature, top_k=9, seed=1), Row(temperature, top_p=0.5, num_logprobs=3)):
        check_sample(logits[[0, 3]], [row] * 2, f"{row}, seed 17")
        check_sample(logits[1:3], [dataclasses.replace(row, num_logprobs=-1)] * 2, f"{row}, seed 17")


def test_nan_fails_its_row_only(device, small_tiles):
    logits = random_logits(18, 5, 400, 3.0, device)
    logits[0, 399] = logits[2, 0] = torch.nan
    logits[4] = torch.nan
    row = Row(top_p=0.9, presence_penalty=0.5, stop_token_ids=(0, 399), min_tokens=9, num_logprobs=2)
    sampled = check_sample(logits, [row] * 5, "seed 18")
    assert sampled.is_nan.tolist() == [True, False, True, False, True]


def test_a_row_draws_the_same_alone_and_among_others(device, small_tiles):
    rows = paired_rows(19)[:4]
    logits = random_logits(19, 4, 500, 3.0, device)
    together = check_sample(logits.clone(), rows, "seed 19").token_ids
    assert together[2] == check_sample(logits[2:3].clone(), rows[2:3], "seed 19").token_ids[0]


def test_what_was_drawn_counts_in_the_next_step(device):
    """A penalty forbids repetition: in as many steps as the vocabulary has tokens, each token is drawn once."""
    rows = [Row(presence_penalty=1e4, token_ids=(0,), num_prompt_tokens=1)]
    counts, columns = make_counts(rows, 5, device), make_columns(rows, device)
    logits = random_logits(20, 1, 5, 1.0, device)
    drawn = [int(sampler.sample(logits.clone(), columns, counts).token_ids) for _ in range(5)]
    assert sorted(drawn) == [0, 1, 2, 3, 4]


def test_the_draws_follow_the_distribution(device):
    """A statistic of 200 simultaneous draws, which would show an error that kernels and specification share."""
    seed = 21
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], device=device).expand(200, 4)
    rows = [Row(seed=random.Random(seed + i).getrandbits(64)) for i in range(200)]
    drawn = sampling.sample(logits.clone(), make_columns(rows, device)).token_ids
    expected = 200 * logits[0].softmax(0)
    chi_squared = float(((drawn.bincount(minlength=4) - expected) ** 2 / expected).sum())
    assert chi_squared < 16.3, f"of 3 degrees of freedom: chance of 0.001; seed {seed}"
    assert torch.equal(sampler.sample(logits[:20].clone(), make_columns(rows[:20], device)).token_ids, drawn[:20])


def test_no_rows(device):
    columns = make_columns([Row()], device)._asdict()
    none = sampling.SamplingColumns(
        **{name: None if column is None else column[:0] for name, column in columns.items()}
    )
    sampled = sampler.sample(torch.empty((0, 9), device=device), none, None, 3)
    assert sampled.token_ids.shape == (0,)
    assert sampled.top_token_ids.shape == (0, 3)


@pytest.mark.parametrize(("num_sequences", "max_tokens"), [(1, 1), (3, 40), (2, 700)])
def test_sequences_are_counted(device, num_sequences, max_tokens):
    check_count_tokens(device, num_sequences, max_tokens, 90, seed=max_tokens)


def refusals():
    rows = [Row(bias=((1, 1.0),), stop_token_ids=(3,)), Row()]
    columns = make_columns(rows, torch.device("cpu"))
    logits, counts = torch.zeros(2, 9), torch.zeros((3, 9), dtype=torch.int32)

    target = make_target(columns)

    def refused(message, logits=logits, token_counts=counts, max_logprobs=None, target=None, **changed):
        arguments = (logits, columns._replace(**changed), token_counts, max_logprobs, target)
        return pytest.param(arguments, message, id=message)

    yield refused("logits is .* torch.float16 .* torch.float32", logits.half())
    yield refused("its last dimension dense", torch.zeros(9, 2).t())
    yield refused("the vocabulary has 0 tokens", torch.zeros(2, 0))
    yield refused("temperature is \\[3\\]", temperature=torch.zeros(3))
    yield refused("top_k is \\[2\\] torch.int64", top_k=torch.zeros(2, dtype=torch.int64))
    yield refused("only one of bias_token_ids and bias_values", bias_values=None)
    yield refused("only one of stop_token_ids and min_num_tokens", stop_token_ids=None)
    yield refused("stop_token_ids is \\[1, 1\\]", stop_token_ids=torch.zeros((1, 1), dtype=torch.int32))
    yield refused("bias_values is \\[2, 3\\]", bias_values=torch.zeros(2, 3))
    yield refused("token_counts is \\[3, 8\\] .* make it \\[num_slots, 9\\]", token_counts=counts[:, :8])
    yield refused("token_counts is \\[3, 9\\] torch.int64", token_counts=counts.long())
    yield refused("max_logprobs is -1", max_logprobs=-1)
    yield refused("token_ids is", target=target._replace(token_ids=target.token_ids.long()))
    yield refused("slots is \\[1\\]", target=target._replace(slots=target.slots[:1]))
    yield refused("sampled is \\[2, 1\\]", target=target._replace(sampled=target.sampled[:, :1]))


@pytest.mark.parametrize(("arguments", "message"), list(refusals()))
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sampler.sample(*arguments)
