"""Runs transformers' `generate` with one static batch, or its continuous batching as `generate_batch` does."""

import argparse
import json
import sys
import time

import torch
import transformers


@torch.inference_mode()
def generate(model, prompts: list[list[int]], output_lens: list[int]) -> None:
    """Generate on a CPU. Prompts are padded on the left to the longest, and every row runs for the longest output."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    length = max(output_lens)
    output = model.generate(token_ids, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0)
    assert output.shape[1] == longest + length


def generate_batch(manager, prompts: list[list[int]], output_lens: list[int]) -> None:
    """Generate by continuous batching. Every request has its own output length."""
    missing = {}
    for prompt, length in zip(prompts, output_lens, strict=True):
        missing[manager.add_request(prompt, max_new_tokens=length)] = length
    while missing:
        result = manager.get_result(timeout=1)
        if result is None:
            assert manager.is_running(), "continuous batching has ended"
        elif result.is_finished():
            assert result.error is None, result.error
            assert len(result.generated_tokens) == missing.pop(result.request_id)


def answer(run) -> None:
    print("peer: ready", flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        start = time.perf_counter()
        run(batch["prompts"], batch["output_lens"])
        print(f"peer: {time.perf_counter() - start}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--mode", choices=["generate", "generate_batch"], required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    dtype = getattr(torch, arguments.dtype)
    if arguments.load_format == "dummy":
        config = transformers.AutoConfig.from_pretrained(arguments.model)
        with torch.device(arguments.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        model.generation_config = transformers.GenerationConfig()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        model.to(arguments.device)
    if arguments.mode == "generate":
        answer(lambda prompts, output_lens: generate(model, prompts, output_lens))
        return
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        batching = model.continuous_batching_context_manager(generation_config=config, timeout=5)
    except (AttributeError, TypeError) as error:
        sys.exit(
            f"this needs the continuous batching of transformers 5.23; {transformers.__version__} differs: {error}"
        )
    with batching as manager:
        answer(lambda prompts, output_lens: generate_batch(manager, prompts, output_lens))


if __name__ == "__main__":
    main()
