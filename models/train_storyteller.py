"""Trains the bundled model: `python -m models.train_storyteller [DIRECTORY]`, from the repository's root.

`--shape wide` trains a model whose row lengths fit llama.cpp's K-quants. The repository does not contain this model,
but the tests' GGUF files are made from it (models/quantize_fixtures.py).

The script writes a checkpoint directory as published on the Hugging Face Hub. With the same versions of torch,
transformers and tokenizers, on the same kind of CPU, it writes the same bytes. On other CPUs sums round differently,
and so the weights differ. Training takes about ten minutes on one core. It uses only one core, because the division of
sums among threads would change their rounding.
"""

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.story_grammar import write_document, write_story_or_card
from models.story_tokens import END_OF_TEXT, sequences

logger = logging.getLogger("train_storyteller")

MAX_MODEL_LEN = 2048
NUM_TOKENIZER_DOCUMENTS = 2_000
SAMPLE_PROMPTS = (
    "Once",
    "The little fox",
    "There once was a brave turtle",
    "Long ago, a shy cat named Ivy",
    "A card about Pip the fox:\n",
)

SEED = 20
NUM_WARMUP_STEPS = 40
NUM_TOKENS_PER_STEP = 2048
# The first half of the steps trains on short sequences. The second half uses all lengths, so that it covers every
# position.
LENGTHS = (256, 512, 1024, MAX_MODEL_LEN)
MAX_LEARNING_RATE = 3e-3
MIN_LEARNING_RATE = 3e-5

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 0,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_MODEL_LEN,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 1024,
}
# K-quants need rows of a multiple of 256 weights.
WIDE_CONFIG = {
    **CONFIG,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


@dataclass(frozen=True)
class Recipe:
    """The recipe of a model: its configuration, the function that writes a training document, and the number of
    steps."""

    config: Mapping[str, Any]
    write: Callable[[random.Random], str]
    num_steps: int


RECIPES = {"bundled": Recipe(CONFIG, write_story_or_card, 1300), "wide": Recipe(WIDE_CONFIG, write_document, 1000)}
# The model continues the text of the conversation. It knows empty lines between the stories of a collection, so the
# template adds an empty line before every further message of the user.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last and message['role'] != 'user' %}{{ '\n\n' }}{% endif %}"
    "{% endfor %}"
)
TOKENIZER_CONFIG = {
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": END_OF_TEXT,
    "model_max_length": MAX_MODEL_LEN,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
GENERATION_CONFIG = {"eos_token_id": 0}


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which has no unknown tokens. Token 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def batches(tokenizer: Tokenizer, rng: random.Random, recipe: Recipe) -> Iterator[Tensor]:
    """Yield the token ids of each step, [num_sequences, length]."""
    for step in range(recipe.num_steps):
        length = LENGTHS[0] if step < recipe.num_steps // 2 else LENGTHS[step % len(LENGTHS)]
        rows = sequences(tokenizer, rng, length, recipe.write)
        yield torch.tensor([next(rows) for _ in range(NUM_TOKENS_PER_STEP // length)])


def learning_rate(step: int, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine decay from the maximum to the minimum."""
    if step < NUM_WARMUP_STEPS:
        return MAX_LEARNING_RATE * (step + 1) / NUM_WARMUP_STEPS
    progress = (step - NUM_WARMUP_STEPS) / (num_steps - NUM_WARMUP_STEPS)
    return MIN_LEARNING_RATE + (MAX_LEARNING_RATE - MIN_LEARNING_RATE) * (1 + math.cos(math.pi * progress)) / 2


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, rng: random.Random, recipe: Recipe) -> None:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=MAX_LEARNING_RATE, betas=(0.9, 0.95))
    started = time.monotonic()
    for step, token_ids in enumerate(batches(tokenizer, rng, recipe)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.num_steps)
        loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            logger.info(
                "step %d of %d, loss %.4f, %.0f s", step + 1, recipe.num_steps, loss.item(), time.monotonic() - started
            )


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, config: Mapping[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # The output embedding is tied to the input embedding, so it is stored only once.
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def print_samples(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    for prompt in SAMPLE_PROMPTS:
        token_ids = torch.tensor([tokenizer.encode(prompt).ids])
        output = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), do_sample=False, max_length=512)
        print(tokenizer.decode(output[0].tolist(), skip_special_tokens=False), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model, or another model of the same architecture.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("models/storyteller"))
    parser.add_argument("--shape", choices=RECIPES, default="bundled", help="which model (default: %(default)s)")
    args = parser.parse_args()
    recipe = RECIPES[args.shape]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rng = random.Random(SEED)
    tokenizer = train_tokenizer([write_document(rng) for _ in range(NUM_TOKENIZER_DOCUMENTS)], CONFIG["vocab_size"])
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(recipe.config))
    logger.info("%d parameters", sum(parameter.numel() for parameter in model.parameters()))
    train(model.train(), tokenizer, rng, recipe)
    save(model, tokenizer, recipe.config, args.directory)
    print_samples(Qwen3ForCausalLM.from_pretrained(args.directory).eval(), tokenizer)


if __name__ == "__main__":
    main()
