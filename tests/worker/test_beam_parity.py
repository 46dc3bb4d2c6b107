"""The scheduler's beam selection compared with transformers' `generate(num_beams=k)`, on identical log-probabilities.

Transformers is made to search with the log-probabilities that the scheduler receives. Its own log-probabilities come
from other batches and a KV cache. They would differ in the last bits, by an amount that depends on the processor.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from scheduler_service.core.beam import BeamSearch, BeamState, FinishedHypothesis
from scheduler_service.core.request import BeamParams, EarlyStopping
from testing.checkpoints.families import make_checkpoint

pytestmark = pytest.mark.thorough

SEEDS = (11, 12)
NUM_PROMPT_TOKENS = 7
MAX_TOKENS = 9
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
# Transformers adds up to MAX_TOKENS float32 log-probabilities of one sign, the first to zero. It rounds the length to
# the power of the penalty, and divides. Each operation rounds by at most half a unit in the last place. Ours uses
# float64.
MAX_SCORE_ERROR = (MAX_TOKENS + 1) * 2.0**-24
EARLY_STOPPING = {EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never"}


class Model:
    """A model of transformers, and the log-probabilities after any prefix."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.seed = seed
        checkpoint = make_checkpoint(directory, "llama", seed=seed)
        self._transformers = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.prompt = torch.randint(150, (NUM_PROMPT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
        self._logprobs: dict[tuple[int, ...], torch.Tensor] = {}
        self.stop_sets = self._stop_sets()

    def candidates(self, beams: list[BeamState], num: int) -> list[list[tuple[int, float]]]:
        rows = self._after([tuple(beam.output_token_ids) for beam in beams])
        values, token_ids = rows.sort(dim=-1, descending=True, stable=True)
        return [
            list(zip(row_ids[:num], row[:num], strict=True))
            for row_ids, row in zip(token_ids.tolist(), values.tolist(), strict=True)
        ]

    def generate(self, **options: object) -> transformers.utils.ModelOutput:
        """Generate from the prompt with transformers."""
        processors = transformers.LogitsProcessorList([self._replace])
        return self._transformers.generate(
            torch.tensor([self.prompt]), logits_processor=processors, **(OPTIONS | options)
        )

    def _replace(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Replace transformers' log-probabilities, except of stop tokens that it has already excluded."""
        outputs = [tuple(row[NUM_PROMPT_TOKENS:]) for row in input_ids.tolist()]
        return torch.where(scores.isneginf(), scores, self._after(outputs))

    def _after(self, outputs: list[tuple[int, ...]]) -> torch.Tensor:
        """Return the log-probabilities of the next token after each output, [number of outputs, vocabulary].

        They are computed once.
        """
        unknown = [output for output in dict.fromkeys(outputs) if output not in self._logprobs]
        if unknown:
            with torch.no_grad():
                logits = self._transformers(torch.tensor([[*self.prompt, *output] for output in unknown])).logits[:, -1]
            self._logprobs.update(zip(unknown, torch.log_softmax(logits.float(), dim=-1), strict=True))
        return torch.stack([self._logprobs[output] for output in outputs])

    def _stop_sets(self) -> list[frozenset[int]]:
        """Return sets of stop tokens: empty, one, or three tokens that the model often emits, early or late."""
        output = self.generate(num_beams=6, num_return_sequences=6)
        emitted = output.sequences[:, NUM_PROMPT_TOKENS:].tolist()
        liked = [token_id for token_id, _ in Counter(token_id for row in emitted for token_id in row).most_common(3)]
        return [frozenset(), frozenset({emitted[0][2]}), frozenset({emitted[0][-2]}), frozenset(liked)]


OPTIONS = {
    "max_new_tokens": MAX_TOKENS,
    "do_sample": False,
    "pad_token_id": 150,
    "return_dict_in_generate": True,
    "output_scores": True,
}


@dataclass(frozen=True)
class Case:
    params: BeamParams
    stops: frozenset[int]
    min_tokens: int = 0


@pytest.fixture(scope="module", params=SEEDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("beams"), request.param)


def searched(model: Model, case: Case) -> list[FinishedHypothesis]:
    search = BeamSearch(case.params, case.stops, case.min_tokens, MAX_TOKENS)
    beams = [BeamState(0.0, ())]
    num_candidates = case.params.beam_width + len(case.stops)
    while True:
        step = search.advance(beams, model.candidates(beams, num_candidates))
        if step.is_done:
            return search.best(case.params.beam_width)
        beams = [
            BeamState(child.cumulative_logprob, (*beams[child.parent].output_token_ids, child.token_id))
            for child in step.children
        ]


def generated(model: Model, case: Case) -> list[tuple[tuple[int, ...], float]]:
    """Return transformers' hypotheses as (output tokens, score), best first."""
    width = case.params.beam_width
    output = model.generate(
        num_beams=width,
        num_return_sequences=width,
        early_stopping=EARLY_STOPPING[case.params.early_stopping],
        length_penalty=case.params.length_penalty,
        eos_token_id=sorted(case.stops) or None,
        min_new_tokens=case.min_tokens or None,
    )
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    rows = output.sequences[:, NUM_PROMPT_TOKENS:].tolist()
    return [
        (tuple(row[:length]), score)
        for row, length, score in zip(rows, lengths, output.sequences_scores.tolist(), strict=True)
    ]


def cases(model: Model, width: int, early_stopping: EarlyStopping) -> Iterator[Case]:
    for stops in model.stop_sets:
        for length_penalty in LENGTH_PENALTIES:
            yield Case(BeamParams(width, length_penalty, early_stopping), stops)
        if stops:
            yield Case(BeamParams(width, 1.0, early_stopping), stops, min_tokens=4)


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", range(2, 7))
def test_hypotheses_equal_those_of_transformers(model: Model, width: int, early_stopping: EarlyStopping) -> None:
    num_stopped = 0
    for case in cases(model, width, early_stopping):
        print(f"seed {model.seed}: {case}")
        found = searched(model, case)
        expected = generated(model, case)
        assert [hypothesis.token_ids for hypothesis in found] == [token_ids for token_ids, _ in expected]
        assert [hypothesis.score for hypothesis in found] == pytest.approx(
            [score for _, score in expected], rel=MAX_SCORE_ERROR, abs=0
        )
        for hypothesis in found:
            last = hypothesis.token_ids[-1]
            assert hypothesis.stop_token_id == (last if last in case.stops else None)
            num_stopped += hypothesis.stop_token_id is not None
    assert num_stopped >= width  # some hypotheses end in the stop tokens


@pytest.mark.parametrize("early_stopping", [EarlyStopping.HEURISTIC, EarlyStopping.FIRST])
def test_a_width_of_one_is_greedy(model: Model, early_stopping: EarlyStopping) -> None:
    for case in cases(model, 1, early_stopping):
        print(f"seed {model.seed}: {case}")
        (found,) = searched(model, case)
        output = model.generate(eos_token_id=sorted(case.stops) or None, min_new_tokens=case.min_tokens or None)
        assert found.token_ids == tuple(output.sequences[0, NUM_PROMPT_TOKENS:].tolist())
