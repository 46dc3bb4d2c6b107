"""An oracle for beam search, without cache, blocks or steps.

The engine's hypotheses must equal its results. It is written after transformers' `_beam_search`, over whole lists of
candidates, and independently of `core/beam.py`.
"""

from scheduler_service.core.request import EarlyStopping, Request
from testing.core.simulated_worker import candidates, digest, digest_all
from testing.core.toy_grammar import constrained_candidates, read

Hypotheses = list[tuple[tuple[int, ...], float, int | None]]  # tokens, cumulative logprob, stop token; best first


def search(request: Request, vocab_size: int) -> Hypotheses:
    """Return the hypotheses of a request, best first."""
    assert request.beam is not None
    params, width, stops = request.beam, request.beam.beam_width, set(request.sampling.stop_token_ids)
    grammar_ends = set(request.grammar.end_token_ids if request.grammar is not None else ())
    running: list[tuple[float, tuple[int, ...], int]] = [(0.0, (), digest_all(request.prompt_token_ids))]
    finished: list[tuple[float, tuple[int, ...], float, int | None]] = []
    for length in range(1, request.max_tokens + 1):
        barred = stops if length <= request.sampling.min_tokens and request.grammar is None else set()
        is_early = length <= request.sampling.min_tokens
        ending = grammar_ends if is_early else stops | grammar_ends
        ranked = sorted(
            (-cumulative - logprob, beam, token_id)
            for beam, (cumulative, output, prefix) in enumerate(running)
            for token_id, logprob in _candidates(request, output, prefix, vocab_size)
            if token_id not in barred
        )
        ends = [token_id in ending or length == request.max_tokens for _, _, token_id in ranked]
        for (loss, beam, token_id), is_end in list(zip(ranked, ends, strict=True))[:width]:
            if is_end:
                stop = token_id if token_id in ending else None
                finished.append((loss / length**params.length_penalty, (*running[beam][1], token_id), -loss, stop))
        finished = sorted(finished, key=lambda hypothesis: hypothesis[0])[:width]
        going_on = [entry for entry, is_end in zip(ranked, ends, strict=True) if not is_end][:width]
        running = [
            (-loss, (*running[beam][1], token_id), digest(running[beam][2], token_id))
            for loss, beam, token_id in going_on
        ]
        if not running or (len(finished) == width and _is_over(request, running[0][0], -finished[-1][0], length)):
            break
    return [(token_ids, cumulative, stop) for _, token_ids, cumulative, stop in finished[: request.n]]


def _candidates(request: Request, output: tuple[int, ...], prefix: int, vocab_size: int) -> list[tuple[int, float]]:
    assert request.beam is not None
    if request.grammar is None:
        return candidates(prefix, 2 * request.beam.beam_width + 2 * len(request.sampling.stop_token_ids), vocab_size)
    matcher = read(request.grammar.text, request.grammar.end_token_ids, vocab_size)
    matcher.consume(output)
    entries = candidates(prefix, vocab_size, vocab_size)
    return constrained_candidates(matcher, request.sampling, entries, vocab_size)


def _is_over(request: Request, best_running: float, worst_finished: float, length: int) -> bool:
    assert request.beam is not None
    penalty = request.beam.length_penalty
    if request.beam.early_stopping is EarlyStopping.FIRST:
        return True
    if request.beam.early_stopping is EarlyStopping.NEVER and penalty > 0:
        length = request.max_tokens
    return not best_running / length**penalty > worst_finished
