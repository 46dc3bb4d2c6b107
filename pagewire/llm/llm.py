"""`LLM` completes and embeds lists of prompts, in the way that users of vLLM and nano-vllm know."""

import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from pagewire import background_loop, conversation, installation, wire
from pagewire.arguments import are_token_ids, as_list, check_text, split_prompt
from pagewire.batch import RequestBatch
from pagewire.channels import Channels
from pagewire.client import Client, one_each
from pagewire.completion import Completion
from pagewire.conversation import Message
from pagewire.errors import Cancelled, StartError, Unavailable
from pagewire.hosting.local_server import LocalServer
from pagewire.llm.options import serve_flags
from pagewire.llm.progress import ForeignProgress, Progress
from pagewire.llm.request_output import (
    EmbeddingRequestOutput,
    RequestOutput,
    embedding_output,
    request_output,
    token_ids_of,
)
from pagewire.retry import Attempts
from pagewire.sampling import UNSET, SamplingParams

# Where `generate` is given no sampling parameters, vLLM's number of tokens and the checkpoint's own choices.
DEFAULT_SAMPLING = replace(UNSET, max_tokens=16)
# A run that is ended by the program's end does not drain.
FLAGS = ("--drain-timeout=0",)
_SEEDS = 1 << 64
# From the first call that fails because the services die to their end.
END_TIMEOUT_S = 2.0


