"""Random requests of every kind, and their fates while they run, all drawn from a seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from pagewire import SamplingParams, Session
from testing.serving.over_http import is_expressible

VOCAB_SIZE = 1024  # of the bundled model's tokenizer
SPECIAL = 5  # ids below are special tokens, which occur in no text
WORDS = ("Once", "upon", "a", "time", "fox", "river", "kite", "the", "moon", "Lily", "é", "😀", "and", "\n", "played")
CARD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<card>", "content": {"type": "json_schema", "json_schema": CARD}, "end": "</card>"}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": CARD},
    {"json_object": True},
    {"regex": r"[A-Z][a-z]{2,9}( [a-z]+){1,6}\."},
    {"regex": r"(é|fox|😀){3,5}"},
    {"choice": ["Once upon a time", "Once upon a hill", "é", "the end"]},
    {"grammar": 'start: "the " ANIMAL (" and " ANIMAL)*\nANIMAL: "fox" | "owl" | /[a-z]{2,5}/'},
    {"grammar": 'root ::= ("moon" | "kite ") root | "."'},
    {"structural_tag": {"format": TAG}},
    {"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<card"], "tags": [TAG]}}},
    {"regex": "[a-z"},  # invalid: the request is refused
)
# The fates of a request, with their weights.
FATES = {"stays": 12, "cancelled": 3, "expires": 1, "disconnected": 2, "aborted": 1, "detached": 3, "left": 1}


class Way(Enum):
    """How a client sends a request and receives its output."""

    GRPC = "over gRPC"
    WHOLE = "over HTTP, whole"
    STREAMED = "over HTTP, streamed"


# The fates of requests that may be sent over HTTP.
_FATES_OVER_HTTP = {"stays", "cancelled", "expires", "aborted"}


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request and its fate.

    Attributes:
        arguments: of `Client.complete` or `Client.embed`.
        is_embedding: it asks for an embedding.
        fate: "stays" until it ends, is "cancelled" by its client, "expires" at a deadline, is "disconnected" with its
            client's connection, is "aborted" by another call, is "detached" and attached to repeatedly, or is detached
            and "left": its client only asks for the result.
        after: the number of its tokens after which the fate occurs; of the whole round's tokens if it has none.
        timeout: of a request that expires, in seconds.
        way: how it is sent beside other requests. Alone it is sent over gRPC.
        follows: the number of the request whose conversation it continues, or None. Its prompt then begins with the
            prompt and the output of that request: see `after_turn`.
    """

    arguments: dict[str, Any]
    is_embedding: bool
    fate: str
    after: int
    timeout: float
    way: Way
    follows: int | None = None

    @property
    def num_rows(self) -> int:
        """The number of samples or beams that run."""
        options = {} if self.is_embedding else self.arguments["sampling"].options
        return options.get("beam_width") or options.get("n", 1)

    def after_turn(self, previous: "DrawnRequest", token_ids: list[int]) -> "DrawnRequest":
        """Return this request with a prompt that begins with the previous turn, whose output is `token_ids`."""
        prompt = [*previous.arguments["prompt_token_ids"], *token_ids, *self.arguments["prompt_token_ids"]]
        return replace(self, arguments={**self.arguments, "prompt_token_ids": prompt})


def draw_requests(rng: random.Random, num_requests: int) -> list[DrawnRequest]:
    """Return the requests of one round. Many share the beginning of their prompts."""
    stems = [[rng.randrange(SPECIAL, VOCAB_SIZE) for _ in range(64)] for _ in range(3)]
    return [_draw_request(rng, stems) for _ in range(num_requests)]


def draw_turns(rng: random.Random, requests: Sequence[DrawnRequest]) -> list[DrawnRequest]:
    """Return requests that continue the conversations of some of `requests`. They are numbered after these."""
    turns: list[DrawnRequest] = []
    for number, request in enumerate(requests):
        is_whole = request.num_rows == 1 and not request.is_embedding and request.fate in ("stays", "detached")
        if not is_whole or "prompt_token_ids" not in request.arguments or rng.random() < 0.5:
            continue
        for _ in range(rng.choice((1, 1, 2))):
            turns.append(_draw_turn(rng, request, number))
            number = len(requests) + len(turns) - 1
    return turns


def lengthened(rng: random.Random, requests: Sequence[DrawnRequest]) -> list[DrawnRequest]:
    """Return the requests. Most of those with one row have longer outputs, up to the limit that a small pool sets."""

    def longer(request: DrawnRequest) -> DrawnRequest:
        if request.is_embedding or request.num_rows > 1 or request.follows is not None or rng.random() < 0.2:
            return request
        sampling = replace(request.arguments["sampling"], max_tokens=rng.randint(60, 120), ignore_eos=True)
        return replace(request, arguments={**request.arguments, "sampling": sampling})

    return [longer(request) for request in requests]


