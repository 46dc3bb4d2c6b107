"""The scenario of a seed: a small system, drawn so that seeds differ in kind and not only in detail."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from pagewire.common.wire.messages import GrammarKind, LayerGroup, Pooling, SamplingParams, WorkerCapacity
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.policy import POLICIES
from scheduler_service.core.request import BeamParams, EarlyStopping, Grammar, OutputMode, Request
from scheduler_service.core.scheduler_options import SchedulerOptions

VOCAB_SIZE = 97
BAD_TOKEN = VOCAB_SIZE - 1  # in a prompt: its logits are always invalid
MIN_STATES = 3  # with one more, every request of one sequence fits

FAULTS = (
    "crash",  # the worker's process dies and is restarted
    "cut",  # the connection breaks in one or both directions; noticed at once or by missing heartbeats
    "pause",  # the worker pauses, mostly for longer than the heartbeat limit
    "out_of_memory",  # the worker ends its session
    "bad_row",  # a sequence's logits are NaN
    "cancel",
    "late_cancel",
    "stop",  # a stop text, noticed late
    "stale_hello",
    "rival",  # another scheduler takes over the worker for a moment
    "late_plan",
    "wrong_plans",
    "false_result",
    "false_acknowledgement",
    "question",
    "clock_jump",
    "duplicate",  # a request is sent again while it runs
)

# The share of the seeds that have requests of this kind.
_FEATURES = (
    ("samples", 0.6),
    ("beams", 0.5),
    ("stops", 0.3),
    ("priorities", 0.25),
    ("tenants", 0.25),
    ("deadlines", 0.2),
    ("logprobs", 0.2),
    ("bad", 0.2),
    ("crash", 0.1),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    request: Request
    time: float
    crashes_worker: bool
    goes_bad: bool  # its first sampling row has bad logits, and writes bad blocks
    reads_every: int  # the number of tokens between the client's reads


@dataclass(frozen=True, slots=True)
class Scenario:
    """The scenario of a seed. Times are in seconds, rates in events per event of the scheduler."""

    seed: int
    capacity: WorkerCapacity
    options: SchedulerOptions
    step_seconds: float
    delay_seconds: float  # the longest delay of a message
    wake_seconds: float  # the longest time between an event and the plan that follows it
    read_seconds: float  # the longest time until a client with many requests on one call reads
    move_seconds: float  # the longest time of a move; 0: moves finish before the forward pass of their plan
    worker_timeout: float  # without a worker for this time, all requests end
    worker_grace: float  # without a worker for this time, requests that can restart elsewhere end
    faults: tuple[str, ...]
    fault_rate: float
    late_rate: float  # the share of samples of constrained rows whose mask is late
    flush_times: tuple[float, ...]  # when an operator empties the cache
    arrivals: tuple[Arrival, ...]


def draw_scenario(seed: int, rng: Random) -> Scenario:
    capacity = _draw_capacity(rng)
    num_faults = rng.choice((0, 1, 2, 3, 5, len(FAULTS)))
    arrivals = _draw_arrivals(rng, capacity)
    max_num_seqs = rng.randint(1, 6)
    # Random streams of their own: seeds that once found a defect draw everything else as before.
    slowdown, flushes, patience = Random(f"slowdown {seed}"), Random(f"flush {seed}"), Random(f"patience {seed}")
    hints = Random(f"hints {seed}") if Random(f"sessions {seed}").random() < 0.3 else None
    embeddings = Random(f"embeddings {seed}") if Random(f"pooling {seed}").random() < 0.2 else None
    lengths = Random(f"length {seed}")
    sessions = Random(f"sessions {seed}")
    grammars = Random(f"grammars {seed}")
    has_grammars = grammars.random() < 0.25
    if has_grammars:
        capacity = replace(capacity, gates_grammars=grammars.random() < 0.5)
    share = 0.6
    if Random(f"direction {seed}").random() < 0.05:
        capacity = replace(capacity, is_bidirectional=True, layer_groups=(LayerGroup(),))
        embeddings, share = Random(f"embeddings {seed}"), 1.0
    capacity = _with_layer_groups(Random(f"layer groups {seed}"), capacity)
    states = Random(f"states {seed}")
    capacity = _with_states(states, capacity)
    least_depth = 1
    if capacity.num_device_states:
        # A row that is late twice does not reach a position that a third plan wants to save.
        least_depth = 3 if states.random() < (0.5 if has_grammars else 0.1) else 1
        arrivals = tuple(
            _within_states(states, _repeated(states, arrival, arrivals), capacity, has_grammars) for arrival in arrivals
        )
    leases = Random(f"leases {seed}")
    if leases.random() < 0.5:
        capacity = replace(capacity, max_leased_steps=leases.choice((1, 4, 8, 8)))
        least_depth = max(least_depth, leases.choice((2, 2, 3, 4)))
        if leases.random() < 0.7:  # leases need time in which no request waits
            num_blocks = capacity.num_device_blocks + leases.choice((0, 40))
            capacity = replace(capacity, num_device_blocks=num_blocks, max_model_len=64)
            few = arrivals[: leases.randint(2, 6)]
            arrivals = tuple(_decoding_longer(leases, arrival, capacity.max_model_len) for arrival in few)
    if any(capacity.windows) and lengths.random() < 0.6:
        arrivals = tuple(_lengthened(lengths, arrival, capacity.max_model_len) for arrival in arrivals)
    if sessions.random() < 0.3:
        arrivals = tuple(_renamed(sessions, arrivals))
    if sessions.random() < 0.3:
        arrivals = tuple(replace(arrival, request=_of_a_session(sessions, arrival.request)) for arrival in arrivals)
    return Scenario(
        seed=seed,
        capacity=capacity,
        options=SchedulerOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice((max_num_seqs, max_num_seqs, max_num_seqs + 1, 1, 3, 8, 16, 64, 64)),
            max_model_len=capacity.max_model_len,
            pipeline_depth=max(rng.choice((1, 2, 2)), least_depth),
            enable_prefix_caching=rng.random() < 0.85,
            watermark=rng.choice((0.0, 0.0, 0.01, 0.2, 0.5)),
            policy=rng.choice(POLICIES),
            preemption=rng.choice((PreemptionMode.SWAP, PreemptionMode.SWAP, *PreemptionMode)),
            retention=sessions.choice(("lru", "learned")),
            max_waiting_requests=3 if rng.random() < 0.07 else 100,
            max_waiting_tokens=20 if rng.random() < 0.07 else 1000,
            max_tenant_waiting_requests=3 if rng.random() < 0.07 else None,
            max_lease_ms=leases.choice((30.0, 200.0, 200.0)),
            max_decode_slowdown=slowdown.choice((None, None, 1.0, 2.0)),
            grammar_version="g",
        ),
        step_seconds=0.01,
        delay_seconds=rng.choice((0.0, 0.002, 0.03)),
        wake_seconds=rng.choice((0.0, 0.0, 0.002, 0.02)),
        read_seconds=sessions.choice((0.0, 0.02, 0.2)),
        move_seconds=rng.choice((0.0, 0.005, 0.03, 0.15)),
        worker_timeout=rng.choice((0.3, 60.0, 60.0, 60.0)),
        worker_grace=patience.choice((60.0, 60.0, 0.2, 0.0)),
        faults=tuple(rng.sample(FAULTS, num_faults)),
        fault_rate=rng.choice((0.01, 0.03, 0.1)),
        late_rate=Random(f"late {seed}").choice((0.0, 0.1, 0.6)),
        flush_times=tuple(flushes.random() for _ in range(flushes.choice((0, 0, 5)))),
        arrivals=tuple(
            replace(
                arrival,
                request=_with_hints(
                    hints, _or_an_embedding(embeddings, share, _with_output_mode(patience, arrival.request))
                ),
            )
            for arrival in (_constrained(grammars, arrivals) if has_grammars else arrivals)
        ),
    )


def _constrained(rng: Random, arrivals: tuple[Arrival, ...]) -> list[Arrival]:
    """Return the arrivals, most of them with one of a few grammars."""
    grammars = [_draw_grammar(rng) for _ in range(rng.randint(1, 3))]
    return [
        replace(arrival, request=_with_grammar(arrival.request, rng.choice(grammars), rng))
        if rng.random() < 0.7
        else arrival
        for arrival in arrivals
    ]


def _draw_grammar(rng: Random) -> Grammar:
    fault = rng.choice(("none",) * 6 + ("unreadable", "failed", "limit"))
    seed = rng.randrange(1 << 32)
    if fault == "unreadable" and seed % 3 == 0:
        fault = "deadly"
    if fault == "failed" and seed % 3 == 0:
        fault = "dead_end"
    text = f"{seed} {rng.choice((1, 5, 100))} {fault} {rng.randint(0, 6)}"
    ends = tuple(sorted(rng.sample(range(BAD_TOKEN), rng.choice((1, 1, 2)))))
    return Grammar(GrammarKind.REGEX, text, ends)


def _with_grammar(request: Request, grammar: Grammar, rng: Random) -> Request:
    """Return the request with a grammar, whose end tokens are also stop tokens in half of the cases."""
    sampling, stops = request.sampling, set(request.sampling.stop_token_ids)
    if rng.random() < 0.5:
        stops.update(grammar.end_token_ids)
    if request.beam is not None:
        num = request.beam.beam_width + len(stops.union(grammar.end_token_ids))
        sampling = replace(sampling, num_candidates=num)
    min_tokens = rng.choice((sampling.min_tokens, 2))
    sampling = replace(sampling, stop_token_ids=tuple(sorted(stops)), min_tokens=min_tokens)
    return replace(request, sampling=sampling, grammar=grammar)


def _or_an_embedding(rng: Random | None, share: float, request: Request) -> Request:
    """Return the request, or in a `share` of the cases an embedding of its prompt. `rng` is None for a seed without
    embeddings."""
    if rng is None or rng.random() < 1 - share:
        return request
    pooling = rng.choice((Pooling.LAST, Pooling.MEAN))
    return replace(request, sampling=SamplingParams(pooling=pooling), max_tokens=0, n=1, beam=None, grammar=None)


def _renamed(rng: Random, arrivals: tuple[Arrival, ...]) -> Iterator[Arrival]:
    """Yield the arrivals, many of them with names that other requests have or had."""
    for arrival in arrivals:
        name = rng.choice(arrivals).request.request_id if rng.random() < 0.5 else arrival.request.request_id
        yield replace(arrival, request=replace(arrival.request, request_id=name))


def _of_a_session(rng: Random, request: Request) -> Request:
    """Return the request with random session hints: a session, whether it will return, and a retention time."""
    return replace(
        request,
        session_id=rng.choice(("", "s", "t")),
        will_return=rng.choice((None, True, False)),
        retention_seconds=rng.choice((None, 1, 3600)),
    )


def _lengthened(rng: Random, arrival: Arrival, max_model_len: int) -> Arrival:
    """Return the arrival, sometimes with a longer prompt or more output tokens than the pool has positions for."""
    request = arrival.request
    prompt = list(request.prompt_token_ids)
    if rng.random() < 0.4:
        prompt += [rng.randrange(BAD_TOKEN) for _ in range(rng.randint(0, max_model_len - len(prompt) - 1))]
    max_tokens = max(1, min(request.max_tokens, max_model_len - len(prompt)))
    if rng.random() < 0.3:
        max_tokens = rng.randint(1, max_model_len - len(prompt))
    return replace(arrival, request=replace(request, prompt_token_ids=tuple(prompt), max_tokens=max_tokens))


def _decoding_longer(rng: Random, arrival: Arrival, max_model_len: int) -> Arrival:
    """Return the arrival at a time of its own, usually with more output tokens."""
    arrival = replace(arrival, time=rng.random() * 1.5)
    request = arrival.request
    room = max_model_len - len(request.prompt_token_ids)
    if request.grammar is not None or request.beam is not None or room <= request.max_tokens or rng.random() < 0.2:
        return arrival
    return replace(arrival, request=replace(request, max_tokens=rng.randint(request.max_tokens, room)))


def _with_output_mode(rng: Random, request: Request) -> Request:
    return replace(request, output_mode=rng.choice((OutputMode.STREAMED, *OutputMode)))


def _draw_capacity(rng: Random) -> WorkerCapacity:
    block_size = rng.choice((1, 2, 2, 3, 4, 4, 8))
    return WorkerCapacity(
        worker_id="w",
        model_digest=b"m",
        vocab_size=VOCAB_SIZE,
        max_model_len=rng.choice((64, 64, 20)),
        block_size=block_size,
        num_device_blocks=min(20, max(4, rng.randint(12, 60) // block_size)),
        block_bytes=1000,
        max_num_seqs=rng.choice((2, 6, 6)),
        max_num_batched_tokens=64,
        device="cpu",
        dtype="float32",
        attention_backend="none",
        grammar_version="g",
        num_host_blocks=rng.choice((0, rng.randint(1, 6), 12, 12, 12)),
        swap_bandwidth=rng.choice((1e4, 1e6, 1e8)),
        layer_groups=(LayerGroup(rng.choice((0, 0, 0, rng.randint(1, 16)))),),
    )


def _with_layer_groups(rng: Random, capacity: WorkerCapacity) -> WorkerCapacity:
    """Return the capacity of a model with two or three layer groups in a share of the seeds, else the same."""
    if capacity.is_bidirectional or rng.random() < 0.6:
        return capacity
    num_more, most = rng.choice((1, 1, 2)), capacity.windows[0] or 16
    windows = sorted((rng.choice((capacity.windows[0], rng.randint(1, most))) for _ in range(num_more)), reverse=True)
    windows.sort(key=bool)  # those without a window first
    share = rng.uniform(0.4, 1.0)  # of the blocks that another layer group with as many tokens would need
    return replace(
        capacity,
        layer_groups=tuple(map(LayerGroup, (capacity.windows[0], *windows))),
        num_device_blocks=capacity.num_device_blocks + int(num_more * share * capacity.num_device_blocks),
        num_host_blocks=capacity.num_host_blocks + int(num_more * share * capacity.num_host_blocks),
    )


def _with_states(rng: Random, capacity: WorkerCapacity) -> WorkerCapacity:
    """Return the capacity of a model with states in a share of the seeds, else the same."""
    if capacity.is_bidirectional or rng.random() < 0.7:
        return capacity
    num_host_states = rng.choice((0, rng.randint(1, 3), 8, 8))
    return replace(
        capacity,
        num_device_states=rng.choice((rng.randint(MIN_STATES, 6), rng.randint(5, 10), 12, 20)),
        num_host_states=num_host_states if capacity.num_host_blocks else 0,
        state_bytes=rng.choice((100, 1000, 5000)),
        num_state_layers=1,
    )


def _repeated(rng: Random, arrival: Arrival, arrivals: tuple[Arrival, ...]) -> Arrival:
    """Return the arrival, sometimes with the prompt and the seed of another, so that their outputs may be equal."""
    if rng.random() < 0.6:
        return arrival
    other = rng.choice(arrivals).request
    request = replace(
        arrival.request, prompt_token_ids=other.prompt_token_ids, max_tokens=other.max_tokens, seed=other.seed
    )
    return replace(arrival, request=request)


def _within_states(rng: Random, arrival: Arrival, capacity: WorkerCapacity, has_grammars: bool) -> Arrival:
    """Return the arrival with at most the number of sequences for which the worker has states, most of the time."""
    request, num_states = arrival.request, capacity.num_device_states - 1
    most = max(1, num_states // 2 if request.beam or has_grammars else num_states - 1)
    if request.beam:  # beams that are computed again may share nothing, and copy a block each
        num_blocks = -(-(len(request.prompt_token_ids) + request.max_tokens - 1) // capacity.block_size)
        most = max(1, min(most, capacity.num_device_blocks // (num_blocks + 1)))
    if rng.random() < 0.05:
        return arrival
    beam = request.beam and replace(request.beam, beam_width=min(request.beam.beam_width, most))
    return replace(arrival, request=replace(request, n=min(request.n, most), beam=beam))


def smaller(rng: Random, capacity: WorkerCapacity) -> WorkerCapacity:
    """Return the capacity of a restarted worker: at most the previous capacity."""
    if capacity.num_device_states:
        capacity = replace(
            capacity,
            num_device_states=rng.randint(max(MIN_STATES, capacity.num_device_states // 2), capacity.num_device_states),
            num_host_states=rng.randint(0, capacity.num_host_states),
        )
    return replace(
        capacity,
        num_device_blocks=rng.randint(max(2, capacity.num_device_blocks // 2), capacity.num_device_blocks),
        num_host_blocks=rng.randint(0, capacity.num_host_blocks),
        max_num_seqs=rng.randint(1, capacity.max_num_seqs),
        max_num_batched_tokens=rng.randint(1, capacity.max_num_batched_tokens),
    )


def _draw_arrivals(rng: Random, capacity: WorkerCapacity) -> tuple[Arrival, ...]:
    num_positions = min(capacity.max_model_len - 1, capacity.num_device_blocks * capacity.block_size)
    longest = max(1, min(20, num_positions - 2))
    stems = [[rng.randrange(BAD_TOKEN) for _ in range(longest)] for _ in range(rng.randint(1, 3))]
    spread = rng.choice((0.0, 0.2, 0.6))
    most_tokens = rng.choice((3, 12, 12, 16))
    features = [name for name, rate in _FEATURES if rng.random() < rate]
    if rng.random() < 0.2:  # many groups at once
        spread, features = 0.0, ["samples", rng.choice(("samples", "beams"))]
    arrivals: list[Arrival] = []
    for i in range(rng.randint(3, 6)):
        prompt = _draw_prompt(rng, stems, longest, capacity.block_size)
        if arrivals and rng.random() < 0.2:
            prompt = list(rng.choice(arrivals).request.prompt_token_ids)
        crashes_worker = "crash" in features and rng.random() < 0.2
        goes_bad = "bad" in features and rng.random() < 0.3
        if "bad" in features and rng.random() < 0.15:
            prompt[rng.randrange(len(prompt))] = BAD_TOKEN
        room = max(1, num_positions + 1 - len(prompt))
        max_tokens = rng.randint(1, min(most_tokens, room)) if rng.random() < 0.97 else room + rng.randint(0, 2)
        time = rng.random() * spread
        request = _draw_request(rng, f"r{i}", prompt, max_tokens, features, time)
        if rng.random() < 0.95:
            request = _shrunk(request, capacity)
        arrivals.append(Arrival(request, time, crashes_worker, goes_bad, rng.choice((1, 1, 3, 1000))))
    return tuple(arrivals)


def _shrunk(request: Request, capacity: WorkerCapacity) -> Request:
    """Return the request with at most the number of sequences that the pool can hold, most of the time."""
    size = capacity.block_size
    num_blocks = -(-(len(request.prompt_token_ids) + request.max_tokens - 1) // size)
    has_window = any(capacity.windows) and request.beam
    num_shared = 0 if has_window else (len(request.prompt_token_ids) - 1) // size
    num_copies = 1 if request.beam else 0
    most = max(1, (capacity.num_device_blocks - num_shared) // (num_blocks - num_shared + num_copies))
    if request.beam is None:
        return replace(request, n=min(request.n, most))
    width = min(request.beam.beam_width, most)
    return replace(request, n=min(request.n, width), beam=replace(request.beam, beam_width=width))


def _with_hints(rng: Random | None, request: Request) -> Request:
    """Return the request with random session hints in a share of the seeds (`rng` is not None), or unchanged."""
    if rng is None:
        return request
    return replace(
        request,
        session_id=rng.choice(("", "", "s", "t", "u")),
        will_return=rng.choice((None, True, False)),
        retention_seconds=rng.choice((None, 1, 300)),
    )


def _draw_prompt(rng: Random, stems: list[list[int]], longest: int, block_size: int) -> list[int]:
    length = rng.randint(1, longest)
    shared = rng.randint(0, length)
    if rng.random() < 0.5:
        shared -= shared % block_size
    prompt = rng.choice(stems)[:shared]
    return prompt + [rng.randrange(BAD_TOKEN) for _ in range(length - shared)]


def _draw_request(
    rng: Random, request_id: str, prompt: list[int], max_tokens: int, features: list[str], time: float
) -> Request:
    stops: tuple[int, ...] = ()
    if "stops" in features and rng.random() < 0.6:
        stops = tuple(rng.sample(range(VOCAB_SIZE), rng.choice((1, 5, 20))))
    beam, n = None, 1
    if "beams" in features and rng.random() < 0.6:
        width = rng.choice((1, 2, 2, 3, 4))
        penalty = rng.choice((1.0, 0.0, 2.0, -1.0))
        beam, n = BeamParams(width, penalty, rng.choice(list(EarlyStopping))), rng.randint(1, width)
    elif "samples" in features and rng.random() < 0.8:
        n = rng.randint(2, 4)
    return Request(
        request_id=request_id,
        tenant=rng.choice(("", "a", "b")) if "tenants" in features else "",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            stop_token_ids=stops,
            min_tokens=rng.choice((0, 0, 3)) if stops else 0,
            num_candidates=beam.beam_width + len(stops) if beam else None,
            num_logprobs=0 if "logprobs" in features and not beam and rng.random() < 0.5 else None,
            num_prompt_logprobs=0 if "logprobs" in features and not beam and rng.random() < 0.5 else None,
        ),
        max_tokens=max_tokens,
        seed=rng.randrange(1 << 32),
        n=n,
        priority=rng.randint(-1, 1) if "priorities" in features else 0,
        cache_salt=rng.choice(("", "", "x")) if "tenants" in features else "",
        beam=beam,
        deadline=time + rng.random() * 1.5 if "deadlines" in features and rng.random() < 0.5 else None,
    )