class TextPrompt(TypedDict):
    """A prompt as a mapping with a text, which is one of vLLM's forms."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as a mapping with token ids. A `prompt` beside them is only handed back with the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


# A mapping is one of the two above; literals of them are easier to type so.
Prompt = str | Sequence[int] | Mapping[str, object]


class LLM:
    """A model with both services in the background on this machine. They start here, and end with `close`, at the end
    of `with`, or with the process, however that ends.

    `model` is what `pagewire serve` takes. `options` are those of `pagewire serve` under the names of its YAML keys,
    such as `max_model_len=4096`, and those of vLLM and nano-vllm: an option that means the same becomes ours, one that
    makes no difference is ignored with a warning, and any other is refused with ValueError (`pagewire.llm.options` and
    `pagewire.compatibility` list them). With `seed`, equal programs give equal outputs.

    Raises StartError, with the services' reason, if they do not come up, and ImportError, in one line, without torch.
    Any thread may make an LLM and use it, also at the same time.
    """

    def __init__(self, model: str | os.PathLike[str], *, seed: int | None = None, **options: Any) -> None:
        missing = installation.shortage("serve")
        if missing is not None:
            raise ImportError(missing)
        self.model = os.fspath(model)
        server = LocalServer(self.model, [*FLAGS, *serve_flags(self.model, options)])
        self._server = server
        self._seeds = None if seed is None else itertools.count(seed << 32)
        self.url = server.start()
        self._client = Client(self.url)
        self._channels = Channels(self.url)
        self._finalizer = weakref.finalize(self, _close, server, self._client, self._channels)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both services and everything that runs. The LLM cannot be used afterwards."""
        self._finalizer()

    @property
    def client(self) -> Client:
        """A client of the services. Raises StartError once they have ended."""
        if not self._finalizer.alive or self._server.ends_within(0.0):
            raise StartError(self._end())
        return self._client

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Returns the results of all prompts, in their order. The result of a single prompt is in a list too.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`. `sampling_params` are
        for all, or a list with one for each; None takes the checkpoint's own and 16 tokens. If `max_tokens` is more
        than the model's context allows, as many tokens as fit are made. `use_tqdm` False shows no progress; tqdm's
        class, or one like it, shows its own. `priority` has a number for each prompt, and lower ones run first.
        """
        if lora_request is not None:
            raise ValueError("lora_request is not supported: Pagewire serves one model as it is")
        texts, token_ids = _split(prompts)
        return self._run(texts, token_ids, sampling_params, use_tqdm, priority, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Returns the answers to a conversation, or to each conversation of a list; the rest is as in `generate`.

        A conversation is a list of messages such as {"role": "user", "content": "Hello"}. The model's chat template, or
        `chat_template`, makes the prompt of it and of `chat_template_kwargs`.
        """
        if lora_request is not None:
            raise ValueError("lora_request is not supported: Pagewire serves one model as it is")
        conversations, _ = conversation.as_conversations(messages)
        with self._telling_of_the_end():
            info = self.client.info()
        texts = conversation.prompts_of(info, chat_template, add_generation_prompt, conversations, chat_template_kwargs)
        return self._run(texts, [None] * len(texts), sampling_params, use_tqdm, None, add_special_tokens=False)

    def embed(
        self,
        prompts: Any,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embeddings of all prompts, in their order; the prompts and the rest are as in `generate`.

        They are made of the hidden states of a prompt's tokens, pooled as the checkpoint says, and have the length 1.
        """
        if lora_request is not None:
            raise ValueError("lora_request is not supported: Pagewire serves one model as it is")
        texts, given = _split(prompts)
        priorities = _one_each(priority, len(texts))
        if not texts:
            return []
        with self._telling_of_the_end():
            token_ids = self._tokens(texts, given, add_special_tokens=True)
            requests = _requests(token_ids, [None] * len(texts), priorities)
            for request in requests:
                request.embed = True
            completions = self._complete(requests, use_tqdm)
        return [
            embedding_output(completion, list(map(int, prompt)))
            for completion, prompt in zip(completions, token_ids, strict=True)
        ]

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer as transformers loads it. Raises ImportError, in one line, without that."""
        if missing := installation.shortage("transformers"):
            raise ImportError(f"get_tokenizer needs transformers, but {missing}")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    def _run(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[Sequence[int] | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        samplings = one_each(sampling_params, len(texts))
        priorities = _one_each(priority, len(texts))
        if not texts:
            return []
        arrival_time = time.time()
        with self._telling_of_the_end():
            prompts = self._tokens(texts, token_ids, add_special_tokens)
            max_tokens = self.client.info().max_sequence_tokens
            resolved = [
                self._resolve(sampling, max_tokens - len(prompt))
                for prompt, sampling in zip(prompts, samplings, strict=True)
            ]
            requests = _requests(prompts, resolved, priorities)
            completions = self._complete(requests, use_tqdm)
            names = self._names(completions)
        return [
            request_output(completion, text, list(map(int, prompt)), names, arrival_time)
            for completion, text, prompt in zip(completions, texts, prompts, strict=True)
        ]

    @contextmanager
    def _telling_of_the_end(self) -> Iterator[None]:
        """Raises StartError where services are unavailable inside because they have ended."""
        try:
            yield
        except (Unavailable, Cancelled) as error:
            if self._finalizer.alive and not self._server.ends_within(END_TIMEOUT_S):
                raise
            raise StartError(self._end()) from error

    def _end(self) -> str:
        """Says why there are no services any more."""
        if not self._finalizer.alive:
            return "this LLM is closed, and its services have ended: make another one"
        reason = f": {self._server.reason}" if self._server.reason else ""
        return f"the services of this LLM have ended ({self._server.exit}){reason}"

    def _tokens(
        self, texts: Sequence[str | None], token_ids: Sequence[Sequence[int] | None], add_special_tokens: bool
    ) -> list[Sequence[int]]:
        """Returns the token ids of each prompt: those that were given, or those of its text."""
        unknown = [text for text, ids in zip(texts, token_ids, strict=True) if ids is None and text is not None]
        made = iter(self.client.tokenize(unknown, add_special_tokens=add_special_tokens) if unknown else [])
        return [next(made) if ids is None else ids for ids in token_ids]

    def _resolve(self, sampling: SamplingParams | None, num_free: int) -> SamplingParams:
        """Returns the parameters of a request whose prompt leaves room for `num_free` tokens."""
        sampling = DEFAULT_SAMPLING if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling_params must be pagewire.SamplingParams, got {sampling!r:.80}")
        if sampling.max_tokens is not None and sampling.max_tokens > num_free >= 1:
            sampling = replace(sampling, max_tokens=num_free)
        if self._seeds is not None and sampling.seed is None:
            sampling = replace(sampling, seed=next(self._seeds) % _SEEDS)
        return sampling

    def _complete(self, requests: Sequence[Any], use_tqdm: bool | Callable[..., Any]) -> list[Completion]:
        batch = RequestBatch(requests, self._channels, Attempts(0.0))
        if not use_tqdm:
            return background_loop.run(batch.run())
        progress = Progress(len(requests)) if use_tqdm is True else ForeignProgress(len(requests), use_tqdm)
        with closing(progress), closing(background_loop.iterate(batch.news())) as all_news:
            for news in all_news:
                for num_tokens, has_ended in news:
                    progress.add(num_tokens, has_ended)
        return batch.completions

    def _names(self, completions: Sequence[Completion]) -> dict[int, str]:
        """Returns the texts of all tokens that log-probabilities name."""
        token_ids = sorted(set().union(*map(token_ids_of, completions)))
        if not token_ids or not self.client.info().has_tokenizer:
            return {}
        texts = self.client.detokenize([[token_id] for token_id in token_ids], skip_special_tokens=False)
        return dict(zip(token_ids, texts, strict=True))


def _close(server: LocalServer, client: Client, channels: Channels) -> None:
    """Ends everything, except in a process that was forked from the one that started the server: gRPC is of no use
    there."""
    if os.getpid() != server.owner:
        return
    client.close()
    background_loop.finish(channels.aclose)
    server.stop()


def _one_each(priority: Sequence[int] | None, num_prompts: int) -> Sequence[int]:
    priorities = [0] * num_prompts if priority is None else as_list("priority", priority, "a list of integers")
    if len(priorities) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(priorities)} priorities; give one for each")
    return priorities


def _requests(
    prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams | None], priorities: Sequence[int]
) -> list[Any]:
    requests = []
    for index, (prompt, sampling, priority) in enumerate(zip(prompts, samplings, priorities, strict=True)):
        with wire.at_place(index):
            requests.append(wire.encode_request(None, sampling, prompt_token_ids=prompt, priority=priority))
    return requests


def _split(prompts: Any) -> tuple[list[str | None], list[Sequence[int] | None]]:
    """Returns the text and the token ids of each prompt, also where only one is given. One of both may be None."""
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    given = as_list("prompts", prompts, "a text, token ids, a mapping, or a list of those")
    if given and are_token_ids(given):
        given = [given]
    split = [_split_one(prompt, index) for index, prompt in enumerate(given)]
    return [text for text, _ in split], [token_ids for _, token_ids in split]


def _split_one(prompt: Any, index: int) -> tuple[str | None, Sequence[int] | None]:
    text, token_ids = (
        (prompt.get("prompt"), prompt.get("prompt_token_ids"))
        if isinstance(prompt, Mapping)
        else split_prompt(prompt, index, "prompts: ")
    )
    if isinstance(prompt, Mapping):
        more = [key for key in prompt if key not in ("prompt", "prompt_token_ids") and prompt[key] is not None]
        if more:
            raise ValueError(f"prompt {index}'s {more[0]} is not supported: give prompt or prompt_token_ids")
        if text is None and token_ids is None:
            raise ValueError(f"prompt {index} is a mapping without prompt and prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt {index}'s text must be a text, got {text!r:.80}")
    if token_ids is not None and not are_token_ids(token_ids):
        raise TypeError(f"prompt {index}'s prompt_token_ids must be a list of integers, got {token_ids!r:.80}")
    if text is not None:
        check_text(f"prompts[{index}]", text)
    return text, token_ids
