"""The expected outputs of requests: transformers computes the logits, in float32 and for one request at a time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from pagewire.kernels.noise import gumbel_noise, noise_keys

# from our values to those that transformers accepts
EARLY_STOPPING = {"heuristic": False, "first": True, "never": "never"}


def load(path: Path) -> transformers.PreTrainedModel:
    """Load a model without the checkpoint's generation parameters: there is no end token unless a call names one."""
    return _load(path, torch.float32)


def _load(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.generation_config = transformers.GenerationConfig()
    for module in model.modules():
        # Older versions clamp the gate and up values of gpt-oss at 7, whatever the checkpoint's limit is.
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
    """Return tokens sampled with the noise of (seed, sample index, position), without filters."""
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
    """Return the continuation in which each token maximises `preferred(logits, position)`.

    For `preferred` equal to the logits, `generate` of transformers gives the same tokens in twice the time.
    """
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
    """Return the values [vocab_size] whose maximum determines the next token.

    These are the logits, or the perturbed logits of the first sample of a request without filters.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
        return _perturbed(logits, temperature, seed, 0, len(tokens)) if temperature else logits


def _perturbed(logits: torch.Tensor, temperature: float, seed: int, sample_index: int, position: int) -> torch.Tensor:
    signed = seed - (1 << 64) if seed >> 63 else seed
    keys = noise_keys(*(torch.tensor([value]) for value in (signed, sample_index, position)))
    return logits / temperature + gumbel_noise(keys, len(logits))[0]


def best_after(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the best next token after the prompt and after each prefix of `tokens`.

    If the result equals `tokens`, then `tokens` is also the result of `greedy`, at a fraction of the time.
    """
    return _logits_after(model, prompt, tokens).argmax(-1).tolist()


def shortfalls(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return by how much the logit of each token after the prompt falls below the best logit: [len(tokens)]."""
    logits = _logits_after(model, prompt, tokens)
    return logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def shortfalls_of_rounding(
    rounded: transformers.PreTrainedModel, exact: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]
) -> torch.Tensor:
    """Return by how much the rounded model's best tokens fall below the exact model's best logit: [len(tokens)].

    Both logits are the exact model's, at the positions of `tokens`.
    """
    logits = _logits_after(exact, prompt, tokens)
    chosen = _logits_after(rounded, prompt, tokens).argmax(-1, keepdim=True)
    return logits.max(-1).values - logits.gather(1, chosen)[:, 0]


def _logits_after(model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the teacher-forced logits of `tokens` after the prompt: [len(tokens), vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def load_rounded(checkpoint: Path) -> transformers.PreTrainedModel:
    """Load the model in bfloat16."""
    return _load(checkpoint, torch.bfloat16)


def load_with_noise(checkpoint: Path, seed: int) -> transformers.PreTrainedModel:
    """Load the model in bfloat16 and add random noise to the output of each leaf module.

    The noise is at most half a unit in the last place. Each call draws new noise, so that many calls sample the effect
    of rounding on a text.
    """
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
    """Return the most by which rounding shifts a logit relative to the best logit, at any position of a text.

    In bfloat16 a different order of summation rounds differently, so a near tie may have a different winner. The
    float32 logit of that winner is below the best float32 logit by at most this shift.
    """
    with torch.inference_mode():
        one, other = (model(torch.tensor([tokens])).logits[0].float() for model in (rounded, exact))
    error = one - other
    return (error - error.gather(1, other.argmax(1, keepdim=True))).abs().max().item()


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The parameters of a beam search, in Pagewire's terms."""

    beam_width: int
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: str = "heuristic"
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Hypothesis:
    token_ids: list[int]  # including the stop token
    score: float  # sum of log probabilities / number of tokens ** length penalty


def beams(model: transformers.PreTrainedModel, prompt: list[int], search: BeamSearch) -> list[Hypothesis]:
    """Return the hypotheses of a beam search, best first."""
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
    """Return the tokens up to the stop token, without the padding after it."""
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
