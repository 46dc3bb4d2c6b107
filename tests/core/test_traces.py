"""Reading traces in three formats, and generating token ids from their blocks."""

import gzip
from pathlib import Path

import pytest

from scheduler_service.simulation.trace import (
    Trace,
    TraceContent,
    TraceError,
    TraceRequest,
    TraceSession,
    common_blocks,
    read_trace,
)
from tests.core.trace_files import entry, write_azure, write_mooncake, write_sessions


def test_sessions_need_blocks_new_since_the_previous_request(tmp_path: Path) -> None:
    path = write_sessions(
        tmp_path / "trace",
        [
            entry(700, 40, [[1, 10]], think_s=9.0),
            entry(900, 0, [[1, 8], [20, 6]], think_s=3.0),
            entry(910, 7, [[1, 8], [20, 6]], think_s=None),
            entry(320, 7, [[30, 5]], think_s=1.5),
        ],
    )
    trace = read_trace(path)
    assert (trace.form, trace.block_size, trace.shares_blocks) == ("agent sessions", 64, False)
    [session] = trace.sessions
    assert [request.num_needed_tokens for request in session.requests] == [700, 900 - 8 * 64, 910 - 14 * 64, 320]
    assert [request.think_s for request in session.requests] == [0.0, 3.0, 0.0, 1.5]
    assert [request.num_output_tokens for request in session.requests] == [40, 1, 7, 7]


def test_a_prompt_shorter_than_what_it_shares_needs_nothing(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "trace", [entry(128, 1, [[1, 2]]), entry(100, 1, [[1, 2]])])
    assert [request.num_needed_tokens for request in read_trace(path).sessions[0].requests] == [128, 0]


def test_mooncake_requests_need_unseen_blocks_only(tmp_path: Path) -> None:
    path = write_mooncake(
        tmp_path / "trace",
        (0, 1100, 5, [0, 1, 2]),
        (500, 1600, 6, [0, 1, 3, 4]),
        (2500, 1030, 7, [0, 1, 3]),
    )
    trace = read_trace(path)
    assert (trace.form, trace.block_size, trace.shares_blocks) == ("mooncake", 512, True)
    assert [session.start_s for session in trace.sessions] == [0.0, 0.5, 2.5]
    requests = [session.requests[0] for session in trace.sessions]
    assert [request.num_needed_tokens for request in requests] == [1100, 1600 - 1024, 0]
    assert requests[1].block_runs == ((0, 2), (3, 2))


def test_azures_requests_have_lengths_alone(tmp_path: Path) -> None:
    trace = read_trace(write_azure(tmp_path / "trace", ("18:15:46.6805900", 374, 44), ("18:15:50.9305900", 396, 109)))
    assert (trace.form, trace.block_size) == ("azure", 0)
    assert [session.start_s for session in trace.sessions] == [0.0, 4.25]
    assert [session.requests[0] for session in trace.sessions] == [
        TraceRequest(0.0, 374, 44, (), 374),
        TraceRequest(0.0, 396, 109, (), 396),
    ]


def test_compressed_traces_are_the_same(tmp_path: Path) -> None:
    for plain in (
        write_sessions(tmp_path / "sessions", [entry(64, 1, [[1, 1]])]),
        write_mooncake(tmp_path / "mooncake", (0, 100, 1, [0])),
        write_azure(tmp_path / "azure", ("10:00:00.0000000", 10, 1)),
    ):
        packed = tmp_path / "packed"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert read_trace(packed) == read_trace(plain)


def test_a_limit_cuts_within_a_session(tmp_path: Path) -> None:
    requests = [entry(64, 1, [[1, 1]])] * 3
    path = write_sessions(tmp_path / "trace", requests, [], requests, requests)
    assert [len(session.requests) for session in read_trace(path).sessions] == [3, 3, 3]
    assert [len(session.requests) for session in read_trace(path, 5).sessions] == [3, 2]
    assert [len(session.requests) for session in read_trace(path, 3).sessions] == [3]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "its first line is neither"),
        ("hello\n", "its first line is neither"),
        ("[1]\n", "its first line is neither"),
        ('{"session": "a", "block_size": 64, "requests": []}\n', "has no requests"),
        (
            '{"session": "a", "block_size": 64, "requests": [{"think_s": 0}]}\n',
            "line 1 is not a session: it has no 'blocks'",
        ),
        ('{"session": "a", "requests": []}\n', "line 1 is not a session: it has no 'block_size'"),
        ('{"timestamp": 0, "hash_ids": [1], "input_length": -3, "output_length": 1}\n', "a number is negative"),
        ('{"timestamp": 0, "hash_ids": [1], "input_length": 3, "output_length": 1}\n{\n', "line 2 is not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,x,1\n", "line 2 is not a request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0\n", "line 2 is not a request"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match="trace") as error:
        read_trace(path)
    assert fault in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for content in (b"\xff\xfe\x00", gzip.compress(b"{}" * 1000)[:20]):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="is not a trace"):
            read_trace(path)


def test_common_blocks_are_counted_from_the_beginning() -> None:
    assert common_blocks(((1, 5), (9, 2)), ((1, 3), (4, 2), (9, 1), (7, 1))) == 6
    assert common_blocks(((2, 5),), ((1, 6),)) == 0
    assert common_blocks((), ((1, 6),)) == 0


# Content


def content_of(*sessions: list[TraceRequest], shares_blocks: bool = False, scale: int = 16) -> TraceContent:
    made = tuple(TraceSession(str(i), 0.0, tuple(requests)) for i, requests in enumerate(sessions))
    return TraceContent(Trace("test", 64, shares_blocks, made), scale)


def request(num_prompt: int, num_output: int, *runs: tuple[int, int]) -> TraceRequest:
    return TraceRequest(0.0, num_prompt, num_output, runs, 0)


def test_equal_blocks_have_equal_tokens_within_a_session_alone() -> None:
    prompts = [request(192, 1, (1, 3)), request(192, 1, (1, 2), (7, 1))]
    content = content_of(prompts, prompts)
    first, _ = content.tokens(0, 0)
    second, _ = content.tokens(0, 1)
    assert len(first) == len(second) == 12
    assert first[:8] == second[:8]
    assert not set(first[8:]) & set(second)
    assert not {*first, *second} & {*content.tokens(1, 0)[0], *content.tokens(1, 1)[0]}
    shared = content_of(prompts, prompts, shares_blocks=True)
    assert shared.tokens(0, 0)[0] == shared.tokens(1, 0)[0]


def test_an_output_is_what_the_next_prompt_shows() -> None:
    content = content_of([request(136, 113, (1, 2)), request(320, 1, (1, 5))])
    prompt, output = content.tokens(0, 0)
    following, _ = content.tokens(0, 1)
    assert len(prompt) == round(136 / 16)
    assert len(output) == 1 + round(112 / 16)
    assert prompt + output == following[: len(prompt) + len(output)]


def test_output_not_in_any_prompt_has_unique_tokens() -> None:
    branching = content_of([request(128, 64, (1, 2)), request(320, 64, (1, 1), (9, 4))])
    prompt, output = branching.tokens(0, 0)
    following, last = branching.tokens(0, 1)
    assert not set(output) & {*prompt, *following, *last}
    assert not set(last) & {*prompt, *following}


def test_lengths_without_blocks_make_fresh_tokens() -> None:
    content = content_of([request(3, 1)], [request(1000, 33)])
    short, long = content.tokens(0, 0), content.tokens(1, 0)
    assert [len(tokens) for tokens in (*short, *long)] == [1, 1, 62, 3]
    assert not {*short[0], *short[1]} & {*long[0], *long[1]}


def test_a_last_block_that_is_not_full_is_cut() -> None:
    content = content_of([request(100, 1, (0, 2))])
    assert content.tokens(0, 0)[0] == [0] * 4 + [1] * 2
