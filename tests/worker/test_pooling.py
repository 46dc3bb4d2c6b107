"""Embeddings of a runner: they equal transformers' pooled hidden states, bit for bit for any chunks of the prompts."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from pagewire.common.gguf import GgufFile
from pagewire.common.wire.messages import Pooling, RowOpening, RowStatus, SamplingParams, StepPlan, WorkerProtocolError
from pagewire.network.checkpoint_files import SINGLE_FILE, CheckpointError
from pagewire.network.pooling_config import read_gguf_pooling
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.plans import Row, plan_for, plan_steps
from testing.seeds import seeded
from tests.thorough import thorough
from tests.worker.runners import load
from worker_service.engine import LoadedWorker
from worker_service.rows.pooling import PooledChunk, Pooler

VOCAB_SIZE = 151
FAMILIES = ("llama", "qwen3", "gpt2", "gemma3_text")
POOLINGS = (Pooling.LAST, Pooling.MEAN)
LENGTHS = (1, 2, 40, 17, 64)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family, seed=9) for family in FAMILIES}


def random_prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = seeded(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def expected_embedding(model: transformers.PreTrainedModel, prompt: Sequence[int], pooling: Pooling) -> NDArray:
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = hidden[-1] if pooling is Pooling.LAST else hidden.mean(0)
    return torch.nn.functional.normalize(pooled, dim=0).float().numpy()


def embed(worker: LoadedWorker, rows: Sequence[tuple[Sequence[int], Pooling]], budget: int) -> list[bytes]:
    """Return the embedding of each row, computed in steps of at most `budget` tokens."""
    worker.runner.reset(1)
    planned = [Row(prompt, 1, SamplingParams(pooling=pooling)) for prompt, pooling in rows]
    found: dict[int, bytes] = {}
    for step in plan_for(worker.ready, planned, budget):
        result = worker.runner.execute(step.plan)
        assert (result.statuses, result.token_ids) == ((), ())
        found |= zip(step.sampling_slots, result.embeddings, strict=True)
    return [found[slot] for slot in range(len(rows))]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(checkpoints: dict[str, Path], family: str) -> None:
    worker = load(checkpoints[family], dtype="float32")
    model = transformers.AutoModel.from_pretrained(checkpoints[family], dtype=torch.float32)
    rows = [(prompt, pooling) for prompt in random_prompts(21) for pooling in POOLINGS]
    together = embed(worker, rows, 2048)
    for (prompt, pooling), found in zip(rows, together, strict=True):
        numbers = np.frombuffer(found, "<f4")
        assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-6)
        assert numbers == pytest.approx(expected_embedding(model, prompt, pooling), abs=2e-6)
    for budget in (7, 64):
        assert embed(worker, rows, budget) == together, "other bits in other chunks"
    assert [embed(worker, [row], 2048)[0] for row in rows] == together, "other bits alone"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_checkpoint_without_head(tmp_path: Path, family: str) -> None:
    whole = transformers.AutoModel.from_pretrained(make_checkpoint(tmp_path / "whole", family, seed=9))
    whole.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["architectures"] == [type(whole).__name__]
    (prompt,) = random_prompts(22, [40])
    (found,) = embed(load(tmp_path / "bare", dtype="float32"), [(prompt, Pooling.LAST)], 2048)
    assert np.frombuffer(found, "<f4") == pytest.approx(expected_embedding(whole, prompt, Pooling.LAST), abs=2e-6)
    assert read_model_info(str(tmp_path / "bare")).only_embeds
    assert not read_model_info(str(tmp_path / "whole")).only_embeds


def test_embeddings_share_steps_with_rows_of_every_kind(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen3"])
    samplings = [
        SamplingParams(pooling=Pooling.MEAN),
        SamplingParams(),
        SamplingParams(temperature=0.8, num_logprobs=2, num_prompt_logprobs=1),
        SamplingParams(pooling=Pooling.LAST),
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
    ]

    def run(slots: Sequence[int]) -> dict[int, list[object]]:
        worker.runner.reset(1)
        prompts = random_prompts(5)
        rows = [Row(prompts[slot], 1, samplings[slot], seed=slot) for slot in slots]
        found: dict[int, list[object]] = {slot: [] for slot in slots}
        for step in plan_steps(rows, block_size=worker.ready.block_size, max_num_batched_tokens=50):
            result = worker.runner.execute(step.plan)
            tokens, embeddings = iter(result.token_ids), iter(result.embeddings)
            for place in step.sampling_slots:
                is_pooled = rows[place].sampling.pooling is not Pooling.NONE
                found[slots[place]].append(next(embeddings if is_pooled else tokens))
            assert (list(tokens), list(embeddings)) == ([], [])
        return found

    together = run(range(5))
    for slot in range(5):
        assert run([slot])[slot] == together[slot]


BIDIRECTIONAL = {
    "qwen2": {"is_causal": False},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 20},
}


@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen2", "auto"), ("gemma3_text", "torch"), *thorough(("qwen2", "torch"), ("gemma3_text", "auto"))],
)
def test_tokens_of_bidirectional_models_attend_to_later_tokens(
    tmp_path: Path, family: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, family, seed=9)
    causal = load(path, dtype="float32", num_device_blocks=500)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | BIDIRECTIONAL[family]))
    worker = load(path, dtype="float32", attention_backend=backend, max_num_batched_tokens=1000)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    rows = [(prompt, pooling) for prompt in random_prompts(23, (1, 2, 17, 64, 300)) for pooling in POOLINGS]
    together = embed(worker, rows, 2048)
    for (prompt, pooling), found, other in zip(rows, together, embed(causal, rows, 2048), strict=True):
        numbers = np.frombuffer(found, "<f4")
        assert numbers == pytest.approx(expected_embedding(model, prompt, pooling), abs=2e-6)
        assert len(prompt) == 1 or abs(numbers - np.frombuffer(other, "<f4")).max() > 1e-3, "computed causally"
    assert [embed(worker, [row], 2048)[0] for row in rows] == together, "other bits alone"
    assert worker.ready.is_bidirectional
    assert "prompts of more than 1000 tokens are refused: raise --max-num-batched-tokens" in caplog.text
    with pytest.raises(WorkerProtocolError, match="slot 0 is to compute 60 of 64 tokens; this model's tokens attend"):
        embed(worker, rows[6:7], 60)
    info = read_model_info(str(path))
    assert info.only_embeds


def write_dense(path: Path, folder: str, in_size: int, out_size: int, activation: str, *, bias: bool) -> nn.Module:
    """Add a Dense module to a checkpoint's folder as sentence-transformers does. Return the module."""
    torch.manual_seed(in_size + out_size)
    linear = nn.Linear(in_size, out_size, bias=bias)
    (path / folder).mkdir()
    save_file({f"linear.{name}": value.data for name, value in linear.named_parameters()}, path / folder / SINGLE_FILE)
    config = {"in_features": in_size, "out_features": out_size, "bias": bias, "activation_function": activation}
    (path / folder / "config.json").write_text(json.dumps(config))
    return nn.Sequential(linear, getattr(nn, activation.rpartition(".")[2])())


