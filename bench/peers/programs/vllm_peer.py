"""Runs batches through vLLM's offline engine."""

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--kv-cache-memory", type=int, required=True, help="bytes")
    parser.add_argument("--max-model-len", type=int, default=2048)
    arguments = parser.parse_args()
    # By default, vLLM reserves a core for its scheduler and computes on the others, which is one of two cores here.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=arguments.model,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=256,
        # By default, vLLM requires 92 % of the machine's memory and does not start if less is free.
        kv_cache_memory_bytes=arguments.kv_cache_memory,
    )
    print("peer: ready", flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in batch["output_lens"]
        ]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == batch["output_lens"]
        print(f"peer: {seconds}", flush=True)


# vLLM's engine is a process that imports this file again.
if __name__ == "__main__":
    main()
