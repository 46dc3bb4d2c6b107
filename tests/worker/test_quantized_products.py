"""Quantised checkpoints in the Triton kernels: every multiplication of a model, and whole models' tokens."""

from pathlib import Path

import pytest
import torch

from testing.kernels.device import choose_device

DEVICE = choose_device()


from pagewire.kernels import scaled  # noqa: E402
from pagewire.kernels.quantized import quantize  # noqa: E402
from testing.checkpoints.families import make_checkpoint  # noqa: E402
from testing.checkpoints.gguf_files import write_gguf  # noqa: E402
from testing.checkpoints.packed import Case, fp8, make_mxfp4, make_quantized, w8a8  # noqa: E402
from testing.checkpoints.quantized import BY_NAME, CASES  # noqa: E402
from testing.kernel_checks.linear import held_bytes  # noqa: E402
from testing.models import load_model  # noqa: E402
from tests.worker.triton_tokens import HEADS_OF_32, SHAPES, check_tokens, make_runner  # noqa: E402
from worker_service.device.triton_operations import (  # noqa: E402
    PackedExpertProduct,
    PackedProduct,
    RoundedProduct,
    TritonOperations,
)
from worker_service.models.decoder import Decoder  # noqa: E402
from worker_service.models.linear import ExpertLinear, Linear  # noqa: E402
from worker_service.models.loading import prepare_model  # noqa: E402
from worker_service.models.torch_operations import DenseProduct, Operations  # noqa: E402

pytestmark = pytest.mark.thorough

# Formats with rounded inputs, with scales per block and per row.
ROUNDED = [fp8("FP8 in blocks of 128", (128, 128)), w8a8("W8A8, inputs rounded")]
# The number of outputs of each projection is a multiple of 128.
WHOLE_BLOCKS = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32
}  # fmt: skip
HIDDEN, INTERMEDIATE = 64, 32  # of experts
EPSILON = torch.finfo(torch.float32).eps


class WideningOperations(Operations):
    """Operations that dequantise weights when they are loaded."""

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        return False


def load(path: Path, dtype: torch.dtype = torch.float32, **options: str) -> Decoder:
    return load_model(path, dtype=dtype, device=DEVICE, operations=TritonOperations(DEVICE), **options)


def load_plain(path: Path) -> dict[str, DenseProduct]:
    """Return the float32 multiplications of a float checkpoint, by the names of their layers."""
    model = load_model(path, dtype=torch.float32, device=DEVICE, operations=WideningOperations())
    found = {name: layer.product for name, layer in model.named_modules() if isinstance(layer, Linear)}
    return {name: product for name, product in found.items() if isinstance(product, DenseProduct)}


def is_always_widened(case: Case) -> bool:
    return "in act-order" in case.name or case.name == "FP8 block, odd" or case.name.startswith(("nf4", "fp4"))


def check_product(layer: Linear, plain: DenseProduct, generator: torch.Generator) -> None:
    """Compare a layer with plain multiplication, within the rounding of float32 sums.

    If the layer rounds its inputs, the comparison uses the specified rounded inputs.
    """
    x = torch.randn(5, plain.weight.shape[1], generator=generator).to(DEVICE)
    actual, meant = layer(x), x
    if isinstance(layer.product, RoundedProduct):
        weight = layer.product.weight
        rounded = scaled.round_rows(x, weight.values.dtype, weight.block_size)
        groups = rounded.values.float().unflatten(1, (rounded.scale.shape[1], -1))
        meant = (groups * rounded.scale[..., None]).flatten(1)
        assert (meant - x).abs().max() < x.abs().max() / 16
    products = meant.double()[:, None] * plain.weight.double()
    expected = products.sum(2) + (0 if plain.bias is None else plain.bias.double())
    allowed = 4 * EPSILON * products.abs().sum(2) + 2 * EPSILON * expected.abs()
    assert ((actual - expected).abs() <= allowed).all(), "a product is off"


@pytest.mark.parametrize("case", [*CASES, *ROUNDED], ids=lambda case: case.name)
def test_products_are_of_what_the_weights_mean(tmp_path: Path, case: Case) -> None:
    seed = 17
    print(f"seed {seed}")
    sizes = WHOLE_BLOCKS if case in ROUNDED else {}
    path, plain_path = make_quantized(tmp_path, "llama", case, seed=seed, num_hidden_layers=1, **sizes)
    model, plain, generator = load(path), load_plain(plain_path), torch.Generator().manual_seed(seed)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert layers.keys() == plain.keys()
    for name, layer in layers.items():
        check_product(layer, plain[name], generator)
    kinds = {type(layer.product) for name, layer in layers.items() if name != "head"}
    is_widened = is_always_widened(case)
    rounds = case in ROUNDED or case.name == "FP8 tensor" or case.name.startswith(("FP8 of ModelOpt", "FP8 of Quark"))
    if case.name == "FP8 block, powers of two":
        kinds.discard(RoundedProduct)  # rows that happen to have equal scales
    assert kinds == {DenseProduct if is_widened else RoundedProduct if rounds else PackedProduct}


