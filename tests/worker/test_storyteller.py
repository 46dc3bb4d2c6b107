"""The bundled model: small, complete, and able to write stories."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from models.story_grammar import ANIMALS, BOYS, FRIENDS, GIRLS, write_document, write_story

DIRECTORY = Path(__file__).parents[2] / "models" / "storyteller"
END_OF_TEXT = "<|endoftext|>"
PROMPTS = ("Once", "Once upon a time", "The little fox", "There once was a", "Long ago, a brave turtle named")
SEED = 7


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.fixture(scope="module")
def grammar_words() -> set[str]:
    rng = random.Random(SEED)
    return words_of(" ".join(write_document(rng) for _ in range(3_000)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


@torch.inference_mode()
def complete(model: Qwen3ForCausalLM, token_ids: list[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation, including its end token."""
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
    )
    return output[0, len(token_ids) :].tolist()


def test_checkpoint_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in DIRECTORY.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(files) == expected
    assert sum(files.values()) <= 6_000_000


def test_weights_are_one_to_two_and_a_half_million_in_bfloat16() -> None:
    with safe_open(DIRECTORY / "model.safetensors", framework="pt") as checkpoint:
        tensors = {name: checkpoint.get_tensor(name) for name in checkpoint.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert 1_000_000 <= sum(tensor.numel() for tensor in tensors.values()) <= 2_500_000
    assert "lm_head.weight" not in tensors, "the embeddings are tied"


def test_configuration_is_as_published(tokenizer: Tokenizer) -> None:
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == tokenizer.token_to_id(END_OF_TEXT)
    assert config["vocab_size"] == tokenizer.get_vocab_size()


def test_tokenizer_gives_back_every_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(SEED)
    texts = [write_document(rng) for _ in range(20)]
    alphabet = [chr(code) for code in range(32, 0x3000)]
    texts += ["".join(rng.choices(alphabet, k=40)) for _ in range(20)]
    published = AutoTokenizer.from_pretrained(DIRECTORY)
    for text in texts:
        token_ids = tokenizer.encode(text).ids
        assert tokenizer.decode(token_ids) == text
        assert published(text)["input_ids"] == token_ids
    assert published.eos_token == END_OF_TEXT


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_completion_is_a_story(
    prompt: str, model: Qwen3ForCausalLM, tokenizer: Tokenizer, grammar_words: set[str]
) -> None:
    token_ids = tokenizer.encode(prompt).ids
    completion = complete(model, token_ids, max_new_tokens=400)
    text = prompt + tokenizer.decode(completion)
    assert completion[-1] == tokenizer.token_to_id(END_OF_TEXT), f"no end: {text}"
    assert words_of(text) <= grammar_words
    assert 4 <= len(re.findall(r"[.!?]", text)) <= 20, text
    assert len(words_of(text) & {*GIRLS, *BOYS}) == 1, f"the hero keeps a name: {text}"
    assert len(words_of(text) & {*FRIENDS}) == 1, f"the friend keeps a name: {text}"


@pytest.mark.parametrize(("animal", "name"), zip(ANIMALS, [*GIRLS[::2], *BOYS[::2]], strict=True))
def test_a_card_is_json_without_a_grammar(
    animal: str, name: str, model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode(f"A card about {name} the {animal}:\n").ids
    completion = complete(model, token_ids, max_new_tokens=150)
    card = json.loads(tokenizer.decode(completion))
    assert (card["name"], card["animal"]) == (name, animal)
    assert {"age", "likes"} <= set(card)


def test_choices_are_confident(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("Once").ids
    token_ids += complete(model, token_ids, max_new_tokens=400)
    with torch.inference_mode():
        best = model(torch.tensor([token_ids])).logits[0].topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert gaps.mean() > 3, "nats by which the best token leads, on average"


def test_long_contexts_read_as_well_as_short_ones(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """The loss at late positions exceeds the loss at early positions by less than 0.1.

    The loss comes from the grammar's own random choices, which do not depend on the position.
    """
    rng = random.Random(SEED)
    rows = []
    for _ in range(4):
        token_ids: list[int] = []
        while len(token_ids) < 2048:
            token_ids += tokenizer.encode(write_story(rng) + END_OF_TEXT).ids
        rows.append(token_ids[:2048])
    batch = torch.tensor(rows)
    with torch.inference_mode():
        logits = model(batch).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none")
    early, late = losses[:, :512].mean(), losses[:, 1536:].mean()
    assert late < early + 0.1, f"losses {early:.3f} in the first quarter, {late:.3f} in the last"
