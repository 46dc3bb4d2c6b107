"""Model files with unexpected content are reported with their name and a remedy, whichever file it is.

Such files are Git LFS pointers, in a clone without the large files, and files that are too large for their kind.
"""

import hashlib
import json
import os
import random
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from pagewire.common.gguf import MAX_LISTING_BYTES, MAX_SETTINGS_BYTES, ModelFileError
from pagewire.hosting.model_source import SMALL_FILES
from scheduler_service.api.vllm.tokenizer_archive import archive_chunks, read_tokenizer_archive
from scheduler_service.serving.checkpoint.chat_template import _MAX_FILE_BYTES
from scheduler_service.serving.checkpoint.model_info import read_model_info
from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer
from testing.checkpoints.families import make_checkpoint
from worker_service.config import WorkerConfig
from worker_service.startup.preflight import check_worker

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with every file that the services read."""
    path = shutil.copytree(STORYTELLER, tmp_path / "model")
    (path / "model.safetensors").unlink()
    make_checkpoint(tmp_path / "sharded", "llama", seed=1, max_shard_size="50KB")
    for file in (tmp_path / "sharded").glob("*safetensors*"):
        shutil.copy(file, path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    modules = [{"type": kind, "path": f"{index}_{kind}"} for index, kind in enumerate(("Pooling", "Dense"), start=1)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "2_Dense").mkdir()
    (path / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 8}))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    return path


def start(path: Path, *, is_worker: bool) -> None:
    if is_worker:
        check_worker(WorkerConfig(str(path), device="cpu"))
        return
    info = read_model_info(str(path))
    if info.tokenizer_path is not None:
        load_tokenizer(info.tokenizer_path)


def test_what_is_read_is_what_is_downloaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, open_path = set(), Path.open

    def noting(path: Path, *arguments: Any, **options: Any) -> Any:
        read.add(path)
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", noting)
    for is_worker in (True, False):
        start(model, is_worker=is_worker)
    names = {str(path.relative_to(model)) for path in read if path.is_relative_to(model)}
    assert {"1_Pooling/config.json", "2_Dense/config.json"} <= names
    assert [name for name in names if not any(fnmatch(name, known) for known in (*SMALL_FILES, "*.safetensors"))] == []


@pytest.mark.parametrize(
    ("name", "is_workers", "is_schedulers", "max_bytes"),
    [
        ("config.json", True, True, MAX_SETTINGS_BYTES),
        ("tokenizer.json", True, True, MAX_LISTING_BYTES),
        ("generation_config.json", False, True, MAX_SETTINGS_BYTES),
        ("tokenizer_config.json", True, True, MAX_SETTINGS_BYTES),
        ("chat_template.jinja", False, True, _MAX_FILE_BYTES),
        ("additional_chat_templates/rag.jinja", False, True, _MAX_FILE_BYTES),
        ("modules.json", False, True, MAX_SETTINGS_BYTES),
        ("1_Pooling/config.json", False, True, MAX_SETTINGS_BYTES),
        ("2_Dense/config.json", False, True, MAX_SETTINGS_BYTES),
        ("model.safetensors.index.json", True, False, MAX_LISTING_BYTES),
        ("model-00001-of-", True, False, None),
    ],
)
def test_a_file_that_is_not_what_it_is_called_is_named(
    model: Path, name: str, is_workers: bool, is_schedulers: bool, max_bytes: int | None
) -> None:
    file = next(model.glob(f"{name}*"), model / name)
    faults = {rf"{name}.* is a Git LFS pointer .* run `git lfs pull`": lambda: file.write_text(POINTER)}
    if max_bytes is not None:
        told = rf"{name} has {max_bytes + 1} bytes; the maximum is {max_bytes}: use the file"
        faults[told] = lambda: os.truncate(file, max_bytes + 1)
    for told, corrupt in faults.items():
        corrupt()
        for is_worker, reads in ((True, is_workers), (False, is_schedulers)):
            if not reads:
                continue
            with pytest.raises(ValueError, match=told) as raised:
                start(model, is_worker=is_worker)
            assert "\n" not in str(raised.value)


def test_templates_in_other_files_have_bounds_too(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").unlink()
    file = model / "chat_template.json"
    file.touch()
    os.truncate(file, MAX_SETTINGS_BYTES + 1)
    with pytest.raises(ValueError, match=rf"chat_template\.json has .*; the maximum is {MAX_SETTINGS_BYTES}:"):
        start(model, is_worker=False)


def test_routers_are_given_no_file_that_is_larger_than_it_can_be(model: Path) -> None:
    info, file = read_model_info(str(model)), model / "special_tokens_map.json"
    file.touch()
    os.truncate(file, MAX_LISTING_BYTES + 1)
    with pytest.raises(ModelFileError, match=r"special_tokens_map\.json has"):
        read_tokenizer_archive(info)


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 131_072])
def test_the_last_chunk_of_an_archive_alone_has_its_digest(size: int) -> None:
    archive = random.Random(size).randbytes(size)
    *chunks, last = archive_chunks(archive)
    assert b"".join(chunk.data for chunk in (*chunks, last)) == archive
    assert last.data
    assert [chunk.sha256 for chunk in chunks] == [""] * len(chunks)
    assert last.sha256 == hashlib.sha256(archive).hexdigest()


def test_a_single_file_of_weights_and_a_gguf_file(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", seed=1)
    (tmp_path / "m.gguf").write_text(POINTER)
    (path / "model.safetensors").write_text(POINTER)
    for pointer, is_worker in ((path, True), (tmp_path / "m.gguf", True), (tmp_path / "m.gguf", False)):
        with pytest.raises(ValueError, match=r"is a Git LFS pointer .* run `git lfs pull`"):
            start(pointer, is_worker=is_worker)
