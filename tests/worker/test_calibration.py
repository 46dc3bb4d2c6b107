"""The importance of inputs: measured as by hooks in transformers, stored, and used by `--quantization int4`."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewire.cli import calibrate
from pagewire.client.errors import CommandError
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.source import model_digest
from testing.checkpoints.families import make_checkpoint
from testing.worker.model_logits import CPU, edited, load, packed_products
from testing.worker.own_cache import use_own_cache
from tests.thorough import thorough
from worker_service.config import WorkerConfig
from worker_service.host import create_host_operations
from worker_service.models.importance import Importance
from worker_service.models.loading import prepare_model
from worker_service.startup import calibration
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import load_worker

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
README = STORYTELLER.parents[1] / "README.md"
LINEAR = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a user cache of the test's own, with the built kernels."""
    use_own_cache(tmp_path / "cache", monkeypatch)


def random_text(num_tokens: int, seed: int) -> list[int]:
    print(f"seed {seed}")
    return torch.randint(0, 151, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def measured_by_transformers(path: Path, token_ids: list[int], length: int) -> dict[str, torch.Tensor]:
    """Return the mean squares of the inputs of all linear modules, by the name of their weight."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, LINEAR):
            module.register_forward_pre_hook(
                lambda module, given, name=name: inputs[f"{name}.weight"].append(given[0].flatten(0, -2))
            )
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(
                lambda module, given, name=name: add_experts(model.get_submodule(name), name, inputs, *given)
            )
    for start in range(0, len(token_ids), length):
        model(torch.tensor(token_ids[start : start + length])[None])
    return {name: torch.cat(given).double().square().mean(0).float() for name, given in inputs.items()}


def add_experts(
    experts: torch.nn.Module, name: str, inputs: dict[str, list[torch.Tensor]], x: torch.Tensor, ids: torch.Tensor, *_
) -> None:
    """Add the inputs of each expert's three matrices."""
    for expert in range(experts.num_experts):
        chosen = x[(ids == expert).any(-1)]
        if not len(chosen):
            continue
        gates, ups = (chosen @ experts.gate_up_proj[expert].t()).chunk(2, dim=-1)
        for projection in ("gate_proj", "up_proj"):
            inputs[f"{name}.{expert}.{projection}.weight"].append(chosen)
        inputs[f"{name}.{expert}.down_proj.weight"].append(torch.nn.functional.silu(gates) * ups)


@pytest.mark.parametrize(
    "family", ["qwen3", "gpt2", "qwen3_moe", "lfm2", *thorough("llama", "gemma2", "gpt_neox", "qwen3_5_text", "mpt")]
)
def test_the_importance_is_what_hooks_in_transformers_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(calibration, "CHUNK_TOKENS", 40)
    path = make_checkpoint(tmp_path / "model", family, seed=61)
    token_ids = random_text(70, 62)
    found = calibration.measure_importance(path, token_ids, print)
    expected = measured_by_transformers(path, token_ids, 40)
    assert found.mean_squares.keys() == expected.keys() - {"lm_head.weight", "embed_out.weight"}
    for name, values in found.mean_squares.items():
        torch.testing.assert_close(values, expected[name], rtol=2e-3, atol=1e-7, msg=name)


def test_experts_without_tokens_are_missing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3_moe", seed=63, num_experts=64, num_experts_per_tok=2)
    found = calibration.measure_importance(path, random_text(5, 64), print)
    experts = {name for name in found.mean_squares if ".experts." in name}
    assert 0 < len(experts) <= 2 * 3 * 2 * 5
    weights = found.by_weight(load(path).network.operations)
    assert experts <= weights.keys()


def test_a_file_returns_the_importance(tmp_path: Path) -> None:
    squares = {"a.weight": torch.rand(64), "b.weight": torch.rand(32)}
    Importance(b"\1\2", squares).save(tmp_path / "file")
    found = Importance.load(tmp_path / "file")
    assert found.model_digest == b"\1\2"
    assert found.mean_squares.keys() == squares.keys()
    assert all(torch.equal(found.mean_squares[name], values) for name, values in squares.items())


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    (tmp_path / "broken").write_bytes(b"\1" * 100)
    for name, reason in {
        "plain": "was not written by",
        "broken": "cannot be read",
        "missing": "cannot be read",
    }.items():
        with pytest.raises(ValueError, match=reason):
            Importance.load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.ones(65)),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(64, dtype=torch.float64)),
        ("model.layers.0.mlp.up_proj.weight", torch.full((64,), torch.nan)),
        ("model.layers.0.mlp.up_proj.weight", -torch.ones(64)),
        ("model.layers.9.mlp.up_proj.weight", torch.ones(64)),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, name: str, values: torch.Tensor) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=65)
    with pytest.raises(CheckpointError, match=f"the importance of {re.escape(name)} does not fit the model"):
        Importance(b"", {name: values}).by_weight(load(path).network.operations)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_in_4_bits_are_rounded_by_importance(tmp_path: Path, family: str) -> None:
    """Rows of 256 divide into blocks. Values of inputs that never are large may become less exact."""
    width = {"n_embd": 256, "n_head": 4} if family == "gpt2" else {"hidden_size": 256, "intermediate_size": 512}
    path = make_checkpoint(tmp_path / "model", family, seed=66, **width)
    up = "transformer.h.0.mlp.c_fc" if family == "gpt2" else "model.layers.0.mlp.up_proj"
    squares = torch.rand(256, generator=torch.Generator().manual_seed(67)) ** 8
    squares[100] = 0.0
    operations = create_host_operations(load_cpu_kernels())
    given = {"dtype": torch.float32, "device": CPU, "operations": operations, "quantization": "int4"}
    plain, weighed = (
        packed_products(prepare_model(path, importance=importance, **given).load())
        for importance in (None, Importance(b"", {f"{up}.weight": squares}))
    )
    stored = load_file(path / "model.safetensors")[f"{up}.weight"]
    exact = stored.t().contiguous() if family == "gpt2" else stored
    holder = next(name for name in plain if name in (up, up.replace("up_proj", "gate_proj")))
    rows = torch.arange(plain[holder].out_size)[-len(exact) :]
    kernels = load_cpu_kernels()
    errors = [(kernels.lookup_rows(products[holder], rows) - exact).square() @ squares for products in (plain, weighed)]
    assert errors[1].sum() < 0.8 * errors[0].sum()
    meant = kernels.quantize(exact, 4, (squares / squares.mean()).clamp(min=2.0**-20))
    assert torch.equal(kernels.lookup_rows(weighed[holder], rows), meant.dequantized())
    others = plain.keys() - {holder}
    everything = {name: torch.arange(plain[name].out_size) for name in others}
    assert all(
        torch.equal(*(kernels.lookup_rows(products[name], everything[name]) for products in (plain, weighed)))
        for name in others
    )


