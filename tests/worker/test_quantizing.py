"""Float weights that are quantised during loading: the same bits at every start, and in 8 bits those of a GGUF file."""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.source import weights_digest
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.checkpoints.packed import make_quantized
from testing.checkpoints.quantized import BY_NAME
from testing.worker.model_logits import CPU, compute_logits, load, random_tokens
from testing.worker.own_cache import use_own_cache
from worker_service.config import WorkerConfig
from worker_service.host import PackedCache
from worker_service.host.cpu_operations import CpuProduct, create_host_operations
from worker_service.models import quantizing
from worker_service.models.decoder import Decoder
from worker_service.models.linear import ExpertLinear, Linear
from worker_service.models.loading import prepare_model
from worker_service.models.quantizing import QuantizingTensors
from worker_service.models.torch_operations import Operations
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import check_quantization, load_worker
from worker_service.startup.preflight import check_worker
from worker_service.startup.progress import LoadProgress

pytestmark = pytest.mark.one_of_each


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a user cache of the test's own, with the built kernels."""
    use_own_cache(tmp_path / "cache", monkeypatch)


def logits_of(model: Decoder, *, is_fused: bool = True) -> torch.Tensor:
    model.is_fused = is_fused
    return compute_logits(model, random_tokens())


def products(model: Decoder) -> dict[str, Any]:
    """Return the multiplications by name, including each expert's."""
    kernels, found = load_cpu_kernels(), {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            of_experts = enumerate(module.product.packed.linears)
            found |= {f"{name}.{expert}": CpuProduct(kernels, packed, torch.float32) for expert, packed in of_experts}
        elif isinstance(module, Linear) and module.product is not None:
            found[name] = module.product
    assert all(isinstance(product, CpuProduct) for product in found.values())
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "is_tied"),
    [
        ("llama", "bfloat16", False),
        ("llama", "float32", True),
        ("mistral", "float16", False),
        ("qwen2", "bfloat16", True),
        ("qwen3", "bfloat16", False),
    ],
)
def test_logits_in_8_bits_are_those_of_the_same_gguf_file(
    tmp_path: Path, family: str, dtype: str, is_tied: bool
) -> None:
    source = make_checkpoint(tmp_path / "model", family, seed=21, dtype=dtype, tie_word_embeddings=is_tied)
    types = {"attn_output.weight": "Q8_0", "token_embd.weight": "Q8_0", "output.weight": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", source, "Q8_0", types=types)
    ours, theirs = load(source, "int8"), load(path)
    assert torch.equal(logits_of(ours), logits_of(theirs))
    assert torch.equal(logits_of(ours, is_fused=False), logits_of(theirs, is_fused=False))
    assert products(ours).keys() == products(theirs).keys()


@pytest.mark.parametrize("hidden_size", [64, 256])
def test_4_bits_are_more_where_they_count(tmp_path: Path, hidden_size: int) -> None:
    """The first and last of eight layers are an eighth each. Rows of 64 are no blocks, and only the last down
    projection then has 6 bits."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": hidden_size // 4}
    source = make_checkpoint(tmp_path / "model", "llama", seed=30, dtype="bfloat16", **sizes)
    found, stored = products(load(source, "int4")), load_file(source / "model.safetensors")
    for name, product in found.items():
        wide = r"embed|head|\.[057]\.mlp\.down" if hidden_size == 256 else r"\.7\.mlp\.down|^((?!down).)*$"
        is_wide = bool(re.search(wide, name))
        rows, part = product.lookup_rows(torch.arange(product.packed.out_size)), name.replace("head", "lm_head")
        assert product.packed.format.bits == (6 if is_wide else 4), name
        if f"{part}.weight" in stored:
            first = stored[f"{part}.weight"].float()
            meant = load_cpu_kernels().quantize(first, 6 if is_wide else 4).dequantized()
            assert torch.equal(rows[: len(first)], meant), name


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_gguf_file_of_floats_is_quantised_alike(tmp_path: Path, quantization: str) -> None:
    """The rows of queries and keys have another order in the file, and are read by whole heads."""
    source = make_checkpoint(tmp_path / "model", "llama", seed=22, dtype="bfloat16")
    path = write_gguf(tmp_path / "model.gguf", source, "BF16")
    assert torch.equal(logits_of(load(path, quantization)), logits_of(load(source, quantization)))


def test_what_is_read_in_chunks_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "model", "llama", seed=23)
    path = write_gguf(tmp_path / "model.gguf", source, "F32")
    whole = logits_of(load(source, "int8"))
    for max_chunk in (1, 64 * 20):
        monkeypatch.setattr("worker_service.models.quantizing._CHUNK_ELEMENTS", max_chunk)
        assert torch.equal(logits_of(load(source, "int8")), whole)
        assert torch.equal(logits_of(load(path, "int8")), whole)


@pytest.mark.parametrize(("quantization", "is_tied"), [("int8", True), ("int4", True), ("int4", False)])
def test_gpt2s_weights_are_turned_first(tmp_path: Path, quantization: str, is_tied: bool) -> None:
    source = make_checkpoint(tmp_path / "model", "gpt2", seed=24, tie_word_embeddings=is_tied)
    model = load(source, quantization)
    stored = load_file(source / "model.safetensors")

    def meant(name: str) -> torch.Tensor:
        values = stored[f"transformer.{name}.weight" if name != "lm_head" else "lm_head.weight"]
        turned = values.t() if name.startswith("h.") else values
        bits = 8 if quantization == "int8" else 6 if turned.shape[1] % 256 or name == "h.1.mlp.c_proj" else 4
        return load_cpu_kernels().quantize(turned.contiguous(), bits).dequantized()

    names = [
        f"h.{layer}.{name}" for layer in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    expected = {f"transformer.{name}": meant(name) for name in names}
    expected["head"] = meant("wte" if is_tied else "lm_head")
    if not is_tied:
        expected["transformer.wte"] = meant("wte")
    assert products(model).keys() == expected.keys()
    for name, product in products(model).items():
        assert torch.equal(product.lookup_rows(torch.arange(len(expected[name]))), expected[name]), name
    rows = torch.arange(151)
    assert torch.equal(model.embedding.lookup_rows(rows), meant("wte"))
    assert torch.equal(logits_of(model), logits_of(load(source, quantization)))


@pytest.mark.parametrize("family", ["gpt_neox", "starcoder2", "bloom", "mpt"])
def test_families_without_gguf_files_are_quantised(tmp_path: Path, family: str) -> None:
    """Rows of a head that are adjacent in the checkpoint have their codes reordered."""
    source = make_checkpoint(tmp_path / "model", family, seed=26, dtype="bfloat16")
    quantised, exact = load(source, "int8"), load(source)
    assert all(product.packed.format.bits == 8 for product in products(quantised).values())
    for name, product in products(exact).items():
        rows = torch.arange(product.packed.out_size)
        meant = load_cpu_kernels().quantize(product.lookup_rows(rows).float(), 8).dequantized()
        assert torch.equal(products(quantised)[name].lookup_rows(rows), meant), name
    assert torch.nn.functional.cosine_similarity(logits_of(quantised), logits_of(exact)).median() > 0.999


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 6)])
def test_experts_are_quantised_and_routers_are_not(tmp_path: Path, quantization: str, bits: int) -> None:
    source = make_checkpoint(tmp_path / "model", "qwen2_moe", seed=25, dtype="bfloat16")
    model, stored = load(source, quantization), load_file(source / "model.safetensors")
    found = products(model)
    for router in ("mlp.gate", "mlp.shared_expert_gate"):
        name = f"model.layers.1.{router}"
        packed = found[name].packed
        assert (packed.format.group_size, packed.activation) == (0, torch.float32)
        rows = found[name].lookup_rows(torch.arange(packed.out_size))
        assert torch.equal(rows, stored[f"{name}.weight"].float())
    for expert in range(8):
        down = stored[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].float()
        product = found[f"model.layers.1.mlp.experts.{{expert}}.down_proj.{expert}"]
        meant = load_cpu_kernels().quantize(down, bits).dequantized()
        assert torch.equal(product.lookup_rows(torch.arange(len(down))), meant)
    exact = logits_of(load(source))
    similarity = torch.nn.functional.cosine_similarity(logits_of(model), exact)
    assert similarity.median() > (0.999 if bits == 8 else 0.99)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_footprint_is_what_the_model_takes(tmp_path: Path, quantization: str, family: str, is_tied: bool) -> None:
    sizes = {"vocab_size": 160, "tie_word_embeddings": is_tied}
    if family == "qwen3_moe":
        sizes["num_experts"] = 32
    path = make_checkpoint(tmp_path / "model", family, seed=25, dtype="bfloat16", **sizes)
    operations = create_host_operations(load_cpu_kernels())
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "operations": operations}
    unloaded = prepare_model(path, quantization=quantization, **settings)
    footprint = unloaded.footprint()
    model = unloaded.load()
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    held += sum(product.packed.panels.nbytes for product in products(model).values())
    assert footprint.held == pytest.approx(held, rel=0.02)
    assert footprint.held < footprint.peak
    assert footprint.held < prepare_model(path, **settings).footprint().held


@pytest.mark.parametrize(
    ("sizes", "num_copies", "num_elements"),
    [({"vocab_size": 9000, "tie_word_embeddings": False}, 1, 9000 * 64), ({"intermediate_size": 4096}, 2, 8192 * 64)],
    ids=["the head", "gates beside ups"],
)
def test_a_weight_that_is_joined_takes_room_for_its_parts_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], num_copies: int, num_elements: int
) -> None:
    monkeypatch.setattr(quantizing, "_CHUNK_ELEMENTS", 1024)  # of floats, whose memory is then small
    path = make_checkpoint(tmp_path / "model", "llama", seed=36, dtype="bfloat16", **sizes)
    operations = create_host_operations(load_cpu_kernels())
    unloaded = prepare_model(path, dtype=torch.float32, device=CPU, operations=operations, quantization="int8")
    footprint = unloaded.footprint()
    assert footprint.peak - footprint.held == num_copies * 1.5 * num_elements


@pytest.mark.parametrize(
    ("quantization", "end"), [("int8", ""), ("int4", ", embedding, head and some others to 6 bits")]
)
def test_what_becomes_of_weights_is_said(tmp_path: Path, quantization: str, end: str) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=28)
    operations = create_host_operations(load_cpu_kernels())
    unloaded = prepare_model(path, dtype=torch.float32, device=CPU, operations=operations, quantization=quantization)
    said = unloaded.describe_quantization()
    assert said == f"linear weights are quantised to {quantization} in groups of 32{end}"


# From one start to the next


@pytest.fixture
def num_quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of weights as they are quantised."""
    names: list[str] = []
    quantized = QuantizingTensors.quantized

    def count(self: QuantizingTensors, name: str, shape: tuple[int, int]) -> Any:
        names.append(name)
        return quantized(self, name, shape)

    monkeypatch.setattr(QuantizingTensors, "quantized", count)
    return names


def start(path: Path, quantization: str = "int8", **options: Any) -> torch.Tensor:
    """Load a worker; return the packed panels of all weights of its decoder, concatenated."""
    config = worker_config(path, quantization=quantization, **options)
    check_worker(config)
    loaded = load_worker(config, "worker")
    assert (loaded.ready.quantization, loaded.ready.weight_format) == (quantization, quantization)
    operations = loaded.runner.computation._model._kernel._model
    named = [(operation, name) for operation in operations for name in ("projection", "head")]
    packed = [getattr(operation, name) for operation, name in named if hasattr(operation, name)]
    assert len(packed) > 4
    return torch.cat([linear.panels for linear in packed])


def worker_config(path: Path, **options: Any) -> WorkerConfig:
    return WorkerConfig(
        **{"model": str(path), "device": "cpu", "num_device_blocks": 20, "max_model_len": 64, **options}
    )


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "quantized").iterdir())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_second_start_reads_what_the_first_has_packed(
    tmp_path: Path, num_quantised: list[str], caplog: pytest.LogCaptureFixture, quantization: str
) -> None:
    caplog.set_level(logging.INFO)
    path = make_checkpoint(tmp_path / "model", "qwen2", seed=26, dtype="bfloat16", tie_word_embeddings=False)
    first = start(path, quantization)
    assert len(num_quantised) == len(set(num_quantised)) == 2 * 7 + 2
    (file,) = files(tmp_path)
    assert f"quantised to {quantization} in groups of 32" in caplog.text
    assert re.search(rf"stored the packed weights in {re.escape(str(file))}, [1-9]\d*\.\d\d KiB", caplog.text)
    assert f"quantised the model's 27 tensors to {quantization} in" in caplog.text
    caplog.clear()
    written = file.read_bytes()
    assert torch.equal(start(path, quantization), first)
    assert len(num_quantised) == 16, "nothing is quantised again"
    assert f"reading weights that were quantised and packed at an earlier start: {file}" in caplog.text
    assert "loaded the model's 27 tensors in" in caplog.text
    assert files(tmp_path) == [file]
    assert file.read_bytes() == written
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_logits_are_the_same_bits_at_both_starts(tmp_path: Path, family: str) -> None:
    """Biases, norms and routers are read from the checkpoint each time."""
    path = make_checkpoint(tmp_path / "model", family, seed=27)
    operations = create_host_operations(load_cpu_kernels())
    logits = []
    for is_kept in (False, True):
        unloaded = prepare_model(path, dtype=torch.float32, device=CPU, operations=operations, quantization="int4")
        cache = PackedCache(tmp_path / "folder", operations.kernels, torch.float32, {"checkpoint": "x"})
        assert cache.is_empty != is_kept
        logits.append(logits_of(unloaded.load(find_kept=cache.find)))
        num_kept = sum(linear.format.group_size > 0 for linear in unloaded._linears())
        assert cache.num_read == (num_kept if is_kept else 0)
        cache.keep(unloaded.model)
    assert torch.equal(*logits)


