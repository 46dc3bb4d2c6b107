import pytest

from pagewire.network.layer_groups import LayersOfGroup, group_of_layer, layer_groups
from pagewire.network.operations import AttentionHeads


def heads(window: int, num_kv_heads: int = 2, head_dim: int = 16) -> AttentionHeads:
    return AttentionHeads(4, num_kv_heads, head_dim, 1.0, window)


def every(period: int, num_layers: int, window: int) -> list[AttentionHeads]:
    """Layers of which every `period`-th has no window."""
    return [heads(0 if layer % period == period - 1 else window) for layer in range(num_layers)]


ALTERNATING = [heads(0 if layer % 2 else 128) for layer in range(24)]
MODELS = {
    "Gemma 3 1B": (every(6, 26, 512), 32768, [4, 4, 4, 4, 4, 4, 2]),
    "Gemma 3 4B": (every(6, 34, 1024), 131072, [5, 5, 5, 5, 5, 5, 4]),
    "Gemma 3 27B": (every(6, 62, 1024), 131072, [10, 10, 10, 10, 10, 10, 2]),
    "gpt-oss-20b": (ALTERNATING, 131072, [12, 12]),
    "EXAONE 4 32B": (every(4, 64, 4096), 131072, [16, 16, 16, 16]),
    "OLMo 3 7B": (every(4, 32, 4096), 65536, [8, 8, 8, 8]),
    "Llama": ([heads(0)] * 16, 8192, [16]),
    "Mistral": ([heads(4096)] * 32, 32768, [32]),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_hold_as_many_layers_as_there_are_without_a_window(name: str) -> None:
    layers, max_model_len, sizes = MODELS[name]
    groups = layer_groups(layers, max_model_len)
    assert [len(group.layers) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    assert all(layers[layer].window == group.window for group in groups for layer in group.layers)
    assert group_of_layer(groups) == tuple(
        next(number for number, group in enumerate(groups) if layer in group.layers) for layer in range(len(layers))
    )


def test_groups_are_in_the_order_of_their_reach() -> None:
    layers = [heads(8), heads(32), heads(0), heads(16)]
    assert [group.window for group in layer_groups(layers, 64)] == [0, 32, 16, 8]


def test_a_window_of_the_longest_sequence_is_no_window() -> None:
    layers = [heads(0), heads(32)]
    assert layer_groups(layers, 32) == (LayersOfGroup(0, (0, 1)),)
    assert layer_groups(layers, 33) == (LayersOfGroup(0, (0,)), LayersOfGroup(32, (1,)))
    assert layer_groups(layers, 33, is_bidirectional=True) == (LayersOfGroup(0, (0, 1)),)


def test_ranks_have_the_groups_of_the_whole_model() -> None:
    whole = [heads(0 if layer % 6 == 5 else 512, num_kv_heads=8) for layer in range(26)]
    assert layer_groups([each.of_rank(1, 4) for each in whole], 32768) == layer_groups(whole, 32768)


def test_layers_of_different_heads_are_never_in_one_group() -> None:
    """A block holds one of the large layers or two of the small layers."""
    layers = [heads(0, 4), heads(32, 2), heads(32, 2), heads(32, 2), heads(0, 4)]
    groups = layer_groups(layers, 4096)
    assert groups == (LayersOfGroup(0, (0, 4)), LayersOfGroup(32, (1, 2, 3)))
    assert layer_groups([heads(0, 4), heads(0, 2), heads(0, 2)], 64) == (
        LayersOfGroup(0, (0,)),
        LayersOfGroup(0, (1, 2)),
    )


def test_few_groups_are_worth_a_twentieth_of_the_memory() -> None:
    """Two layers without a window, and three with one: of 1 or 2 layers in a block."""
    layers = [heads(0), heads(0), *[heads(10)] * 3]
    assert [len(group.layers) for group in layer_groups(layers, 80)] == [1, 1, 1, 1, 1]  # 190 or 200
    assert [len(group.layers) for group in layer_groups(layers, 90)] == [2, 2, 1]  # 210 or 220
