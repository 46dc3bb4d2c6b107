"""The table of tiles: complete, within a device's memory, and replaceable by measured tiles."""

import pytest
import torch

from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.tiles import Shape, Tile

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
MAX_SHARED_MEMORY = 227 * 1024


@pytest.mark.parametrize("kernel", tiles.ESTIMATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_has_a_tile_that_fits(kernel, dtype):
    for head_dim in (16, 32, 40, 64, 80, 96, 112, 128, 192, 256, 320, 512):
        for num_groups in (1, 2, 3, 4, 5, 7, 8, 16, 20, 32, 71, 128):
            if num_groups > tiles.max_groups(head_dim):
                continue
            tile = tiles.lookup(kernel, head_dim=head_dim, num_groups=num_groups, dtype=dtype)
            padded = tiles.key(kernel, head_dim=head_dim, num_groups=num_groups, dtype=dtype).head_dim
            assert 2 * tile.num_stages * tile.block_n * padded * dtype.itemsize <= MAX_SHARED_MEMORY
            for number in (tile.block_n, tile.block_m, tile.num_warps):
                assert number & (number - 1) == 0
            assert tile.block_n >= 16 <= tile.block_m >= num_groups


def test_shapes_outside_the_table_are_refused():
    arguments = {"head_dim": 64, "num_groups": 1, "dtype": torch.float16}
    for change, message in (
        ({"head_dim": 513}, "head_dim is 513; paged_prefill supports 1 to 512"),
        ({"num_groups": 129}, "129 query heads of 64 share a KV head; paged_prefill supports 1 to 128"),
        ({"num_groups": 33, "head_dim": 264}, "33 query heads of 264 share a KV head; paged_prefill supports 1 to 32"),
        ({"dtype": torch.float64}, "elements of at most 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            tiles.lookup("paged_prefill", **{**arguments, **change})
    with pytest.raises(
        ValueError, match="no tiles for the kernel 'attention'; those with tiles are paged_attention_v1"
    ):
        tiles.lookup("attention", **arguments)


def test_a_forced_tile_lasts_until_the_end_of_its_block():
    arguments = {"head_dim": 64, "num_groups": 1, "dtype": torch.float16}
    usual = tiles.lookup("paged_prefill", **arguments)
    with tiles.forced("paged_prefill", Tile(16, 1, 1)):
        with pytest.raises(RuntimeError, match="on purpose"), tiles.forced("paged_prefill", Tile(32, 1, 1)):
            raise RuntimeError("on purpose")
        assert tiles.lookup("paged_prefill", **arguments) == Tile(16, 1, 1)
        assert tiles.lookup("paged_attention_v1", **arguments) != Tile(16, 1, 1)
    assert tiles.lookup("paged_prefill", **arguments) == usual


def test_measured_tiles_come_before_estimates(tmp_path, monkeypatch):
    measured = {
        Shape("paged_prefill", 128, 4, 2): Tile(64, 16, 4, 256),
        Shape("paged_prefill", 64, 1, 4): Tile(16, 2, 1),
    }
    path = tmp_path / "tiles.json"
    assert tiles.read(path) == {}
    tiles.write(measured, "a device", path)
    assert tiles.read(path) == measured
    monkeypatch.setattr(tiles, "_measured", lambda: tiles.read(path))
    for head_dim, num_groups, dtype, expected in (
        (112, 3, torch.bfloat16, Tile(64, 16, 4, 256)),
        (128, 8, torch.bfloat16, tiles.ESTIMATES["paged_prefill"][128][2]),
        (64, 1, torch.float32, Tile(16, 2, 1)),
    ):
        assert tiles.lookup("paged_prefill", head_dim=head_dim, num_groups=num_groups, dtype=dtype) == expected