def cut_off(data: bytes) -> bytes:
    return data[:-1000]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:100]


def empty(data: bytes) -> bytes:
    return b""


def changed(data: bytes) -> bytes:
    middle = len(data) * 2 // 3
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def changed_in_the_header(data: bytes) -> bytes:
    return data.replace(b'"in_size": 64', b'"in_size": 32', 1)


def too_long(data: bytes) -> bytes:
    return data + bytes(64)


def endless(data: bytes) -> bytes:
    return b"\xff" * 8 + data[8:]


@pytest.mark.parametrize(
    "harm",
    [cut_off, cut_in_the_header, empty, changed, changed_in_the_header, too_long, endless],
    ids=lambda f: f.__name__,
)
def test_a_broken_file_is_made_anew(
    tmp_path: Path, num_quantised: list[str], caplog: pytest.LogCaptureFixture, harm: Any
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=28)
    first = start(path)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(harm(whole))
    caplog.clear()
    assert torch.equal(start(path), first)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"the packed weights in {file} cannot be used, and are made anew: ")
    assert files(tmp_path) == [file]
    assert file.read_bytes() == whole
    num_before = len(num_quantised)
    assert torch.equal(start(path), first)
    assert len(num_quantised) == num_before


def test_a_folder_that_cannot_be_written_to_is_a_warning(
    tmp_path: Path, num_quantised: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=29)
    (tmp_path / "cache" / "quantized").write_text("no folder")
    first = start(path)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"the packed weights cannot be kept in {tmp_path / 'cache' / 'quantized'}/")
    assert warning.endswith("each start quantises them anew")
    assert torch.equal(start(path), first)
    assert len(num_quantised) == 2 * len(set(num_quantised))


