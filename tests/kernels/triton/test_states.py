"""The operations with states, compared with `pagewire.kernels.states`."""

import math
from dataclasses import replace

import pytest
import torch

from pagewire.kernels.triton import states
from testing.kernel_checks.states import (
    Convolution,
    DeltaRule,
    check_normalize_gated,
    check_operation,
    check_steps,
    make_rows,
    make_states,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPERATIONS = (
    Convolution(20, 3, is_gated=True),
    Convolution(130, 4),
    Convolution(7, 8, is_gated=True, has_bias=True),
    Convolution(256, 2, has_bias=True),
    DeltaRule(2, 2, 16, 16),
    DeltaRule(4, 2, 20, 12),
    DeltaRule(3, 1, 128, 9),
    DeltaRule(1, 1, 130, 5),
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=str)


@every_dtype
@every_operation
@pytest.mark.parametrize("lengths", [(1,), (1, 6, 3), (2, 1, 1, 1)], ids=str)
def test_rows_with_saves(device, dtype, operation, lengths):
    for seed in range(3):
        check_operation(device, dtype, operation, lengths, seed)


@every_operation
def test_bits_do_not_depend_on_steps(device, operation):
    for seed, lengths in enumerate([(1, 1, 1, 1), (5, 2, 1), (2, 6)]):
        check_steps(device, torch.bfloat16, operation, lengths, seed)


@every_operation
def test_errors_do_not_grow_over_many_tokens(device, operation):
    check_operation(device, torch.float32, operation, (100,), seed=5)


def test_a_state_that_hardly_decays_keeps_its_rate(device):
    """exp(-16.7) is lost when it is added to 1 in float32. The gates forbid changes of the state."""
    num_tokens, decay, bias = 200, -16.0, -16.7
    rows = make_rows(torch.tensor([[0.0], [1.0]], device=device), [(1, [(num_tokens, 1)])])
    x, gate = torch.ones(num_tokens, 3, device=device), torch.tensor([[-50.0, 0.0]], device=device)
    numbers = (torch.tensor([number], device=device) for number in (decay, bias))
    states.apply_delta_rule(x, gate.expand(num_tokens, -1), *numbers, rows, 0, num_key_heads=1, key_dim=1)
    expected = math.exp(num_tokens * decay * math.log1p(math.exp(bias)))
    assert float(rows.states[1, 0]) == pytest.approx(expected, rel=5e-5)


@every_operation
def test_a_row_without_tokens_may_copy_its_state_or_write_none(device, operation):
    """A step that is padded has rows without saves."""
    torch.manual_seed(1)
    values = make_states(operation, device)
    before = values.clone()
    padded = make_rows(values, [(3, [(0, 4)]), (0, [(0, 5)])])
    rows = replace(padded, save_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32, device=device))
    inputs = [*operation.draw_tokens(0, torch.float32), *operation.draw_weights()]
    inputs = [None if tensor is None else tensor.to(device) for tensor in inputs]
    assert operation.run(states, inputs, rows).shape[0] == 0
    expected = before.clone()
    expected[4, 16 : 16 + operation.state_size] = before[3, 16 : 16 + operation.state_size]
    assert torch.equal(values, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(200), whose inverse is 0
@every_dtype
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 1), (3, 5, 16), (2, 9, 128), (2, 1, 1000)])
def test_normalize_gated(device, dtype, num_tokens, num_heads, head_dim):
    for weight_dtype in {dtype, torch.float32}:
        check_normalize_gated(device, dtype, weight_dtype, num_tokens, num_heads, head_dim, seed=head_dim)