@pytest.mark.parametrize("name", ["W4A16 asymmetric", "W8A16", "FP8 by channel", "FP8 tensor"])
def test_experts_are_products_of_codes(tmp_path: Path, name: str) -> None:
    """The inputs of experts are not rounded."""
    seed = 19
    print(f"seed {seed}")
    path, plain_path = make_quantized(tmp_path, "qwen3_moe", BY_NAME[name], seed=seed, **SHAPES["qwen3_moe"])
    plain = load_model(plain_path, dtype=torch.float32, device=DEVICE, operations=Operations())
    generator = torch.Generator().manual_seed(seed)
    found = [(name, layer) for name, layer in load(path).named_modules() if isinstance(layer, ExpertLinear)]
    assert found
    for layer_name, layer in found:
        assert type(layer.product) is PackedExpertProduct
        assert all(linear.product is None for linear in layer.linears), "weights are held twice"
        x = torch.randn(7, HIDDEN if layer_name.endswith("gate_proj") else INTERMEDIATE, generator=generator).to(DEVICE)
        ids = torch.stack([torch.randperm(len(layer), generator=generator)[:2].sort().values for _ in x]).to(DEVICE)
        torch.testing.assert_close(layer(x, ids), plain.get_submodule(layer_name)(x, ids), rtol=1e-5, atol=1e-5)


def make_divisible(tmp_path: Path) -> Path:
    """Make a checkpoint all of whose rows divide into blocks. Its embedding is tied to its head."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    return make_checkpoint(tmp_path / "model", "qwen3", seed=20, tie_word_embeddings=True, **sizes)


def check_quantized(model: Decoder, meant: dict[str, torch.Tensor]) -> None:
    """The products are those of the given weights. The embedding takes its rows from the head, to which it is tied."""
    generator = torch.Generator().manual_seed(20)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert layers.keys() == meant.keys()
    for name, layer in layers.items():
        assert type(layer.product) is PackedProduct
        check_product(layer, DenseProduct(meant[name], None), generator)
    indexes = torch.tensor([150, 0, 3, 3], device=DEVICE)
    assert torch.equal(model.embedding.lookup_rows(indexes), meant["head"][indexes])


def test_a_model_in_8_bits_is_quantised_as_its_gguf_file(tmp_path: Path) -> None:
    path, types = make_divisible(tmp_path), {"token_embd.weight": "Q8_0"}
    plain = load_plain(write_gguf(tmp_path / "model.gguf", path, "Q8_0", types=types))
    check_quantized(load(path, quantization="int8"), {name: product.weight for name, product in plain.items()})


def test_a_model_in_4_bits_is_quantised_as_specified(tmp_path: Path) -> None:
    """The head and the last down projection have 6 bits."""
    path = make_divisible(tmp_path)
    model, plain = load(path, quantization="int4"), load_plain(path)
    last = max(name for name in plain if name.endswith("down_proj"))
    bits = {name: 6 if name in ("head", last) else 4 for name in plain}
    meant = {name: quantize(product.weight, bits[name]).dequantized() for name, product in plain.items()}
    check_quantized(model, meant)


@pytest.mark.parametrize("name", ["W4A16 asymmetric", "W8A16", "FP8 by channel", "MXFP4"])
def test_what_a_gpu_will_hold_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The footprint is at least the size of the weights, and not much more.

    Experts count twice while a layer's experts are joined.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = SHAPES["qwen3_moe"] | {"num_experts": 64}  # a layer needs more than any one weight
    path, _ = make_quantized(tmp_path, "qwen3_moe", BY_NAME[name], seed=22, **sizes)
    cuda = torch.device("cuda")
    unloaded = prepare_model(path, dtype=torch.float32, device=cuda, operations=TritonOperations(cuda))
    footprint = unloaded.footprint()
    model = load(path)
    products = [getattr(layer, "product", None) for layer in model.modules()]
    joined = [held_bytes(product.packed) for product in products if isinstance(product, PackedExpertProduct)]
    packed = [held_bytes(product.packed) for product in products if isinstance(product, PackedProduct)]
    floats = [product.weight.nbytes for product in products if isinstance(product, DenseProduct)]
    tensors = [tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]]
    actual = sum([*joined, *packed, *floats, *tensors])
    assert joined
    assert actual <= footprint.held <= 1.3 * actual
    assert footprint.peak >= actual + max(joined)


def test_float32_logits_of_codes_are_not_rounded(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=21, **HEADS_OF_32)
    model = load(path, torch.bfloat16, quantization="int8")
    x = torch.randn(3, HEADS_OF_32["hidden_size"]).bfloat16().to(DEVICE)
    logits = model.head.multiply_to_float32(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.bfloat16(), model.head(x))
    assert not torch.equal(logits.bfloat16().float(), logits)
    written = torch.empty_like(logits)
    assert torch.equal(model.head.multiply_to_float32(x, written), logits)
    assert torch.equal(written, logits)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "W4A16 asymmetric"), ("qwen2", "AWQ"), ("qwen3_moe", "GPTQ of 8 bits")]
)
def test_greedy_tokens_are_those_of_what_the_weights_mean(tmp_path: Path, family: str, name: str) -> None:
    path, plain = make_quantized(tmp_path, family, BY_NAME[name], seed=7, **SHAPES[family])
    check_tokens(plain, make_runner(path))


def test_greedy_tokens_over_mxfp4(tmp_path: Path) -> None:
    path, plain = make_mxfp4(tmp_path, seed=7, **SHAPES["gpt_oss"])
    check_tokens(plain, make_runner(path))
