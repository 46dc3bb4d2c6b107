"""Readable histories of the scheduler core: commands, each followed by indented lines with the core's plans and events.

The folder `histories/` has a file for each history. `python -m tests.core.story --rewrite` writes the indented lines,
and `test_histories.py` checks that they are up to date. The worker is simulated; its cache raises an error if a read
would return wrong content.

    scheduler NAME=VALUE...   set the scheduler's options, before any other command
    worker NAME=VALUE...      a worker joins, with these fields of its capacity; held_moves: `moved` finishes its moves
    add NAME prompt=... NAME=VALUE...  add a request; its prompt has numbers, ranges, and requests whose text it repeats
    schedule, complete        make and execute the next plan; process the oldest result
    moved NUM, grammar ID     report the oldest moves as finished; report a grammar as prepared
    abort NAME, stop NAME NUM the client has gone; a stop text was found after this number of tokens
    spoil NAME                the request's next row that samples has invalid logits
    lose, grace, timeout      the worker is lost; has been lost for a while; has been lost for too long
    wait SECONDS, flush, run  advance the clock; empty the cache; run until nothing is left to do
    show, stats NAME...       print requests and blocks; print statistics

Device blocks are shown as numbers, and host blocks as numbers with the prefix h. States have the prefix s; s0 is all
zeros. A save is a row, its number of tokens, and a state. In a block table, a dot is a hole. A bar separates the tables
of two layer groups. A map of blocks shows the owner of each block. It shows = for several owners, + for a block that is
only cached, ~ for a block that only a move uses, and a dot for a free block.
"""

import shlex
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from pagewire.common.wire.messages import (
    FIRST_STATE_ID,
    GrammarKind,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerCapacity,
)
from scheduler_service.core import explain
from scheduler_service.core.request import (
    AdmissionError,
    BeamParams,
    BlockUse,
    Grammar,
    OutputMode,
    Request,
    TokenOutputs,
)
from scheduler_service.core.scheduler import Scheduler
from testing.core.recorded_history import DEFAULTS
from testing.core.simulated_worker import SimulatedWorker
from tests.core.system import capacity_of

_NOTHING = "nothing is planned"
HISTORIES = Path(__file__).with_name("histories")
_USES = {BlockUse.FREE: ".", BlockUse.CACHED: "+", BlockUse.MOVING: "~", BlockUse.SHARED: "="}
_SAMPLING = {field.name for field in fields(SamplingParams)}
_CAPACITY = {field.name for field in fields(WorkerCapacity)}


def _value(text: str):
    return int(text) if text.removeprefix("-").isdigit() else {"yes": True, "no": False}.get(text, text)


