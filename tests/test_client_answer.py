"""Reading a streamed answer gives the same result however the network cuts it, and every doubt is a failure."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.refserver import faults
from tuner.client.answer import Answer, read_event
from tuner.records import RequestStatus


def read(pieces: list[bytes], *, planned: int = 4, ignore_eos: bool = True, complete: bool = True) -> Answer:
    answer = Answer(planned, ignore_eos)
    answer.http_status = 200
    for number, piece in enumerate(pieces):
        answer.now_ns = 1_000_000 * (number + 1)
        answer.feed(piece)
    answer.close(complete)
    return answer


def facts(answer: Answer) -> tuple[object, ...]:
    return (answer.status, answer.error, answer.chunks, answer.usage, answer.finish_reason, answer.done)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
events = st.one_of(
    st.builds(faults.text_event, st.text(max_size=6), st.sampled_from([None, None, None, "length", "stop", "abort"])),
    st.builds(lambda text: faults.delta_event({"content": text}), st.text(max_size=6)),
    st.builds(lambda text: faults.delta_event({"reasoning": text}), st.text(max_size=6)),
    st.builds(faults.usage_event, st.integers(0, 6)),
    st.just(faults.DONE),
    st.just(faults.event({"error": {"message": "dead"}})),
    st.just(b'data: {"choices": [{"text": "\\ud83d"}]}\n\n'),
    st.just(b": comment\n\n"),
    st.just(b"event: message\r\n"),
    st.just(b"\n"),
    st.builds(faults.event, json_values),
    st.builds(lambda value: faults.event({"choices": value}), json_values),
    st.builds(lambda value: faults.event({"choices": [{"text": value, "delta": value}], "usage": value}), json_values),
    st.builds(lambda data: b"data: " + data + b"\n\n", st.binary(max_size=12)),
    st.binary(max_size=12),
)
streams = st.lists(events | events.map(lambda data: data.replace(b"\n", b"\r\n")), max_size=12)


@given(streams, st.lists(st.integers(0, 4000), max_size=20), st.booleans(), st.booleans())
def test_any_cut_of_any_stream_reads_the_same(
    stream: list[bytes], places: list[int], ignore_eos: bool, complete: bool
) -> None:
    data = b"".join(stream)
    whole = read([data], ignore_eos=ignore_eos, complete=complete)
    RequestStatus(whole.status)
    for pieces in (stream, cut(data, places), [data[k : k + 1] for k in range(len(data))]):
        assert facts(read(pieces, ignore_eos=ignore_eos, complete=complete)) == facts(whole)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_non_empty_text_is_one_chunk(words: list[str], chat: bool, escape: bool) -> None:
    """Against the JSON parser: the shortcut for events of a known shape sees what it sees."""
    pieces = []
    for word in words:
        data = faults.delta_event({"content": word}) if chat else faults.text_event(word)
        document = json.loads(data[6:])
        pieces.append(b"data: " + json.dumps(document, ensure_ascii=escape).encode() + b"\n\n")
    answer = read([*pieces, faults.text_event("", "stop"), faults.usage_event(len(words)), faults.DONE], planned=1)
    assert (answer.status, answer.chunks) == ("ok", len(words))
    # One read a millisecond: the stamps are those of the reads that brought the tokens.
    assert answer.first_ns == 1_000_000
    assert answer.last_ns == len(words) * 1_000_000
    assert list(answer.gaps_us) == [1000] * (len(words) - 1)


@given(st.binary(max_size=40))
def test_bytes_in_the_place_of_a_text_are_judged_by_the_json_parser(inside: bytes) -> None:
    first = faults.text_event("probe")
    before, after = first.split(b"probe")
    piece = before + inside + after
    answer = read([first, piece], complete=False)
    try:
        expected = 1 + sum(
            read_event(json.loads(part.removeprefix(b"data: ").decode())).has_token for part in [piece[:-2]]
        )
    except ValueError:
        expected = None
    if b"\n" in inside or b"\r" in inside:
        return  # then it is no longer one event
    if expected is None:
        assert answer.status == "protocol-error"
    else:
        assert (answer.status, answer.chunks) == ("early-close", expected)


def test_half_a_character_is_a_token_and_no_error() -> None:
    halves = [b'data: {"choices": [{"text": "\\ud83d"}]}\n\n', b'data: {"choices": [{"text": "\\ude00"}]}\n\n']
    answer = read([*halves, faults.text_event(" w", "length"), faults.usage_event(3), faults.DONE], planned=3)
    assert (answer.status, answer.chunks) == ("ok", 3)
    failed = read([b'data: {"error": "\\ud83d"}\n\n'])
    assert (failed.status, failed.error.encode()) == ("stream-error", b'"\\ud83d"')


def test_a_token_id_counts_without_text() -> None:
    part = faults.event({"choices": [{"text": "", "token_ids": [7]}]})
    last = faults.event({"choices": [{"text": "", "token_ids": [7], "finish_reason": "length"}]})
    answer = read([part, last, faults.usage_event(2), faults.DONE], planned=2)
    assert (answer.status, answer.chunks) == ("ok", 2)


def test_data_after_done_or_after_an_error_changes_nothing() -> None:
    tokens = faults.texts(4)
    done = read([*tokens, faults.usage_event(4), faults.DONE, faults.text_event(" w"), faults.text_event(" w")])
    assert (done.status, done.chunks) == ("ok", 4)
    failed = read([*tokens[:2], faults.event({"error": "dead"}), faults.text_event(" w0"), faults.DONE])
    assert (failed.status, failed.error, failed.chunks) == ("stream-error", '"dead"', 2)


def test_an_event_without_end_is_given_up() -> None:
    answer = read([b"data: " + b"x" * 1_000_000] * 6)
    assert answer.status == "protocol-error"
    assert "longer than" in answer.error


def test_deeply_nested_json_is_a_protocol_error() -> None:
    assert read([b"data: " + b"[" * 200_000 + b"\n\n"]).status == "protocol-error"


def test_short_output_is_only_claimed_on_the_servers_own_count() -> None:
    three = faults.texts(3)
    assert read([*three, faults.DONE]).status == "ok"  # perhaps two tokens came in one event
    short = read([*three, faults.usage_event(3), faults.DONE])
    assert (short.status, short.error) == ("short-output", "3 of 4 tokens; finish_reason: length, stop_reason: None")
    assert read([*three, faults.usage_event(3), faults.DONE], ignore_eos=False).status == "ok"
