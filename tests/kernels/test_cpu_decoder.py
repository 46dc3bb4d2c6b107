"""Arguments that a decoder refuses before it accesses memory. Its results are tested with the models."""

import pytest
import torch

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cpu import DecoderKernel, PagedRows
from pagewire.kernels.weight import StoredWeight
from pagewire.network.operations import (
    Activate,
    AttendPaged,
    AttentionHeads,
    Clip,
    Embed,
    LmHead,
    Multiply,
    Normalize,
    QkNormRopeStore,
)

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 32, 4, 2, 8, 50


def layer(cpu_kernels, number, *, head_dim=HEAD_DIM, norm_dim=HEAD_DIM, angles=None, sinks=None):
    def packed(out_size, in_size):
        return cpu_kernels.pack_linear(StoredWeight(torch.randn(out_size, in_size)))

    angles = torch.ones(16, head_dim) if angles is None else angles
    update, heads = "update" if number else None, AttentionHeads(NUM_HEADS, NUM_KV_HEADS, head_dim, 1.0)
    return [
        Normalize("x", "normed", torch.ones(HIDDEN), 1e-6, update),
        Multiply("normed", "heads", packed((NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, HIDDEN)),
        QkNormRopeStore(
            "heads",
            "queries",
            number,
            heads,
            16,
            torch.ones(norm_dim),
            torch.ones(norm_dim),
            1e-6,
            (angles, angles),
        ),
        AttendPaged("queries", "attended", number, heads, sinks),
        Multiply("attended", "update", packed(HIDDEN, NUM_HEADS * head_dim)),
        Normalize("x", "normed", torch.ones(HIDDEN), 1e-6, "update"),
        Multiply("normed", "gate_up", packed(96, HIDDEN)),
        Activate("gate_up", "activated", "silu", is_gated=True),
        Multiply("activated", "update", packed(HIDDEN, 48)),
    ]


def decoder(cpu_kernels, *, embedding=None, norm=None, head=None, is_tied=False, **changed):
    """Return a decoder of two layers, with a float16 embedding table and a float32 head."""
    head = head or cpu_kernels.pack_linear(StoredWeight(torch.randn(VOCAB, HIDDEN)))
    table = torch.randn(VOCAB, HIDDEN).half() if embedding is None else embedding
    operations = [
        Embed("x", head if is_tied else table),
        *layer(cpu_kernels, 0),
        *layer(cpu_kernels, 1, **changed),
        Normalize("x", "normed", torch.ones(HIDDEN) if norm is None else norm, 1e-6, "update"),
        LmHead("normed", head),
    ]
    return DecoderKernel(cpu_kernels, operations)


def forward(
    kernel,
    *,
    num_slots=3,
    dtypes=(torch.float32,) * 2,
    num_tokens=3,
    logit_rows=(0, 1, 2),
    head_dim=HEAD_DIM,
    layer_groups=(),
):
    caches = [(torch.zeros(3, 16, NUM_KV_HEADS, head_dim, dtype=dtype),) * 2 for dtype in dtypes]
    slots = torch.arange(16, 16 + num_slots)
    rows = PagedRows.of([0, num_tokens], [num_tokens], torch.tensor([[[1]]]), slots[None])
    token_ids, positions = torch.randint(0, VOCAB, (num_tokens,)), torch.arange(num_tokens)
    return kernel.forward(
        token_ids,
        positions,
        torch.tensor(logit_rows, dtype=torch.int64),
        rows,
        [Scoring(1.0)] * 2,
        caches,
        layer_groups,
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"num_slots": 2}, "there are 3 token_ids and 2 in rows"),
        ({"logit_rows": (0, 1, 2, 0)}, "logit_rows has 4 entries for 3 tokens"),
        (
            {"dtypes": (torch.float32, torch.bfloat16)},
            "all layers need one dtype of torch.float32",
        ),
        ({"dtypes": (torch.float64,) * 2}, "all layers need one dtype of torch.float32"),
        ({"head_dim": 4}, "the model has 2 KV heads of size 8, but the cache has 2 of size 4"),
        ({"layer_groups": (0, 1)}, "rows has block tables of 1 layer groups, but the layers are in 2"),
    ],
)
def test_what_does_not_fit_is_refused(cpu_kernels, step, message):
    kernel = decoder(cpu_kernels)
    with pytest.raises(ValueError, match=message):
        forward(kernel, **step)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"embedding": torch.ones(VOCAB, HIDDEN, dtype=torch.float64)}, "^no kernel supports torch.float64"),
        ({"embedding": torch.ones(VOCAB, HIDDEN, dtype=torch.int8)}, "a table of torch.int8 has no rows of floats"),
        ({"embedding": torch.ones(HIDDEN, VOCAB).t()}, "^Embed's table is .* contiguous"),
        ({"norm": torch.ones(HIDDEN).half()}, r"weight is torch.float16 \(32,\); it must be torch.float32 \(32,\)"),
        ({"norm": torch.ones(HIDDEN - 1)}, r"weight is torch.float32 \(31,\); it must be torch.float32 \(32,\)"),
        ({"sinks": torch.ones(NUM_KV_HEADS)}, r"sinks is .*must be torch.float32 \(4,\)"),
        ({"norm_dim": 4}, r"query_norm is .*must be torch.float32 \(8,\)"),
        ({"angles": torch.ones(16, 2 * HEAD_DIM)}, r"cosines is .*must be torch.float32 \(16, 8\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(cpu_kernels, changed, message):
    with pytest.raises(ValueError, match=message):
        decoder(cpu_kernels, **changed)


def test_more_buffers_than_there_is_room_for_are_refused(cpu_kernels):
    head = cpu_kernels.pack_linear(StoredWeight(torch.eye(4)))

    def clips(num_buffers):
        chain = [Clip(f"x{number}", f"x{number + 1}", 1.0) for number in range(num_buffers - 1)]
        return [Embed("x0", torch.zeros(2, 4)), *chain, LmHead(f"x{num_buffers - 1}", head)]

    DecoderKernel(cpu_kernels, clips(31))
    with pytest.raises(ValueError, match="the model needs 32 buffers; the limit is 31"):
        DecoderKernel(cpu_kernels, clips(32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_a_cache_of_16_bits_rounds_what_it_holds(cpu_kernels, dtype, tolerance):
    torch.manual_seed(1)
    kernel = decoder(cpu_kernels)
    outputs = []
    for cache_dtype in (torch.float32, dtype, torch.float32):
        torch.manual_seed(0)
        outputs.append(forward(kernel, dtypes=(cache_dtype,) * 2)[0])
    assert torch.equal(outputs[0], outputs[2])
    assert 0 < (outputs[0] - outputs[1]).abs().max() < tolerance * outputs[0].abs().max()


def test_negligible_and_dominant_sinks(cpu_kernels):
    outputs = []
    for sinks in (None, torch.full((NUM_HEADS,), -1e4), torch.full((NUM_HEADS,), 1e4)):
        torch.manual_seed(4)
        kernel = decoder(cpu_kernels, sinks=sinks)
        torch.manual_seed(5)
        outputs.append(forward(kernel)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-2)


def test_projections_are_clipped(cpu_kernels):
    table = torch.tensor([[-3.0, 0.5, torch.nan, 2.0], [torch.inf, -torch.inf, 1.0, -1.0]])
    head = cpu_kernels.pack_linear(StoredWeight(torch.eye(4)))
    kernel = DecoderKernel(cpu_kernels, [Embed("x", table), Clip("x", "clipped", 1.0), LmHead("clipped", head)])
    rows = PagedRows.of([0, 2], [2], torch.tensor([[[1]]]), torch.arange(2)[None])
    caches = [(torch.zeros(2, 16, 1, 4),) * 2]
    step = torch.arange(2), torch.arange(2), torch.empty(0, dtype=torch.int64), rows, [Scoring(1.0)], caches
    expected = torch.tensor([[-1.0, 0.5, torch.nan, 1.0], [1.0, -1.0, 1.0, -1.0]])
    torch.testing.assert_close(kernel.forward(*step)[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_gates_are_clamped(cpu_kernels, num_parts):
    """Gates are clamped from above and ups on both sides, as in gpt-oss, for each slot and for partial vectors."""
    size, alpha, limit = 37, 1.702, 1.5
    table = torch.randn(2, num_parts, 2, size, generator=torch.Generator().manual_seed(6)) * 2
    table[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -30.0])
    table[1, 0, 1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    gate, up = table[:, :, 0].clamp(max=limit), table[:, :, 1].clamp(-limit, limit)
    expected = ((up + 1) * gate * (alpha * gate).sigmoid()).flatten(1)
    operations = [
        Embed("x", table.flatten(1)),
        Activate("x", "activated", "clamped_swiglu", is_gated=True, num_parts=num_parts, alpha=alpha, limit=limit),
        LmHead("activated", cpu_kernels.pack_linear(StoredWeight(torch.eye(num_parts * size)))),
    ]
    rows = PagedRows.of([0, 2], [2], torch.tensor([[[1]]]), torch.arange(2)[None])
    caches = [(torch.zeros(2, 16, 1, 4),) * 2]
    step = torch.arange(2), torch.arange(2), torch.empty(0, dtype=torch.int64), rows, [Scoring(1.0)], caches
    actual = DecoderKernel(cpu_kernels, operations).forward(*step)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_xielu_is_exact_near_zero(cpu_kernels):
    generator = torch.Generator().manual_seed(9)
    sizes = 10 ** torch.empty(2, 37).uniform_(-7, 2, generator=generator)
    table = sizes * torch.empty(2, 37).uniform_(-1, 1, generator=generator).sign()
    table[0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
    parameters = torch.tensor([0.3, -0.4, 0.5, -1e-6])
    alpha_p, alpha_n, beta, eps = parameters.double()
    x, one = table.double(), torch.ones((), dtype=torch.float64)
    below = (beta + (one + alpha_n.exp()).log()) * (x.clamp(max=eps).expm1() - x)
    expected = torch.where(x > 0, (one + alpha_p.exp()).log() * x * x, below) + beta * x

    def kernel(parameters):
        activate = Activate("x", "activated", "xielu", parameters=parameters)
        head = LmHead("activated", cpu_kernels.pack_linear(StoredWeight(torch.eye(37))))
        return DecoderKernel(cpu_kernels, [Embed("x", table), activate, head])

    rows = PagedRows.of([0, 2], [2], torch.tensor([[[1]]]), torch.arange(2)[None])
    caches = [(torch.zeros(2, 16, 1, 4),) * 2]
    step = torch.arange(2), torch.arange(2), torch.empty(0, dtype=torch.int64), rows, [Scoring(1.0)], caches
    actual = kernel(parameters).forward(*step)[0]
    torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=1e-12, equal_nan=True)
    with pytest.raises(ValueError, match="xielu needs four parameters and no gate"):
        kernel(None)


@pytest.mark.parametrize("num_tokens", [3, 13])
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_fits_is_computed(cpu_kernels, is_tied, num_tokens):
    """The decoder's logits agree with torch, for any rows in any order.

    With few tokens, all threads normalise all of them; with many, each thread normalises a share.
    """
    torch.manual_seed(2)
    weight = torch.randn(VOCAB, HIDDEN)
    kernel = decoder(cpu_kernels, head=cpu_kernels.pack_linear(StoredWeight(weight)), is_tied=is_tied)
    for logit_rows in ((), (2,), (2, 0), tuple(range(num_tokens))):
        hidden, logits, highest = forward(kernel, num_slots=num_tokens, num_tokens=num_tokens, logit_rows=logit_rows)
        # The norm after the layers has unit weights.
        torch.testing.assert_close(hidden.square().mean(1), torch.ones(num_tokens), rtol=0, atol=1e-4)
        torch.testing.assert_close(logits, hidden[list(logit_rows)] @ weight.t(), rtol=0, atol=1e-4)
        assert highest.tolist() == logits.argmax(1).tolist()
    assert all(nanoseconds > 0 for nanoseconds in kernel.times().values())


@pytest.mark.parametrize("vocab", [1, 7, 8, 50, 64])
def test_the_highest_logit_is_found(cpu_kernels, vocab):
    """The first of equal logits is chosen.

    A NaN among the logits gives -1, and an infinite logit is compared like any other.
    """
    torch.manual_seed(3)
    for place in {0, vocab // 2, vocab - 1}:
        for value, expected in [(20.0, place), (torch.inf, place), (-torch.inf, None), (torch.nan, -1)]:
            bias = torch.randn(vocab).clamp(max=3)
            bias[place] = value
            head = cpu_kernels.pack_linear(StoredWeight(torch.zeros(vocab, HIDDEN)), bias)
            _, logits, highest = forward(decoder(cpu_kernels, head=head), logit_rows=(1,))
            assert torch.equal(logits[0].nan_to_num(), bias.nan_to_num())
            assert highest.item() == (bias.argmax().item() if expected is None else expected)
        equal = torch.zeros(vocab)
        equal[place:] = 1.0
        head = cpu_kernels.pack_linear(StoredWeight(torch.zeros(vocab, HIDDEN)), equal)
        assert forward(decoder(cpu_kernels, head=head), logit_rows=(1,))[2].item() == place
