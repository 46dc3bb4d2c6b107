"""A model's list of operations, and its rewrites.

Buffers are written before they are read, and released after their last use.
"""

import random
from dataclasses import replace

import pytest

from pagewire.network.families import BY_ARCHITECTURE, parse_config
from pagewire.network.operations import (
    Activate,
    AllReduce,
    LmHead,
    Multiply,
    MultiplyRouted,
    Operation,
    Share,
    StoredRows,
    last_uses,
    num_elements,
    weights_of,
)
from pagewire.network.rewrites import cut, fuse_updates, gate_projections, renamed, tied

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Plain and parallel models; norms of updates, projections and heads; and several kinds of experts.
ARCHITECTURES = (
    "LlamaForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Olmo2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM",
)  # fmt: skip


def listed(architecture: str, rank: int = 0, num_ranks: int = 1) -> tuple[Operation, ...]:
    network = parse_config({"architectures": [architecture], **SIZES, **EXPERTS})
    return tuple(fuse_updates(cut(network.operations, rank, num_ranks)))


def read_by(operation: Operation) -> set[str]:
    names = ("input", "update", "gate", "routes")
    return {getattr(operation, name) for name in names if getattr(operation, name, None) is not None}


def written_by(operation: Operation) -> set[str]:
    return {operation.output} if hasattr(operation, "output") else set()


def is_read(buffer: str, operations: tuple[Operation, ...]) -> bool:
    """Return whether any operation reads the buffer before another operation overwrites it."""
    for operation in operations:
        if buffer in read_by(operation) | written_by(operation):
            return buffer in read_by(operation)
    return False


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_buffers_live_from_what_writes_them_to_their_last_reader(architecture: str, num_ranks: int) -> None:
    operations = listed(architecture, num_ranks=num_ranks)
    alive: set[str] = set()
    for number, (operation, released) in enumerate(zip(operations, last_uses(operations), strict=True)):
        assert read_by(operation) <= alive
        alive = (alive | written_by(operation)) - set(released)
        assert all(is_read(buffer, operations[number + 1 :]) for buffer in alive)
    assert isinstance(operations[-1], LmHead)
    assert not alive
    assert any(isinstance(operation, AllReduce) for operation in operations) == (num_ranks > 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_projections_gate_where_they_can(architecture: str) -> None:
    """Each chosen projection includes the SiLU that follows it, and no other operation changes."""
    operations = listed(architecture)
    assert list(gate_projections(operations, lambda projection: False)) == list(operations)
    names = sorted(weight.name for weight in weights_of(operations))
    chosen = random.Random(4).sample(names, len(names) // 2)
    rewritten = list(gate_projections(operations, lambda projection: projection.name in chosen))
    expected: list[Operation] = []
    for operation in operations:
        before = expected[-1] if expected else None
        is_silu = isinstance(operation, Activate) and operation.is_gated and operation.function == "silu"
        if is_silu and isinstance(before, Multiply | MultiplyRouted) and before.projection.name in chosen:
            expected[-1] = replace(before, output=operation.output, is_gated=True)
        else:
            expected.append(operation)
    assert rewritten == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_partition_the_model(architecture: str) -> None:
    """Two ranks share all projections of the model, and each rank has the vectors and tables that are not split."""
    whole = weights_of(listed(architecture))
    shares = [weights_of(listed(architecture, rank, 2)) for rank in (0, 1)]
    names = [[weight.name for weight in share] for share in (whole, *shares)]
    assert names[0] == names[1] == names[2]
    for weight, *parts in zip(whole, *shares, strict=True):
        held = [part.num_elements for part in parts]
        assert weight.num_elements <= sum(held) <= 2 * weight.num_elements
    assert num_elements(listed(architecture)) - num_elements(tied(listed(architecture))) == 64 * 151


@pytest.mark.parametrize("seed", range(20))
def test_ranks_have_all_of_a_dimension_between_them(seed: int) -> None:
    """Each position is assigned once.

    If there are fewer units than ranks, each unit is assigned equally often. If the last rank may have less, all shares
    have equal sizes.
    """
    rng = random.Random(seed)
    num_ranks, unit = rng.choice((2, 3, 4, 8)), rng.choice((1, 5, 16))
    num_repeated = rng.choice([size for size in (1, 2, 4) if num_ranks % size == 0])
    shares = (
        Share.of(rng.randint(1, 9) * num_ranks * unit, unit, "columns"),
        Share.of(num_repeated * unit, unit, "heads", is_repeated=True),
        Share.of(rng.randint(1, 40), 1, "tokens", is_padded=True),
        Share(12 * num_ranks, 50 * num_ranks, first=7, unit=3),  # a part of a tensor
    )
    for share, times in zip(shares, (1, num_ranks // num_repeated, 1, 1), strict=True):
        parts = [share.of_rank(rank, num_ranks) for rank in range(num_ranks)]
        places = [place for part in parts for place in range(share.whole)[part.stored]]
        assert sorted(places) == sorted(list(range(share.whole)[share.stored]) * times)
        assert len({part.size for part in parts}) == 1
    whole = Share.of(7)
    assert whole.of_rank(1, num_ranks) == whole, "what is not shared out"


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="size is 4; for this model it must divide the 6 columns"):
        Share.of(6, 1, "columns").of_rank(0, 4)
    with pytest.raises(ValueError, match="it must divide the 6 KV heads, or be a multiple of them"):
        Share.of(96, 16, "KV heads", is_repeated=True).of_rank(0, 4)


def test_heads_are_brought_to_one_order() -> None:
    """Each head has its query, key and value together, and rotates adjacent pairs."""
    rows = StoredRows((0, 2, 1, 3), (4, 4, 4)).row_order((24,))
    queries, keys, values = [0, 2, 1, 3], [4, 6, 5, 7], [8, 9, 10, 11]
    second = [[row + 12 for row in each] for each in (queries, keys, values)]
    assert rows == (*queries, *second[0], *keys, *second[1], *values, *second[2])
    assert StoredRows((3, 2, 1, 0)).row_order((4, 4, 4)) == (3, 2, 1, 0, 7, 6, 5, 4, 8, 9, 10, 11)
    assert StoredRows().row_order((4, 4, 4)) == ()
    # Two KV heads of two query heads each, and gates and ups in turn.
    assert StoredRows(unit=(2, 1, 1)).row_order((8,)) == (0, 1, 4, 5, 2, 6, 3, 7)
    assert StoredRows(unit=(1, 1)).row_order((6,)) == (0, 2, 4, 1, 3, 5)


def test_weights_have_the_names_of_another_checkpoint() -> None:
    operations = listed("MixtralForCausalLM")
    (_, new, bare, both) = BY_ARCHITECTURE["MixtralForCausalLM"].renamings
    names = {weight.name for weight in weights_of(operations)}
    assert "model.layers.2.block_sparse_moe.experts.{expert}.w1" in names
    assert "model.layers.2.mlp.experts.{expert}.gate_proj" in {
        each.name for each in weights_of(renamed(operations, new))
    }
    assert {each.name for each in weights_of(renamed(operations, bare))} == {
        name.removeprefix("model.") for name in names
    }
    assert renamed(operations, both) == renamed(renamed(operations, new), bare)
