"""The class `LLM`, which generates and embeds lists of prompts with the interface of vLLM and nano-vllm."""

import itertools
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from pagewire import installation
from pagewire.cli.services import API_OPTIONS, serve_options
from pagewire.client import background_loop, conversation, wire
from pagewire.client.arguments import are_token_ids, as_list, check_text, is_integer, is_real, require, split_prompt
from pagewire.client.batch import RequestBatch
from pagewire.client.channels import Channels
from pagewire.client.client import UNARY_TIMEOUT_S, Client, one_each
from pagewire.client.completion import Completion
from pagewire.client.conversation import Message
from pagewire.client.errors import Cancelled, StartError, Unavailable
from pagewire.client.retry import Attempts
from pagewire.client.sampling_params import UNSET, BeamSearchParams, SamplingParams
from pagewire.client.server_info import Metric, metrics_of
from pagewire.compatibility import FOREIGN, IN_PYTHON, MAPPED, suggestion, translate
from pagewire.hosting.local_server import END_TIMEOUT_S, LocalServer
from pagewire.llm.request_output import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    beam_search_output,
    embedding_output,
    request_output,
    token_ids_of,
)
from pagewire.options import spelled
from pagewire.progress import ForeignProgress, Progress

# The default of `generate`: vLLM's number of tokens, and the checkpoint's own sampling parameters.
DEFAULT_SAMPLING = replace(UNSET, max_tokens=16)
_TOOLS = "a list of mappings, or None"
# Stop the services without draining: no client is left when the program ends.
FLAGS = ("--drain-timeout=0",)
_SEEDS = 1 << 64


