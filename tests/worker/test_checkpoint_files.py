"""Which files of a checkpoint directory are its weights: those that transformers reads, and files of other names."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.hosting.model_source import ModelSourceError, locate
from pagewire.network.checkpoint_files import CheckpointError
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.packed import gptq, make_quantized
from testing.models import load_model
from testing.worker.model_logits import TOLERANCE, compute_logits, edit_config, random_tokens, transformers_logits
from tests.thorough import thorough

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def logits(path):
    return compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())


def check_logits(path):
    """Check that the directory is loaded, and that its logits are those of transformers."""
    expected = transformers_logits(path, random_tokens())
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def split(path, names=HALVES, index=INDEX):
    """Split the weights into two files of the given names, with an index if `index` is not None. Return the index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: names[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in names:
        own = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(own, path / file, {"format": "pt"})
    if index is not None:
        write_index(path, weight_map, index)
    return weight_map


def write_index(path, weight_map, index=INDEX):
    (path / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_may_list_a_tied_head_that_no_file_has(tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=41, tie_word_embeddings=True)
    write_index(path, {**split(path), "lm_head.weight": HALVES[0]})
    check_logits(path)


def test_tensors_that_the_index_does_not_list_count(tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=42)
    weight_map = split(path)
    write_index(
        path, {name: file for name, file in weight_map.items() if "layers.1" not in name and "head" not in name}
    )
    check_logits(path)


def test_the_file_that_has_a_tensor_counts_not_the_index(tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=43)
    weight_map = split(path)
    write_index(path, {name: HALVES[file == HALVES[0]] for name, file in weight_map.items()})
    check_logits(path)


def test_of_a_tensor_in_two_files_the_last_counts(tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=44)
    weight_map = split(path)
    first, last = (load_file(path / file) for file in HALVES)
    for name in ("model.norm.weight", "lm_head.weight"):
        original = first.get(name, last.get(name))
        first[name], last[name] = original + 1, original - 1
    for file, tensors in zip(HALVES, (first, last), strict=True):
        save_file(tensors, path / file, {"format": "pt"})
    write_index(path, {**weight_map, "model.norm.weight": HALVES[0]})
    check_logits(path)


def test_a_missing_tensor_is_named_even_if_the_index_lists_it(tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=45)
    weight_map = split(path)
    file = path / weight_map["model.norm.weight"]
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing in"):
        logits(path)


NAMED = "gptq_model-4bit-16g"
PARTS = (f"{NAMED}-00001-of-00002.safetensors", f"{NAMED}-00002-of-00002.safetensors")


@pytest.mark.parametrize("form", ["one file", *thorough("parts", "parts with index", "beside an adapter")])
def test_weights_in_files_of_other_names(tmp_path, form):
    """AutoGPTQ names its files by bits and group size; transformers no longer finds them, vLLM does."""
    case = gptq("GPTQ", 4, 16, version="gptq", sym=True, g_idx="in order")
    path, plain = make_quantized(tmp_path, "llama", case, seed=46)
    if form.startswith("parts"):
        split(path, PARTS, f"{NAMED}.safetensors.index.json" if "index" in form else None)
    else:
        (path / "model.safetensors").rename(path / f"{NAMED}.safetensors")
    if form == "beside an adapter":
        save_file({"a": torch.zeros(1)}, path / "adapter_model.safetensors")
        save_file({"a": torch.zeros(1)}, path / "consolidated.safetensors")
    assert locate(str(path)).directory == str(path)
    assert torch.equal(logits(path), logits(plain))


UNCLEAR = [
    (("a.safetensors", "b.safetensors"), r"several models, a\.safetensors and b\.safetensors, and no model\.safetens"),
    (PARTS[:1], rf"has 1 of 2 parts of the weights, such as {re.escape(PARTS[0])}"),
    ((*PARTS, "a-00001-of-00001.safetensors"), r"several models, a-00001-of-00001\.safetensors and gptq_model"),
    (("adapter_model.safetensors", "adapter_config.json"), r"is an adapter \(adapter_config\.json\) without its model"),
    (
        ("adapter_model.safetensors",),
        r"(holds|has no weights:) neither model\.safetensors nor model\.safetensors\.index",
    ),
]


@pytest.mark.parametrize(("names", "message"), UNCLEAR)
def test_it_is_said_which_files_cannot_be_used(tmp_path, names, message):
    make_checkpoint(tmp_path, "llama", seed=1)
    (tmp_path / "model.safetensors").unlink()
    for name in names:
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        logits(tmp_path)
    with pytest.raises(ModelSourceError, match=message):
        locate(str(tmp_path))
    assert locate(str(tmp_path), with_weights=False).directory == str(tmp_path)


def test_a_file_that_only_config_json_names_is_refused(tmp_path):
    """transformers would read this file in place of model.safetensors."""
    path = make_checkpoint(tmp_path, "llama", seed=47)
    edit_config(path, transformers_weights="model.safetensors")
    check_logits(path)
    edit_config(path, transformers_weights="other.safetensors")
    with pytest.raises(
        CheckpointError, match=r'transformers_weights is "other\.safetensors", but must be one of model'
    ):
        logits(path)


def test_a_directory_with_only_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    for with_weights in (True, False):
        with pytest.raises(
            ModelSourceError, match=r"is an adapter \(adapter_config\.json\) without its model: merge both"
        ):
            locate(str(tmp_path), with_weights=with_weights)
