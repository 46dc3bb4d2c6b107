"""Runs batches through mistral.rs, from a GGUF file.

mistral.rs accepts text only, and a tokenizer only if its tokens are those of the file. In this program's tokenizer each
of them is a word, so that a prompt of n words has n tokens.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# A prompt is its message alone.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tokenizer(tokens: list[str]) -> dict:
    """Return the contents of a tokenizer.json whose tokens are words."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": tokens[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    arguments = parser.parse_args()
    from gguf import GGUFReader
    from mistralrs import ChatCompletionRequest, Runner, Which

    tokens = GGUFReader(arguments.model).fields["tokenizer.ggml.tokens"].contents()
    with tempfile.TemporaryDirectory() as folder:
        path, template = Path(folder) / "tokenizer.json", Path(folder) / "template.jinja"
        path.write_text(json.dumps(tokenizer(tokens)))
        template.write_text(TEMPLATE)
        which = Which.GGUF(
            quantized_model_id=str(arguments.model.parent),
            quantized_filename=arguments.model.name,
            tokenizer_json=str(path),
        )
        engine = Runner(which=which, max_seqs=arguments.max_num_seqs, prefix_cache_n=0, jinja_explicit=str(template))

    def begin(prompt: list[int], length: int) -> Iterator:
        """Send a prompt and await its first token."""
        chunks = engine.send_chat_completion_request(
            ChatCompletionRequest(
                messages=" ".join(tokens[token] for token in prompt),
                model="default",
                max_tokens=length,
                temperature=0.0,
                top_k=1,
                stream=True,
                ignore_eos=True,
            )
        )
        next(chunks)
        return chunks

    print("peer: ready", flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        start = time.perf_counter()
        # One after another, because version 0.9.5 fails if it computes several prompts at once.
        streams = [begin(*each) for each in zip(batch["prompts"], batch["output_lens"], strict=True)]
        found = [1 + sum(1 for _ in chunks) for chunks in streams]
        seconds = time.perf_counter() - start
        assert found == batch["output_lens"], f"{found} tokens, not {batch['output_lens']}"
        print(f"peer: {seconds}", flush=True)


if __name__ == "__main__":
    main()
