"""Scaling of rotary positions compared with transformers: frequencies of every type, and LongRoPE by model length."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from pagewire.network.families.reading import MAX_SIZE
from pagewire.network.rope import RopeConfig
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.kernels.compiler import skip_without_compiler
from testing.models import load_model
from testing.worker.model_logits import TOLERANCE, compute_logits
from tests.worker.rotary_tables import SCALINGS, filled_tables
from worker_service.config import WorkerConfig
from worker_service.models.rope import inverse_frequencies
from worker_service.startup import loader, warm_up
from worker_service.startup.loader import load_worker

pytestmark = pytest.mark.one_of_each

CPU = torch.device("cpu")
ORIGINAL, STRETCHED = 24, 96
FACTORS = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.5, 7.5, 24.0]}


def longrope(**fields: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": ORIGINAL, **FACTORS, **fields,
    }  # fmt: skip
    positions = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": STRETCHED}
    return {"rope_parameters": rope, "sliding_window": None, **positions}


def drawn_scaling(rng: random.Random, rope_type: str, num_pairs: int) -> tuple[dict[str, Any], int]:
    """Return random settings of a scaling type, and the number of positions."""
    original, positions = rng.choice([32, 1000, 4096]), rng.choice([32, 4096, 131_072])
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": rng.choice([500.0, 10_000.0, 1e6])}
    if rope_type != "longrope" or rng.random() < 0.3:
        rope["factor"] = rng.choice([0.5, 1.0, 4.0, 32.0])
    if rope_type == "llama3":
        rope |= {"low_freq_factor": rng.choice([0.5, 1.0]), "high_freq_factor": rng.choice([2.0, 4.0])}
    if rope_type == "yarn":
        optional = {"beta_fast": 6.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2}
        rope |= {key: value for key, value in optional.items() if rng.random() < 0.5}
    if rope_type in ("yarn", "longrope") and rng.random() < 0.3:
        rope["attention_factor"] = rng.choice([0.8, 1.0, 1.3])
    if rope_type == "longrope":
        rope |= {key: [rng.uniform(1, 30) for _ in range(num_pairs)] for key in FACTORS}
    if rope_type in ("llama3", "yarn", "longrope") and rng.random() < 0.7:
        rope["original_max_position_embeddings"] = original
    return rope, positions


@pytest.mark.parametrize("seed", range(40))
def test_frequencies_are_those_of_transformers(seed: int) -> None:
    """Every type of scaling, with its attention factor, for short and for long sequences."""
    rng = random.Random(seed)
    rope_type = ("linear", "llama3", "yarn", "longrope")[seed % 4]
    rope, positions = drawn_scaling(rng, rope_type, num_pairs=16)
    fields: dict[str, Any] = {"max_position_embeddings": positions, "rope_parameters": rope}
    if "original_max_position_embeddings" in rope and rope_type == "longrope":
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    print(seed, fields)
    config_class = transformers.Phi3Config if rope_type == "longrope" else transformers.LlamaConfig
    config = config_class(**fields, hidden_size=128, num_attention_heads=4, pad_token_id=None)
    architecture = "Phi3ForCausalLM" if rope_type == "longrope" else "LlamaForCausalLM"
    model = parse_config({**config.to_dict(), "architectures": [architecture]})
    original = config.rope_parameters.get("original_max_position_embeddings", positions)
    for length in {1, min(original, positions), min(original + 1, positions), positions}:
        expected, factor = ROPE_INIT_FUNCTIONS[rope_type](config, CPU, seq_len=length)
        served = model.serving(length).rope
        assert served is not None
        torch.testing.assert_close(inverse_frequencies(served, 32), expected, rtol=1e-6, atol=0)
        assert served.attention_factor == pytest.approx(factor, rel=1e-12)
    assert model.serving(None) == model.serving(MAX_SIZE), "by default for as many positions as there are"


@pytest.mark.parametrize(("length", "factor", "divisor"), [(32, 1.1, 2.0), (33, 1.3, 3.0)])
def test_phi_moe_has_a_factor_for_each_list(length: int, factor: float, divisor: float) -> None:
    lists = {"short_factor": [2.0] * 16, "long_factor": [3.0] * 16, "short_mscale": 1.1, "long_mscale": 1.3}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 32, **lists}
    fields: dict[str, Any] = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    config = transformers.PhimoeConfig(**fields, rope_parameters=rope, hidden_size=128, num_attention_heads=4)
    model = parse_config({**config.to_dict(), "num_key_value_heads": 4, "architectures": ["PhiMoEForCausalLM"]})
    served = model.serving(length).rope
    assert served is not None
    assert (served.attention_factor, served.divisors) == (factor, (divisor,) * 16)


@pytest.mark.parametrize("config", SCALINGS, ids=lambda config: f"{config.rope_type} {config.theta:g}")
def test_tables_are_rounded_once(config: RopeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions, whose first call may be inaccurate, are not used."""
    frequencies = inverse_frequencies(config, 32)
    angles = torch.arange(3000.0)[:, None] * frequencies
    exact = [(function(angles.double()).float() * config.attention_factor) for function in (torch.cos, torch.sin)]
    for name in ("cos", "sin", "pow", "__pow__", "__rpow__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    tables = filled_tables(config)
    size, half = len(frequencies), 16
    assert torch.equal(tables.cos[:, :size], exact[0])
    assert torch.equal(tables.cos[:, half : half + size], exact[0])
    assert torch.equal(tables.sin[:, :size], -exact[1])
    assert torch.equal(tables.sin[:, half : half + size], exact[1])
    others = slice(size, half)
    assert torch.equal(tables.cos[:, others], torch.ones(3000, half - size))
    assert torch.equal(tables.sin[:, others], torch.zeros(3000, half - size))


# Prints the digests of the tables.
PROGRAM = """
import json
from tests.worker.rotary_tables import SCALINGS, filled_tables
print(json.dumps([filled_tables(config).digest.hex() for config in SCALINGS]))
"""


def test_tables_have_a_digest_which_is_that_of_other_processors() -> None:
    digests = [filled_tables(config).digest.hex() for config in SCALINGS]
    assert len(set(digests)) == len(SCALINGS)
    # As without AVX512 and AVX2: torch, numpy and the C library have separate functions for each.
    lacking = {
        "ATEN_CPU_CAPABILITY": "default",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    environ = {**os.environ, **lacking}
    other = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == digests


def test_functions_of_torch_are_first_called_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's vector functions are called once before a worker reads anything of its model."""

    class Begun(Exception):
        pass

    def begin() -> None:
        raise Begun

    monkeypatch.setattr(loader, "initialize_vector_math", begin)
    with pytest.raises(Begun):
        load_worker(WorkerConfig("absent"), "worker")


def test_functions_of_torch_are_called_in_each_dtype_with_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(warm_up, "_FUNCTIONS", (lambda x: called.append((x.numel(), x.dtype)),))
    warm_up.initialize_vector_math()
    assert called == [(1, torch.float32), (1, torch.float64)]


def test_fresh_starts_compute_the_same() -> None:
    skip_without_compiler()
    command = [sys.executable, "-m", "bench", "fresh_starts", "--starts=20"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("20 starts, 1 digests\n")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("phi3"), "phi3", seed=5, **longrope())


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def tokens(num: int) -> torch.Tensor:
    return torch.randint(0, 151, (num,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize(
    ("max_model_len", "is_long"), [(1, False), (ORIGINAL, False), (ORIGINAL + 1, True), (None, True)]
)
def test_longrope_follows_the_served_length(
    path: Path, oracle: Any, tmp_path: Path, max_model_len: int | None, is_long: bool, is_gguf: bool
) -> None:
    """The logits depend on the longest sequence that the worker accepts.

    If no longer sequence is accepted, a sequence of the original length has transformers' logits. Otherwise it has the
    logits of the beginning of a long sequence.
    """
    rotary, token_ids = oracle.model.rotary_emb, tokens(min(max_model_len or ORIGINAL, ORIGINAL))
    kept = rotary.original_inv_freq.clone()
    if is_long:
        rotary.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](oracle.config, CPU, seq_len=ORIGINAL + 1)
    try:
        expected = oracle(token_ids[None]).logits[0]
    finally:
        rotary.original_inv_freq = kept
    model_path = write_gguf(tmp_path / "model.gguf", path, "F32") if is_gguf else path
    model = load_model(model_path, dtype=torch.float32, device=CPU, max_model_len=max_model_len)
    actual = compute_logits(model, token_ids, chunks=(len(token_ids),))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@torch.inference_mode()
def test_longrope_does_not_change_within_a_sequence(path: Path, oracle: Any) -> None:
    """A long sequence in chunks that cross the original length has transformers' logits at every position."""
    token_ids = tokens(60)
    expected = oracle(token_ids[None]).logits[0]
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids, chunks=(20, 3, 1, 1, 35))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize(("max_model_len", "num_warnings"), [(None, 1), (ORIGINAL + 1, 1), (ORIGINAL, 0)])
def test_a_worker_says_once_that_short_sequences_have_long_factors(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, max_model_len: int | None, num_warnings: int
) -> None:
    """The warning names the flag, and the value with which short sequences are computed exactly."""
    model = shutil.copytree(path, tmp_path / "model")
    shutil.copy("models/storyteller/tokenizer.json", model)
    with caplog.at_level(logging.WARNING):
        load_worker(
            WorkerConfig(str(model), device="cpu", num_device_blocks=20, max_model_len=max_model_len), "w"
        ).close()
    said = [record.getMessage() for record in caplog.records if "LongRoPE" in record.getMessage()]
    assert len(said) == num_warnings
    assert all(f"--max-model-len {ORIGINAL}" in text for text in said)


def test_a_worker_with_other_factors_is_noticed(path: Path, tmp_path: Path) -> None:
    """Sequences continue after the loss of a worker, so its successor must rotate heads in the same way.

    The digest of the tables shows a difference.
    """
    model = shutil.copytree(path, tmp_path / "model")
    shutil.copy("models/storyteller/tokenizer.json", model)

    def digest(max_model_len: int) -> str:
        config = WorkerConfig(str(model), device="cpu", num_device_blocks=20, max_model_len=max_model_len)
        worker = load_worker(config, "w")
        worker.close()
        return worker.ready.tables_digest

    assert digest(ORIGINAL) == digest(ORIGINAL - 1)
    assert digest(ORIGINAL + 1) == digest(STRETCHED)
    assert digest(ORIGINAL) != digest(ORIGINAL + 1)


def test_original_lengths_that_differ_are_refused(path: Path) -> None:
    """transformers uses the length beside the scaling, or 4096."""
    config = transformers.AutoConfig.from_pretrained(path).to_dict()
    config["architectures"] = ["Phi3ForCausalLM"]
    del config["original_max_position_embeddings"]
    with pytest.raises(CheckpointError, match="embeddings is 24, but must be 4096, the same as"):
        parse_config(config)