class TextPrompt(TypedDict):
    """A text prompt in the form of a dict, which is one of vLLM's prompt types."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids in the form of a dict, which is one of vLLM's prompt types. An additional `prompt` text is
    only copied to the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


# A mapping is a TextPrompt or a TokensPrompt. The wider type also admits plain dict variables.
Prompt = str | Sequence[int] | Mapping[str, object]
# The text and the token ids of a prompt. One of them may be None.
_SplitPrompt = tuple[str | None, Sequence[int] | None]


class LLM:
    """A model for offline inference, served by background processes on this machine.

        llm = LLM("Qwen/Qwen3-0.6B", max_model_len=4096)
        for output in llm.generate(["Once upon a time", "The little fox"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

    The constructor starts a scheduler and a worker. They end with `close`, at the end of `with`, when the object is
    garbage collected, or with the process, also if it is killed. Any number of threads may create and share instances.

    - `model`: a checkpoint directory, a GGUF file, or the id of a Hugging Face model.
    - `seed`: makes outputs reproducible: programs that send equal requests in the same order get equal outputs.
    - `options`: the options of `pagewire serve` under their YAML names, such as `max_model_len=4096`, and the options
      of vLLM and nano-vllm. A foreign option with an equivalent is translated. A foreign option that does not affect
      results is ignored with a warning, and any other is refused with ValueError. `pagewire.compatibility` lists them
      all.

    The constructor raises StartError with the services' reason if they do not start, and ImportError with an
    installation command if a package such as torch is missing.
    """

    def __init__(self, model: str | os.PathLike[str], *, seed: int | None = None, **options: Any) -> None:
        missing = installation.shortage("serve")
        if missing is not None:
            raise ImportError(missing)
        require("model", model, isinstance(model, str | os.PathLike), "a text or a path")
        require("seed", seed, seed is None or is_integer(seed), "an integer or None")
        self.model = os.fspath(model)
        check_text("model", self.model)
        server = LocalServer(self.model, [*FLAGS, *serve_flags(self.model, options)], flags_only=API_OPTIONS)
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
        """Stop the scheduler and the worker that this LLM started, and abort all requests. The LLM cannot be used
        afterwards."""
        self._finalizer()

    @property
    def client(self) -> Client:
        """A client of the services that this LLM started. Raise StartError if the services have ended."""
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
        """Generate text for each prompt and return the results in the order of the prompts.

        A single prompt also returns a list.

        - `prompts`: a prompt or a list of prompts. A prompt is a text, a list of token ids, or a dict with `prompt` or
          `prompt_token_ids`.
        - `sampling_params`: the parameters for all prompts, or a list with one entry for each prompt. None uses the
          checkpoint's own parameters and 16 tokens. A `max_tokens` beyond the context length is reduced to fit.
        - `use_tqdm`: whether to show progress. A class such as tqdm's own shows its progress bar instead.
        - `priority`: a number for each prompt. Prompts with lower numbers run first.
        - `lora_request`: must be None. Any other value raises ValueError.
        """
        _refuse_adapters(lora_request)
        return self._generate(_split(prompts), sampling_params, use_tqdm, priority, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        *,
        priority: Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the model's answers to a conversation, or to each conversation in a list.

        A conversation is a list of messages such as `{"role": "user", "content": "Hello"}`. The remaining arguments are
        the same as for `generate`.

        - `chat_template`: the text or the name of a template to use instead of the model's default.
        - `tools`, `chat_template_kwargs`: variables for the template. The answer contains tool calls as text, in the
          model's own format.
        - `add_generation_prompt`: whether the prompt ends with the beginning of the model's answer.
        - `continue_final_message`: continue the last message instead of answering it. Requires `add_generation_prompt`
          False.
        """
        _refuse_adapters(lora_request)
        conversations, _ = conversation.as_conversations(messages)
        conversation.check_template(chat_template, add_generation_prompt, chat_template_kwargs=chat_template_kwargs)
        require("continue_final_message", continue_final_message, isinstance(continue_final_message, bool), "a bool")
        given = None if tools is None else as_list("tools", tools, _TOOLS)
        require("tools", tools, all(isinstance(tool, Mapping) for tool in given or ()), _TOOLS)
        with self._reporting_exit():
            info = self.client.info()
        variables = {"tools": given, **(chat_template_kwargs or {})}
        texts = conversation.prompts_of(
            info,
            chat_template,
            add_generation_prompt,
            conversations if messages else [],
            variables,
            continue_final_message=continue_final_message,
        )
        prompts: list[_SplitPrompt] = [(text, None) for text in texts]
        return self._generate(prompts, sampling_params, use_tqdm, priority, add_special_tokens=False)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Run beam search for each prompt. Return the best continuations of each prompt, in the order of the prompts.

        `.sequences[0].text` of a result is the prompt followed by its best continuation. The prompts and the remaining
        arguments are the same as for `generate`. `concurrency_limit` has no effect: the scheduler runs as many searches
        as memory allows.
        """
        _refuse_adapters(lora_request)
        require("params", params, isinstance(params, BeamSearchParams), "pagewire.BeamSearchParams")
        given = _split(prompts)
        results = self._run(given, [params.sampling] * len(given), use_tqdm, priority)
        found = [[*ids, *output.token_ids] for ids, completion in results for output in completion.outputs]
        with self._reporting_exit():
            texts: Iterator[str | None] = itertools.repeat(None)
            if self.client.info().has_tokenizer:
                texts = iter(self.client.detokenize(found, skip_special_tokens=params.skip_special_tokens))
        return [
            beam_search_output(completion, text, token_ids, texts)
            for (text, _), (token_ids, completion) in zip(given, results, strict=True)
        ]

    def embed(
        self,
        prompts: Any,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts.

        An embedding is computed from the hidden states of the prompt's tokens, pooled as the checkpoint specifies, and
        normalized to length 1. As in vLLM, texts are embedded as given: without the prompts of the checkpoint's
        config_sentence_transformers.json, which `Client.embed` and the HTTP APIs apply. The arguments are the same as
        for `generate`.
        """
        _refuse_adapters(lora_request)
        given = _split(prompts)
        results = self._run(given, [None] * len(given), use_tqdm, priority, embed=True)
        return [embedding_output(completion, prompt) for prompt, completion in results]

    def encode(
        self,
        prompts: Any,
        pooling_params: None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the embedding of each prompt. This is vLLM's name for `embed`.

        `.outputs.data` of a result is the embedding as a torch tensor. The only supported `pooling_task` is "embed",
        and the checkpoint determines the pooling. Raise ValueError for another `pooling_task` or for `pooling_params`.
        """
        for name, value, known in (("pooling_params", pooling_params, None), ("pooling_task", pooling_task, "embed")):
            if value not in (None, known):
                raise ValueError(
                    f"{name}={value!r:.80} is not supported: the checkpoint specifies the pooling of embeddings"
                )
        return self.embed(prompts, use_tqdm, lora_request=lora_request)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters for the model: vLLM's defaults, overridden by the checkpoint's
        generation_config.json."""
        self.client  # noqa: B018  # raises StartError once the services have ended
        with self._reporting_exit():
            return SamplingParams(**background_loop.run(lambda: _chosen_sampling(self._channels)))

    def get_metrics(self) -> list[Metric]:
        """Return the current metrics of the server as gauges and counters with vLLM's names. Each metric has a `name`,
        `labels` and a `value`."""
        client = self.client
        with self._reporting_exit():
            return metrics_of(client.loads(), client.info().served_model_name)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, loaded by the package transformers.

        Raise ImportError with an installation command if transformers is missing.
        """
        if missing := installation.shortage("transformers"):
            raise ImportError(f"get_tokenizer needs transformers, but {missing}")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    def _generate(
        self,
        prompts: Sequence[_SplitPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        given = one_each(sampling_params, len(prompts))
        samplings = [DEFAULT_SAMPLING if sampling is None else sampling for sampling in given]
        arrival_time = time.time()
        results = self._run(prompts, samplings, use_tqdm, priority, add_special_tokens=add_special_tokens)
        with self._reporting_exit():
            names = self._names([completion for _, completion in results])
        return [
            request_output(completion, text, token_ids, names, arrival_time, is_ranked=not sampling.logprob_token_ids)
            for (text, _), (token_ids, completion), sampling in zip(prompts, results, samplings, strict=True)
        ]

    def _run(
        self,
        prompts: Sequence[_SplitPrompt],
        samplings: Sequence[SamplingParams | None],
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool = True,
        embed: bool = False,
    ) -> list[tuple[list[int], Completion]]:
        """Run one request for each prompt. Return a list of pairs: the token ids of the prompt, and the completion."""
        given_priorities = 0 if priority is None else as_list("priority", priority, "a list of integers")
        priorities = one_each(given_priorities, len(prompts), "priorities")
        require(
            "use_tqdm",
            use_tqdm,
            isinstance(use_tqdm, bool | None) or callable(use_tqdm),
            "a bool, or a class such as tqdm's",
        )
        client = self.client
        if not prompts:
            return []
        with self._reporting_exit():
            token_ids = _tokens_of(client, prompts, add_special_tokens)
            max_tokens = client.info().max_sequence_tokens
            requests = []
            for index, (ids, sampling, number) in enumerate(zip(token_ids, samplings, priorities, strict=True)):
                with wire.at_place(index):
                    resolved = self._resolve(sampling, max_tokens - len(ids))
                    requests.append(
                        wire.encode_request(None, resolved, prompt_token_ids=ids, priority=number, embed=embed)
                    )
            completions = self._complete(requests, use_tqdm)
        return [(list(map(int, ids)), completion) for ids, completion in zip(token_ids, completions, strict=True)]

    @contextmanager
    def _reporting_exit(self) -> Iterator[None]:
        """Raise StartError in a `with` block if the services that this LLM started have ended. This error replaces the
        Unavailable or Cancelled that the client raises in this case."""
        try:
            yield
        except (Unavailable, Cancelled) as error:
            if self._finalizer.alive and not self._server.ends_within(END_TIMEOUT_S):
                raise
            raise StartError(self._end()) from error

    def _end(self) -> str:
        """Return an error message with the reason why the services that this LLM started are not running."""
        if not self._finalizer.alive:
            return "this LLM is closed, and its services have ended: create another one"
        reason = f": {self._server.reason}" if self._server.reason else ""
        return f"the services of this LLM have ended ({self._server.exit}){reason}"

    def _resolve(self, sampling: SamplingParams | None, num_free: int) -> SamplingParams | None:
        """Return the sampling parameters to send with a request, derived from the parameters that the user gave.
        `max_tokens` is reduced to `num_free`, the number of tokens that fit after the prompt. If this LLM has a seed
        and the request has none, the request gets a seed."""
        if sampling is None:
            return None
        require("sampling_params", sampling, isinstance(sampling, SamplingParams), "pagewire.SamplingParams")
        if sampling.max_tokens is not None and sampling.max_tokens > num_free >= 1:
            sampling = replace(sampling, max_tokens=num_free)
        if self._seeds is not None and sampling.seed is None:
            sampling = replace(sampling, seed=next(self._seeds) % _SEEDS)
        return sampling

    def _complete(self, requests: Sequence[Any], use_tqdm: bool | Callable[..., Any]) -> list[Completion]:
        batch = RequestBatch(requests, self._channels, Attempts(0.0))
        if not use_tqdm:
            return background_loop.run(batch.run)
        num_requests = len(requests)
        # sys.stderr is None in programs without a console.
        progress = Progress(num_requests, sys.stderr) if use_tqdm is True else ForeignProgress(num_requests, use_tqdm)
        with closing(progress), closing(background_loop.iterate(batch.news())) as all_news:
            for news in all_news:
                for num_tokens, has_ended in news:
                    progress.add(num_tokens, has_ended)
        return batch.completions

    def _names(self, completions: Sequence[Completion]) -> dict[int, str]:
        """Return a dict from token ids to texts, for all tokens that appear in the log-probabilities of the
        completions. The result is empty if the checkpoint has no tokenizer."""
        token_ids = sorted(set().union(*map(token_ids_of, completions)))
        if not token_ids or not self.client.info().has_tokenizer:
            return {}
        texts = self.client.detokenize([[token_id] for token_id in token_ids], skip_special_tokens=False)
        return dict(zip(token_ids, texts, strict=True))


def _close(server: LocalServer, client: Client, channels: Channels) -> None:
    """Close the clients of an LLM and stop its local server.

    Do nothing in a process that was forked from the process that started the server, since gRPC is unusable there.
    """
    if os.getpid() != server.owner:
        return
    client.close()
    background_loop.finish(channels.aclose)
    server.stop()


def _refuse_adapters(lora_request: object) -> None:
    if lora_request is not None:
        raise ValueError("lora_request is not supported: Pagewire serves one model, without adapters")


def _split(prompts: Any) -> list[_SplitPrompt]:
    """Convert the user's prompts, a single prompt or a list, to a list of pairs (text, token ids). The text or the
    token ids of a pair may be None."""
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    given = as_list("prompts", prompts, "a text, token ids, a mapping, or a list of those")
    if given and are_token_ids(given):
        given = [given]
    return [_split_one(prompt, index) for index, prompt in enumerate(given)]


def _split_one(prompt: Any, index: int) -> _SplitPrompt:
    if isinstance(prompt, Mapping):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        more = [key for key in prompt if key not in ("prompt", "prompt_token_ids") and prompt[key] is not None]
        if more:
            raise ValueError(f"prompt {index}'s {more[0]} is not supported: give prompt or prompt_token_ids")
        if text is None and token_ids is None:
            raise ValueError(f"prompt {index} is a mapping without prompt and prompt_token_ids")
    else:
        text, token_ids = split_prompt(prompt, index, "prompts: ")
    require(f"prompt {index}'s text", text, isinstance(text, str | None), "a text")
    is_legal = token_ids is None or are_token_ids(token_ids)
    require(f"prompt {index}'s prompt_token_ids", token_ids, is_legal, "a list of integers")
    if text is not None:
        check_text(f"prompts[{index}]", text)
    return text, token_ids


def _tokens_of(client: Client, prompts: Sequence[_SplitPrompt], add_special_tokens: bool) -> list[Sequence[int]]:
    """Return the token ids of each prompt. The server tokenizes the prompts that are texts."""
    unknown = [text for text, token_ids in prompts if token_ids is None and text is not None]
    made = iter(client.tokenize(unknown, add_special_tokens=add_special_tokens) if unknown else [])
    return [next(made) if token_ids is None else token_ids for _, token_ids in prompts]


async def _chosen_sampling(channels: Channels) -> dict[str, Any]:
    """Ask the server, through the gRPC service VllmEngine, which sampling parameters the checkpoint recommends. Return
    them as a dict."""
    from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

    with channels.connected() as connection, connection.translated():
        stub = vllm_engine_pb2_grpc.VllmEngineStub(connection.channel)
        request = vllm_engine_pb2.GetModelInfoRequest()
        info = await stub.GetModelInfo(request, timeout=UNARY_TIMEOUT_S, metadata=connection.metadata)
    return dict(json.loads(info.default_sampling_params_json))


def serve_flags(model: str, given: Mapping[str, Any]) -> list[str]:
    """Convert the keyword arguments of `LLM`, which may be options of vLLM, to command line flags of `pagewire serve`.
    Warn about ignored options.

    Raise TypeError for an unknown name, and ValueError for an invalid value.
    """
    known = serve_options().keys() - {"model", *API_OPTIONS}
    for name in given:
        if not (name in known or name in MAPPED or name in FOREIGN):
            near = suggestion(name, [*known, *MAPPED, *FOREIGN])
            raise TypeError(f"LLM has no option {name!r}{near}")
    wanted = translate({"model": model} | {name: _in_gib(name, value) for name, value in given.items()}, IN_PYTHON)
    for line in wanted.ignored:
        warnings.warn(line, stacklevel=3)
    values = {name: value for name, value in wanted.values.items() if name != "model" and value is not None}
    for name, value in values.items():
        if not isinstance(value, str | int | float):
            raise ValueError(f"{name} must be a text, a number or a bool, got {value!r:.80}")
        check_text(name, str(value))
    return spelled(values)


def _in_gib(name: str, value: Any) -> Any:
    """Return the value of the option `swap_space` as a text with a unit, since a number means GiB in Python. Return the
    values of other options unchanged."""
    return f"{value}GiB" if name == "swap_space" and is_real(value) else value
