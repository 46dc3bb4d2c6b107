"""Locating MODEL: invalid directories, the cache of the Hugging Face hub, and downloads from a local fake hub.

huggingface_hub reads its environment when it is imported, so each case runs in a separate process.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pagewire.hosting.model_source import ModelSourceError, locate
from testing.serving import hub
from testing.serving.hub import COMMIT, Hub, Repository
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "models" / "storyteller"
SMALL = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.suffix == ".json"}
WEIGHTS = b"w" * 200_000
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
OTHER_FORMATS = {"pytorch_model.bin": b"p", "model.gguf": b"g", "onnx/model.onnx": b"o", "README.md": b"r"}
TEMPLATES = {
    "chat_template.jinja": b"a",
    "chat_template.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"t",
    "additional_chat_templates/rag.jinja": b"r",
}
KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
EMBEDDER = {
    "modules.json": json.dumps([{"path": folder, "type": kind} for folder, kind in KINDS.items()]).encode(),
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "2_Dense/config.json": b'{"in_features": 64, "out_features": 8}',
    "2_Dense/model.safetensors": b"d",
    "config_sentence_transformers.json": b"{}",
}
REPOSITORIES = {
    "org/whole": Repository({**SMALL, **OTHER_FORMATS, "model.safetensors": WEIGHTS}),
    "org/split": Repository(
        {
            **SMALL,
            "model.safetensors.index.json": json.dumps(INDEX).encode(),
            **{name: name.encode() for name in INDEX["weight_map"].values()},
            "consolidated.safetensors": b"again",
        }
    ),
    "org/tagged": Repository(
        {**SMALL, "model.safetensors": WEIGHTS}, revisions={"main": COMMIT, "v1": "b" * 40}
    ),
    "org/templates": Repository({**SMALL, **TEMPLATES}),
    "org/pickled": Repository({**SMALL, "pytorch_model.bin": b"p"}),
    "org/gguf": Repository({"model-q4.gguf": b"g", "README.md": b"r"}),
    "org/no-model": Repository({"README.md": b"r"}),
    "org/lacking": Repository({**SMALL, "model.safetensors.index.json": json.dumps(INDEX).encode()}),
    "org/merged": Repository(
        {**SMALL, "model.safetensors": WEIGHTS, "model.safetensors.index.json": json.dumps(INDEX).encode()}
    ),
    "org/gptq": Repository({**SMALL, "gptq_model-4bit-128g.safetensors": WEIGHTS, "old/model.safetensors": b"o"}),
    "org/adapter": Repository({"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}),
    "org/embedder": Repository({**SMALL, **EMBEDDER, "model.safetensors": WEIGHTS, "9_Dense/model.safetensors": b"9"}),
    "org/gated": Repository({**SMALL, "model.safetensors": WEIGHTS}, gated=True),
}  # fmt: skip
PROGRAM = """
import json, logging, sys
logging.basicConfig(level="INFO", format="%(message)s")
from pagewire.hosting.model_source import ModelSourceError, locate
model, revision, with_weights = json.loads(sys.argv[1])
try:
    found = locate(model, revision, with_weights=with_weights)
except ModelSourceError as error:
    sys.exit(str(error))
