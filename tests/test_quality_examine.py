"""Asking a server for its answers: a small stand-in that speaks the two endpoints, well and badly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tuner.quality import Answers, Message, built_in, load_prompts
from tuner.server import Control
from tuner.store import loads
from tuner.trial.broken import Stopped
from tuner.trial.examine import ANSWERS_FILE, Examination, examine

PROMPTS = replace(built_in(), prompts=built_in().prompts[:10], answer_tokens=4)


@dataclass
class Model:
    """Continues a prompt of token ids by counting up; every token has the log-probability `logprob`."""

    logprob: float | None = -0.5
    step: int = 1
    template: bool = True
    told: bool = True  # whether prompt_logprobs are told
    refuses: int = 0  # status of every completion, 0: none
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(body)
        if path == "/tokenize":
            if "messages" in body:
                text = "".join(message["content"] for message in body["messages"])
                return (200, {"tokens": [1, *text.encode(), 2]}) if self.template else (400, {"error": "no template"})
            return 200, {"tokens": list(body["prompt"].encode())}
        if self.refuses:
            return self.refuses, {"error": "no"}
        prompt = body["prompt"]
        tokens = [prompt[-1] + self.step * (i + 1) for i in range(body["max_tokens"])]
        choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"token_logprobs": [self.logprob] * len(tokens)}}
        if self.told and "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": self.logprob}} for token in prompt[1:])]
        return 200, {"choices": [choice]}


@dataclass
class Stand:
    model: Model
    control: Control

    def examine(
        self, folder: Path, reference: Answers | None = None, length: int | None = 1000, prompts: Any = PROMPTS
    ) -> Any:
        folder.mkdir(exist_ok=True)
        return examine(self.control, "m", length, Examination(prompts, reference), folder, threading.Event())


@pytest.fixture
def stand() -> Iterator[Stand]:
    model = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, document = model.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        control = Control(f"http://127.0.0.1:{server.server_port}")
        try:
            yield Stand(model, control)
        finally:
            control.close()
            server.shutdown()
            thread.join()


def test_reference_and_comparison(stand: Stand, tmp_path: Path) -> None:
    made = stand.examine(tmp_path / "a")
    assert (made.reference, made.refused, len(made.prompts), made.left_out) == (True, "", 10, 0)
    reference = loads(Answers, (tmp_path / "a" / ANSWERS_FILE).read_text(), "a")
    same = stand.examine(tmp_path / "b", reference)
    assert not same.reference
    assert all(score.exact and score.drift == 0 for score in same.prompts)
    stand.model.step, stand.model.logprob = 2, -0.75
    other = stand.examine(tmp_path / "c", reference)
    assert all((score.agreed, score.exact, score.drift) == (0, False, 0.25) for score in other.prompts)
    greedy = [body for body in stand.model.asked if "logprobs" in body]
    assert {body["temperature"] for body in greedy} == {0}


def test_a_model_without_a_chat_template_gets_the_text(stand: Stand, tmp_path: Path) -> None:
    stand.model.template = False
    assert stand.examine(tmp_path / "a").refused == ""
    reference = loads(Answers, (tmp_path / "a" / ANSWERS_FILE).read_text(), "a")
    assert bytes(reference.answers[0].prompt).decode() == PROMPTS.prompts[0][0].content


def test_a_conversation_needs_a_template(stand: Stand, tmp_path: Path) -> None:
    stand.model.template = False
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    lines = [json.dumps({"messages": turns}), *(json.dumps(f"prompt {i}") for i in range(8))]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    assert "400" in stand.examine(tmp_path / "a", prompts=load_prompts(tmp_path / "p.jsonl")).refused


def test_prompts_that_do_not_fit_are_left_out(stand: Stand, tmp_path: Path) -> None:
    """Prompts of 12 to 21 tokens, four tokens of answer, and the one that has to be generated beside it."""
    prompts = replace(PROMPTS, prompts=tuple((Message("user", "x" * (10 + i)),) for i in range(10)))
    made = stand.examine(tmp_path / "a", length=24, prompts=prompts)
    assert (made.left_out, len(made.prompts)) == (2, 8)
    assert "only 7 of 10 prompts fit" in stand.examine(tmp_path / "b", length=23, prompts=prompts).refused


def test_whatever_is_not_told_is_a_refusal(stand: Stand, tmp_path: Path) -> None:
    stand.model.told = False
    assert "prompt_logprobs" in stand.examine(tmp_path / "a").refused
    stand.model.told, stand.model.logprob = True, None
    assert "is no log-probability" in stand.examine(tmp_path / "b").refused
    stand.model.refuses = 500
    found = stand.examine(tmp_path / "c")
    assert "status 500" in found.refused
    assert found.prompts == ()
    assert not (tmp_path / "c" / ANSWERS_FILE).exists()


def test_a_wish_to_stop_is_no_refusal(stand: Stand, tmp_path: Path) -> None:
    abort = threading.Event()
    abort.set()
    with pytest.raises(Stopped):
        examine(stand.control, "m", None, Examination(PROMPTS), tmp_path, abort)
