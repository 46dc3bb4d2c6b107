"""The list of operations of a model: what is read is there, what is needed no more is let go; rewrites."""

import random
from dataclasses import replace

import pytest

from pagewire.common.network.families import parse_config
from pagewire.common.network.operations import (
    Activate,
    AllReduce,
    LmHead,
    Multiply,
    MultiplyRouted,
    Operation,
    last_uses,
    num_elements,
    weights_of,
)
from pagewire.common.network.rewrites import cut, fuse_updates, gate_projections, tied

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
# Plain, parallel, with norms of updates, of projections, of heads, and with experts of several kinds.
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
    """Whether anything reads it before it is written anew."""
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
    """Each that can takes the silu behind it, and nothing else changes."""
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
def test_ranks_share_out_what_a_model_is(architecture: str) -> None:
    """Two have all projections of one between them, and each the vectors and tables that are not cut."""
    whole = weights_of(listed(architecture))
    shares = [weights_of(listed(architecture, rank, 2)) for rank in (0, 1)]
    names = [[weight.name for weight in share] for share in (whole, *shares)]
    assert names[0] == names[1] == names[2]
    for weight, *parts in zip(whole, *shares, strict=True):
        held = [part.num_elements for part in parts]
        assert weight.num_elements <= sum(held) <= 2 * weight.num_elements
    assert num_elements(listed(architecture)) - num_elements(tied(listed(architecture))) == 64 * 151
