"""Tiles are chosen by time among the tiles that run and give correct results."""

import pytest
import torch

from bench.gpu import tune_kernels
from bench.gpu.tune_kernels import Problem
from pagewire.kernels.triton import prefill_attention, tiles
from pagewire.kernels.triton.tiles import Tile

TILES = (Tile(32, 4, 2), Tile(16, 4, 2), Tile(64, 4, 2))


@pytest.mark.parametrize("kernel", tiles.ESTIMATES)
def test_every_kernel_can_be_tuned(device, kernel):
    sizes = {"num_rows": 2, "seq_len": 24, "num_queries": 1, "num_kv_heads": 1, "num_programs": 2}
    problem = Problem(kernel, 32, 2, torch.float32, **sizes)
    forced = []

    def time_calls(calls):
        forced.append(tiles.lookup(kernel, head_dim=32, num_groups=2, dtype=torch.float32))
        assert len(calls) == tune_kernels.NUM_SETS
        return float(forced[-1].block_n)

    assert tune_kernels.tune(problem, TILES, device, time_calls) == {TILES[0]: 32.0, TILES[1]: 16.0, TILES[2]: 64.0}
    assert forced == list(TILES)


def test_a_tile_that_computes_something_else_ends_the_tuning(device, monkeypatch):
    problem = Problem("paged_prefill", 32, 1, torch.float32, num_rows=1, seq_len=24, num_queries=3, num_kv_heads=1)

    def wrong_for_small_tiles(*arguments, **options):
        result = prefill_attention.paged_prefill(*arguments, **options)
        tile = tiles.lookup("paged_prefill", head_dim=32, num_groups=1, dtype=torch.float32)
        return result + (tile.block_n == 16)

    monkeypatch.setattr(tune_kernels, "paged_prefill", wrong_for_small_tiles)
    with pytest.raises(RuntimeError, match=r"block_n=16.* computes other results than Tile\(block_n=32"):
        tune_kernels.tune(problem, TILES, device, lambda calls: 1.0)


def test_a_tile_that_does_not_fit_is_left_out(device, monkeypatch, capsys):
    problem = Problem("paged_prefill", 32, 1, torch.float32, num_rows=1, seq_len=24, num_queries=3, num_kv_heads=1)

    def fits_small_tiles(*arguments, **options):
        tile = tiles.lookup("paged_prefill", head_dim=32, num_groups=1, dtype=torch.float32)
        if tile.block_n > 32:
            raise MemoryError("out of shared memory")
        return prefill_attention.paged_prefill(*arguments, **options)

    monkeypatch.setattr(tune_kernels, "paged_prefill", fits_small_tiles)
    assert list(tune_kernels.tune(problem, TILES, device, lambda calls: 1.0)) == list(TILES[:2])
    assert "MemoryError: out of shared memory" in capsys.readouterr().out


@pytest.mark.parametrize("kernel", tiles.ESTIMATES)
def test_candidates_differ_and_begin_with_the_current_one(kernel):
    current = Tile(64, 4, 3, 128)
    tried = list(tune_kernels.candidates(kernel, current))
    assert tried[0] == current
    assert len(tried) == len(set(tried)) > 10