def write_modules(path: Path, kinds: dict[str, str]) -> None:
    """Write a modules.json from the kinds of modules by their folders, with the mean as the pooling."""
    modules = [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for folder, kind in kinds.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))


KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense", "4_Normalize": "Normalize"}


@pytest.mark.parametrize(
    "activation",
    [
        "torch.nn.modules.activation.Tanh",
        *thorough(*(f"torch.nn.modules.activation.{name}" for name in ("ReLU", "GELU", "SiLU", "Sigmoid"))),
        *thorough("torch.nn.modules.linear.Identity"),
    ],
)
def test_dense_modules_follow_the_pooling(checkpoints: dict[str, Path], tmp_path: Path, activation: str) -> None:
    path = shutil.copytree(checkpoints["qwen3"], tmp_path / "model")
    write_modules(path, KINDS)
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    first = write_dense(path, "2_Dense", size, 100, activation, bias=True)
    second = write_dense(path, "3_Dense", 100, 24, "torch.nn.modules.linear.Identity", bias=False)
    worker, model = load(path, dtype="float32"), transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    rows = [(prompt, Pooling.MEAN) for prompt in random_prompts(24)]
    together = embed(worker, rows, 64)
    for (prompt, _), found in zip(rows, together, strict=True):
        with torch.inference_mode():
            pooled = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            expected = torch.nn.functional.normalize(second(first(pooled)), dim=0)
        assert np.frombuffer(found, "<f4") == pytest.approx(expected.numpy(), abs=1e-6)
    assert [embed(worker, [row], 2048)[0] for row in rows] == together, "other bits alone"
    assert read_model_info(str(path)).embedding_size == 24


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (
            lambda path: (path / "2_Dense" / SINGLE_FILE).rename(path / "2_Dense" / "pytorch_model.bin"),
            "2_Dense holds nei.*pytorch_model.bin, are never loaded",
        ),
        (
            lambda path: save_file({"linear.weight": torch.zeros(8, 64)}, path / "2_Dense" / SINGLE_FILE),
            r"linear.weight .*\[8, 64\]",
        ),
        (
            lambda path: save_file({"x": torch.zeros(8)}, path / "2_Dense" / SINGLE_FILE),
            "2_Dense: the tensor x has no place",
        ),
        (lambda path: edit(path / "2_Dense", in_features=63), "in_features is 63, but must be 64, the size"),
    ],
)
def test_dense_modules_that_do_not_fit_are_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, breaks: Callable[[Path], object], text: str
) -> None:
    path = shutil.copytree(checkpoints["qwen3"], tmp_path / "model")
    write_modules(path, {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"})
    write_dense(path, "2_Dense", 64, 9, "torch.nn.Tanh", bias=False)
    breaks(path)
    with pytest.raises(CheckpointError, match=text):
        load(path)
    assert load(path, load_format="dummy") if "in_features" not in text else True


def edit(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def opening(sampling: SamplingParams, num_computed_tokens: int = 0) -> RowOpening:
    return RowOpening(0, 0, (1, 2, 3), 3, num_computed_tokens, (1,), sampling, 0, 0)


MEAN = SamplingParams(pooling=Pooling.MEAN)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (StepPlan(1, 1, openings=(opening(MEAN, 2),)), "slot 0 opens with 2 tokens computed; a mean needs all of them"),
        (
            StepPlan(1, 1, openings=(opening(SamplingParams(pooling=Pooling.LAST, num_candidates=2)),)),
            "pooling and num_candidates",
        ),
        (
            StepPlan(1, 1, openings=(opening(MEAN),), fork_source_slots=(0,), fork_target_slots=(1,)),
            "slot 0 is forked, but has pooling",
        ),
        (
            StepPlan(1, 1, openings=(opening(MEAN),), append_token_slots=(0,), append_token_ids=(3,)),
            "slot 0 gets a token, but has pooling",
        ),
    ],
)
def test_what_a_row_with_pooling_cannot_be_asked_breaks_the_protocol(
    checkpoints: dict[str, Path], plan: StepPlan, text: str
) -> None:
    worker = load(checkpoints["qwen3"])
    worker.runner.reset(1)
    with pytest.raises(WorkerProtocolError, match=text):
        worker.runner.execute(plan)


def test_row_idles_after_reporting_its_embedding_and_frees_its_slot(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen3"])
    worker.runner.reset(1)
    first = worker.runner.execute(StepPlan(1, 1, openings=(opening(MEAN),), work_slots=(0,), work_num_tokens=(2,)))
    assert first.embeddings == ()
    # The first row is aborted, and a mean begins in the same slot, without any remains of the first.
    second = worker.runner.execute(
        StepPlan(1, 2, (0,), openings=(opening(MEAN),), work_slots=(0,), work_num_tokens=(3,))
    )
    assert second.embeddings == tuple(embed(worker, [((1, 2, 3), Pooling.MEAN)], 2048))
    assert worker.runner.execute(StepPlan(1, 2)).embeddings == ()
    assert not worker.runner.table.work.any()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_hidden_states_that_are_no_numbers_are_told(
    checkpoints: dict[str, Path], pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = load(checkpoints["qwen3"])
    worker.runner.reset(1)
    model = worker.runner.computation._model
    forward = model.forward_logits

    def broken(*arguments: torch.Tensor) -> object:
        outputs = forward(*arguments)
        hidden = outputs.hidden.clone()
        hidden[2] = torch.inf
        return outputs._replace(hidden=hidden)

    monkeypatch.setattr(model, "forward_logits", broken)
    rows = (opening(SamplingParams(pooling=pooling)), RowOpening(1, 1, (4, 5), 2, 0, (2,), MEAN, 0, 0))
    result = worker.runner.execute(StepPlan(1, 1, openings=rows, work_slots=(0, 1), work_num_tokens=(3, 2)))
    assert result.statuses == (RowStatus.NAN_LOGITS, RowStatus.OK)
    assert len(result.embeddings) == 1


def test_a_mean_adds_tokens_one_after_the_other() -> None:
    """The bits of the sum do not depend on the chunks, beyond float64's rounding."""
    hidden = torch.randn(700, 33, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(33)
    whole, _ = Pooler().pool(hidden, [PooledChunk(0, Pooling.MEAN, 0, 700, 0, True)])
    pooler = Pooler()
    for start, end in ((0, 1), (1, 130), (130, 131), (131, 699)):
        chunk = PooledChunk(0, Pooling.MEAN, start, end - start, start, False)
        nothing, sums = pooler.pool(hidden, [chunk])
        assert nothing == []
        again, _ = pooler.pool(hidden, [chunk])
        assert again == []
        pooler.keep([chunk], sums)
    last = PooledChunk(0, Pooling.MEAN, 699, 1, 699, True)
    cut, sums = pooler.pool(hidden, [last])
    pooler.keep([last], sums)
    assert torch.equal(cut[0], whole[0])
    assert not pooler._sums


def test_a_checkpoint_without_the_prefix_of_its_names_is_read_as_it_is(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Files of embedding models often have no head: it is the embedding if config.json ties them."""
    tied = make_checkpoint(tmp_path / "tied", "qwen3", seed=9, tie_word_embeddings=True)
    rows = [(prompt, pooling) for prompt in random_prompts(4) for pooling in POOLINGS]
    expected = embed(load(tied), rows, 64)
    tensors = load_file(tied / "model.safetensors")
    assert all(name.startswith("model.") for name in tensors)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tied / "model.safetensors")
    assert embed(load(tied), rows, 64) == expected
    untied = make_checkpoint(tmp_path / "untied", "qwen3", seed=9, tie_word_embeddings=False)
    tensors = load_file(untied / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, untied / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        load(untied)


@pytest.mark.parametrize(
    ("pooling_type", "pooling"),
    [(None, Pooling.LAST), (0, Pooling.LAST), (1, Pooling.MEAN)],
)
def test_a_gguf_file_says_how_it_is_pooled(
    checkpoints: dict[str, Path], tmp_path: Path, pooling_type: int | None, pooling: Pooling
) -> None:
    settings = {} if pooling_type is None else {"qwen3.pooling_type": pooling_type}
    path = write_gguf(tmp_path / "model.gguf", checkpoints["qwen3"], "F32", settings=settings)
    assert read_gguf_pooling(GgufFile.open(path)).pooling is pooling
    rows = [(prompt, Pooling.MEAN) for prompt in random_prompts(4)]
    found = embed(load(path, dtype="float32"), rows, 64)
    expected = embed(load(checkpoints["qwen3"], dtype="float32"), rows, 64)
    for one, other in zip(found, expected, strict=True):
        assert np.frombuffer(one, "<f4") == pytest.approx(np.frombuffer(other, "<f4"), abs=2e-6)
