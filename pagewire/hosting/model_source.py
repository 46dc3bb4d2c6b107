"""The lookup of MODEL: a checkpoint directory, a GGUF file, or a Hugging Face model, which becomes a directory.

A hub id is looked up in huggingface_hub's local cache. Missing files are downloaded into the cache, unless
HF_HUB_OFFLINE is set. Only files that the services read are downloaded, never pickled weights or a second weight
format.
"""

import hashlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pagewire import installation
from pagewire.client.errors import CommandError
from pagewire.common.gguf import is_gguf
from pagewire.common.process.memory_size import describe_memory
from pagewire.compatibility import suggestion
from pagewire.network.checkpoint_files import (
    ADAPTER_ALONE,
    ADAPTER_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    weight_files,
)
from pagewire.network.pooling_config import read_pooling

log = logging.getLogger(__name__)

EXAMPLE = "Qwen/Qwen3-0.6B"
# In a source tree, this is a link to models/storyteller. An installed package contains the files.
BUNDLED = Path(__file__).parents[1] / "storyteller"
GIVE = (
    f"give a checkpoint directory, a GGUF file, or the id of a Hugging Face model such as {EXAMPLE}; {BUNDLED.name} is "
    "the bundled model"
)
MISSING = f"MODEL is missing (also --model): {GIVE}"
# The files besides the weights that the scheduler, the worker and routers read.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "modules.json",
    "*_Pooling/config.json",
    "*.safetensors.index.json",
    "*_Dense*/config.json",
    "config_sentence_transformers.json",
    ADAPTER_FILE,
)
PICKLED = (".bin", ".pt", ".pth")
# "models/..." is never a hub id, since the hub has no owner of that name. It is a folder, as in the commands of the
# README.
_HUB_ID = re.compile(r"(?!models/)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+).*")


class ModelSourceError(CommandError):
    """Raised if the MODEL argument of a command cannot be served. The message names the problem and suggests a valid
    MODEL."""


class DownloadError(ModelSourceError):
    """Raised if the download of a model failed. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class ModelSourceConfig:
    revision: str | None = field(
        default=None, metadata={"help": "branch, tag or commit of a Hugging Face model (default: main)"}
    )

    def validate(self) -> None:
        """Accept any revision of a Hugging Face model. The hub itself checks whether the revision exists."""


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """The checkpoint directory or GGUF file that the MODEL argument of a command names. `hub_id` is its id on Hugging
    Face, or None for a local model."""

    directory: str
    hub_id: str | None = None


def locate(model: str, revision: str | None = None, *, with_weights: bool = True) -> LocatedModel:
    """Return the checkpoint directory or GGUF file that the MODEL argument of a command names. Files of a Hugging Face
    model that are missing in the cache are downloaded.

    With `with_weights` False, only the files that a scheduler or a front end reads are required. Raise ModelSourceError
    for a MODEL that cannot be served, and DownloadError if a download fails.
    """
    if model == BUNDLED.name and not Path(model).exists():
        model = str(BUNDLED)
    path = Path(model).expanduser()
    is_directory = path.is_dir()
    if is_directory or is_gguf(path):
        if revision is not None:
            kind = "directory" if is_directory else "GGUF file"
            raise ModelSourceError(
                f"--revision {revision} is for Hugging Face models, but {model} is a {kind}: leave it out"
            )
        if is_directory:
            check_directory(path, with_weights=with_weights)
        return LocatedModel(str(path))
    if path.exists():
        raise ModelSourceError(_file_refusal(path))
    if address := _HUB_ADDRESS.fullmatch(model):
        raise ModelSourceError(f"{model} is an address: give the id of the model, {address[1]}")
    if _is_gguf_name(model):
        beside = [entry.name for entry in path.parent.glob("*") if _is_gguf_name(entry.name)]
        raise ModelSourceError(f"there is no file {model}{_path_hint(path, beside)}")
    if not _is_hub_id(model):
        beside = [entry.name for entry in path.parent.glob("*") if entry.is_dir()]
        raise ModelSourceError(f"there is no directory {model}{_path_hint(path, beside)}")
    return LocatedModel(str(_HubModel(model, revision, with_weights=with_weights).directory()), model)


def check_directory(path: Path, *, with_weights: bool) -> None:
    """Raise ModelSourceError if a directory does not contain a model checkpoint in a supported format."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ModelSourceError(f"cannot read the directory {path}: {error.strerror}") from None
    if not names:
        raise ModelSourceError(f"{path} is empty: {GIVE}")
    is_whole = "config.json" in names and (not with_weights or bool(_weight_files(path, names)))
    if ADAPTER_FILE in names and not is_whole:
        raise ModelSourceError(f"{path} {ADAPTER_ALONE}")
    if "config.json" not in names:
        inside = [path / name for name in names if (path / name / "config.json").is_file()]
        files = _gguf_models(names)
        if not inside and files:
            raise ModelSourceError(f"{path} contains GGUF files: give one of them, such as {path / files[0]}")
        inside += [path.parent] if (path.parent / "config.json").is_file() else []
        hint = f"; did you mean {inside[0]}?" if inside else f": {_native_format(names) or GIVE}"
        raise ModelSourceError(f"{path} has no config.json, so it is not a checkpoint directory{hint}")
    if not is_whole:
        raise ModelSourceError(f"{path} has {_without_safetensors(names)}")


