"""What a request must yield: transformers computes the logits, in float32 and alone."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from pagewire.kernels.noise import gumbel_noise, noise_keys

EARLY_STOPPING = {"heuristic": False, "first": True, "never": "never"}  # ours to transformers'


def load(path: Path) -> transformers.PreTrainedModel:
    """Without the checkpoint's own generation parameters: no end token unless asked for."""
    return _load(path, torch.float32)


def _load(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.generation_config = transformers.GenerationConfig()
    for module in model.modules():
        # Older versions clamp gpt-oss's gates and ups at 7, whatever the checkpoint says.
        if type(module).__name__ == "GptOssExperts":
            module.limit, module.alpha = model.config.swiglu_limit, getattr(model.config, "swiglu_alpha", 1.702)
    return model


def random_prompts(seed: int, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    return _continued(model, prompt, num_tokens, lambda logits, _: logits)


def sampled(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    num_tokens: int,
    *,
    temperature: float,
    seed: int,
    sample_index: int,
) -> list[int]:
    """Tokens drawn with the noise of (seed, sample index, position), without filters."""
    return _continued(
        model,
        prompt,
        num_tokens,
        lambda logits, position: _perturbed(logits.float(), temperature, seed, sample_index, position),
    )


def _continued(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    num_tokens: int,
    preferred: Callable[[torch.Tensor, int], torch.Tensor],
) -> list[int]:
    """Each token is the one that a function of the logits and its position prefers. transformers' own `generate` gives
    the same for the logits themselves, at twice the time."""
    tokens, past = list(prompt), None
    with torch.inference_mode():
        for _ in range(num_tokens):
            step = model(torch.tensor([tokens if past is None else tokens[-1:]]), past_key_values=past, use_cache=True)
            past = step.past_key_values
            tokens.append(int(preferred(step.logits[0, -1], len(tokens)).argmax()))
    return tokens[len(prompt) :]


def preferences(
    model: transformers.PreTrainedModel, tokens: list[int], *, temperature: float = 0.0, seed: int = 0
) -> torch.Tensor:
    """What the choice of the token behind others maximises, [vocab_size]: the logits, or what sampling makes of them
    for the first sample of a request without filters."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
        return _perturbed(logits, temperature, seed, 0, len(tokens)) if temperature else logits


def _perturbed(logits: torch.Tensor, temperature: float, seed: int, sample_index: int, position: int) -> torch.Tensor:
    signed = seed - (1 << 64) if seed >> 63 else seed
    keys = noise_keys(*(torch.tensor([value]) for value in (signed, sample_index, position)))
    return logits / temperature + gumbel_noise(keys, len(logits))[0]


def best_behind(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """The best token behind a prompt, and behind it with ever more of the tokens that followed. Where these are the
    same, they are what `greedy` gives, at a fraction of the time."""
    return _logits_behind(model, prompt, tokens).argmax(-1).tolist()


def shortfalls(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """How far below the best logit each of the tokens lies that followed a prompt: [len(tokens)]."""
    logits = _logits_behind(model, prompt, tokens)
    return logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def shortfalls_of_rounding(
    rounded: transformers.PreTrainedModel, exact: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]
) -> torch.Tensor:
    """How far below the exact model's best logit that token lies which the rounded model thinks best, behind the prompt
    and behind each of the tokens but the last: [len(tokens)]."""
    logits = _logits_behind(exact, prompt, tokens)
    chosen = _logits_behind(rounded, prompt, tokens).argmax(-1, keepdim=True)
    return logits.max(-1).values - logits.gather(1, chosen)[:, 0]


def _logits_behind(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Teacher-forced: [len(tokens), vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def load_rounded(checkpoint: Path) -> transformers.PreTrainedModel:
    """The model as transformers computes it in bfloat16."""
    return _load(checkpoint, torch.bfloat16)


def load_unsteady(checkpoint: Path, seed: int) -> transformers.PreTrainedModel:
    """The model in bfloat16, with what each layer computes moved at random by up to half a unit of its last place. Each
    call moves anew, so that many calls are a sample of what rounding does to a text."""
    model, generator = load_rounded(checkpoint), torch.Generator().manual_seed(seed)

    def move(module: torch.nn.Module, inputs: object, output: object) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        moved = output.float() * (1 + (2 * torch.rand(output.shape, generator=generator) - 1) * 2**-8)
        return moved.to(output.dtype)

    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(move)
    return model


def rounding_error(
    rounded: transformers.PreTrainedModel, exact: transformers.PreTrainedModel, tokens: list[int]
) -> float:
    """The most by which rounding moves a logit against the best one, at any position of a text.

    In bfloat16 another order of summation rounds differently, and a near tie may fall the other way. What is chosen
    then lies at most so far below the best logit of float32 as rounding has moved the two against each other.
    """
    with torch.inference_mode():
        one, other = (model(torch.tensor([tokens])).logits[0].float() for model in (rounded, exact))
    error = one - other
    return (error - error.gather(1, other.argmax(1, keepdim=True))).abs().max().item()


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A beam search in our words."""

    beam_width: int
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: str = "heuristic"
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Hypothesis:
    token_ids: list[int]  # the stop token included
    score: float  # sum of log-probabilities / number of tokens ** length penalty


def beams(model: transformers.PreTrainedModel, prompt: list[int], search: BeamSearch) -> list[Hypothesis]:
    """The hypotheses, best first."""
    output = _generate(
        model,
        prompt,
        max_new_tokens=search.max_tokens,
        num_beams=search.beam_width,
        num_return_sequences=search.n,
        length_penalty=search.length_penalty,
        early_stopping=EARLY_STOPPING[search.early_stopping],
        eos_token_id=list(search.stop_token_ids) or None,
        pad_token_id=0,
        output_scores=True,
    )
    tokens = output.sequences[:, len(prompt) :].tolist()
    return [
        Hypothesis(_until_stop(row, search.stop_token_ids), score)
        for row, score in zip(tokens, output.sequences_scores.tolist(), strict=True)
    ]


def _until_stop(tokens: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Without the padding behind the stop token."""
    end = next((i for i, token_id in enumerate(tokens) if token_id in stop_token_ids), len(tokens) - 1)
    return tokens[: end + 1]


def _generate(model: transformers.PreTrainedModel, prompt: list[int], **options: object):
    with torch.inference_mode():
        return model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )
