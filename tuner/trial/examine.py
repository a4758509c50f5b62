"""The answers of one running server to a set of prompts, and how far they are from the reference's; it judges nothing.

A few requests at once, not the load of a probe: numbers are to be compared, not speeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tuner.quality import (
    LEAST,
    Answer,
    Answers,
    Message,
    PromptSet,
    forcing_body,
    generation_body,
    read_forced,
    read_generation,
    scores,
)
from tuner.records import QualityScores
from tuner.server import Control, ServerFailure
from tuner.store import dumps, write_atomic
from tuner.trial.broken import Stopped

AT_ONCE = 8
"""As few as keep this short: batches are part of how a server answers, but what is in them must not be chance alone."""
TIMEOUT_S = 120.0
ANSWERS_FILE = "answers.json"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Examination:
    """What a trial is asked about its answers. Without `reference` its answers become the reference."""

    prompts: PromptSet
    reference: Answers | None = None


def examine(
    control: Control,
    model: str,
    max_model_len: int | None,
    examination: Examination,
    folder: Path,
    abort: threading.Event,
) -> QualityScores:
    """Ask every prompt, keep the raw answers in `folder`, and score them against the reference.

    Prompts that are too long for the server are left out when the reference is made. A server that does not answer, or
    answers without what is needed, gives scores with `refused`: that is no verdict on anything else that it does.
    Raises Stopped.
    """
    asking = _Asking(control, model, abort)
    digest, reference = examination.prompts.digest, examination.reference
    tokens, left_out = examination.prompts.answer_tokens, 0
    try:
        if reference is None:
            asked = asking.each(asking.tokenized, examination.prompts.prompts)
            fit = [p for p in asked if max_model_len is None or len(p) + tokens < max_model_len]
            left_out = len(asked) - len(fit)
            if len(fit) < LEAST:
                longest = f"{max_model_len} tokens, {tokens} of them for the answer"
                raise ValueError(f"only {len(fit)} of {len(asked)} prompts fit into max-model-len ({longest})")
            made = asking.each(lambda prompt: asking.generated(prompt, tokens), fit)
            answers = asking.each(lambda answer: asking.forced(answer, answer.tokens), made)
            reference = Answers(digest, tuple(answers))
        else:
            made = asking.each(lambda one: asking.generated(one.prompt, tokens), reference.answers)
            pairs = zip(made, reference.answers, strict=True)
            answers = asking.each(lambda pair: asking.forced(pair[0], pair[1].tokens), pairs)
    except (ServerFailure, ValueError) as error:
        if abort.is_set():
            raise Stopped("stopped while answers were compared") from error
        return QualityScores(digest, examination.reference is None, (), refused=str(error), left_out=left_out)
    write_atomic(folder / ANSWERS_FILE, dumps(Answers(digest, tuple(answers)), indent=None))
    return QualityScores(
        prompts_digest=digest,
        reference=examination.reference is None,
        prompts=scores(reference.answers, answers),
        answers_file=ANSWERS_FILE,
        left_out=left_out,
    )


class _Asking:
    """The requests of one examination."""

    def __init__(self, control: Control, model: str, abort: threading.Event) -> None:
        self._control, self._model, self._abort = control, model, abort
        self._template = True

    def each(self, ask: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """In order, `AT_ONCE` at a time; the first failure ends it."""

        def checked(item: T) -> R:
            if self._abort.is_set():
                raise Stopped("stopped while answers were compared")
            return ask(item)

        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="quality") as pool:
            try:
                return list(pool.map(checked, items))
            finally:
                pool.shutdown(cancel_futures=True)

    def tokenized(self, prompt: tuple[Message, ...]) -> tuple[int, ...]:
        """By the chat template; a model without one gets the bare text, as a base model expects it."""
        if self._template:
            try:
                return self._control.tokenize_chat(self._model, [asdict(message) for message in prompt])
            except ServerFailure:
                if any(message.role != "user" for message in prompt):
                    raise
                self._template = False
        text = "\n\n".join(message.content for message in prompt)
        return self._control.tokenize(self._model, text, special_tokens=True)

    def generated(self, prompt: tuple[int, ...], answer_tokens: int) -> Answer:
        document = self._control.complete(generation_body(self._model, prompt, answer_tokens), timeout_s=TIMEOUT_S)
        tokens, logprobs = read_generation(document)
        return Answer(prompt, tokens, logprobs, ())

    def forced(self, answer: Answer, expected: tuple[int, ...]) -> Answer:
        """With the log-probabilities of the reference's tokens."""
        document = self._control.complete(forcing_body(self._model, answer.prompt, expected), timeout_s=TIMEOUT_S)
        found = read_forced(document, len(answer.prompt), expected)
        return Answer(answer.prompt, answer.tokens, answer.logprobs, found)
