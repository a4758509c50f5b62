"""The quality guard on a real model and a real vLLM: a planted bad knob is rejected, equivalent ones pass."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.quality import Answers, Closeness, compare, load_prompts
from tuner.records import QualityScores
from tuner.server import ReadyLimits, Server, find_vllm
from tuner.store import loads
from tuner.trial.examine import ANSWERS_FILE, Examination, examine

FLAGS = ("--max-model-len", "256", "--enforce-eager", "--kv-cache-memory-bytes", "64M", "--dtype", "float32")
ONE_PROCESS = ("--distributed-executor-backend", "uni")
CONFIGS = {
    "baseline": (),
    # Other batches, and prompts in pieces: the same arithmetic in another order.
    "equivalent": ("--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
    # Positions turn at another speed than the model was trained with: fluent, and another model.
    "bad": ("--hf-overrides", '{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}'),
}
PROMPTS = (
    "The capital of France is",
    "Name three colours.",
    "What is 12 plus 30?",
    "Why is the sky blue?",
    "Translate into French: good morning.",
    "Write one sentence about the sea.",
    "List the days of the week.",
    "How do birds fly?",
)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_bad_knob_is_rejected_and_an_equivalent_one_passes(
    vllm_executable: Path, language_model: Path, tmp_path: Path
) -> None:
    install = find_vllm(str(vllm_executable))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    prompts = replace(load_prompts(tmp_path / "prompts.txt"), answer_tokens=12)
    found: dict[str, QualityScores] = {}
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, own in CONFIGS.items():
            log = tmp_path / f"{name}.log"
            made = Server(
                install,
                model=str(language_model),
                flags=(*FLAGS, *ONE_PROCESS, *own),
                log_path=log,
                extra_environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # starts in half the time
            )
            servers[name] = stack.enter_context(made)
            servers[name].launch()  # all at once: a start is mostly waiting
        reference: Answers | None = None
        for name, repeat in (("baseline", 0), ("baseline", 1), ("equivalent", 0), ("bad", 0)):
            server = servers[name]
            server.wait_ready(ReadyLimits(silent_s=200, cap_s=280))
            identity = server.identify()
            folder = tmp_path / f"{name}-{repeat}"
            folder.mkdir()
            asked = Examination(prompts, reference)
            scores = examine(server.control, identity.model, identity.max_model_len, asked, folder, threading.Event())
            assert scores.refused == ""
            if reference is None:
                assert scores.reference
                reference = loads(Answers, (folder / ANSWERS_FILE).read_text(), name)
                assert len(reference.answers) == len(PROMPTS)
            found[f"{name}-{repeat}"] = scores
    noise = [found["baseline-1"]]
    equivalent, bad = compare(found["equivalent-0"], noise), compare(found["bad-0"], noise)
    assert equivalent.verdict is Closeness.EQUIVALENT, equivalent.reason
    assert bad.verdict is Closeness.DEGRADED, bad.reason
