"""The process of one checkout in `scheduler_pairs`: it times a turn of decode steps for each line of its input."""

import gc
import sys

from bench.core.scheduler import Pipeline, prompts

MAX_MODEL_LEN = 8192
NUM_PROMPT_TOKENS = 64
NUM_WARM_UP_STEPS = 64


def serve(num_sequences: int, num_steps: int) -> None:
    """Print "ready" when all sequences decode. Then print the microseconds of schedule() and complete() per sequence
    and step for each turn of `num_steps` steps."""
    pipeline = Pipeline("agent", num_sequences, MAX_MODEL_LEN)
    for i, prompt in enumerate(prompts(1, num_sequences, NUM_PROMPT_TOKENS)):
        pipeline.add(prompt, str(i), MAX_MODEL_LEN - 2 * NUM_PROMPT_TOKENS)
    pipeline.fill(num_sequences)
    pipeline.steps(NUM_WARM_UP_STEPS)
    gc.collect()
    gc.disable()
    print("ready", flush=True)
    for _ in sys.stdin:
        steps = pipeline.steps(num_steps)
        print(*(each / steps.num_sequence_steps * 1e6 for each in (steps.schedule, steps.complete)), flush=True)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
