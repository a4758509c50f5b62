"""Every odd answer of a server ends as what it is, once, over real connections."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.refserver import faults
from tests.refserver.faults import FaultServer
from tuner.client import LoadRequest, run_load
from tuner.errors import EnvironmentFault
from tuner.records import RequestResult, RequestStatus

TOKENS = 6
TIMEOUT_S = 1.5

S = RequestStatus


@dataclass(frozen=True)
class Expected:
    status: RequestStatus
    chunks: int
    output_tokens: int
    error: str = ""


EXPECTED = {
    "plain": Expected(S.OK, 6, 6),
    "role-first": Expected(S.OK, 6, 6),
    "empty-first": Expected(S.OK, 5, 6),
    "multi-token": Expected(S.OK, 3, 6),
    "reasoning": Expected(S.OK, 6, 6),
    "reasoning_content": Expected(S.OK, 6, 6),
    "tool_calls": Expected(S.OK, 6, 6),
    "reasoning-then-content": Expected(S.OK, 6, 6),
    "escaped": Expected(S.OK, 6, 6),
    "continuous-usage": Expected(S.OK, 6, 6),
    "cached": Expected(S.OK, 6, 6),
    "coalesced": Expected(S.OK, 6, 6),
    "split": Expected(S.OK, 6, 6),
    "crlf-and-comments": Expected(S.OK, 6, 6),
    "content-length": Expected(S.OK, 6, 6),
    "close-delimited": Expected(S.OK, 6, 6),
    "connection-close": Expected(S.OK, 6, 6),
    "continue-first": Expected(S.OK, 6, 6),
    "answers-twice": Expected(S.OK, 6, 6),
    "no-usage": Expected(S.OK, 6, 6),
    "short-output": Expected(S.SHORT_OUTPUT, 4, 4, "4 of 6 tokens; finish_reason: stop, stop_reason: 128001"),
    "abort": Expected(S.STREAM_ERROR, 1, 1, "finish_reason: abort"),
    "no-token": Expected(S.NO_TOKEN, 0, 6, "the server counted 6"),
    "error-in-stream": Expected(S.STREAM_ERROR, 1, 1, "EngineCore encountered an issue."),
    "old-error-in-stream": Expected(S.STREAM_ERROR, 0, 0, "engine dead"),
    "http-500": Expected(S.HTTP_ERROR, 0, 0, "HTTP 500: out of order"),
    "http-429": Expected(S.HTTP_ERROR, 0, 0, "HTTP 429: slow down"),
    "http-502-page": Expected(S.HTTP_ERROR, 0, 0, "HTTP 502: <html>xxx"),
    "http-400-stream": Expected(S.HTTP_ERROR, 0, 0, "HTTP 400: data: {"),
    "early-close": Expected(S.EARLY_CLOSE, 5, 5, "without finish_reason and [DONE]"),
    "cut-in-event": Expected(S.EARLY_CLOSE, 1, 1, "without finish_reason and [DONE]"),
    "closes-unanswered": Expected(S.EARLY_CLOSE, 0, 0, "closed before any answer"),
    "no-done": Expected(S.EARLY_CLOSE, 6, 6, "without [DONE]"),
    "no-finish-reason": Expected(S.EARLY_CLOSE, 6, 6, "without finish_reason"),
    "empty-200": Expected(S.EARLY_CLOSE, 0, 0, "without finish_reason and [DONE]"),
    "hang": Expected(S.TIMEOUT, 0, 0, "no complete answer within 1.5 s"),
    "hang-in-stream": Expected(S.TIMEOUT, 5, 5, "no complete answer within 1.5 s"),
    "not-http": Expected(S.PROTOCOL_ERROR, 0, 0, "not HTTP"),
    "bad-chunk-size": Expected(S.PROTOCOL_ERROR, 1, 1, "not HTTP"),
    "bad-json": Expected(S.PROTOCOL_ERROR, 1, 1, "{not json}"),
    "switches-protocol": Expected(S.HTTP_ERROR, 0, 0, "HTTP 101: the server switches to another protocol"),
    "html-in-200": Expected(S.PROTOCOL_ERROR, 0, 0, "not an event stream: <!doctype html>"),
    "json-in-200": Expected(S.PROTOCOL_ERROR, 0, 0, "not an event stream"),
    "bytes-in-200": Expected(S.PROTOCOL_ERROR, 0, 0, "utf-8"),
}


def request(index: int, body: dict[str, object]) -> LoadRequest:
    document = {"stream": True, "max_tokens": TOKENS} | body
    return LoadRequest(index, "c", 0.005 * index, json.dumps(document).encode(), "/v1/completions", 7, TOKENS, True)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


@pytest.fixture(scope="module")
def results(server: FaultServer) -> dict[str, RequestResult]:
    names = list(EXPECTED)
    requests = [request(index, {"user": name}) for index, name in enumerate(names)]
    before = server.requests
    load = run_load(server.url, requests, timeout_s=TIMEOUT_S, drain_s=5, workers=2)
    assert server.requests - before == len(names), "something was sent twice, or not at all"
    assert [result.index for result in load.requests] == list(range(len(names)))
    return dict(zip(names, load.requests, strict=True))


def test_every_script_is_expected() -> None:
    assert set(EXPECTED) == set(faults.SCRIPTS)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_answer_ends_as_what_it_is(results: dict[str, RequestResult], name: str) -> None:
    result, expected = results[name], EXPECTED[name]
    assert (result.status, result.chunks, result.output_tokens) == (
        expected.status,
        expected.chunks,
        expected.output_tokens,
    ), result.error
    assert expected.error in result.error
    assert bool(result.error) == (expected.status is not S.OK)
    assert len(result.error) <= 500
    assert len(result.gaps_us) == max(result.chunks - 1, 0)
    assert (result.first_s is None) == (result.chunks == 0)
    assert result.end_s >= (result.last_s or result.sent_s) >= result.sent_s >= result.scheduled_s - 1e-6


@pytest.mark.parametrize("name", ["role-first", "empty-first"])
def test_ttft_waits_for_the_first_non_empty_token(results: dict[str, RequestResult], name: str) -> None:
    ttft_s = results[name].ttft_s
    assert ttft_s is not None
    assert ttft_s >= faults.LATE_S


def test_counts_are_the_servers_own_where_it_reports_them(results: dict[str, RequestResult]) -> None:
    assert results["cached"].cached_tokens == 5
    assert results["plain"].cached_tokens is None
    assert results["multi-token"].usage_reported
    assert not results["no-usage"].usage_reported
    assert results["plain"].input_tokens == 7
    assert results["no-usage"].input_tokens == results["no-usage"].planned_input_tokens


def test_tpot_of_multi_token_chunks_comes_from_the_usage_count(results: dict[str, RequestResult]) -> None:
    result = results["multi-token"]
    assert result.first_s is not None
    assert result.last_s is not None
    assert result.tpot_s == pytest.approx((result.last_s - result.first_s) / 5)


def test_one_token_has_no_tpot(server: FaultServer) -> None:
    body = json.dumps({"user": "plain", "max_tokens": 1}).encode()
    (result,) = run_load(
        server.url, [LoadRequest(0, "c", 0, body, "/v1/completions", 7, 1, True)], timeout_s=5, drain_s=5
    ).requests
    assert (result.status, result.output_tokens, result.tpot_s) == (S.OK, 1, None)
    assert result.e2e_s == result.ttft_s


def test_a_refused_connection_is_counted_and_not_retried() -> None:
    requests = [request(index, {"user": "plain"}) for index in range(20)]
    load = run_load("http://127.0.0.1:9", requests, timeout_s=5, drain_s=5)
    assert Counter(result.status for result in load.requests) == {S.CONNECT_ERROR: 20}
    assert {result.error for result in load.requests} == {"Connection refused"}


def test_a_host_that_no_resolver_takes_is_the_environments() -> None:
    with pytest.raises(EnvironmentFault, match="is no host name"):
        run_load("http://a..b", [request(0, {})], timeout_s=1, drain_s=1)


def test_an_idle_connection_is_used_again_unless_the_answer_forbade_it(server: FaultServer) -> None:
    for name, connections in (("plain", 1), ("connection-close", 5), ("http-429", 1)):
        before = server.connections
        requests = [request(index, {"user": name}) for index in range(5)]
        run_load(server.url, requests, timeout_s=5, drain_s=5, concurrency=1)
        assert server.connections - before == connections, name


pieces = st.one_of(
    st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"transfer-encoding: chunked\r\n",
            b"content-length: 20\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n",
            b"\r\n",
            b"0\r\n\r\n",
            faults.HEAD + b"transfer-encoding: chunked\r\n\r\n",
            faults.HEAD + b"\r\n",
            faults.chunk(faults.text_event(" w")),
            faults.chunk(faults.text_event(" w", "stop") + faults.DONE),
            faults.text_event(" w"),
            faults.DONE,
        ]
    ),
    st.binary(max_size=20),
)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.lists(pieces, max_size=6), min_size=20, max_size=40))
def test_any_bytes_end_as_one_status_however_they_are_cut(server: FaultServer, answers: list[list[bytes]]) -> None:
    def raw(cut: list[bytes]) -> dict[str, object]:
        return {"raw": [piece.decode("latin-1") for piece in cut]}

    def run(bodies: list[dict[str, object]]) -> list[tuple[RequestStatus, str, int]]:
        requests = [request(index, body) for index, body in enumerate(bodies)]
        load = run_load(server.url, requests, timeout_s=5, drain_s=5, concurrency=40)
        return [(result.status, result.error, result.chunks) for result in load.requests]

    whole = run([raw([b"".join(answer)]) for answer in answers])
    in_pieces = run([raw(answer) for answer in answers])
    in_bytes = run([raw([bytes([byte]) for byte in b"".join(answer)]) for answer in answers])
    for answer, *seen in zip(answers, whole, in_pieces, in_bytes, strict=True):
        assert len(set(seen)) == 1, (b"".join(answer), seen)
        assert seen[0][0] is not S.TIMEOUT
