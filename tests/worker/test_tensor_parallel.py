"""Models with tensor parallelism: ranks are threads here, which meet at a barrier."""

import pytest
import torch
from safetensors.torch import load_file

from testing.checkpoints.families import FAMILIES, make_checkpoint
from testing.models import load_model
from testing.worker.model_logits import (
    BIASES,
    CPU,
    TOLERANCE,
    compute_logits,
    host_operations,
    random_tokens,
    transformers_logits,
    use_kernels,
)
from tests.thorough import thorough
from tests.worker.thread_ranks import Meeting, ThreadRank, kept, on_every_rank

pytestmark = pytest.mark.one_of_each

# Families whose weights are cut in ways of their own. The others are cut as one of these.
CUT_DIFFERENTLY = (
    "llama",
    "gpt2",
    "phi3",
    "gpt_neox",
    "bloom",
    "mpt",
    "gpt_oss",
    "qwen2_moe",
    "falcon",
    "afmoe",
    "phi3small",
    "lfm2",
    "qwen3_5_text",
)
VARIANTS = [
    *[(family, {}, 2) for family in CUT_DIFFERENTLY],
    *thorough(*((family, {}, 2) for family in FAMILIES if family not in CUT_DIFFERENTLY)),
    ("llama", {"tie_word_embeddings": True, **BIASES}, 2),
    ("llama", {"vocab_size": 5, "num_key_value_heads": 4}, 4),  # ranks 0 to 2 have the vocabulary
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 40}, 4),  # each KV head is on two ranks
    ("qwen2", {"num_key_value_heads": 1, "num_hidden_layers": 1}, 4),
    ("olmo2", {}, 4),  # a norm over the heads of four ranks; each KV head is on two of them
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ("falcon", {"alibi": True, "multi_query": False}, 2),
    ("stablelm", {"qk_layernorm": True}, 4),
    ("cohere", {"use_qk_norm": True}, 4),
    ("phi3", {"partial_rotary_factor": 0.5}, 4),
    ("gpt2", {"tie_word_embeddings": False, "n_head": 3, "n_embd": 48}, 3),
]


@pytest.mark.parametrize("mode", ["fused", "require", "off"])
@pytest.mark.parametrize(("family", "overrides", "size"), VARIANTS)
def test_every_rank_has_the_logits_of_transformers(tmp_path, monkeypatch, family, overrides, size, mode):
    use_kernels(monkeypatch, "off" if mode == "off" else "require")
    path = make_checkpoint(tmp_path, family, seed=31, **overrides)
    token_ids = random_tokens() % overrides.get("vocab_size", 151)

    def compute(communicator):
        options = {"operations": host_operations(), "communicator": communicator}
        model = load_model(path, dtype=torch.float32, device=CPU, **options)
        model.is_fused = mode == "fused"
        return compute_logits(model, token_ids)

    expected = transformers_logits(path, token_ids)
    first, *others = on_every_rank(size, compute)
    torch.testing.assert_close(first, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_step_ends_with_the_error_of_ranks_that_do_not_meet(tmp_path, monkeypatch, num_tokens):
    """A failed exchange ends the step with its error, and does not affect the next step.

    This is tested with few tokens, where threads do not wait, and with many.
    """
    use_kernels(monkeypatch, "require")
    path = make_checkpoint(tmp_path, "qwen3", seed=35)
    communicator = FailingRank()
    options = {"operations": host_operations(), "communicator": communicator}
    model = load_model(path, dtype=torch.float32, device=CPU, **options)
    model.is_fused = True
    expected = compute_logits(model, random_tokens(), chunks=(num_tokens,))
    for call in (1, 2, 4):
        communicator.fails_at = communicator.num_calls + call
        with pytest.raises(ConnectionError, match=f"call {communicator.fails_at}"):
            compute_logits(model, random_tokens(), chunks=(num_tokens,))
        assert communicator.num_calls == communicator.fails_at, "no communicator is asked after that"
        assert torch.equal(compute_logits(model, random_tokens(), chunks=(num_tokens,)), expected)


class FailingRank:
    """The first of two ranks, of which the other contributes zeros, until a call fails."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.num_calls = 0
        self.fails_at: int | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise ConnectionError(f"call {self.num_calls}")
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=1)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_of_a_decoder_make_the_whole(tmp_path, tied):
    tensors = load_file(make_checkpoint(tmp_path, "qwen2", seed=32, tie_word_embeddings=tied) / "model.safetensors")
    ranks = kept(tmp_path, 2)
    qkv = [rank["model.layers.1.self_attn.q_proj"] for rank in ranks]
    for kind in ("weight", "bias"):
        heads = [getattr(product, kind).split([32, 16, 16]) for product in qkv]
        for part, letter in enumerate("qkv"):
            whole = tensors[f"model.layers.1.self_attn.{letter}_proj.{kind}"]
            assert torch.equal(torch.cat([rank[part] for rank in heads]), whole)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        parts = [rank[f"model.layers.1.{name}"].weight for rank in ranks]
        assert torch.equal(torch.cat(parts, dim=1), tensors[f"model.layers.1.{name}.weight"])
    for part, name in enumerate(("gate_proj", "up_proj")):
        parts = [rank["model.layers.0.mlp.gate_proj"].weight.chunk(2)[part] for rank in ranks]
        assert torch.equal(torch.cat(parts), tensors[f"model.layers.0.mlp.{name}.weight"])
    head = torch.cat([rank["head"].weight for rank in ranks])
    assert len(head) == 152
    assert torch.equal(head[:151], tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])


def test_the_parts_of_gpt2_make_the_whole(tmp_path):
    """The checkpoint stores queries, keys and values as one transposed weight. One rank adds the biases."""
    tensors = load_file(make_checkpoint(tmp_path, "gpt2", seed=33) / "model.safetensors")
    ranks = kept(tmp_path, 2)
    qkv = [rank["transformer.h.1.attn.c_attn"] for rank in ranks]
    parts = [part.weight.chunk(3)[i] for i in range(3) for part in qkv]
    assert torch.equal(torch.cat(parts), tensors["transformer.h.1.attn.c_attn.weight"].t())
    biases = [part.bias.chunk(3)[i] for i in range(3) for part in qkv]
    assert torch.equal(torch.cat(biases), tensors["transformer.h.1.attn.c_attn.bias"])
    for name in ("attn.c_proj", "mlp.c_proj"):
        products = [rank[f"transformer.h.0.{name}"] for rank in ranks]
        whole = tensors[f"transformer.h.0.{name}.weight"].t()
        assert torch.equal(torch.cat([product.weight for product in products], dim=1), whole)
        assert torch.equal(products[0].bias, tensors[f"transformer.h.0.{name}.bias"])
        assert products[1].bias is None


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ({}, 3, "--tensor-parallel-size is 3; for this model it must divide the 4 attention heads"),
        ({"intermediate_size": 97}, 2, "must divide the 97 columns of the MLP"),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "must divide the 6 KV heads, or be a multiple of them",
        ),
    ],
)
def test_impossible_partitions_are_refused(tmp_path, overrides, size, message):
    path = make_checkpoint(tmp_path, "llama", seed=34, **overrides)
    with pytest.raises(ValueError, match=message):
        load_model(path, dtype=torch.float32, device=CPU, communicator=ThreadRank(Meeting(size), 0))