def test_no_rows_and_no_tokens_are_no_error(device):
    operation = DeltaRule(2, 1, 16, 16)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    rows = replace(make_rows(make_states(operation, device), [(0, [(0, 1)])]), reads=empty)
    rows = replace(rows, query_start_loc=rows.query_start_loc[:1], save_start_loc=rows.save_start_loc[:1])
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, 3, device=device)
    assert states.convolve(x, weight, None, rows, 0).shape == (0, 64)
    heads = torch.ones(2, device=device)
    sizes = {"num_key_heads": 1, "key_dim": 16}
    assert states.apply_delta_rule(x, x[:, :4], heads, heads, rows, 0, **sizes).shape == (0, 32)
    assert states.normalize_gated(x, x, weight[:32, 0].contiguous(), 1e-6).shape == (0, 64)


def test_bad_convolutions_are_refused(device):
    rows = make_rows(make_states(Convolution(8, 3), device), [(0, [(2, 1)])])
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, 3, device=device)
    for message, arguments in (
        (r"x is \[2, 8\] torch.float32 .* make it \[T, 24\]", {"is_gated": True}),
        (r"x is \[2, 8\] torch.float64", {"x": x.double()}),
        (r"weight is \[8, 3\] torch.float16", {"weight": weight.half()}),
        ("kernel_size of 9; 2 to 8", {"weight": torch.ones(8, 9, device=device)}),
        ("kernel_size of 1; 2 to 8", {"weight": weight[:, :1].contiguous()}),
        (r"bias is \[7\]", {"bias": weight[:7, 0].contiguous()}),
        ("states have 40 values; the operation needs 16 from 25", {"offset": 25}),
        ("states have 40 values; the operation needs 16 from -1", {"offset": -1}),
        (r"states is .* torch.float16", {"rows": replace(rows, states=rows.states.half())}),
        (r"reads is \[1\] torch.int64", {"rows": replace(rows, reads=rows.reads.long())}),
        (r"query_start_loc is \[1\] .* make it \[2\]", {"rows": replace(rows, query_start_loc=rows.reads)}),
        (r"save_start_loc is \[1\] .* make it \[2\]", {"rows": replace(rows, save_start_loc=rows.reads)}),
        (r"save_counts is \[2\] .* make it \[1\]", {"rows": replace(rows, save_counts=rows.query_start_loc)}),
    ):
        with pytest.raises(ValueError, match=message):
            states.convolve(**{"x": x, "weight": weight, "bias": None, "rows": rows, "offset": 0, **arguments})


def test_bad_heads_are_refused(device):
    operation = DeltaRule(4, 2, 16, 8)
    rows = make_rows(make_states(operation, device), [(0, [(2, 1)])])
    x, gate, heads = torch.ones(2, 96, device=device), torch.ones(2, 8, device=device), torch.ones(4, device=device)
    given = {"x": x, "gate": gate, "decay": heads, "bias": heads, "rows": rows, "offset": 0}
    given |= {"num_key_heads": 2, "key_dim": 16}
    for message, arguments in (
        (r"gate is \[2, 8\] torch.float16", {"gate": gate.half()}),
        (r"gate is \[1, 8\] .* make it \[2, 8\]", {"gate": gate[:1]}),
        (r"bias is \[3\] .* make it \[4\]", {"bias": heads[1:]}),
        ("key_dim is 257; 1 to 256", {"key_dim": 257}),
        ("num_key_heads is 3; make it a divisor of the 4 heads", {"num_key_heads": 3}),
        ("x leaves 30 values for 4 heads", {"x": x[:, :94]}),
        ("x leaves 0 values for 4 heads", {"x": x[:, :64]}),
        ("states have 536 values; the operation needs 512 from 25", {"offset": 25}),
    ):
        with pytest.raises(ValueError, match=message):
            states.apply_delta_rule(**{**given, **arguments})
    with pytest.raises(ValueError, match="head_dim is 7; make it a divisor of the 96 columns"):
        states.normalize_gated(x, x, torch.ones(7, device=device), 1e-6)
    with pytest.raises(ValueError, match=r"gate is \[2, 8\]"):
        states.normalize_gated(x, gate, torch.ones(8, device=device), 1e-6)
