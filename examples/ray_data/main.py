"""Processes a data set on many machines: Ray Data distributes the rows, and each Ray actor has its own `pagewire.LLM`.

    pip install -r examples/ray_data/requirements.txt       # next to Pagewire with the extra serve, on every machine
    python examples/ray_data/main.py MODEL PROMPTS.txt OUTPUT_FOLDER

An actor runs a scheduler and a worker on its machine, with CPUS_PER_ACTOR cores. It batches continuously within the
rows of each Ray batch. On a cluster, set RAY_ADDRESS or use `ray job submit`, and leave one core for reading and
writing. Otherwise Ray runs on this machine only.
"""

import os
import sys
from typing import Any

import ray

from pagewire import LLM, SamplingParams

NUM_ACTORS = int(os.environ.get("NUM_ACTORS", "2"))
CPUS_PER_ACTOR = 1
ROWS_PER_BATCH = 64
SAMPLING = SamplingParams(temperature=0, max_tokens=24)


class Completer:
    """The state of a Ray actor: created once, and called with every batch of the actor."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(model, num_threads=CPUS_PER_ACTOR)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self._llm.generate(list(batch["text"]), SAMPLING, use_tqdm=False)
        batch["completion"] = [output.outputs[0].text for output in outputs]
        batch["actor"] = [os.getpid()] * len(outputs)
        return batch


def main(model: str, prompts: str, folder: str) -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:  # one core more than the actors use, for reading and writing
        ray.init("local", num_cpus=NUM_ACTORS * CPUS_PER_ACTOR + 1)
    rows = ray.data.read_text(prompts).repartition(target_num_rows_per_block=ROWS_PER_BATCH)
    completed = rows.map_batches(
        Completer,
        fn_constructor_args=(os.path.abspath(model),),
        batch_size=ROWS_PER_BATCH,
        compute=ray.data.ActorPoolStrategy(size=NUM_ACTORS),
        num_cpus=CPUS_PER_ACTOR,
    )
    completed.write_json(folder)
    written = ray.data.read_json(folder)
    print(f"{written.count()} rows by {len(written.unique('actor'))} actors in {folder}")
    for row in written.take(3):
        print(f"{row['text']}{row['completion']}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} MODEL PROMPTS.txt OUTPUT_FOLDER")
    main(*sys.argv[1:])
