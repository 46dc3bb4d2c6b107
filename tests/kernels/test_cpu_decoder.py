"""What a stack of decoder layers refuses before it touches memory; what it computes is tested with the models."""

import pytest
import torch

from kernels.cpu import DecoderStack, LayerWeights, PagedRows, PagedScoring

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 2, 8


def layer(cpu_kernels, *, head_dim=HEAD_DIM, norm_dim=HEAD_DIM):
    def packed(out_size, in_size):
        return cpu_kernels.pack_linear(torch.randn(out_size, in_size))

    return LayerWeights(
        attention_norm=torch.ones(HIDDEN),
        query_norm=torch.ones(norm_dim),
        key_norm=torch.ones(norm_dim),
        qkv=packed((NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, HIDDEN),
        output=packed(HIDDEN, NUM_HEADS * head_dim),
        mlp_norm=torch.ones(HIDDEN),
        gate_up=packed(96, HIDDEN),
        down=packed(HIDDEN, 48),
    )


def forward(stack, *, num_slots=3, dtypes=(torch.float32,) * 2, num_tokens=3):
    caches = [(torch.zeros(3, 16, NUM_KV_HEADS, HEAD_DIM, dtype=dtype),) * 2 for dtype in dtypes]
    rows = PagedRows.of([0, num_tokens], [num_tokens], torch.tensor([[1]]), torch.arange(16, 16 + num_slots))
    angles = torch.ones(num_tokens, HEAD_DIM)
    return stack.forward(torch.randn(num_tokens, HIDDEN), angles, angles, rows, [PagedScoring(1.0)] * 2, caches)


@pytest.mark.parametrize(
    ("weights", "step", "message"),
    [
        ({}, {"num_slots": 2}, "x has 3 tokens and the rows 2"),
        ({}, {"dtypes": (torch.float32, torch.bfloat16)}, "all layers have one shape, in one of torch.float32"),
        ({}, {"dtypes": (torch.float64,) * 2}, "all layers have one shape, in one of torch.float32"),
        ({"head_dim": 4}, {}, "qkv gives 32 and output takes 16; .* need 64 and 32"),
        ({"norm_dim": 4}, {}, r"query_norm is .*must be torch.float32 \(8,\)"),
    ],
)
def test_what_does_not_fit_is_refused(cpu_kernels, weights, step, message):
    good, other = layer(cpu_kernels), layer(cpu_kernels, **weights)
    stack = DecoderStack(cpu_kernels, [good, other], torch.ones(HIDDEN), 1e-6, NUM_HEADS)
    with pytest.raises(ValueError, match=message):
        forward(stack, **step)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_a_cache_of_16_bits_rounds_what_it_holds(cpu_kernels, dtype, tolerance):
    torch.manual_seed(1)
    stack = DecoderStack(cpu_kernels, [layer(cpu_kernels)] * 2, torch.ones(HIDDEN), 1e-6, NUM_HEADS)
    outputs = []
    for cache_dtype in (torch.float32, dtype, torch.float32):
        torch.manual_seed(0)
        outputs.append(forward(stack, dtypes=(cache_dtype,) * 2))
    assert torch.equal(outputs[0], outputs[2])
    assert 0 < (outputs[0] - outputs[1]).abs().max() < tolerance * outputs[0].abs().max()


def test_what_fits_is_computed(cpu_kernels):
    stack = DecoderStack(cpu_kernels, [layer(cpu_kernels)] * 2, torch.ones(HIDDEN), 1e-6, NUM_HEADS)
    hidden = forward(stack)
    # The norm after the layers has weights of one.
    torch.testing.assert_close(hidden.square().mean(1), torch.ones(3), rtol=0, atol=1e-4)
    assert all(nanoseconds > 0 for nanoseconds in stack.times().values())
