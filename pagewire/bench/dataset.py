"""Makes prompts that are texts: of random tokens, or of a file. All that is drawn follows from the seed."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pagewire.bench.workload import PlannedRequest, Workload
from pagewire.errors import CommandError
from pagewire.hosting.model_source import locate

MAX_ADJUSTMENTS = 10


class TextTokenizer:
    """A model's tokenizer. `chat_template` is the model's, or None."""

    def __init__(self, model: str) -> None:
        """Loads the tokenizer of a directory, a GGUF file or a hub id. Raises CommandError if there is none."""
        from scheduler_service.serving.checkpoint.model_info import read_model_info
        from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer

        try:
            info = read_model_info(locate(model, with_weights=False).directory)
            if info.tokenizer_path is None:
                raise ValueError(f"{Path(info.directory) / 'tokenizer.json'} is missing")
            self._tokenizer = load_tokenizer(info.tokenizer_path)
        except ValueError as error:
            raise CommandError(f"--tokenizer: {error}") from None
        self.chat_template = info.chat_template
        self.vocab_size = self._tokenizer.get_vocab_size()

    def count(self, text: str) -> int:
        """Returns the number of tokens in a text, with the special ones that a server adds."""
        return len(self._tokenizer.encode(text))

    def text_of(self, token_ids: list[int], rng: random.Random) -> str:
        """Returns a text of about as many tokens as these, which begins with theirs: not every list of tokens is a
        text.

        Source: vLLM's random dataset, which encodes and cuts or fills up again, too.
        """
        length, ids = len(token_ids), token_ids
        text = ""
        for _ in range(MAX_ADJUSTMENTS):
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == length:
                break
            ids = [*ids[:length], *(rng.randrange(self.vocab_size) for _ in range(length - len(ids)))]
        return text


def timed(workload: Workload, requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Returns these requests with the times and seeds of a workload of as many."""
    return [
        replace(request, send_at=at, seed=workload.seed + index)
        for index, (request, at) in enumerate(zip(requests, workload.times(), strict=True))
    ]


def random_prompts(workload: Workload, tokenizer: TextTokenizer) -> list[PlannedRequest]:
    """Returns the requests of a workload with texts of random tokens, which are about as long as it says."""
    rng = random.Random(f"{workload.seed} texts")
    requests = []
    for request in workload.requests(tokenizer.vocab_size):
        text = tokenizer.text_of(list(request.prompt_token_ids), rng)
        requests.append(replace(request, prompt_token_ids=(), text=text, num_text_tokens=tokenizer.count(text)))
    return requests


def custom_prompts(path: str, num_prompts: int, seed: int, *, shuffles: bool, repeats: bool) -> list[str]:
    """Returns the prompts of a file with a JSON object {"prompt": TEXT} on each line. Raises CommandError for any other
    file.

    `repeats` uses prompts more than once where there are too few.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read --dataset-path {path}: {error}") from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise CommandError(f'--dataset-path {path}, line {number}: expected a JSON object {{"prompt": TEXT}}')
        texts.append(text)
    if not texts:
        raise CommandError(f"--dataset-path {path} has no prompts")
    rng = random.Random(f"{seed} prompts")
    if shuffles:
        rng.shuffle(texts)
    if len(texts) < num_prompts and not repeats:
        raise CommandError(f"--dataset-path {path} has {len(texts)} prompts, but {num_prompts} are to be sent")
    return [texts[index % len(texts)] for index in range(num_prompts)]
