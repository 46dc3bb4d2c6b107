"""`pagewire.kernels.triton.gathering` compared with its specification."""

import pytest
import torch

from pagewire.kernels.triton import gathering
from testing.kernel_checks.gathering import check_columns, check_tokens, make_tables


@pytest.mark.parametrize(
    ("num_tokens", "num_rows"), [(0, 0), (1, 1), (0, 2), (3, 0), (255, 3), (256, 256), (257, 5), (700, 2)]
)
def test_every_number_of_tokens_and_rows(device, num_tokens, num_rows):
    check_tokens(device, num_tokens, num_rows, seed=num_tokens)


@pytest.mark.parametrize(
    ("max_blocks", "num_blocks"), [(5, 0), (5, 1), (5, 5), (2100, 1024), (2100, 1025), (2100, 2100)]
)
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_every_size_of_tables(device, max_blocks, num_blocks, block_size):
    check_tokens(device, 40, 3, max_blocks=max_blocks, num_blocks=num_blocks, block_size=block_size, seed=num_blocks)


@pytest.mark.parametrize("num_layer_groups", [2, 7])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(0, 2), (3, 3), (257, 5)])
def test_every_number_of_layer_groups(device, num_tokens, num_rows, num_layer_groups):
    blocks = {"max_blocks": 1100, "num_blocks": 1030, "num_layer_groups": num_layer_groups}
    check_tokens(device, num_tokens, num_rows, **blocks, seed=num_tokens)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 31, 32, 33, 100])
def test_every_number_of_columns(device, num_rows):
    check_columns(device, num_rows, seed=num_rows)


def refusals():
    tables = make_tables(4, 5, 16, torch.device("cpu"), seed=1)
    slots = torch.zeros(3, dtype=torch.int32)
    tokens = {"tables": tables, "slots": slots, "lengths": slots, "row_slots": slots, "num_blocks": 5}
    columns = {"lines": torch.zeros(10, 4, dtype=torch.int32), "seeds": torch.zeros(4, dtype=torch.int64)}
    columns |= {"slots": slots, "num_tokens": slots}
    for name, function, arguments, changed in (
        ("slots is .* torch.int64", gathering.gather_tokens, tokens, {"slots": slots.long()}),
        ("lengths is \\[1, 3\\] torch.int32", gathering.gather_tokens, tokens, {"lengths": slots[None]}),
        ("lengths is \\[2\\] .* make it \\[3\\]", gathering.gather_tokens, tokens, {"lengths": slots[1:]}),
        (
            "block_tables is \\[4, 5\\] .* make it \\[layer_groups, num_slots, max_blocks\\]",
            gathering.gather_tokens,
            tokens,
            {"tables": tables._replace(block_tables=tables.block_tables[0])},
        ),
        ("num_blocks is 6; make it 0 to 5", gathering.gather_tokens, tokens, {"num_blocks": 6}),
        (
            "token_ids is .* torch.int64",
            gathering.gather_tokens,
            tokens,
            {"tables": tables._replace(token_ids=tables.token_ids.long())},
        ),
        ("lines is .* torch.float32", gathering.gather_columns, columns, {"lines": torch.zeros(10, 4)}),
        ("seeds is \\[3\\] torch.int64", gathering.gather_columns, columns, {"seeds": columns["seeds"][1:]}),
    ):
        yield pytest.param(function, {**arguments, **changed}, name, id=name)


@pytest.mark.parametrize(("function", "arguments", "message"), list(refusals()))
def test_what_does_not_fit_is_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)