def test_a_worker_keeps_what_was_rounded_by_importance_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Starts without importance, with a file, and with another file at the same path, each twice."""
    path = make_checkpoint(tmp_path / "model", "llama", seed=68, hidden_size=256, intermediate_size=512)
    file, found, reported = tmp_path / "importance", [], []
    caplog.set_level("INFO")
    for seed in (None, 1, 2):
        if seed is not None:
            squares = torch.rand(256, generator=torch.Generator().manual_seed(seed)) ** 8
            Importance(model_digest(path), {"model.layers.0.mlp.up_proj.weight": squares}).save(file)
        calibrate = None if seed is None else str(file)
        for _ in range(2):
            caplog.clear()
            config = WorkerConfig(
                model=str(path), device="cpu", quantization="int4", calibrate=calibrate, num_device_blocks=8
            )
            worker = load_worker(config, "worker")
            worker.close()
            reported.append(worker.ready.quantization)
            found.append("reading weights that were quantised and packed at an earlier start" in caplog.text)
    assert found == [False, True] * 3
    assert reported[::2] == reported[1::2]
    assert len({*reported}) == 3
    assert len(list((tmp_path / "cache" / "quantized").iterdir())) == 1


def test_the_importance_of_another_model_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=69)
    other = make_checkpoint(tmp_path / "other", "llama", seed=69, num_hidden_layers=1)
    Importance(model_digest(other), {}).save(tmp_path / "importance")
    given = {"device": "cpu", "quantization": "int4", "calibrate": str(tmp_path / "importance")}
    with pytest.raises(ValueError, match="which was made with another model: calibrate this one"):
        load_worker(WorkerConfig(model=str(path), **given), "worker")
    with pytest.raises(ValueError, match="--calibrate needs --quantization int4"):
        WorkerConfig(model=str(path), quantization="int8", calibrate="file").validate()


def test_the_command_writes_a_file_that_a_worker_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "importance.safetensors"
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little fox who liked to read. " * 80)
    assert calibrate.main([str(STORYTELLER), str(text), "--output", str(output), "--max-tokens", "700"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"wrote {output}; serve the model with --quantization int4 --calibrate {output}\n"
    assert "computed 512 of 700 tokens\ncomputed 700 of 700 tokens\n" in printed.err
    assert len(Importance.load(output).mean_squares) == 4 * 7
    given = {"device": "cpu", "quantization": "int4", "calibrate": str(output), "num_device_blocks": 8}
    load_worker(WorkerConfig(model=str(STORYTELLER), **given), "worker").close()


@pytest.mark.parametrize(
    ("text", "output", "reason"),
    [
        (b"short", "file", "has [0-9]+ tokens: at least 512 are needed"),
        (b"\xff", "file", "cannot read .*text: "),
        (None, "file", "cannot read .*text: "),
        (b"text", "missing/file", "cannot write .*missing/file: "),
    ],
)
def test_the_command_refuses_what_it_cannot_use(tmp_path: Path, text: bytes | None, output: str, reason: str) -> None:
    if text is not None:
        (tmp_path / "text").write_bytes(text)
    with pytest.raises(CommandError, match=reason):
        calibrate.main([str(STORYTELLER), str(tmp_path / "text"), "--output", str(tmp_path / output)])


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=72)
    with pytest.raises(ValueError, match="the text has the token 151, but the model has 151 tokens"):
        calibration.measure_importance(path, [3, 151, 4], print)


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=73)
    edited(path, **{"model.layers.1.input_layernorm.weight": torch.full((64,), torch.inf)})
    with pytest.raises(ValueError, match=r"inputs of model\.layers\.1\.self_attn\.q_proj\.weight are not finite in"):
        calibration.measure_importance(path, random_text(10, 74), print)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=70)
    config = (path / "config.json").read_text()
    quantised = '{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}, '
    (path / "config.json").write_text(config.replace("{", quantised, 1))
    with pytest.raises(ValueError, match="is quantised already"):
        calibration.measure_importance(path, random_text(10, 71), print)