print(found.directory, found.hub_id)
"""


@pytest.fixture
def served() -> Iterator[tuple[Hub, str]]:
    made = Hub(REPOSITORIES)
    with hub.serving(made) as url:
        yield made, url


def environ(cache: Path, url: str, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PAGEWIRE_"))}
    return kept | {"HF_HOME": str(cache), "HF_ENDPOINT": url, "PYTHONPATH": str(ROOT), **variables}


def locating(model: str, revision: str | None = None, *, with_weights: bool = True) -> list[str]:
    return [sys.executable, "-c", PROGRAM, json.dumps([model, revision, with_weights])]


def run(command: list[str], variables: Mapping[str, str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_templates_are_downloaded_wherever_they_are_read(served: tuple[Hub, str], tmp_path: Path) -> None:
    made, url = served
    ended = run(locating("org/templates", with_weights=False), environ(tmp_path / "hf", url), tmp_path)
    directory = Path(ended.stdout.split()[0])
    assert sorted(made.downloaded) == sorted([*SMALL, *TEMPLATES])
    assert {name: (directory / name).read_bytes() for name in TEMPLATES} == TEMPLATES


def test_only_the_files_that_are_read_are_downloaded_and_only_once(served: tuple[Hub, str], tmp_path: Path) -> None:
    made, url = served
    for number in range(2):
        ended = run(locating("org/whole"), environ(tmp_path / "hf", url), tmp_path)
        directory, hub_id = ended.stdout.split()
        assert hub_id == "org/whole"
        assert names_in(Path(directory)) == {*SMALL, "model.safetensors"}
        assert (Path(directory) / "model.safetensors").read_bytes() == WEIGHTS
        assert "%|" not in ended.stderr
        assert "HTTP Request" not in ended.stderr
        assert ("downloading org/whole: weights in 1 files, " in ended.stderr) == (number == 0)
        assert ("is in the local cache" in ended.stderr) == (number == 1)
    assert sorted(made.downloaded) == sorted([*SMALL, "model.safetensors"])
    num_requests = len(made.requests)
    offline = run(locating("org/whole"), environ(tmp_path / "hf", url, HF_HUB_OFFLINE="1"), tmp_path)
    assert offline.stdout == ended.stdout
    assert len(made.requests) == num_requests


def test_the_modules_of_an_embedder_are_downloaded(served: tuple[Hub, str], tmp_path: Path) -> None:
    made, url = served
    for _ in range(2):
        ended = run(locating("org/embedder"), environ(tmp_path / "hf", url), tmp_path)
        assert (Path(ended.stdout.split()[0]) / "2_Dense" / "model.safetensors").read_bytes() == b"d"
    assert "is in the local cache" in ended.stderr
    assert sorted(made.downloaded) == sorted([*SMALL, *EMBEDDER, "model.safetensors"])


def test_an_index_of_former_files_is_passed_over(served: tuple[Hub, str], tmp_path: Path) -> None:
    made, url = served
    for _ in range(2):
        ended = run(locating("org/merged"), environ(tmp_path / "hf", url), tmp_path)
        assert (Path(ended.stdout.split()[0]) / "model.safetensors").read_bytes() == WEIGHTS
    assert "is in the local cache" in ended.stderr
    assert made.downloaded.count("model.safetensors") == 1


@pytest.mark.parametrize("length", [20, *thorough(0)])
def test_a_file_that_was_cut_is_downloaded_again(served: tuple[Hub, str], tmp_path: Path, length: int) -> None:
    made, url = served
    variables = environ(tmp_path / "hf", url)
    snapshot = Path(run(locating("org/split"), variables, tmp_path).stdout.split()[0])
    cut = {"config.json", "tokenizer.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"}
    good = {name: (snapshot / name).read_bytes() for name in names_in(snapshot)}
    for name in cut:
        os.truncate(snapshot / name, length)
    made.downloaded.clear()
    ended = run(locating("org/split"), variables, tmp_path)
    assert ended.stdout.split()[0] == str(snapshot)
    assert {name: (snapshot / name).read_bytes() for name in names_in(snapshot)} == good
    assert set(made.downloaded) == cut
    assert ended.stderr.count("downloading it again") == len(cut)


@pytest.mark.parametrize(
    "name", ["model-00002-of-00002.safetensors", *thorough("config.json", "model.safetensors.index.json")]
)
def test_a_file_that_came_with_other_bytes_is_not_taken(served: tuple[Hub, str], tmp_path: Path, name: str) -> None:
    made, url = served
    variables = environ(tmp_path / "hf", url)
    good = made.repositories["org/split"].files[name]
    made.sent[name] = good[:-1] + bytes([good[-1] ^ 1])
    ended = run(locating("org/split"), variables, tmp_path)
    assert ended.returncode == 1
    assert f"{name} differs from the file of org/split on the hub and was removed: start again" in ended.stderr
    assert "Traceback" not in ended.stderr
    made.sent.clear()
    made.downloaded.clear()
    snapshot = Path(run(locating("org/split"), variables, tmp_path).stdout.split()[0])
    assert (snapshot / name).read_bytes() == good
    assert made.downloaded.count(name) == 1


def test_weights_in_several_files(served: tuple[Hub, str], tmp_path: Path) -> None:
    ended = run(locating("org/split"), environ(tmp_path / "hf", served[1]), tmp_path)
    weights = set(INDEX["weight_map"].values())
    assert names_in(Path(ended.stdout.split()[0])) == {*SMALL, "model.safetensors.index.json", *weights}


@pytest.mark.thorough
def test_weights_of_another_name(served: tuple[Hub, str], tmp_path: Path) -> None:
    for _ in range(2):
        ended = run(locating("org/gptq"), environ(tmp_path / "hf", served[1]), tmp_path)
        assert names_in(Path(ended.stdout.split()[0])) == {*SMALL, "gptq_model-4bit-128g.safetensors"}
    assert "is in the local cache" in ended.stderr


def test_a_scheduler_downloads_no_weights(served: tuple[Hub, str], tmp_path: Path) -> None:
    variables = environ(tmp_path / "hf", served[1])
    ended = run(locating("org/whole", with_weights=False), variables, tmp_path)
    assert names_in(Path(ended.stdout.split()[0])) == set(SMALL)
    ended = run(locating("org/whole"), variables, tmp_path)
    assert names_in(Path(ended.stdout.split()[0])) == {*SMALL, "model.safetensors"}


@pytest.mark.thorough
def test_a_revision(served: tuple[Hub, str], tmp_path: Path) -> None:
    for revision in ("v1", "b" * 40):
        ended = run(locating("org/tagged", revision), environ(tmp_path / "hf", served[1]), tmp_path)
        assert Path(ended.stdout.split()[0]).name == "b" * 40


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("org/unknown", None, "org/unknown is neither a directory here nor a model that you can access at http"),
        ("org/lacking", None, "org/lacking lacks model-00001-of-00002.safetensors"),
        *thorough(
            ("unknown", None, "unknown is neither a directory here nor a model that you can access at http"),
            ("org/tagged", "v2", "org/tagged has no revision v2: give a branch, tag or commit"),
            ("org/gated", None, "org/gated is gated: accept its terms at http"),
            ("org/pickled", None, "org/pickled has only pickled weights (pytorch_model.bin)"),
            ("org/gguf", None, "org/gguf has GGUF files and no config.json: run `hf download org/gguf model-q4.gguf`"),
            ("org/adapter", None, "org/adapter is an adapter (adapter_config.json) without its model: merge both"),
            ("org/no-model", None, "org/no-model has no config.json: give a checkpoint directory"),
        ),
    ],
)
def test_what_the_hub_does_not_have(
    served: tuple[Hub, str], tmp_path: Path, model: str, revision: str | None, message: str
) -> None:
    ended = run(locating(model, revision), environ(tmp_path / "hf", served[1]), tmp_path)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert message in last
    assert "Traceback" not in ended.stderr
    assert not [path for path in served[0].downloaded if path.endswith((".bin", ".gguf"))]


def test_offline_it_says_what_to_do(tmp_path: Path) -> None:
    dead = "http://127.0.0.1:1"
    for variables, reason in (({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"), ({}, "cannot be reached (")):
        ended = run(locating("org/whole"), environ(tmp_path / "hf", dead, **variables), tmp_path)
        assert ended.returncode == 1
        assert ended.stderr.count("\n") == 1
        assert f"org/whole is neither a directory here nor complete in the cache {tmp_path}/hf/hub, and" in ended.stderr
        assert reason in ended.stderr
        assert "hf download org/whole" in ended.stderr


@pytest.mark.thorough
def test_a_hub_that_is_out_of_order(served: tuple[Hub, str], tmp_path: Path) -> None:
    served[0].is_broken = True
    ended = run(locating("org/whole"), environ(tmp_path / "hf", served[1]), tmp_path)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "500" in ended.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_a_cache_that_another_program_has_filled(tmp_path: Path) -> None:
    """The cache as older versions of huggingface_hub leave it: links to blobs, and no list of the
    repository's files.
    """
    folder = tmp_path / "hf" / "hub" / "models--org--mine"
    snapshot = folder / "snapshots" / COMMIT
    for path in (folder / "refs", folder / "blobs", snapshot):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in {**SMALL, "model.safetensors": WEIGHTS}.items():
        (folder / "blobs" / name).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    variables = environ(tmp_path / "hf", "http://127.0.0.1:1")
    assert run(locating("org/mine"), variables, tmp_path).stdout == f"{snapshot} org/mine\n"
    (snapshot / "model.safetensors").unlink()
    ended = run(locating("org/mine"), variables, tmp_path)
    assert ended.returncode == 1
    assert "org/mine is neither a directory here nor complete in the cache" in ended.stderr
    assert run(locating("org/mine", with_weights=False), variables, tmp_path).returncode == 0


def test_ctrl_c_ends_a_download_and_the_next_one_completes_it(served: tuple[Hub, str], tmp_path: Path) -> None:
    made, url = served
    made.stalls.set()
    command = [sys.executable, "-m", "pagewire", "worker", "org/whole"]
    variables = environ(tmp_path / "hf", url)
    with subprocess.Popen(command, env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert made.has_stalled.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    offline = run(locating("org/whole"), variables | {"HF_HUB_OFFLINE": "1"}, tmp_path)
    assert "org/whole is neither a directory here nor complete in the cache" in offline.stderr
    made.stalls.clear()
    ended = run(locating("org/whole"), variables, tmp_path)
    assert (Path(ended.stdout.split()[0]) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.thorough
def test_a_terminal_shows_a_progress_bar(served: tuple[Hub, str], tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 120))
    with os.fdopen(leader, "rb", buffering=0) as terminal:
        process = subprocess.Popen(locating("org/whole"), env=environ(tmp_path / "hf", served[1]), stderr=follower)
        os.close(follower)
        shown = b""
        try:
            while part := terminal.read(4096):
                shown += part
        except OSError:  # the other end of the terminal is closed
            pass
        assert process.wait(60) == 0
    assert b"100%" in shown
    assert b"200kB" in shown or b"200k" in shown


@pytest.mark.thorough
def test_without_a_huggingface_hub_that_can(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "huggingface_hub.py").write_text("snapshot_download = None\n")
    variables = environ(tmp_path / "hf", "http://127.0.0.1:1", PYTHONPATH=f"{tmp_path / 'old'}:{ROOT}")
    ended = run(locating("org/whole"), variables, tmp_path)
    assert ended.stderr.startswith("org/whole is not a directory here, and finding it on Hugging Face needs")
    assert "-m pip install 'pagewire[hub]'" in ended.stderr
    assert ended.stderr.count("\n") == 1


def make(directory: Path, *names: str) -> Path:
    directory.mkdir()
    for name in names:
        (directory / name).write_bytes(b"{}")
    return directory


def test_directories_and_files_that_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "sha256-0123").symlink_to("model.gguf")
    make(tmp_path / "good", "config.json", "model.safetensors")
    cases = {
        make(tmp_path / "empty"): "is empty: give a checkpoint directory",
        make(tmp_path / "other", "README.md"): "other has no config.json, so it is not a checkpoint directory: give",
        make(
            tmp_path / "gguf", "model.gguf"
        ): f"contains GGUF files: give one of them, such as {tmp_path}/gguf/model.gguf",
        make(tmp_path / "both", "config.json", "x.gguf"): "no safetensors weights, but GGUF files: give one of them",
        make(tmp_path / "pickled", "config.json", "pytorch_model.bin"): "only pickled weights (pytorch_model.bin)",
        make(tmp_path / "encoder", "mmproj-f16.gguf", "a-model.gguf", "x.mmproj.gguf"): "such as "
        f"{tmp_path}/encoder/a-model.gguf",
        make(
            tmp_path / "encoded", "config.json", "mmproj.gguf", "the-model.gguf"
        ): "give one of them by its path, such as the-model.gguf",
        make(tmp_path / "meta", "consolidated.00.pth", "params.json"): "consolidated.00.pth is in its "
        "publisher's own format",
        make(
            tmp_path / "mistral", "config.json", "consolidated.safetensors"
        ): "consolidated.safetensors is in its publisher's own format; run `hf download OWNER/NAME --exclude",
        make(
            tmp_path / "mixed", "config.json", "consolidated.00.pth", "pytorch_model.bin"
        ): "only pickled weights (consolidated.00.pth)",
        make(
            tmp_path / "good" / "original", "consolidated.00.pth", "params.json"
        ): f"it is not a checkpoint directory; did you mean {tmp_path / 'good'}?",
        make(tmp_path / "bare", "config.json"): "no weights: neither model.safetensors nor",
        tmp_path: f"did you mean {tmp_path / 'bare'}?",
        tmp_path / "goof": f"there is no directory {tmp_path / 'goof'}; did you mean {tmp_path / 'good'}?",
        tmp_path / "none" / "x": "there is no directory",
        tmp_path / "modl.gguf": f"there is no file {tmp_path}/modl.gguf; did you mean {tmp_path}/model.gguf?",
        Path(
            "Qwen/Qwen3-0.6B-Q4_K_M.gguf"
        ): "there is no file Qwen/Qwen3-0.6B-Q4_K_M.gguf: give a checkpoint directory",
        tmp_path / "good" / "model.safetensors": f"is a file: give its directory, {tmp_path / 'good'}",
        tmp_path / "other" / "README.md": "is a file, not a checkpoint directory",
        Path("good/x"): "there is no directory good/x",
        Path("qwen3:0.6b"): "there is no directory qwen3:0.6b",
        Path("models/storyteller"): "there is no directory models/storyteller: give a checkpoint directory",
        Path("hf.co/org/name"): "hf.co/org/name is an address: give the id of the model, org/name",
        "https://huggingface.co/org/name/tree/main": "/main is an address: give the id of the model, org/name",
        "https://example.org/name": "there is no directory https://example.org/name: give",
    }
    for path, message in cases.items():
        with pytest.raises(ModelSourceError) as refused:
            locate(str(path))
        assert message in str(refused.value), path
        assert "\n" not in str(refused.value)
    with pytest.raises(ModelSourceError, match="--revision v1 is for Hugging Face models, but good is a directory"):
        locate("good", "v1")
    with pytest.raises(
        ModelSourceError, match=r"--revision v1 is for Hugging Face models, but model\.gguf is a GGUF file"
    ):
        locate("model.gguf", "v1")
    assert Path(locate("storyteller").directory).samefile(BUNDLED)
    make(tmp_path / "storyteller", "config.json", "model.safetensors")
    assert locate("storyteller").directory == "storyteller", "what is here comes first"
    assert locate("good").directory == "good"
    assert locate("model.gguf").directory == "model.gguf"
    assert locate("sha256-0123").directory == "sha256-0123"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/good").directory == str(tmp_path / "good")
    assert locate("bare", with_weights=False).hub_id is None
