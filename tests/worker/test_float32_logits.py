"""Logits as a GPU computes them: float32 directly from a matrix multiplication of narrower floats."""

import pytest
import torch
from safetensors.torch import load_file

from testing.checkpoints.families import make_checkpoint
from testing.models import load_model
from tests.worker.float32_products import float32_products
from tests.worker.thread_ranks import on_every_rank

CPU = torch.device("cpu")
FACTORS = {"logits_multiplier": 1 / 1.5, "logits_softcap": 30.0}


def random_hidden(seed, num_rows, dtype):
    print("seed", seed)
    return torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def head_of(model):
    """Return the tied output head, [vocab_size, hidden_size]."""
    return model.embedding.weight.data


def expected_logits(family, hidden, head):
    logits = hidden.float() @ head.float().t()
    if family == "granite":
        return logits * FACTORS["logits_multiplier"]
    return FACTORS["logits_softcap"] * (logits / FACTORS["logits_softcap"]).tanh() if family == "gemma2" else logits


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "granite", "gemma2"])
def test_one_product_writes_the_logits_where_they_are_wanted(tmp_path, monkeypatch, family, dtype):
    """Scaled and soft-capped logits are included, and never rounded in between."""
    path = make_checkpoint(tmp_path, family, seed=3, tie_word_embeddings=True)
    with float32_products(monkeypatch) as calls:
        model = load_model(path, dtype=dtype, device=CPU)
        hidden = random_hidden(4, 5, dtype)
        buffer = torch.full((9, 151), torch.nan)
        out = buffer[:5]
        assert model.compute_logits(hidden, out) is out
        fresh = model.compute_logits(hidden)
    ((x, other, out_dtype, target), (_, _, _, made)) = calls
    assert (x is hidden, out_dtype, target.data_ptr()) == (True, torch.float32, buffer.data_ptr())
    assert other.data_ptr() == head_of(model).data_ptr(), "the head takes no memory of its own"
    assert made.data_ptr() == fresh.data_ptr() != target.data_ptr()
    torch.testing.assert_close(out, expected_logits(family, hidden, head_of(model)), rtol=1e-6, atol=1e-6)
    assert torch.equal(fresh, out)
    assert buffer[5:].isnan().all()


@torch.inference_mode()
def test_a_bias_of_the_head_is_added(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, "phimoe", seed=9, lm_head_bias=True)
    with float32_products(monkeypatch):
        model = load_model(path, dtype=torch.bfloat16, device=CPU)
        hidden = random_hidden(10, 3, torch.bfloat16)
        logits = model.compute_logits(hidden, torch.full((3, 151), torch.nan))
    head = load_file(path / "model.safetensors")
    weight, bias = (head[f"lm_head.{kind}"].bfloat16().float() for kind in ("weight", "bias"))
    torch.testing.assert_close(logits, hidden.float() @ weight.t() + bias, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
def test_ranks_gather_float32(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, "qwen3", seed=5, tie_word_embeddings=True)
    hidden = random_hidden(6, 3, torch.bfloat16)
    with float32_products(monkeypatch) as calls:
        whole = load_model(path, dtype=torch.bfloat16, device=CPU)
        expected = whole.compute_logits(hidden)

        @torch.inference_mode()
        def compute(communicator):
            model = load_model(path, dtype=torch.bfloat16, device=CPU, communicator=communicator)
            out = torch.full((3, 151), torch.nan)
            assert model.compute_logits(hidden, out) is out
            return out, model.compute_logits(hidden)

        results = on_every_rank(2, compute)
    assert {tuple(call[3].shape) for call in calls[1:]} == {(3, 76)}, "151 tokens and one that is none"
    for out, fresh in results:
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(out, fresh)


@torch.inference_mode()
def test_where_torch_has_no_such_product_outputs_are_converted(tmp_path):
    """The choice is made when the model is loaded."""
    path, hidden = make_checkpoint(tmp_path, "qwen3", seed=7), random_hidden(8, 3, torch.bfloat16)
    model = load_model(path, dtype=torch.bfloat16, device=CPU)
    out = torch.full((3, 151), torch.nan)
    assert model.compute_logits(hidden, out) is out
    assert torch.equal(out, out.bfloat16().float()), "rounded as the model's outputs are"
    assert torch.equal(out, model.compute_logits(hidden))