def _without_safetensors(names: Iterable[str]) -> str:
    """Return a phrase for an error message about a checkpoint without safetensors files. The phrase describes the
    weights that were found, and a remedy."""
    native = _native_format(names)
    pickled = [name for name in names if name.endswith(PICKLED)]
    if native and all(_is_native(name) for name in pickled):
        return f"no weights in the format that is read: {native}"
    if pickled:
        return (
            f"only pickled weights ({pickled[0]}), which can run any code and are never loaded: convert them to "
            "safetensors, for instance with save_pretrained of transformers"
        )
    files = _gguf_models(names)
    if files:
        return f"no safetensors weights, but GGUF files: give one of them by its path, such as {files[0]}"
    return f"no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"


def _native_format(names: Iterable[str]) -> str:
    """Return a hint for an error message if a checkpoint has only weights in the unconverted formats of Meta and
    Mistral. Return an empty text if there are no such weights."""
    native = [name for name in names if _is_native(name)]
    if not native:
        return ""
    command = "`hf download OWNER/NAME --exclude 'consolidated*' 'original/*'`"
    return f"{native[0]} is in its publisher's own format; run {command}"


def _is_native(name: str) -> bool:
    return name.rpartition("/")[2].startswith("consolidated.")


def _gguf_models(names: Iterable[str]) -> list[str]:
    """Return the names of the GGUF files that may contain a language model. Image encoders, which are GGUF files too,
    are left out."""
    return [name for name in names if _is_gguf_name(name) and "mmproj" not in name.lower()]


