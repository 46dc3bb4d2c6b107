"""Files that llama.cpp's own converter wrote, of the bundled model and of another model with its tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.story_grammar import write_document
from models.train_storyteller import RECIPES
from pagewire.common.gguf import GgufFile, tokenizer_config_json, tokenizer_json
from pagewire.network.source import load_config
from testing.seeds import seeded

BUNDLED = Path(__file__).parents[2] / "models" / "storyteller"
FILES = sorted((Path(__file__).parent / "fixtures").glob("*.gguf"))
SEED = 11


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_configuration_is_the_checkpoints(path, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RECIPES[path.stem.partition("-")[0]].config))
    assert load_config(path) == load_config(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_tokenizer_is_the_checkpoints(path):
    file = GgufFile.open(path)
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(file)))
    theirs = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    rng = seeded(SEED)
    alphabet = [chr(code) for code in range(9, 0x3000)]
    texts = [write_document(rng) + "<|endoftext|>" for _ in range(10)]
    texts += ["".join(rng.choices(alphabet, k=40)) for _ in range(50)]
    for text in texts:
        token_ids = theirs.encode(text).ids
        assert ours.encode(text).ids == token_ids
        assert ours.decode(token_ids, skip_special_tokens=False) == text
    assert ours.get_vocab() == theirs.get_vocab()
    described = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    assert tokenizer_config_json(file)["chat_template"] == described["chat_template"]
    assert tokenizer_config_json(file)["eos_token"] == described["eos_token"]
