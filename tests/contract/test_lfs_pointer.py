"""A clone whose large files were not fetched: whichever file is a pointer of Git LFS, it is named with the remedy."""

import json
import shutil
from pathlib import Path

import pytest

from scheduler_service.serving.model_info import read_model_info
from scheduler_service.serving.tokenizer import load_tokenizer
from tests.worker.checkpoints import make_checkpoint
from worker_service.config import WorkerConfig
from worker_service.startup.preflight import check_worker

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with every file that is read."""
    path = shutil.copytree(STORYTELLER, tmp_path / "model")
    (path / "model.safetensors").unlink()
    make_checkpoint(tmp_path / "sharded", "llama", seed=1, max_shard_size="50KB")
    for file in (tmp_path / "sharded").glob("*safetensors*"):
        shutil.copy(file, path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "modules.json").write_text(json.dumps([{"type": "Pooling", "path": "1_Pooling"}]))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    return path


def start(path: Path, *, is_worker: bool) -> None:
    if is_worker:
        check_worker(WorkerConfig(str(path), device="cpu"))
        return
    info = read_model_info(str(path))
    if info.tokenizer_path is not None:
        load_tokenizer(info.tokenizer_path)


@pytest.mark.parametrize(
    ("name", "is_workers", "is_schedulers"),
    [
        ("config.json", True, True),
        ("tokenizer.json", True, True),
        ("generation_config.json", False, True),
        ("tokenizer_config.json", False, True),
        ("chat_template.jinja", False, True),
        ("modules.json", False, True),
        ("1_Pooling/config.json", False, True),
        ("model.safetensors.index.json", True, False),
        ("model-00001-of-", True, False),
    ],
)
def test_a_pointer_is_named(model: Path, name: str, is_workers: bool, is_schedulers: bool) -> None:
    file = next(model.glob(f"{name}*"), model / name)
    file.write_text(POINTER)
    for is_worker, reads in ((True, is_workers), (False, is_schedulers)):
        if not reads:
            continue
        with pytest.raises(ValueError, match=rf"{name}.* is a pointer of Git LFS .* run `git lfs pull`") as raised:
            start(model, is_worker=is_worker)
        assert "\n" not in str(raised.value)


def test_a_single_file_of_weights_and_a_gguf_file(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=1)
    (tmp_path / "m.gguf").write_text(POINTER)
    (path / "model.safetensors").write_text(POINTER)
    for pointer, is_worker in ((path, True), (tmp_path / "m.gguf", True), (tmp_path / "m.gguf", False)):
        with pytest.raises(ValueError, match=r"is a pointer of Git LFS .* run `git lfs pull`"):
            start(pointer, is_worker=is_worker)