def _draw_turn(rng: random.Random, request: DrawnRequest, follows: int) -> DrawnRequest:
    sampling = SamplingParams(
        temperature=rng.choice((0, 0.7)), seed=rng.getrandbits(64), max_tokens=rng.randint(1, 30), ignore_eos=True
    )
    own = [rng.randrange(SPECIAL, VOCAB_SIZE) for _ in range(rng.choice((1, 5, 20)))]
    arguments = {**request.arguments, "prompt_token_ids": own, "sampling": sampling}
    return DrawnRequest(arguments, False, "stays", 0, 0.0, _draw_way(arguments, "stays"), follows)


def _draw_request(rng: random.Random, stems: list[list[int]]) -> DrawnRequest:
    arguments: dict[str, Any] = {"priority": rng.choice((0, 0, 0, -1, 1)), "cache_salt": rng.choice(("", "", "", "s"))}
    if rng.random() < 0.3:
        arguments["prompt"] = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 20, 60))))
    else:
        own = [rng.randrange(SPECIAL, VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 90)))]
        arguments["prompt_token_ids"] = rng.choice(stems)[: rng.choice((0, 0, 16, 33, 64))] + own
    fate = rng.choices(list(FATES), FATES.values())[0]
    after, timeout = rng.choice((0, 0, 1, 5, 30)), rng.choice((0.001, 0.05, 0.5))
    if rng.random() < 0.12:
        fate = "stays" if fate in ("detached", "left", "aborted") else fate
        return DrawnRequest(arguments, True, fate, after, timeout, _draw_way(arguments, fate))
    if rng.random() < 0.3:
        returns = rng.choice((None, True, False))
        arguments["session"] = Session(rng.choice(("", "chat", "agent")), returns, rng.choice((None, 1, 60)))
    arguments["sampling"] = _draw_sampling(rng)
    if arguments["sampling"].beam_width and fate == "aborted":
        fate = "cancelled"  # the partial output of an aborted search is not the beginning of its result
    return DrawnRequest(arguments, False, fate, after, timeout, _draw_way(arguments, fate))


def _draw_way(arguments: dict[str, Any], fate: str) -> Way:
    """Return how a request is sent.

    The choice has a random stream of its own, so that seeds that once found a bug draw everything else as before.
    """
    rng = random.Random(f"way {arguments}")
    if fate not in _FATES_OVER_HTTP or not is_expressible(arguments):
        return Way.GRPC
    return rng.choice((Way.GRPC, Way.WHOLE, Way.STREAMED))


def _draw_sampling(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.choice((1, rng.randint(2, 30), rng.randint(30, 100)))}
    if rng.random() < 0.12:
        width = rng.randint(2, 4)
        options |= {"beam_width": width, "n": rng.randint(1, width), "length_penalty": rng.choice((0.0, 1.0, -0.5))}
        options |= {"temperature": 0, "early_stopping": rng.choice((True, False, "never"))}
    else:
        options |= {"n": rng.choice((1, 1, 1, 2, 3)), "temperature": rng.choice((0, 0.7, 1.2))}
        options |= {"seed": rng.getrandbits(64)}
        options |= _drawn(rng, 0.3, top_k=lambda: rng.randint(1, 50), top_p=lambda: rng.uniform(0.3, 1))
        options |= _drawn(rng, 0.15, min_p=lambda: 0.05, logprobs=lambda: rng.choice((0, 1, 5)))
        options |= _drawn(rng, 0.1, prompt_logprobs=lambda: rng.choice((0, 2)))
    # Each request must fit a small cache alone. A beam may need one more block for a copy.
    if options.get("beam_width"):
        options["max_tokens"] = min(options["max_tokens"], 24)
    elif options["n"] > 1:
        options["max_tokens"] = min(options["max_tokens"], 40)
    options |= _drawn(
        rng,
        0.12,
        stop=lambda: rng.sample(("river", ". ", "e", "kite was", "\n", "}"), 2),
        stop_token_ids=lambda: [rng.randrange(VOCAB_SIZE) for _ in range(3)],
        include_stop_str_in_output=lambda: True,
        skip_special_tokens=lambda: False,
        ignore_eos=lambda: True,
        min_tokens=lambda: min(options["max_tokens"], 10),
        repetition_penalty=lambda: 1.2,
        presence_penalty=lambda: 0.4,
        frequency_penalty=lambda: rng.uniform(-1, 1),
        logit_bias=lambda: {rng.randrange(VOCAB_SIZE): rng.choice((-100.0, -3.0, 4.0)) for _ in range(4)},
    )
    if "beam_width" in options:
        options.pop("stop", None)  # a beam search does not support stop texts
    if rng.random() < 0.25:
        options["structured_outputs"] = rng.choice(GRAMMARS)
    return SamplingParams(**options)


def _drawn(rng: random.Random, share: float, **options: Callable[[], Any]) -> dict[str, Any]:
    """Return some of these options, each with the probability `share`."""
    return {name: draw() for name, draw in options.items() if rng.random() < share}
