"""Compares beam search through both services with transformers' `generate(num_beams=4)`, in the same run.

    python -m bench beam

Both use the same number of threads and run in turns, with new random prompts in every round, one request at a time. The
raw numbers are written to bench/results/beam.json.
"""

import argparse
import random
import statistics
import time
from contextlib import ExitStack

import torch
import transformers

from bench.checkpoint import SHAPES, random_checkpoint
from bench.goals import verdict
from pagewire import Client, SamplingParams
from testing.services import running

VOCAB_SIZE = SHAPES["54M"]["vocab_size"]
DTYPES = ("bfloat16", "float32")
GOAL = 2.0


def ours(client: Client, prompt: list[int], arguments: argparse.Namespace) -> list[int]:
    """Return the best hypothesis of our beam search."""
    sampling = SamplingParams(beam_width=arguments.beam_width, max_tokens=arguments.output_len, ignore_eos=True)
    return list(client.complete(None, sampling, prompt_token_ids=prompt).outputs[0].token_ids)


def theirs(model: transformers.PreTrainedModel, prompt: list[int], arguments: argparse.Namespace) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            num_beams=arguments.beam_width,
            max_new_tokens=arguments.output_len,
        )
    return output[0, len(prompt) :].tolist()


def measure_dtype(dtype: str, arguments: argparse.Namespace) -> dict:
    path = random_checkpoint("54M")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    rng = random.Random(0)
    rounds = []
    with ExitStack() as stack:
        worker = ["--dtype", dtype, "--num-threads", arguments.num_threads, "--num-device-blocks", 512]
        client = stack.enter_context(Client(stack.enter_context(running(path, worker=worker)).url))
        arms = {
            "ours_s": lambda prompt: ours(client, prompt, arguments),
            "transformers_s": lambda prompt: theirs(model, prompt, arguments),
        }
        for index in range(arguments.rounds + 1):
            prompt = rng.choices(range(VOCAB_SIZE), k=arguments.input_len)
            figures, outputs = {}, {}
            for name in list(arms) if index % 2 else list(arms)[::-1]:
                start = time.perf_counter()
                outputs[name] = arms[name](prompt)
                figures[name] = time.perf_counter() - start
            figures["same_tokens"] = outputs["ours_s"] == outputs["transformers_s"]
            figures["ratio"] = figures["transformers_s"] / figures["ours_s"]
            print(f"{dtype} round {index}: {figures}", flush=True)
            if index:  # round 0 warms up
                rounds.append(figures)
    median = {
        key: statistics.median(figures[key] for figures in rounds) for key in ("ours_s", "transformers_s", "ratio")
    }
    return {"median": median, "num_same": sum(figures["same_tokens"] for figures in rounds), "rounds": rounds}


def measure(arguments: argparse.Namespace) -> dict:
    torch.set_num_threads(arguments.num_threads)
    load = {key: getattr(arguments, key) for key in ("beam_width", "input_len", "output_len", "num_threads", "rounds")}
    return {"load": {"model": "54M", **load}} | {dtype: measure_dtype(dtype, arguments) for dtype in DTYPES}


def report(figures: dict) -> None:
    load = figures["load"]
    print(
        f"beam width {load['beam_width']}, {load['input_len']} tokens in, {load['output_len']} out, 54M shape, "
        f"{load['num_threads']} threads; medians of {load['rounds']} rounds"
    )
    for dtype in DTYPES:
        row, num_same = figures[dtype]["median"], figures[dtype]["num_same"]
        print(
            f"  {dtype:9} ours {row['ours_s']:6.2f} s, transformers {row['transformers_s']:6.2f} s: "
            f"{row['ratio']:.2f} times faster {verdict(row['ratio'], GOAL, at_least=True)}; "
            f"the same tokens in {num_same} of {load['rounds']}"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beam-width", type=int, default=4, help="beams (default: 4)")
    parser.add_argument("--input-len", type=int, default=500, help="prompt tokens (default: 500)")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens (default: 64)")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads(), help="CPU threads of each engine")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each dtype (default: 5)")
