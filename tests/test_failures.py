"""Every recorded failure, every case of the catalogue, and the facts that decide where the text cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tuner.failures import TABLE, FailureFacts, classify, not_honoured
from tuner.failures.log import parse, shown
from tuner.failures.running import DEGRADED
from tuner.records import Failure, KnobValue, Verdict

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
LOGS = HERE / "failure_logs"

S, F, R, T, E, H, D, U = (
    Verdict.STATIC,
    Verdict.INFEASIBLE,
    Verdict.RUNTIME,
    Verdict.TRANSIENT,
    Verdict.ENV,
    Verdict.HARNESS,
    Verdict.DEGRADED,
    Verdict.UNKNOWN,
)
UP_KV = {"gpu-memory-utilization": "up", "max-model-len": "down"}
LESS = {"gpu-memory-utilization": "down", "max-num-seqs": "down"}
NOTHING, ALONE = FailureFacts(), FailureFacts(retries=None)


def judge(text: str, facts: FailureFacts = NOTHING, phase: str = "launch", exit_code: int | None = None) -> Failure:
    return classify(text, exit_code=exit_code, phase=phase, facts=facts)


def read(path: Path) -> str:
    return path.read_bytes().decode()


@dataclass(frozen=True)
class Want:
    verdict: Verdict
    kind: str
    moves: Mapping[str, str] = field(default_factory=dict)
    violation: float | None = None
    cause: str = ""


RECORDED_WANT = {
    "cpu-0.32.0/fail_bad_flag": Want(H, "unknown-flag", cause="unrecognized arguments: --no-such-flag"),
    "cpu-0.32.0/fail_bad_value": Want(S, "value-out-of-range", {"max-num-seqs": "up"}),
    "cpu-0.32.0/fail_batched_lt_len": Want(
        S,
        "budget-below-length",
        {"max-num-batched-tokens": "up", "max-model-len": "down", "enable-chunked-prefill": "on"},
        1.0,
    ),
    "cpu-0.32.0/fail_batched_lt_seqs": Want(
        S, "budget-below-seqs", {"max-num-batched-tokens": "up", "max-num-seqs": "down"}, 1.0
    ),
    "cpu-0.32.0/fail_json": Want(H, "bad-flag-value", cause="--compilation-config"),
    "cpu-0.32.0/fail_kv_too_small": Want(
        F, "kv-cache-below-length", {"kv-cache-memory-bytes": "up", "max-model-len": "down"}
    ),
    "cpu-0.32.0/fail_len_too_big_kv1G": Want(F, "kv-cache-below-length", {"max-model-len": "down"}, 0.53),
    "cpu-0.32.0/fail_missing_dir": Want(H, "model-not-found"),
    "cpu-0.32.0/fail_missing_repo": Want(E, "model-not-downloaded"),
    "cpu-0.32.0/fail_no_weights": Want(H, "weights-missing", cause="Cannot find any model weights"),
    "cpu-0.32.0/fail_port_in_use": Want(T, "port-in-use"),
    "cpu-0.32.0/sigterm_during_start_8s": Want(T, "start-incomplete"),
    "h200-0.26.0/fail_awq_mismatch": Want(S, "quantization-mismatch", {"quantization": "off"}),
    "h200-0.26.0/fail_batched_lt_seqs": Want(
        S, "budget-below-seqs", {"max-num-batched-tokens": "up", "max-num-seqs": "down"}, 1.0
    ),
    "h200-0.26.0/fail_cotenant": Want(T, "gpu-not-free", cause="78.77/139.8"),
    "h200-0.26.0/fail_engine_killed": Want(R, "engine-died", cause="exited unexpectedly"),
    "h200-0.26.0/fail_kv_len": Want(F, "kv-cache-none", UP_KV),
}

CASES = {
    "a01_kv_none_old": Want(F, "kv-cache-none", UP_KV),
    "a01_kv_none_new": Want(F, "kv-cache-none", {**UP_KV, "max-num-seqs": "down"}),
    "a02_kv_tokens_old": Want(F, "kv-cache-below-length", UP_KV, 32768 / 7344 - 1),
    "a03_kv_length": Want(F, "kv-cache-below-length", UP_KV, 16 / 11.02 - 1),
    "a03_kv_length_nothing": Want(F, "kv-cache-below-length", UP_KV, 10.0),
    "a04_oom_sampler": Want(F, "oom-sampler", LESS, cause="warming up sampler"),
    "a06_missed_by_a_little": Want(
        F, "memory-utilization-too-high", {"gpu-memory-utilization": "down"}, 19.84 / 19.77 - 1
    ),
    "a06_cotenant_old_text": Want(T, "gpu-not-free"),
    "a06_share_too_large": Want(F, "memory-utilization-too-high", {"gpu-memory-utilization": "down"}),
    "a07_profiling_disturbed": Want(T, "memory-profiling-disturbed"),
    "a09_budget_below_length": Want(S, "budget-below-length", {"enable-chunked-prefill": "on"}),
    "a10_budget_below_seqs": Want(S, "budget-below-seqs", {"max-num-batched-tokens": "up"}, 1024 / 448 - 1),
    "a11_partial_prefills": Want(S, "partial-prefills-need-chunking", {"enable-chunked-prefill": "on"}),
    "a11_long_threshold": Want(S, "long-prefill-threshold", {"long-prefill-token-threshold": "down"}, 3.0),
    "a11_long_partial_prefills": Want(S, "long-partial-prefills", {"max-long-partial-prefills": "down"}, 3.0),
    "a11_long_partial_prefills_old": Want(S, "long-partial-prefills", {"max-num-partial-prefills": "up"}, 0.5),
    "a11_warning_only_started": Want(U, "started"),
    "a13_block_size_1": Want(F, "block-size-unsupported", {"block-size": "up"}),
    "a13_block_size_8_triton": Want(F, "block-size-unsupported", {"block-size": "up"}),
    "a13_block_size_no_backend": Want(F, "block-size-unsupported", {"block-size": "up"}),
    "a13_block_size_8_degraded": Want(D, "backend-replaced", {"block-size": "off"}),
    "a14_kv_dtype_flash": Want(F, "kv-cache-dtype-unsupported", {"kv-cache-dtype": "off"}),
    "a14_kv_dtype_ds_mla": Want(F, "kv-cache-dtype-unsupported", {"kv-cache-dtype": "off"}),
    "a14_kv_dtype_sparse_mla": Want(F, "kv-cache-dtype-unsupported", {"kv-cache-dtype": "off"}),
    "a14_kv_dtype_v100": Want(F, "kv-cache-dtype-unsupported", {"kv-cache-dtype": "off"}),
    "a15_quantization": Want(S, "quantization-mismatch", {"quantization": "off"}),
    "a16_heads_old": Want(S, "heads-not-divisible", {"tensor-parallel-size": "down"}),
    "a16_heads": Want(S, "heads-not-divisible", {"tensor-parallel-size": "down"}),
    "a16_experts": Want(S, "experts-not-divisible", {"tensor-parallel-size": "down"}),
    "a17_world_size_old": Want(S, "gpus-missing", {"tensor-parallel-size": "down"}, 1.0),
    "a17_world_size": Want(S, "gpus-missing", {"tensor-parallel-size": "down"}, 1.0),
    "a17_ray_waits": Want(S, "gpus-missing", {"tensor-parallel-size": "down"}, 3.0),
    "a18_nccl_shared_memory": Want(E, "nccl"),
    "a18_nccl_system": Want(E, "shared-memory-full"),
    "a19_illegal_access": Want(T, "illegal-memory-access", cause="illegal memory access"),
    "a19_engine_dead_by_oom": Want(R, "oom-under-load", LESS, cause="Tried to allocate 960.00 MiB"),
    "a19_unknown_exception": Want(T, "engine-exception", cause="KeyError"),
    "a20_oom_under_load": Want(R, "oom-under-load", LESS, (3.5 - 1.21) / 139.79),
    "a21_exit_zero": Want(T, "engine-died", cause="died unexpectedly"),
    "a22_healthy_but_stuck": Want(T, "no-progress"),
    "a23_waiting": Want(T, "start-incomplete"),
    "a23_ready_timeout": Want(T, "start-timeout"),
    "a26_internal_port": Want(T, "rendezvous"),
    "a26_port_uvicorn": Want(T, "port-in-use"),
    "a26_port_zmq": Want(T, "port-in-use"),
    "a27_ecc": Want(E, "gpu-hardware"),
    "a27_launch_failure": Want(E, "gpu-hardware"),
    "a29_only_the_echo": Want(U, "start-failed"),
    "a29_unfamiliar_cause": Want(U, "unknown", cause="mat1 and mat2 shapes"),
    "a30_removed_flag": Want(H, "unknown-flag"),
    "a30_swap_space": Want(H, "unknown-flag"),
    "a30_bad_choice": Want(H, "bad-flag-value"),
    "a31_chunked_prefill_stays_on": Want(D, "flag-ignored", {"enable-chunked-prefill": "on"}),
    "a31_async_scheduling_off": Want(D, "async-scheduling-off", {"async-scheduling": "off"}),
    "a31_prefix_caching_off": Want(D, "prefix-caching-off", {"enable-prefix-caching": "off"}),
    "a31_graphs_truncated": Want(D, "graphs-truncated"),
    "a31_block_size_replaced": Want(D, "block-size-replaced", {"block-size": "off"}),
    "b_oom_weights": Want(F, "oom-weights", {"tensor-parallel-size": "up"}),
    "b_oom_graphs": Want(F, "oom-graph-capture", LESS),
    "b_oom_profiling": Want(F, "oom-profiling", {"max-num-batched-tokens": "down"}, (7 - 3.1) / 39.48),
    "b_oom_neighbour": Want(T, "gpu-not-free"),
}


def check(failure: Failure, want: Want) -> None:
    assert (failure.verdict, failure.kind) == (want.verdict, want.kind), failure
    assert want.moves.items() <= failure.moves.items(), failure
    assert want.cause in failure.cause
    if want.violation is not None:
        assert failure.violation == pytest.approx(want.violation, rel=0.02, abs=1e-3)
    assert failure.violation > 0
    assert failure.explanation
    assert failure.remedy


@pytest.mark.parametrize("name", RECORDED_WANT)
def test_recorded_failure(name: str) -> None:
    failure = judge(read(RECORDED / f"{name}.log"), ALONE)
    check(failure, RECORDED_WANT[name])
    assert failure.cause in failure.evidence


def test_every_recorded_failure_has_an_expectation() -> None:
    found = {f"{path.parent.name}/{path.stem}" for path in RECORDED.glob("*/fail_*.log")}
    assert found <= RECORDED_WANT.keys()


def test_exit_codes_are_read_from_the_recorded_logs() -> None:
    assert judge(read(RECORDED / "cpu-0.32.0/fail_bad_flag.log")).exit_code == 2
    assert judge(read(RECORDED / "h200-0.26.0/fail_engine_killed.log")).exit_code == 0


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/serve_ok*.log")), ids=lambda path: path.stem)
def test_good_starts_are_no_failures(path: Path) -> None:
    failure = judge(read(path))
    assert failure.kind in ("started", "stopped-from-outside")
    assert judge(read(path), FailureFacts(stop_requested=True)).kind in ("started", "stopped")


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    check(judge(read(LOGS / f"{name}.log")), CASES[name])


def test_every_log_has_an_expectation() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == CASES.keys()


# --- facts ---------------------------------------------------------------------------------------------------------


def test_the_same_sentence_is_decided_by_the_idle_baseline() -> None:
    missed = read(LOGS / "a06_missed_by_a_little.log")
    assert judge(missed, FailureFacts(idle_free_gib=19.77)).verdict is F
    assert judge(missed, FailureFacts(idle_free_gib=21.9)).verdict is T
    taken = read(RECORDED / "h200-0.26.0/fail_cotenant.log")
    assert judge(taken, FailureFacts(idle_free_gib=139.29)).kind == "gpu-not-free"
    assert judge(taken, FailureFacts(idle_free_gib=78.9)).verdict is F  # it has always been that full


def test_a_gpu_that_stays_taken_pauses_the_study() -> None:
    taken = read(RECORDED / "h200-0.26.0/fail_cotenant.log")
    assert judge(taken, FailureFacts(idle_free_gib=139.29, retries=1)).verdict is T
    assert judge(taken, FailureFacts(idle_free_gib=139.29, retries=2)).verdict is E


@pytest.mark.parametrize("name", ["a01_kv_none_new", "a03_kv_length", "b_oom_profiling"])
def test_memory_failures_are_not_blamed_on_a_configuration_while_an_orphan_holds_the_gpu(name: str) -> None:
    orphaned = FailureFacts(other_processes=(4711,))
    failure = judge(read(LOGS / f"{name}.log"), orphaned)
    assert (failure.verdict, failure.kind, failure.moves) == (T, "gpu-not-free", {})
    assert "4711" in failure.explanation


def test_less_free_memory_before_the_launch_than_when_idle_is_an_orphan_too() -> None:
    text = read(LOGS / "a01_kv_none_new.log")
    assert judge(text, FailureFacts(idle_free_gib=79.0, launch_free_gib=40.0)).verdict is T
    assert judge(text, FailureFacts(idle_free_gib=79.0, launch_free_gib=78.8)).verdict is F


def test_a_display_server_that_was_always_there_is_no_excuse() -> None:
    text = read(LOGS / "a06_missed_by_a_little.log")
    assert judge(text, FailureFacts(idle_free_gib=19.8, other_processes=(900,))).verdict is F
    text = read(LOGS / "a01_kv_none_new.log")
    desktop = FailureFacts(idle_free_gib=77.0, launch_free_gib=77.0, other_processes=(900,))
    assert judge(text, desktop).verdict is T  # it may have come after the launch
    assert judge(text, replace(desktop, retries=1)).verdict is F


def test_allocation_errors_name_or_hide_the_neighbour() -> None:
    text = read(LOGS / "b_oom_neighbour.log")
    shared = FailureFacts(idle_free_gib=17.0, device_gib=79.15, launch_free_gib=17.0)
    assert judge(text, shared).kind == "oom-profiling"  # the other one was there all along
    hidden = text.replace("Process 91811 has 61.90 GiB memory in use. ", "")
    assert judge(hidden).kind == "oom-profiling"
    assert judge(hidden, FailureFacts(idle_free_gib=78.6)).kind == "gpu-not-free"


IN_CONTAINER = (
    "CUDA out of memory. Tried to allocate 19.63 GiB. GPU 3 has a total capacity of 79.15 GiB of which {free} GiB is "
    "free. {processes}Of the allocated memory {allocated} is allocated by PyTorch, and 1.07 GiB is reserved by PyTorch "
    "but unallocated."
)


@pytest.mark.parametrize(
    ("allocated", "processes", "kind"),
    [
        ("56.64 GiB", (61.41,), "oom-start"),  # only we are there, under the host's pid
        ("9.50 GiB", (9.6,), "oom-start"),
        ("15.30 GiB", (60.0, 17.2), "gpu-not-free"),  # the smaller one is us
        ("56.64 GiB", (58.9, 0.5), "oom-start"),  # beside a display server
        ("0 bytes", (60.0,), "gpu-not-free"),  # we are not even among them
        ("56.64 GiB", (17.0,), "gpu-not-free"),
        ("9.50 GiB", (17179869184.0,), "oom-start"),  # the driver told nothing
    ],
)
def test_in_a_container_our_own_memory_is_not_somebody_elses(
    allocated: str, processes: tuple[float, ...], kind: str
) -> None:
    named = "".join(f"Process {number} has {held} GiB memory in use. " for number, held in enumerate(processes, 78729))
    text = IN_CONTAINER.format(free=79.15 - sum(processes), processes=named, allocated=allocated)
    assert judge(at_start(f"torch.OutOfMemoryError: {text}")).kind == kind
    ready = "INFO:     Application startup complete.\n"
    under_load = "oom-under-load" if kind == "oom-start" else kind
    assert judge(f"{ready}{CORE}torch.OutOfMemoryError: {text}").kind == under_load


def test_no_room_for_the_cache_is_sized_by_what_was_asked_for() -> None:
    failure = judge(read(LOGS / "a01_kv_none_new.log"), FailureFacts(device_gib=80.0))
    assert failure.violation == pytest.approx(2.14 / 24.0)


def test_distorted_accounting_is_pointed_out() -> None:
    failure = judge(read(RECORDED / "h200-0.26.0/fail_kv_len.log"), FailureFacts(device_gib=139.8))
    assert "another process" in failure.explanation


def test_a_configuration_that_has_started_before_is_not_impossible() -> None:
    text = read(LOGS / "a01_kv_none_new.log")
    assert judge(text, FailureFacts(known_good=True)).verdict is T
    assert judge(text, FailureFacts(known_good=True, retries=2)).verdict is E


def test_an_unknown_end_of_a_start_that_worked_before_is_not_the_configurations() -> None:
    text = "RuntimeWarning: something that nobody has seen before\n"
    known = FailureFacts(known_good=True, retries=1)
    assert judge(text, replace(known, known_good=False), exit_code=2).verdict is U
    assert judge(text, known, exit_code=2).verdict is T
    assert judge(text, replace(known, retries=2), exit_code=2).verdict is E


@pytest.mark.parametrize(
    "line",
    [
        "sh: 0: getcwd() failed: No such file or directory",
        "shell-init: error retrieving current directory: getcwd: cannot access parent directories: No such file",
    ],
)
def test_a_folder_that_is_gone_is_the_machines(line: str) -> None:
    more = "\nIntel oneMKL FATAL ERROR: Cannot load /opt/torch/lib/libtorch_cpu.so."
    assert (judge(line + more, exit_code=2).verdict, judge(line + more).kind) == (E, "folder-gone")


def test_rejected_flag_is_static_where_the_search_chose_it() -> None:
    text = read(LOGS / "a30_bad_choice.log")
    assert judge(text, FailureFacts(searched=frozenset({"block-size"}))).verdict is S
    assert judge(text, FailureFacts(searched=frozenset({"max-num-seqs"}))).verdict is H


@pytest.mark.parametrize(
    ("name", "again"), [("a19_illegal_access", R), ("a19_unknown_exception", R), ("a21_exit_zero", R)]
)
def test_a_crash_counts_against_the_configuration_the_second_time(name: str, again: Verdict) -> None:
    text = read(LOGS / f"{name}.log")
    assert judge(text, FailureFacts(retries=0)).verdict is T
    assert judge(text, FailureFacts(retries=1)).verdict is again


def test_exit_code_zero_is_not_mistaken_for_success() -> None:
    failure = judge(read(LOGS / "a21_exit_zero.log"))
    assert failure.exit_code == 0
    assert "exited with 0" in failure.explanation


STARTING = "(APIServer pid=1) INFO 11-30 12:00:00 [model.py:1] Resolved architecture: LlamaForCausalLM\n"
RUNNING = STARTING + "(APIServer pid=1) INFO:     Application startup complete.\n"


@pytest.mark.parametrize(
    ("facts", "phase", "verdict", "kind"),
    [
        (FailureFacts(timed_out=True), "launch", T, "start-timeout"),
        (FailureFacts(timed_out=True, log_silent=True), "launch", T, "start-hang"),
        (FailureFacts(timed_out=True, retries=1), "launch", F, "start-timeout"),
        (FailureFacts(timed_out=True, retries=1, known_good=True), "launch", T, "start-timeout"),
        (FailureFacts(timed_out=True), "stop", T, "slow-stop"),
        (FailureFacts(timed_out=True), "measure", T, "no-progress"),
        (FailureFacts(no_progress=True), "measure", T, "no-progress"),
        (FailureFacts(no_progress=True, retries=1), "measure", R, "no-progress"),
        (FailureFacts(port_owner="vllm of another user"), "launch", T, "foreign-server"),
        (FailureFacts(disk_free_bytes=10_000_000), "launch", E, "disk-full"),
        (FailureFacts(stop_requested=True), "launch", T, "stopped"),
    ],
)
def test_where_no_text_decides_the_facts_do(facts: FailureFacts, phase: str, verdict: Verdict, kind: str) -> None:
    failure = judge(STARTING if phase == "launch" else RUNNING, facts, phase)
    assert (failure.verdict, failure.kind) == (verdict, kind)


def test_the_slow_start_of_a_known_configuration_is_the_machines_fault_in_the_end() -> None:
    assert judge(STARTING, FailureFacts(timed_out=True, retries=2, known_good=True)).verdict is E


@pytest.mark.parametrize(
    ("code", "verdict", "kind"),
    [
        (-9, T, "killed"),
        (137, T, "killed"),
        (-11, T, "crash"),
        (134, T, "crash"),
        (-4, E, "cpu-too-old"),
        (135, E, "shared-memory-full"),
        (-15, T, "stopped-from-outside"),
        (129, T, "stopped-from-outside"),
    ],
)
def test_signals(code: int, verdict: Verdict, kind: str) -> None:
    failure = judge(STARTING, exit_code=code)
    assert (failure.verdict, failure.kind) == (verdict, kind)


def test_a_second_kill_counts() -> None:
    assert judge(STARTING, FailureFacts(retries=1), exit_code=-9).verdict is F
    assert judge(RUNNING, FailureFacts(retries=1), phase="measure", exit_code=-9).verdict is R


def test_an_unasked_end_without_a_word_is_a_failure() -> None:
    failure = judge(RUNNING, phase="measure", exit_code=0)
    assert (failure.verdict, failure.kind) == (T, "exit-without-reason")


def test_a_known_cause_is_not_hidden_by_a_deadline_or_a_wrapper() -> None:
    text = read(LOGS / "a03_kv_length.log")
    assert judge(text, FailureFacts(timed_out=True, log_silent=True)).kind == "kv-cache-below-length"


def test_what_follows_a_requested_stop_is_noise() -> None:
    text = read(RECORDED / "cpu-0.32.0/serve_ok_eager.log")
    assert "EngineDeadError" in text
    assert judge(text, FailureFacts(stop_requested=True), phase="stop").kind == "stopped"


def test_errors_before_readiness_do_not_explain_a_death_under_load() -> None:
    early = "(EngineCore pid=3) ERROR 11-30 12:00:00 [x.py:1] RuntimeError: NCCL error: unhandled system error\n"
    late = "(EngineCore pid=3) ERROR 11-30 12:01:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
    assert judge(early + RUNNING + late, phase="measure").kind == "oom-under-load"


def test_a_refused_request_is_not_the_cause_of_a_later_death() -> None:
    request = "(APIServer pid=1) ERROR 11-30 12:00:00 [s.py:1] ValueError: `n` is not supported with beam search.\n"
    dead = "(APIServer pid=1) ERROR 11-30 12:01:00 [a.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    failure = judge(RUNNING + request + dead + "encountered an issue.\n", phase="measure")
    assert failure.verdict is T


@pytest.mark.parametrize(
    "line",
    [
        "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://example.com/cat.jpg",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "asyncio.exceptions.TimeoutError",
        "aiohttp.client_exceptions.ClientConnectorError: Name or service not known",
        "pydantic_core.ValidationError: Input should be greater than 0 [type=greater_than, input_value=0]",
        "ModuleNotFoundError: No module named 'librosa'",
        "ValueError: model does not support bfloat16 images",
    ],
)
@pytest.mark.parametrize("dress", ["(APIServer pid=1) ERROR 09-27 05:21:00 [serving_chat.py:237] ", "ERROR:    ", ""])
def test_a_failed_request_is_no_failure_of_a_server_that_serves(line: str, dress: str) -> None:
    report = "INFO 09-27 05:21:02 [loggers.py:123] Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation "
    report += "throughput: 50.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs\n"
    serving = f"INFO:     Application startup complete.\n{dress}{line}\n{report}"
    assert judge(serving, ALONE, "measure").kind == "started"
    dead = "(APIServer pid=1) ERROR 11-30 12:01:00 [a.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    assert judge(f"{serving}{dead}encountered an issue.\n", ALONE, "measure").verdict is not H
    assert judge(f"{dress}{line}\n").kind != "started", "while it starts it is one"


@pytest.mark.parametrize("name", ["/psm_ab12", "/dev/shm/x", "sem.mp-1", "/dev/shm/nccl-AbC", "nccl-AbC"])
def test_full_shared_memory_is_known_by_what_was_written_there(name: str) -> None:
    line = f"OSError: [Errno 28] No space left on device: '{name}'"
    assert judge(at_start(line)).kind == "shared-memory-full"
    assert judge(at_start(line.replace(name, "/models/blobs/semantic"))).kind == "disk-full"


# --- unseen texts --------------------------------------------------------------------------------------------------

CORE = "(EngineCore pid=9) ERROR 11-30 13:46:17 [core.py:1330] "


def at_start(*lines: str) -> str:
    frame = '  File "/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line 3, in init'
    head = [f"{CORE}EngineCore failed to start.", f"{CORE}Traceback (most recent call last):", CORE + frame]
    tail = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    return "\n".join([*head, *(CORE + line for line in lines), tail])


def while_reading(*lines: str) -> str:
    frame = '  File "/venv/lib/python3.12/site-packages/vllm/engine/arg_utils.py", line 3, in create_engine_config'
    return "\n".join("(APIServer pid=9) " + line for line in ("Traceback (most recent call last):", frame, *lines))


def under_load(*lines: str) -> str:
    echo = "ERROR 11-30 13:47:59 [a.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    head = [f"{CORE}EngineCore encountered a fatal error.", f"{CORE}Traceback (most recent call last):"]
    return RUNNING + "\n".join([*head, *(CORE + line for line in lines), echo])


def bare(*lines: str) -> str:
    return "\n".join(["Traceback (most recent call last):", *lines])


UNSEEN: list[tuple[str, Verdict]] = [
    (at_start("RuntimeError: FlashAttention only supports Ampere GPUs or newer."), F),
    (at_start("AssertionError: Sinks are only supported in FlashAttention 3"), F),
    (at_start("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."), F),
    (at_start("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU"), F),
    (at_start("RuntimeError: CUDA error: out of memory", "CUDA kernel errors might be asynchronously reported"), F),
    (at_start("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), F),
    (at_start("RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 1.00 GiB'"), F),
    (at_start("errors.OutOfResources: out of resource: shared memory, Required: 9, Hardware limit: 8"), F),
    (at_start("ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (361)."), F),
    (at_start("ValueError: CUDAGraphMode.FULL is not supported with FlashInferBackend backend"), F),
    (at_start("NotImplementedError: \"addmm\" not implemented for 'Float8_e4m3fn'"), F),
    (at_start("ray.RayTaskError(ValueError): f()", "ValueError: No available memory for the cache blocks"), F),
    (at_start("ValueError: The draft model must share the target's vocabulary"), F),
    (while_reading("ValueError: max_model_len (9) is greater than the derived max_model_len (n_positions=32768.0"), S),
    (while_reading("  Value error, something entirely new about these values [type=value_error, input_value=1]"), S),
    (while_reading("AssertionError: batch size must be a multiple of seven"), S),
    (while_reading("NotImplementedError: Pipeline parallelism is not supported for this model."), S),
    (while_reading("  Value error, Model architectures ['Foo'] are not supported for now. [type=value_error"), H),
    (at_start("RuntimeError: CUDA error: invalid device ordinal"), S),
    (under_load("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB."), R),
    (under_load("RuntimeError: Triton Error [CUDA]: out of memory"), R),
    (under_load("RuntimeError: CUDA error: device-side assert triggered"), T),
    (under_load("RuntimeError: CUDA error: an illegal instruction was encountered"), T),
    (under_load("TimeoutError: RPC call to sample_tokens timed out."), T),
    (under_load("IndexError: list index out of range"), T),
    (under_load("OSError: [Errno 28] No space left on device"), E),
    (under_load("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution"), E),
    (at_start("RuntimeError: No CUDA GPUs are available"), E),
    (at_start("RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."), E),
    (at_start("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"), E),
    (at_start("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"), E),
    (at_start("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"), E),
    (at_start("RuntimeError: Insufficient space in /dev/shm for ring buffer: 240 MiB required, 64 MiB free."), E),
    (at_start("torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler."), E),
    (at_start("RuntimeError: Ninja build failed. Ninja output:", "ninja: build stopped: subcommand failed."), E),
    (at_start("OSError: [Errno 24] Too many open files"), E),
    (at_start("RuntimeError: can't start new thread"), E),
    (at_start("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"), E),
    (bare("ModuleNotFoundError: No module named 'vllm._C'"), E),
    (bare("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"), E),
    (bare("PermissionError: [Errno 13] Permission denied: '/root/.cache/vllm'"), E),
    (bare("OSError: You are trying to access a gated repo."), E),
    (bare("OSError: We couldn't connect to 'https://huggingface.co' to load the files"), E),
    ("Illegal instruction (core dumped)", E),
    ("[12345.678] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", E),
    ("bash: vllm: command not found", E),
    (at_start("RuntimeError: vLLM failed to compile the model, leading to a corrupted compilation artifact"), T),
    (at_start("FileNotFoundError: [Errno 2] No such file or directory: '/c/vllm/torch_compile_cache/3f2f/x'"), T),
    (at_start("_pickle.UnpicklingError: pickle data was truncated"), T),
    (at_start("torch._dynamo.exc.BackendCompilerFailed: backend='VllmBackend' raised: AssertionError:"), T),
    ("Segmentation fault (core dumped)", T),
    ("/usr/bin/start.sh: line 3:   812 Killed                  vllm serve /models/x", T),
    (bare("OSError: foo/bar is not a local folder and is not a valid model identifier listed on the hub"), H),
    (bare("ValueError: Loading m requires you to execute a file; set the option `trust_remote_code=True`"), H),
    (bare("OSError: Can't load tokenizer for '/models/x'."), H),
    (bare("Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3"), H),
    (at_start("ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}"), H),
    (bare("RuntimeError: Cannot re-initialize CUDA in forked subprocess."), H),
    ("vllm serve: error: argument --max-num-seqs: invalid int value: 'abc'", H),
    (at_start("TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'"), U),
    (at_start("ZeroDivisionError: division by zero"), U),
    ("", U),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict"), UNSEEN)
def test_unseen_text(text: str, verdict: Verdict) -> None:
    failure = judge(text, exit_code=1, phase="measure" if "startup complete" in text else "launch")
    assert failure.verdict is verdict, failure


def test_trust_remote_code_is_only_blamed_when_it_is_asked_for() -> None:
    notice = (
        "(APIServer pid=1) The argument `trust_remote_code` is to be used with Auto classes. It has no effect here."
    )
    assert judge(notice + "\n" + at_start("ZeroDivisionError: division by zero")).verdict is U


def test_an_explained_choice_is_not_the_cause() -> None:
    notice = (
        f"{CORE}Cannot use FA version 2 is not supported due to FA2 is only supported on devices with capability >= 8\n"
    )
    assert judge(notice + at_start("ZeroDivisionError: division by zero")).cause.startswith("ZeroDivisionError")


def test_an_unfamiliar_refusal_names_the_settings_to_return() -> None:
    arguments = (
        "INFO 11-30 12:00:00 [u.py:1] non-default args: {'model': 'm', 'max_num_seqs': 4, 'enforce_eager': True}\n"
    )
    failure = judge(arguments + while_reading("ValueError: enforce_eager is incompatible with the moon"))
    assert failure.moves == {"enforce-eager": "off"}


def test_an_exception_out_of_compiled_code_asks_for_a_private_cache_once() -> None:
    frame = f'{CORE}  File "/c/vllm/torch_compile_cache/ea2d/rank_5_0/inductor_cache/bx/cbx.py", line 370, in call'
    text = "\n".join(
        [f"{CORE}Traceback (most recent call last):", frame, f"{CORE}ValueError: too many values to unpack"]
    )
    assert judge(text).kind == "compile-cache"
    compiler = at_start("torch._inductor.exc.InductorError: SubprocException")
    assert judge(compiler, FailureFacts(retries=1)).verdict is F


def test_unknown_shows_the_most_informative_lines() -> None:
    failure = judge(read(LOGS / "a29_unfamiliar_cause.log"))
    assert any("mat1 and mat2 shapes" in line for line in failure.evidence)
    assert not any(line.startswith("File") or "^^^" in line for line in failure.evidence)
    assert len(failure.evidence) <= 8


# --- the dress of a line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dress",
    [
        "{}",
        "\x1b[1;36m(EngineCore pid=7)\x1b[0;0m {}",
        "ESC[0;0m(EngineCore_DP0 pid=7)ESC[0;0m ERROR 09-17 05:40:55 [v1/engine/core.py:712] {}",
        "(VllmWorker rank=1 pid=44) ERROR 05-10 16:00:15 [multiproc_executor.py:470] {}",
        "(RayWorkerWrapper pid=1463574, ip=192.0.2.10) ERROR 03-27 10:29:13 [worker_base.py:620] {}",
        "ERROR 01-20 18:39:37 engine.py:135] {}",
        "Aug 17 18:42:18 host vllm[8052]: (APIServer pid=8052) {}",
        "2026-11-30T12:00:00.123456789Z stderr F (EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:1] {}",
        "[2025-12-13T19:54:35Z] (Worker_TP0 pid=9260) ERROR 12-13 11:54:35 [multiproc_executor.py:826] {}",
        "2026-06-09 14:01:54.604 [Info] (Process) (APIServer pid=42406) {}",
        "vllm-server-1  | (EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:1] {}",
        "[rank0]: {}",
        "[1,0]<stderr>:{}",
        "Loading shards:  25%|██▌ | 1/4 [00:01<00:03]\r{}\r\n",
    ],
)
def test_the_same_message_in_any_dress(dress: str) -> None:
    message = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    failure = judge(dress.format(message))
    assert failure.kind == "kv-cache-none"
    assert failure.cause.startswith("ValueError: No available memory")


def test_worker_lines_of_one_traceback_are_kept_apart() -> None:
    text = "\n".join(
        [
            "(Worker_TP0 pid=1) Traceback (most recent call last):",
            "(Worker_TP1 pid=2) Traceback (most recent call last):",
            '(Worker_TP0 pid=1)   File "/v/vllm/model_executor/model_loader/a.py", line 1, in load_model',
            '(Worker_TP1 pid=2)   File "/v/vllm/other.py", line 1, in f',
            "(Worker_TP0 pid=1) ValueError: x",
        ]
    )
    log = parse(text)
    assert log.frames(log.lines[-1]) == 'File "/v/vllm/model_executor/model_loader/a.py", line 1, in load_model'


def test_stored_lines_carry_no_secrets() -> None:
    assert "hf_abcdefghijkl" not in shown("OSError: bad token hf_abcdefghijkl for model")
    assert shown("Authorization: Bearer abc.def-ghi123456") == "Authorization: Bearer ***"
    assert len(shown("x" * 9999)) == 400


@pytest.mark.parametrize(
    "text",
    [
        "https://bob:SECRETS3cr3t@mirror.corp",
        "https://bob:p@SECRETss@mirror.corp/simple",
        '"api_key": "SECRETabc"',
        "{'api_key': ['SECRETabc', 'SECRETdef'], 'seed': 1}",
        "password: SECRET22x",
        "secret=SECRETVAL1",
        "AWS_SECRET_ACCESS_KEY=SECRETalrXUt",
        "nvapi-SECRETefgh12345678",
        "ghp_SECRET456789abcdef0123456789abcdef0123",
        "glpat-SECRETefghij",
        "AKIASECRETODNN7EXAMPLE",
        "error: unrecognized arguments: --apikey SECRETabc --seed 1",
        "--api-key=SECRETbcdefgh",
        "x-api-key: SECRETKEY",
        'hf_token="SECRET token"',
        "Authorization: Basic SECRETdXNlcjpw",
    ],
)
def test_no_secret_of_a_log_reaches_a_record(text: str) -> None:
    failure = judge(at_start(f"ValueError: bad {text}"))
    assert "SECRET" not in repr(failure).replace("AWS_SECRET", "")
    assert "***" in failure.cause
    assert "SECRET" not in judge(f"vllm serve: {text}").explanation.replace("AWS_SECRET", "")


def test_what_is_no_secret_stays_readable() -> None:
    text = "max_num_batched_tokens=2048 pad_token='<pad>' hf_overrides={} tokenizer: qwen hf_token=None"
    assert shown(text) == text
    assert shown("/models/sk-large-model-v1") == "/models/sk-large-model-v1"


@pytest.mark.parametrize(
    ("text", "is_shown"),
    [
        ("\x1b[1;31mValueError\x1b[0m: x", "ValueError: x"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b]0;never ended", "0;never ended"),
        ("a\x00b\x07\x08c\x7f\x9b2Jd\te\r\nf", "abcd e f"),
        ("\x1bc\x1b(Bplain \u00e9\u4e2d", "plain \u00e9\u4e2d"),
    ],
)
def test_stored_lines_hold_nothing_that_a_terminal_obeys(text: str, is_shown: str) -> None:
    assert shown(text) == is_shown


def test_every_template_of_the_table_fills_from_every_pattern() -> None:
    for row in TABLE:
        for pattern in row.patterns:
            groups = dict.fromkeys(pattern.groupindex, "1")
            assert row.explanation.format(**groups)
            assert row.remedy.format(**groups)


def test_every_kind_is_documented() -> None:
    page = (HERE.parent / "docs" / "failures.md").read_text()
    sources = [path.read_text() for path in (HERE.parent / "tuner" / "failures").glob("*.py")]
    kinds = {row.kind for row in (*TABLE, *DEGRADED)}
    for text in sources:
        kinds |= set(re.findall(r'(?:Judgement\(\s*|kind=)"([a-z][a-z-]+)"', text))
    assert {kind for kind in kinds if f"`{kind}`" not in page} == set()


def case(name: str) -> str:
    return (HERE / "failure_logs" / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [
        ("a13_block_size_8_degraded", {"block-size": 8}, "block-size: Block size 8 rules out the faster"),
        ("a31_async_scheduling_off", {"async-scheduling": True}, "async-scheduling: Asynchronous scheduling"),
        ("a31_block_size_replaced", {"block-size": 16}, "block-size: vLLM chose block size 528"),
        ("a31_prefix_caching_off", {"enable-prefix-caching": True}, "enable-prefix-caching: Prefix caching"),
        ("a31_chunked_prefill_stays_on", {"enable-chunked-prefill": False}, "enable-chunked-prefill: --no-enable"),
    ],
)
def test_what_was_asked_for_and_is_not_in_effect_is_said_with_its_reason(
    name: str, asked: dict[str, KnobValue], says: str
) -> None:
    (sentence,) = not_honoured(case(name), {"max-num-seqs": 8, **asked})
    assert sentence.startswith(says)
    assert not_honoured(case(name), {"max-num-seqs": 8}) == (), "vLLM's own choice is no degradation"


def test_asked_to_be_off_and_off_is_no_degradation() -> None:
    assert not_honoured(case("a31_async_scheduling_off"), {"async-scheduling": False}) == ()
    assert not_honoured(case("a31_prefix_caching_off"), {"enable-prefix-caching": False}) == ()


def test_other_flags_that_are_ignored_are_named() -> None:
    log = "INFO 10-03 09:12:40 [a.py:1] kv_cache_dtype is ignored because the model brings its own\n"
    log += "INFO:     Application startup complete.\n"
    (sentence,) = not_honoured(log, {"kv-cache-dtype": "fp8", "max-num-seqs": 4})
    assert sentence.startswith("kv-cache-dtype: ")
    assert not_honoured(log, {"dtype": "half"}) == ()


@pytest.mark.parametrize("path", sorted((HERE / "recorded").glob("*/serve_ok*.log")), ids=lambda path: path.stem)
def test_good_starts_honour_everything(path: Path) -> None:
    asked = {name.replace("_", "-"): value for name, value in parse(path.read_text()).arguments.items()}
    assert not_honoured(path.read_text(), {**asked, "async-scheduling": True}) == ()


def test_a_dead_engine_is_no_degraded_configuration() -> None:
    log = case("a31_async_scheduling_off")
    for retries, verdict in ((0, Verdict.TRANSIENT), (1, Verdict.RUNTIME)):
        facts = FailureFacts(process_dead=True, retries=retries)
        failure = classify(log, exit_code=None, phase="measure", facts=facts)
        assert (failure.verdict, failure.kind) == (verdict, "engine-died")