@pytest.mark.parametrize("is_off", [False, True])
def test_another_folder_can_be_named_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_quantised: list[str], is_off: bool
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=29)
    monkeypatch.setenv("PAGEWIRE_QUANTIZED_CACHE", "off" if is_off else str(tmp_path / "other" / "folder"))
    assert torch.equal(start(path), start(path))
    assert len(num_quantised) == (2 if is_off else 1) * len(set(num_quantised))
    assert not (tmp_path / "cache" / "quantized").exists()
    assert (tmp_path / "other").exists() != is_off


def test_a_disk_that_is_full_is_a_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=29)

    def fail(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    start(path)
    assert "No space left on device; each start quantises them anew" in caplog.text
    assert files(tmp_path) == []


def test_other_weights_are_not_taken_for_these(tmp_path: Path, num_quantised: list[str]) -> None:
    """The files have equal sizes and times."""
    path = make_checkpoint(tmp_path / "model", "llama", seed=30)
    file = path / "model.safetensors"
    before = file.stat()
    first = start(path)
    weights = load_file(file)
    save_file({name: -tensor for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    other = start(path)
    assert not torch.equal(first, other)
    assert len(num_quantised) == 2 * len(set(num_quantised))
    assert len(files(tmp_path)) == 1, "what was kept of the same checkpoint is removed"


def test_what_is_kept_of_others_stays(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / name, "llama", seed=31) for name in ("a", "b")]
    start(paths[0])
    start(paths[1])
    start(paths[0], "int4")
    assert len(files(tmp_path)) == 3
    (tmp_path / "cache" / "quantized" / "unknown.packed").write_bytes(b"of another version")
    left = tmp_path / "cache" / "quantized" / "left.part"
    left.write_bytes(b"half")
    for seconds, num_files in ((0, 5), (4000, 4)):
        os.utime(left, (left.stat().st_mtime - seconds,) * 2)
        next(file for file in files(tmp_path) if file.suffix == ".packed").write_bytes(b"")
        for path, quantization in ((paths[0], "int8"), (paths[1], "int8"), (paths[0], "int4")):
            start(path, quantization)
        assert len(files(tmp_path)) == num_files


def test_the_digest_of_weights_follows_their_files(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=32, max_shard_size="100KB")
    digest = weights_digest(path)
    assert weights_digest(path) == digest
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 1
    before = shards[1].stat().st_mtime_ns
    os.utime(shards[1], ns=(before, before + 1000))
    assert weights_digest(path) != digest
    file = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "other", "llama", seed=32), "F16")
    assert weights_digest(file) not in (digest, weights_digest(path))


