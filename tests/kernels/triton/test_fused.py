"""The steps between matrix multiplications compared with the reference, in all dtypes."""

import pytest
import torch

from pagewire.kernels import reference
from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.triton import fused
from testing.kernel_checks import fused as checks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (1, 64), (7, 100), (3, 1024), (2, 2050)])
def test_norms(device, dtype, num_tokens, size):
    checks.check_norms(device, dtype, num_tokens, size, seed=size)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(200), whose inverse is 0
@every_dtype
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 27), (3, 1024), (2, 1536)])
def test_silu_mul(device, dtype, num_tokens, size):
    checks.check_silu_mul(device, dtype, num_tokens, size, seed=size)


@every_dtype
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "normalized"),
    [
        (1, 1, 32, ""),
        (5, 2, 16, "qkr"),
        (4, 4, 24, "k"),
        (6, 2, 80, "q"),
        (16, 1, 128, "k"),
        (3, 3, 256, "qk"),
        (2, 1, 320, "q"),
        (2, 1, 512, "qk"),
    ],
)
def test_norm_rope(device, dtype, num_heads, num_kv_heads, head_dim, normalized):
    checks.check_norm_rope(device, dtype, 2, num_heads, num_kv_heads, head_dim, normalized, seed=head_dim)


@every_dtype
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "normalized"),
    [
        (1, 1, 32, 16, "q"),
        (5, 2, 16, 8, "qk"),
        (4, 4, 24, 8, "k"),
        (6, 2, 80, 48, "qkr"),
        (16, 1, 128, 16, ""),
        (3, 3, 256, 256, "k"),
        (2, 1, 512, 16, "qk"),
    ],
)
def test_norm_rope_and_cache(device, dtype, is_quantized, num_heads, num_kv_heads, head_dim, block_size, normalized):
    cache_dtype = torch.float8_e4m3fn if is_quantized else dtype
    shape = (2, num_heads, num_kv_heads, head_dim, block_size)
    checks.check_norm_rope_and_cache(device, dtype, cache_dtype, *shape, head_dim + num_heads, normalized)


def test_layers_of_a_step_get_what_each_gets_alone(device):
    """Some layers have the layout of an earlier one.

    Others differ in their weights, their caches, or as part of more heads.
    """
    num_tokens, num_heads, num_kv_heads, head_dim = 5, 4, 2, 32
    total_heads = num_heads + 2 * num_kv_heads
    slots = torch.tensor([7, 3, -1, 20, 9], device=device)
    caching = fused.HeadCaching(slots)
    storage = torch.zeros(2, 6, 2, 8, num_kv_heads, head_dim, device=device)
    for seed, (kind, layer) in enumerate([("", 0), ("", 1), ("wide", 0), ("q", 1), ("fp8", 0), ("wide", 1), ("", 0)]):
        torch.manual_seed(seed)
        heads, weights, cos, sin = checks.make_heads(device, torch.float32, num_tokens, total_heads + 1, head_dim)
        heads = heads[:, :total_heads] if kind == "wide" else heads[:, :total_heads].contiguous()
        preparation = NormRopeParams(num_heads, weights[0], None if kind == "q" else weights[1], 1e-6, cos, sin)
        blocks = storage[layer].to(torch.float8_e4m3fn) if kind == "fp8" else storage[layer].clone()
        theirs, turned = blocks.clone(), heads.clone()
        queries, keys, values = reference.norm_rope(turned, preparation)
        reference.reshape_and_cache(keys, values, theirs[:, 0], theirs[:, 1], slots)
        actual = caching.turn(heads, preparation, blocks[:, 0], blocks[:, 1])
        checks.assert_same_rounding(actual, queries, f"{kind}, seed {seed}")
        checks.assert_same_rounding(blocks, theirs, f"the cache, {kind}, seed {seed}")
    with pytest.raises(ValueError, match=r"cos is \[4, 32\] torch.float32"):
        caching.turn(heads, preparation._replace(cos=cos[:4]), blocks[:, 0], blocks[:, 1])
    with pytest.raises(ValueError, match="for these heads they must be"):
        caching.turn(heads, preparation, blocks[:, 0].half(), blocks[:, 1].half())
    with pytest.raises(ValueError, match=r"slot_mapping is \[5\] torch.int64 .* make it \[3\]"):
        caching.turn(heads[:3], preparation._replace(cos=cos[:3], sin=sin[:3]), blocks[:, 0], blocks[:, 1])