class Story:
    def __init__(self) -> None:
        self._options = replace(DEFAULTS, pipeline_depth=1, watermark=0.0)
        self._scheduler = Scheduler(self._options)
        self._worker: SimulatedWorker | None = None
        self._holds_moves = False
        self._results: deque[StepResult] = deque()
        self._now = 0.0
        self._epoch = 0
        self._requests: dict[str, Request] = {}
        self._texts: dict[str, list[int]] = {}  # by request: the tokens of its first sequence
        self._names: dict[int, str] = {}  # by sequence id
        self._rows: dict[int, str] = {}  # by slot

    def play(self, line: str) -> Iterator[str]:
        """Execute a command and yield the lines that it produces."""
        command, *words = shlex.split(line)
        options = {name: _value(value) for name, _, value in (word.partition("=") for word in words if "=" in word)}
        yield from getattr(self, f"do_{command}")(*(word for word in words if "=" not in word), **options)
        self._scheduler.check()

    # Requests

    def do_scheduler(self, **options) -> Iterator[str]:
        self._options = replace(self._options, **options)
        self._scheduler = Scheduler(self._options)
        yield from ()

    def do_add(self, name: str, *, prompt, beam: int = 0, grammar: str = "", output_mode: str = "streamed", **options):
        sampling = {option: options.pop(option) for option in _SAMPLING & options.keys()}
        if "stop_token_ids" in sampling:
            sampling["stop_token_ids"] = tuple(self._tokens(sampling["stop_token_ids"]))
        if beam:
            sampling["num_candidates"] = 2 * beam
        request = Request(
            name,
            options.pop("tenant", ""),
            tuple(self._tokens(prompt)),
            SamplingParams(**sampling),
            beam=BeamParams(beam) if beam else None,
            grammar=Grammar(GrammarKind.CHOICE, grammar, (5,)) if grammar else None,
            output_mode=OutputMode(output_mode),
            **options,
        )
        try:
            sequence_ids = self._scheduler.add(request, self._now)
        except AdmissionError as error:
            yield f"refused, {error.reason.value}: {error}"
            return
        self._requests[name] = request
        self._texts[name] = list(request.prompt_token_ids)
        of_several = range(sequence_ids[0], sequence_ids[0] + request.num_rows)
        self._names |= {id_: f"{name}.{i}" if request.num_rows > 1 else name for i, id_ in enumerate(of_several)}

    def _tokens(self, text) -> Iterator[int]:
        for part in str(text).split(","):
            first, _, last = part.partition("..")
            yield from range(int(first), int(last or first) + 1) if first.isdigit() else self._texts[part]

    def do_abort(self, name: str) -> Iterator[str]:
        yield from self._said(self._scheduler.abort(self._requests[name].tenant, name, self._now))

    def do_stop(self, name: str, num_tokens: str) -> Iterator[str]:
        yield from self._said(self._scheduler.stop(self._sequence_id(name), int(num_tokens), self._now))

    def _sequence_id(self, wanted: str) -> int:
        return next(sequence_id for sequence_id, name in self._names.items() if name == wanted)

    # Steps

    def do_schedule(self) -> Iterator[str]:
        plan = self._scheduler.schedule(self._now)
        if plan is None:
            yield _NOTHING
            return
        worker = self._worker
        before = {slot: row.num_computed for slot, row in worker.rows.items()}
        before |= {opening.slot: opening.num_computed_tokens for opening in plan.openings}
        for source, target in zip(plan.fork_source_slots, plan.fork_target_slots, strict=True):
            before[target] = before[source]
        self._results.append(worker.execute(plan, apply_moves=not self._holds_moves))
        yield f"plan {plan.step}:"
        yield from (f"  {what} {' '.join(parts)}" for what, parts in self._phases(plan) if parts)
        computed = {slot: row.num_computed - before[slot] for slot, row in sorted(worker.rows.items())}
        if any(computed.values()):
            yield f"  computes {' '.join(f'{self._rows[slot]}*{num}' for slot, num in computed.items() if num)}"

    def _phases(self, plan: StepPlan) -> Iterator[tuple[str, list[str]]]:
        rows, pairs = self._rows, lambda *columns: zip(*columns, strict=True)
        yield "closes", [rows.pop(slot) for slot in plan.released_slots]
        yield "releases grammar", [str(id_) for id_ in plan.released_grammar_ids]
        yield "adds grammar", [str(added.grammar_id) for added in plan.added_grammars]
        outs = pairs(plan.swap_out_device_blocks, plan.swap_out_host_blocks)
        ins = pairs(plan.swap_in_host_blocks, plan.swap_in_device_blocks)
        yield "moves out", [f"{_block(a)}>h{_block(b)}" for a, b in outs]
        yield "moves in", [f"h{_block(a)}>{_block(b)}" for a, b in ins]
        yield "copies", [f"{a}>{b}" for a, b in pairs(plan.copy_source_blocks, plan.copy_target_blocks)]
        for opening in plan.openings:
            rows[opening.slot] = self._names[opening.sequence_id]
            computed = f", {opening.num_computed_tokens} of them computed" if opening.num_computed_tokens else ""
            grammar = f", with grammar {opening.grammar_id}" if opening.grammar_id else ""
            blocks = " | ".join(" ".join(str(block or ".") for block in table) for table in opening.block_tables)
            own = " ".join(f"s{state}" for state in opening.own_states)
            states = f", from s{opening.read_state} to {own}" if own else ""
            yield (
                f"opens {rows[opening.slot]}:",
                [f"{len(opening.token_ids)} tokens{computed}, in {blocks}{states}{grammar}"],
            )
        forks = [(rows[source], target) for source, target in pairs(plan.fork_source_slots, plan.fork_target_slots)]
        for name, target in forks:  # the rows of a beam search are distinguished by their slots
            rows[target] = f"{name.partition('.')[0]}.{target}"
        yield "forks", [f"{name}>{rows[target]}" for name, target in forks]
        given = pairs(plan.set_state_slots, plan.set_state_firsts, plan.set_state_seconds)
        yield "gives states", [f"{rows[slot]}:s{first} s{second}" for slot, first, second in given]
        appended = pairs(plan.append_tables, plan.append_block_ids)
        yield "appends", [f"{self._table(table)}+{block}" for table, block in appended]
        replaced = pairs(plan.set_block_tables, plan.set_block_indexes, plan.set_block_ids)
        yield "replaces", [f"{self._table(table)}[{index}]={block}" for table, index, block in replaced]
        yield (
            "tells",
            [f"{rows[slot]}:{token}" for slot, token in pairs(plan.append_token_slots, plan.append_token_ids)],
        )
        saves = pairs(plan.save_slots, plan.save_positions, plan.save_states)
        yield "saves", [f"{rows[slot]}@{position}>s{state}" for slot, position, state in saves]

    def _table(self, table: int) -> str:
        """Return the name of a block table: the name of its row, with a bar for each preceding layer group."""
        layer_group, slot = divmod(table, self._scheduler.state.worker.capacity.max_num_seqs)
        return self._rows[slot] + "|" * layer_group

    def do_complete(self) -> Iterator[str]:
        result = self._results.popleft()
        self._scheduler.moved(result.last_moved_step, self._now)
        yield from self._said(self._scheduler.complete(result, self._now))

    def do_moved(self, num_moves: str = "1") -> Iterator[str]:
        self._worker.finish_moves(int(num_moves))
        self._scheduler.moved(self._worker.last_moved_step, self._now)
        yield from ()

    def do_grammar(self, grammar_id: str) -> Iterator[str]:
        error = self._worker.prepare(int(grammar_id))
        yield from self._said(self._scheduler.grammar_ready(int(grammar_id), error, self._now))

    def do_run(self) -> Iterator[str]:
        """Run without printing plans."""
        tokens: dict[str, list[str]] = {}
        ends: list[str] = []
        while True:
            while [*self.do_schedule()] != [_NOTHING]:
                pass
            if not self._results:
                if not self._worker.pending:
                    break
                [*self.do_moved()]
                continue
            for line in self.do_complete():
                name, colon, said = line.partition(": ")
                if colon and " " not in name:
                    tokens.setdefault(name, []).append(said)
                else:
                    ends.append(line)
        yield from (f"{name}: {' '.join(said)}" for name, said in tokens.items())
        yield from ends

    def _said(self, outputs: TokenOutputs) -> Iterator[str]:
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            name = self._names[sequence_id]
            self._texts.get(name, []).append(token_id)
            yield f"{name}: {token_id}"
        for found in outputs.hypotheses:
            tokens = " ".join(map(str, found.token_ids))
            yield f"{self._names[found.sequence_id]} is {tokens}, of log-probability {found.cumulative_logprob:.2f}"
        for end in outputs.ended:
            cached = f", {end.num_cached_tokens} of its prompt were cached" if end.num_cached_tokens else ""
            message = f": {end.message}" if end.message else ""
            tokens = f"{end.num_output_tokens} tokens"
            yield f"{self._names[end.sequence_id]} ends by {end.reason.value} with {tokens}{cached}{message}"

    # The worker

    def do_worker(
        self, *, blocks: int, windows="0", host_blocks: int = 0, held_moves=False, **options
    ) -> Iterator[str]:
        self._epoch += 1
        given = {name: options.pop(name) for name in _CAPACITY & options.keys()}
        capacity = replace(
            capacity_of(blocks, num_host_blocks=host_blocks, windows=tuple(map(int, str(windows).split(",")))),
            grammar_version="g",
            **given,
        )
        self._holds_moves = held_moves
        self._rows.clear()
        self._worker = SimulatedWorker.of(capacity)
        yield from self._said(self._scheduler.worker_joined(capacity, self._epoch, self._now))

    def do_spoil(self, name: str) -> Iterator[str]:
        self._worker.bad_sequences[self._sequence_id(name)] = RowStatus.NAN_LOGITS
        yield from ()

    def do_lose(self) -> Iterator[str]:
        self._worker = None
        self._results.clear()
        yield from self._said(self._scheduler.worker_lost(self._now))

    def do_grace(self) -> Iterator[str]:
        yield from self._said(self._scheduler.worker_grace_ended(self._now))

    def do_timeout(self) -> Iterator[str]:
        yield from self._said(self._scheduler.worker_timed_out(self._now))

    def do_wait(self, seconds: str) -> Iterator[str]:
        self._now += float(seconds)
        yield from ()

    def do_flush(self) -> Iterator[str]:
        self._scheduler.flush_cache(self._now)
        yield from ()

    # Reports

    def do_show(self) -> Iterator[str]:
        state = self._scheduler.state
        for name, request in self._requests.items():
            try:
                report = explain.report(state, request.tenant, name)
            except KeyError:
                continue  # the request has ended
            reason = f", {report.reason}" if report.reason else ""
            done = (
                f"{report.num_prompt_tokens}+{report.num_output_tokens} tokens, {report.num_computed_tokens} computed"
            )
            yield f"{name} is {report.state}: {done}{reason}"
        blocks = explain.block_map(state)
        for tier, uses in (("blocks", blocks.device), ("host", blocks.host)):
            if uses:
                owners = (_USES.get(use) or blocks.owners[use - BlockUse.HELD] for use in uses)
                yield f"{tier} {' '.join(owners)}"

    def do_stats(self, *names: str) -> Iterator[str]:
        stats = explain.stats(self._scheduler.state)
        yield from (f"{name} is {getattr(stats, name)}" for name in names)


def _block(number: int) -> str:
    """Return the name of a block, or of a state, in moves."""
    return str(number) if number < FIRST_STATE_ID else f"s{number - FIRST_STATE_ID}"


def retold(text: str) -> str:
    """Return the history with the lines that its commands produce now."""
    story, lines = Story(), []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"    {said}" for said in story.play(line)]
    return "\n".join([*lines, ""])


def main() -> int:
    """Rewrite all histories."""
    for path in HISTORIES.glob("*.txt"):
        path.write_text(retold(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] == ["--rewrite"] else __doc__)