def test_random_weights_are_quantised_and_not_kept(tmp_path: Path, num_quantised: list[str]) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=33)
    (path / "model.safetensors").unlink()
    start(path, load_format="dummy")
    assert num_quantised
    assert not (tmp_path / "cache" / "quantized").exists()


# Refusals


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"cpu_products": "onednn"}, "--quantization is int4 and --cpu-products is onednn, which "),
        (
            {"tensor_parallel_size": 2},
            "--quantization is int4 and --tensor-parallel-size is 2; --quantization",
        ),
        ({"quantization": "int5"}, "--quantization is 'int5'; it must be one of int8, int4"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        check_worker(worker_config(tmp_path, **{"quantization": "int4", **options}))


@pytest.mark.parametrize("name", ["GPTQ", "FP8 block", "W8A8"])
def test_what_is_quantised_already_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = make_quantized(tmp_path, "llama", BY_NAME[name], seed=34)
    method = json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"]
    line = rf"--quantization is int8, but --model {path} is quantised already \({method}\); leave it out"
    with pytest.raises(ValueError, match=line):
        check_worker(worker_config(path, quantization="int8"))


def test_a_gguf_file_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "llama", seed=35)
    path = write_gguf(tmp_path / "model.gguf", source, "F16", types={"ffn_up.weight": "Q8_0", "attn_q.weight": "Q4_0"})
    with pytest.raises(ValueError, match=rf"--model {path} is quantised already \(Q4_0, Q8_0\); leave it out"):
        check_worker(worker_config(path, quantization="int8"))