def test_what_8_bit_floats_cannot_hold_is_saturated_and_nan_stays(device):
    heads = torch.zeros(1, 3, 32, device=device)
    heads[0, 2, :4] = torch.tensor([1000.0, -1000.0, float("nan"), 3.0])
    angles = torch.ones(1, 32, device=device), torch.zeros(1, 32, device=device)
    cache = torch.zeros(2, 1, 16, 1, 32, device=device).to(torch.float8_e4m3fn)
    slots = torch.tensor([3], device=device)
    fused.HeadCaching(slots).turn(heads, NormRopeParams(1, None, None, 1e-6, *angles), *cache)
    held = cache[1, 0, 3, 0, :4].float().cpu()
    torch.testing.assert_close(held, torch.tensor([448.0, -448.0, float("nan"), 3.0]), rtol=0, atol=0, equal_nan=True)


def test_no_tokens_are_no_error(device):
    nothing, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert fused.rms_norm(nothing, weight, 1e-6).shape == fused.add_rms_norm(nothing, nothing, weight, 1e-6).shape
    assert fused.silu_mul(nothing).shape == (0, 32)
    heads, angles = torch.empty(0, 4, 32, device=device), torch.empty(0, 32, device=device)
    assert fused.norm_rope(heads, NormRopeParams(2, None, None, 1e-6, angles, angles))[0].shape == (0, 2, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_float32_are_multiplied_before_anything_is_rounded(device, dtype):
    torch.manual_seed(1)
    x, heads = torch.randn(5, 96, device=device).to(dtype), torch.randn(5, 8, 32, device=device).to(dtype)
    weight, angles = 1 + torch.rand(96, device=device), torch.randn(5, 32, device=device).to(dtype)
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-6)
    error = (fused.rms_norm(x, weight, 1e-6).double() - exact).abs()
    assert bool((error <= exact.abs() * torch.finfo(dtype).eps * 0.501).all()), "rounded more than once"
    preparation = NormRopeParams(
        4, weight[:32].contiguous(), weight[32:64].contiguous(), 1e-6, angles.cos(), angles.sin()
    )
    actual, expected = (f(heads.clone(), preparation) for f in (fused.norm_rope, reference.norm_rope))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bad_arguments_are_refused(device):
    x, weight = torch.ones(2, 64, device=device), torch.ones(64, device=device)
    with pytest.raises(ValueError, match=r"x is \[2, 64\] torch.float64"):
        fused.rms_norm(x.double(), weight.double(), 1e-6)
    with pytest.raises(ValueError, match=r"x is .* its last dimension dense"):
        fused.rms_norm(x[:, ::2], weight[:32], 1e-6)
    with pytest.raises(ValueError, match=r"weight is \[63\] torch.float32 .* make it \[64\]"):
        fused.rms_norm(x, weight[1:], 1e-6)
    with pytest.raises(ValueError, match=r"update is \[1, 64\] torch.float32"):
        fused.add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match="rows of 65537; 1 to 65536"):
        fused.rms_norm(torch.ones(1, 65537, device=device), torch.ones(65537, device=device), 1e-6)
    with pytest.raises(ValueError, match="gate_up has rows of 63"):
        fused.silu_mul(x[:, :63])


def test_bad_heads_are_refused(device):
    heads, angles = torch.ones(2, 6, 32, device=device), torch.ones(2, 32, device=device)
    cache, slots = torch.ones(2, 4, 16, 2, 32, device=device), torch.tensor([0, 1], device=device)

    def preparation(num_heads, cos, sin):
        return NormRopeParams(num_heads, None, None, 1e-6, cos, sin)

    with pytest.raises(ValueError, match="6 heads with 3 queries"):
        fused.norm_rope(heads, preparation(3, angles, angles))
    with pytest.raises(ValueError, match="6 heads with 6 queries"):
        fused.norm_rope(heads, preparation(6, angles, angles))
    for head_dim in (30, 8):
        with pytest.raises(ValueError, match="multiple of 8 from 16 to 512"):
            fused.norm_rope(heads[..., :head_dim], preparation(2, angles[:, :head_dim], angles[:, :head_dim]))
    with pytest.raises(ValueError, match=r"sin is \[1, 32\] torch.float32 .* make it \[2, 32\]"):
        fused.norm_rope(heads, preparation(2, angles, angles[:1]))
    with pytest.raises(ValueError, match=r"for these heads they must be torch.float32"):
        fused.HeadCaching(slots).turn(heads, preparation(4, angles, angles), *cache)
    with pytest.raises(ValueError, match=r"slot_mapping is \[1\] torch.int64"):
        fused.HeadCaching(slots[:1]).turn(heads, preparation(2, angles, angles), *cache)