def _is_gguf_name(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _path_hint(path: Path, names: Iterable[str]) -> str:
    """Return a hint for an error message about a missing path: the most similar of `names`, or a general hint if no
    name is similar."""
    near = suggestion(path.name, names)
    return near.replace("did you mean ", f"did you mean {path.parent}/") if near else f": {GIVE}"


def _file_refusal(path: Path) -> str:
    if path.suffix == ".safetensors" or path.name == "config.json":
        return f"{path} is a file: give its directory, {path.parent}"
    return f"{path} is a file, not a checkpoint directory: {GIVE}"


def _is_hub_id(model: str) -> bool:
    """Return whether the MODEL argument of a command may be the id of a model on Hugging Face.

    A name inside an existing directory is a mistyped path instead.
    """
    return bool(_HUB_ID.fullmatch(model)) and not ("/" in model and Path(model).parent.is_dir())


def _weight_files(path: Path, names: Iterable[str]) -> list[str]:
    """Return the names of the safetensors files with a model's weights, as `weight_files` does. Raise ModelSourceError
    if the index is broken or it is unclear which files belong to the model."""
    try:
        return weight_files(path, names)
    except CheckpointError as error:
        raise ModelSourceError(str(error)) from None


def _dense_files(snapshot: Path) -> list[str]:
    """Return the names of the weight files of the dense layers that follow the pooling of an embedding model. Raise
    ModelSourceError if the configuration of these layers is broken."""
    try:
        return [f"{module.folder}/{SINGLE_FILE}" for module in read_pooling(snapshot).dense]
    except (OSError, ValueError) as error:
        raise ModelSourceError(str(error)) from None


def _is_whole(blob: Path) -> bool:
    """Check the content of a file in the Hugging Face cache. Return whether the content has the digest that is the
    file's name.

    The hub names files in Git LFS by their SHA-256 digest, and other files by git's own digest. Return True for a file
    with any other name, which cannot be checked.
    """
    with blob.open("rb") as stream:
        if len(blob.name) == 2 * hashlib.sha256().digest_size:
            return hashlib.file_digest(stream, "sha256").hexdigest() == blob.name
        if len(blob.name) == 2 * hashlib.sha1(usedforsecurity=False).digest_size:
            content = stream.read()
            head = f"blob {len(content)}\0".encode()
            return hashlib.sha1(head + content, usedforsecurity=False).hexdigest() == blob.name
    return True


def _remove(path: Path) -> None:
    """Remove a file from a snapshot in the Hugging Face cache. A snapshot has symbolic links to blobs, so the blob is
    removed too."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def _end_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process immediately inside a `with` block that downloads files. Python itself would first wait
    for the download threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _HubModel:
    """One revision of a Hugging Face model, which is looked up in the local cache or downloaded."""

    def __init__(self, hub_id: str, revision: str | None, *, with_weights: bool) -> None:
        self._id = hub_id
        self._revision = revision
        self._with_weights = with_weights
        self._name = hub_id if revision is None else f"{hub_id} at revision {revision}"

    def directory(self) -> Path:
        """Return the model's snapshot directory in the Hugging Face cache, and download missing files. If the cache is
        complete, the hub is not contacted."""
        try:
            from huggingface_hub import constants, get_cached_repo_tree, snapshot_download  # noqa: F401
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError as error:
            raise ModelSourceError(
                f"{self._id} is not a directory here, and finding it on Hugging Face needs huggingface_hub ({error}): "
                f"{installation.command('hub', installation.NEEDED['hub'])}"
            ) from None
        for client in ("httpx", "httpx2"):  # at INFO they log every HTTP request
            logging.getLogger(client).setLevel(logging.WARNING)
        cached = self._cached()
        if cached is not None:
            log.info("%s is in the local cache: %s", self._name, cached)
            return cached
        if constants.is_offline_mode():
            raise ModelSourceError(self._not_here("HF_HUB_OFFLINE forbids downloading: unset it,"))
        if not sys.stderr.isatty():
            disable_progress_bars()
        return self._downloaded()

    def _cached(self) -> Path | None:
        """Return the model's snapshot directory in the Hugging Face cache. Return None if a required file is missing or
        truncated."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            snapshot = self._fetch(SMALL_FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        if self._remove_cut_files(snapshot) or not (snapshot / "config.json").is_file():
            return None
        if not self._with_weights:
            return snapshot
        there = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
        try:
            weights = weight_files(snapshot, (name for name in there if "/" not in name))
        except CheckpointError:  # parts may be missing
            return None
        return snapshot if weights and there.issuperset([*weights, *_dense_files(snapshot)]) else None

    def _remove_cut_files(self, snapshot: Path) -> bool:
        """Remove the files of a cached snapshot whose size differs from the size on the hub, so that they are
        downloaded again.

        A crash or a full disk leaves such files. Return whether a file was removed.
        """
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            files = get_cached_repo_tree(self._id, revision=snapshot.name)
        except CachedRepoTreeNotFoundError:
            return False
        sizes = {snapshot / file.path: file.size for file in files}
        cut = [path for path, size in sizes.items() if path.is_file() and path.stat().st_size != size]
        for path in cut:
            log.warning("%s has %d bytes of %d: downloading it again", path, path.stat().st_size, sizes[path])
            _remove(path)
        return bool(cut)

    def _downloaded(self) -> Path:
        try:
            with _end_at_ctrl_c():
                return self._download()
        except ModelSourceError:
            raise
        except Exception as error:  # the HTTP client's exceptions have other names in each version
            raise DownloadError(self._explain(error)) from None

    def _download(self) -> Path:
        from huggingface_hub import get_cached_repo_tree

        there = self._blobs()
        snapshot = self._fetch(SMALL_FILES)
        self._check_new_files(snapshot, there)
        # The commit is now known, and its list of files is cached. The weights come from the same commit.
        sizes = {file.path: file.size for file in get_cached_repo_tree(self._id, revision=snapshot.name)}
        if ADAPTER_FILE in sizes and "config.json" not in sizes:
            raise ModelSourceError(f"the Hugging Face repository {self._name} {ADAPTER_ALONE}")
        if "config.json" not in sizes:
            raise ModelSourceError(f"the Hugging Face repository {self._name} has {self._without_config(sizes)}")
        if self._with_weights:
            there = self._blobs()
            self._download_weights(snapshot, sizes)
            self._check_new_files(snapshot, there)
        return snapshot

    def _blobs(self) -> set[str]:
        """Return the names of all blobs (file contents) that the Hugging Face cache has for this model, of any
        revision."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self._id, repo_type="model") / "blobs"
        return {path.name for path in folder.glob("*")}

    def _check_new_files(self, snapshot: Path, there: Container[str]) -> None:
        """Verify the downloaded files of a snapshot against the hub's digests. Files whose blobs are in `there` were
        cached before and are not verified.

        If a file is corrupt, remove it and raise DownloadError.
        """
        paths = [path for path in snapshot.rglob("*") if path.is_file() and path.resolve().name not in there]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            are_whole = list(threads.map(lambda path: _is_whole(path.resolve()), paths))
        spoilt = [path for path, is_whole in zip(paths, are_whole, strict=True) if not is_whole]
        for path in spoilt:
            _remove(path)
        if spoilt:
            raise DownloadError(
                f"{spoilt[0]} differs from the file of {self._name} on the hub and was removed: start again to "
                "download it once more; if that does not help, look for a proxy that changes files, or a failing disk"
            )

    def _without_config(self, names: Iterable[str]) -> str:
        files = sorted(_gguf_models(names))
        if not files:
            return f"no config.json: {GIVE}"
        return (
            f"GGUF files and no config.json: run `hf download {self._id} {files[0]}`, or for another of them, and give "
            "the path that it prints"
        )

    def _download_weights(self, snapshot: Path, sizes: Mapping[str, int]) -> None:
        names = _weight_files(snapshot, (name for name in sizes if "/" not in name))
        if not names:
            raise ModelSourceError(f"the Hugging Face repository {self._name} has {_without_safetensors(sizes)}")
        names += _dense_files(snapshot)
        missing = [name for name in names if name not in sizes]
        if missing:
            raise ModelSourceError(
                f"the Hugging Face repository {self._name} lacks {missing[0]}, which its index names: choose another "
                "revision"
            )
        size = describe_memory(sum(sizes[name] for name in names))
        # Logged as a warning to be always visible: the download may take long, and only a terminal shows a progress
        # bar.
        log.warning("downloading %s: weights in %d files, %s", self._name, len(names), size)
        started_at = time.monotonic()
        self._fetch(names, revision=snapshot.name)
        log.warning("downloaded %s in %.1f s to %s", self._name, time.monotonic() - started_at, snapshot)

    def _fetch(self, names: Iterable[str], *, revision: str | None = None, local_files_only: bool = False) -> Path:
        """Download the named files, as far as the repository has them, and return the snapshot directory in the Hugging
        Face cache. With `local_files_only`, only look the snapshot up in the cache."""
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self._id,
                revision=revision or self._revision,
                allow_patterns=list(names),
                local_files_only=local_files_only,
            )
        )

    def _explain(self, error: Exception) -> str:
        from huggingface_hub import constants, errors

        if isinstance(error, errors.GatedRepoError):
            return (
                f"the Hugging Face model {self._id} is gated: accept its terms at {constants.ENDPOINT}/{self._id}, "
                "then log in with `hf auth login` or set HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"the Hugging Face model {self._id} has no revision {self._revision}: give a branch, tag or commit"
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return (
                f"{self._id} is neither a directory here nor a model that you can access at {constants.ENDPOINT}: "
                "check the name; for a private model, log in "
                "with `hf auth login` or set HF_TOKEN"
            )
        # If the hub is unreachable, an incomplete snapshot without a cached list of its files is found here.
        if isinstance(error, errors.LocalEntryNotFoundError | errors.CachedRepoTreeNotFoundError):
            cause = f" ({' '.join(str(error.__cause__).split())})" if error.__cause__ else ""
            return self._not_here(f"{constants.ENDPOINT} cannot be reached{cause}:")
        reason = " ".join(str(error).split())
        return f"the Hugging Face model {self._name} cannot be downloaded to {constants.HF_HUB_CACHE}: {reason}"

    def _not_here(self, why: str) -> str:
        from huggingface_hub import constants

        return (
            f"{self._name} is neither a directory here nor complete in the cache {constants.HF_HUB_CACHE}, and {why} "
            f"run `hf download {self._id}` where there is a network and copy the cache, or give a checkpoint directory"
        )