def test_without_kernels_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    path = make_checkpoint(tmp_path / "model", "llama", seed=36)
    line = "int8, which needs the C kernels of a CPU, but they are not available: PAGEWIRE_CPU_KERNELS is off"
    with pytest.raises(ValueError, match=line):
        load_worker(worker_config(path, quantization="int8"), "worker")


def test_a_gpu_without_triton_is_refused() -> None:
    with pytest.raises(ValueError, match="--quantization is int4, which needs the Triton kernels of a GPU, but they "):
        check_quantization("int4", Operations(), torch.device("cuda"))


@pytest.mark.parametrize(
    ("family", "sizes", "tensor", "num_inputs"),
    [
        ("llama", {"intermediate_size": 100}, "model.layers.0.mlp.down_proj.weight", 100),
        ("qwen3", {"head_dim": 20}, "model.layers.0.self_attn.o_proj.weight", 80),
        ("mixtral", {"intermediate_size": 80}, "model.layers.0.block_sparse_moe.experts.0.w2.weight", 80),
        ("gpt2", {"n_inner": 80}, "transformer.h.0.mlp.c_proj.weight", 80),
    ],
)
def test_inputs_that_groups_do_not_divide_are_refused(
    tmp_path: Path, family: str, sizes: dict[str, int], tensor: str, num_inputs: int
) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=37, **sizes)
    line = f"tensor {tensor} cannot be quantised: its {num_inputs} inputs are not a multiple of the group size 32"
    with pytest.raises(CheckpointError, match=line):
        load(path, "int8")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e8])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, wrong: float) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=38)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = wrong
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    line = r"tensor model\.layers\.1\.mlp\.up_proj\.weight cannot be quantised: it holds numbers that are not finite"
    with pytest.raises(CheckpointError, match=line):
        load(path, "int4")


def test_progress_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    progress = LoadProgress(lambda doing: None, lambda: now)
    progress.begin_tensors("int4")
    now = 11.0
    progress(3, 4)
    now = 12.5
    progress(4, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "quantising the model to int4: 3 of 4 tensors (75 %) in 11 s",
        "quantised the model's 4 tensors to int4 in 12.5 s",
    ]
