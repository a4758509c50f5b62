"""Rules about configurations that vLLM refuses: flags, combinations, and what a model or GPU does not support."""

from __future__ import annotations

import re

from tuner.failures.log import Line, Log
from tuner.failures.rule import EXACT, FAMILY, Case, Judgement, Rule, by_ratio, excess, rule
from tuner.records import Verdict

_S, _I, _H = Verdict.STATIC, Verdict.INFEASIBLE, Verdict.HARNESS

_FLAG = re.compile(r"--?[a-zA-Z][\w.-]*")
_FIELD = re.compile(r"^[a-z][a-z0-9_.]{2,60}$")


def _flags(case: Case, judgement: Judgement) -> Judgement:
    """A rejected flag is the search's mistake where the search chose it, the user's (or ours) where it did not."""
    named = [word.lstrip("-").removeprefix("no-") for word in _FLAG.findall(case.match.groupdict().get("flags") or "")]
    chosen = [name for name in named if name in case.facts.searched]
    if not chosen:
        return judgement
    return judgement.but(
        verdict=_S,
        remedy=f"This vLLM does not take --{chosen[0]} this way: drop that dimension for it.",
        moves={chosen[0]: "off"},
    )


def _field(case: Case, judgement: Judgement) -> Judgement:
    """pydantic names each field on the line before its complaint; derived fields complain along with the one set."""
    fields: dict[str, tuple[str, str]] = {}
    for line in case.log.lines[case.line.index - 1 : case.line.index + 60]:
        words = line.text.strip()
        if _FIELD.match(words):
            complaint = case.log.lines[line.index + 1].text if line.index + 1 < len(case.log.lines) else ""
            if match := case.match.re.search(complaint):
                kind = match["type"]
                direction = "up" if kind.startswith("greater") else "down" if kind.startswith("less") else "off"
                fields[words.split(".")[-1]] = (match["what"].strip(), direction)
    set_by_hand = {name: fields[name] for name in fields if name in case.log.arguments}
    fields = set_by_hand or fields
    if not fields:
        return judgement
    names = {name: "--" + name.replace("_", "-") for name in fields}
    return judgement.but(
        explanation="; ".join(f"{names[name]}: {what}" for name, (what, _) in fields.items()) + ".",
        remedy=f"Choose another value for {', '.join(names.values())}.",
        moves={names[name][2:]: direction for name, (_, direction) in fields.items()},
    )


def _budget_below_seqs(case: Case, judgement: Judgement) -> Judgement:
    return judgement.but(violation=excess(case.number("seqs"), case.number("budget")))


def _block_size(case: Case, judgement: Judgement) -> Judgement:
    """Too small a block is the usual case; a large one may be refused as well."""
    size = case.number("size") or case.argument("block_size")
    return judgement.but(moves={"block-size": "down" if size is not None and size >= 64 else "up"})


def _attention_backend(case: Case, judgement: Judgement) -> Judgement:
    """ "No valid attention backend": the reasons in brackets say which setting every backend refused."""
    text = case.match.string
    reasons = {
        "block_size not supported": ("block-size-unsupported", {"block-size": "up"}),
        "kv_cache_dtype not supported": ("kv-cache-dtype-unsupported", {"kv-cache-dtype": "off"}),
        "dtype not supported": ("dtype-unsupported", {"dtype": "off"}),
    }
    for words, (kind, moves) in reasons.items():
        if words in text:
            judgement = judgement.but(kind=kind, moves=moves)
            return _block_size(case, judgement) if "block-size" in moves else judgement
    return judgement


def _world(case: Case, judgement: Judgement) -> Judgement:
    return judgement.but(violation=excess(case.number("world"), case.number("gpus")))


def _quantization(case: Case, judgement: Judgement) -> Judgement:
    return judgement.but(moves={"quantization": "off"})


_PARALLEL = {"tensor-parallel-size": "down"}

RESEMBLING = rule(
    "combination-unsupported",
    _I,
    r"(?i)(?:is|are|was) (?:currently )?not (?:yet |currently |officially )?(?:supported|compatible|implemented|"
    r"allowed|available)"
    r"|does not (?:yet |currently )?support|do not support|doesn't support|not compatible with|incompatible with"
    r"|mutually exclusive|must be divisible|not divisible|cannot be (?:used|enabled|combined|set|greater|larger|"
    r"smaller)"
    r"|can only be (?:set|used|enabled)|is only (?:supported|available|valid)|only supports? |must be (?:<=|>=|"
    r"less|greater|at least|enabled)"
    r"|requires (?:that |the )?\W?\w|[Uu]nsupported|NotImplementedError",
    explanation="This vLLM refuses the combination for this model and GPU.",
    remedy="Return the setting that the message names to its default.",
    weight=FAMILY,
)
"""Any other refusal of a setting, in the words that vLLM, PyTorch and kernels use for it."""

RULES: tuple[Rule, ...] = (
    # --- scheduler ---------------------------------------------------------------------------------------------
    rule(
        "budget-below-seqs",
        _S,
        r"max_num_batched_tokens \(?=?(?P<budget>\d+)\)? must be (?:greater than or equal to|>=|"
        r"at least) max_num_seqs \(?=?(?P<seqs>\d+)",
        explanation="The token budget of a step ({budget}) is smaller than the number of sequences in it ({seqs}); "
        "every "
        "running sequence needs at least one token.",
        remedy="Raise --max-num-batched-tokens or lower --max-num-seqs.",
        moves={"max-num-batched-tokens": "up", "max-num-seqs": "down"},
        judge=_budget_below_seqs,
    ),
    rule(
        "budget-below-length",
        _S,
        r"max_num_batched_tokens \((?P<budget>\d+)\) is smaller than max_model_len \((?P<len>\d+)\)",
        explanation="Without chunked prefill a whole prompt must fit into one step: the budget ({budget}) is below the "
        "longest "
        "allowed request ({len}).",
        remedy="Raise --max-num-batched-tokens, shorten --max-model-len, or leave chunked prefill on.",
        moves={"max-num-batched-tokens": "up", "max-model-len": "down", "enable-chunked-prefill": "on"},
        judge=by_ratio("len", "budget"),
    ),
    rule(
        "partial-prefills-need-chunking",
        _S,
        r"Chunked prefill must be enabled to set max_num_partial_prefills",
        explanation="Several partial prefills at once exist only with chunked prefill.",
        remedy="Leave chunked prefill on, or --max-num-partial-prefills at 1.",
        moves={"enable-chunked-prefill": "on", "max-num-partial-prefills": "down"},
    ),
    rule(
        "long-prefill-threshold",
        _S,
        r"long_prefill_token_threshold \((?P<need>\d+)\) cannot be greater than the max_model_len \((?P<have>\d+)\)",
        explanation="A prompt of {need} tokens, from which on it counts as long, can never occur: requests end at "
        "{have}.",
        remedy="Lower --long-prefill-token-threshold to at most --max-model-len.",
        moves={"long-prefill-token-threshold": "down"},
        judge=by_ratio("need", "have"),
    ),
    rule(
        "long-partial-prefills",
        _S,
        r"max_long_partial_prefills=(?P<need>\d+) must be less than "
        r"or equal to \S*max_num_partial_prefills=(?P<have>\d+)",
        r"max_long_partial_prefills \((?P<need>\d+)\) must be .{0,60}max_num_partial_prefills \((?P<have>\d+)\)",
        explanation="More long partial prefills ({need}) are allowed than partial prefills at all ({have}).",
        remedy="Lower --max-long-partial-prefills or raise --max-num-partial-prefills.",
        moves={"max-long-partial-prefills": "down", "max-num-partial-prefills": "up"},
        judge=by_ratio("need", "have"),
    ),
    rule(
        "active-seqs",
        _S,
        r"max_num_active_seqs \((?P<need>\d+)\) cannot be greater than max_num_seqs \((?P<have>\d+)\)",
        explanation="{need} sequences may be active, but a step holds only {have}.",
        remedy="Lower --max-num-active-seqs or raise --max-num-seqs.",
        moves={"max-num-active-seqs": "down", "max-num-seqs": "up"},
        judge=by_ratio("need", "have"),
    ),
    rule(
        "length-beyond-model",
        _S,
        r"max_model_len \((?P<need>\d+)\) is greater than the derived max_model_len \(\w+=(?P<have>[\d.]+)",
        explanation="The model was made for at most {have} tokens; {need} are asked for.",
        remedy="Lower --max-model-len to {have}.",
        moves={"max-model-len": "down"},
        judge=by_ratio("need", "have"),
    ),
    # --- parallel ----------------------------------------------------------------------------------------------
    rule(
        "heads-not-divisible",
        _S,
        r"[Tt]otal number of attention heads \((?P<heads>\d+)\) must "
        r"be divisible by tensor parallel size \((?P<tp>\d+)\)",
        explanation="{heads} attention heads cannot be shared evenly by {tp} GPUs.",
        remedy="Choose a --tensor-parallel-size that divides {heads}.",
        moves=_PARALLEL,
    ),
    rule(
        "experts-not-divisible",
        _S,
        r"n(?:um)?_(?:physical|logical)?_?experts=?(?P<experts>\d+) must be divisible by \w*=?(?P<ep>\d+)",
        explanation="{experts} experts cannot be shared evenly by {ep} ranks.",
        remedy="Choose tensor and data parallel sizes whose product divides {experts}.",
        moves=_PARALLEL,
    ),
    rule(
        "gpus-missing",
        _S,
        r"world_size \((?P<world>\d+)\) is less than than? max local gpu count \((?P<gpus>\d+)\)",
        r"World size \((?P<world>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        r"Tensor parallel size \((?P<world>\d+)\) exceeds available GPUs \((?P<gpus>\d+)\)",
        r"[Ll]ocal rank (?P<world>\d+) is out of bounds for (?P<gpus>\d+) devices",
        explanation="The configuration wants {world} GPUs; {gpus} are there.",
        remedy="Lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size.",
        moves={"tensor-parallel-size": "down", "pipeline-parallel-size": "down", "data-parallel-size": "down"},
        judge=_world,
    ),
    rule(
        "gpus-missing",
        _S,
        r"(?:Waiting for creating|Cannot provide|Failed to create) a placement group",
        r"You don't have enough GPUs available|Not enough resources to allocate \d+ (?:DP ranks|placement groups)",
        r"CUDA error: invalid device ordinal",
        explanation="More GPUs are asked for than the machine (or the Ray cluster) has; Ray then waits for half an "
        "hour.",
        remedy="Lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size.",
        moves={"tensor-parallel-size": "down", "pipeline-parallel-size": "down", "data-parallel-size": "down"},
        weight=FAMILY,
    ),
    # --- precision and kernels ---------------------------------------------------------------------------------
    rule(
        "quantization-mismatch",
        _S,
        r"Quantization method specified in the model config \((?P<model>[^)]*)\) "
        r"does not match .{0,120}\((?P<asked>[^)]*)\)",
        explanation="The model is quantized as {model}, and --quantization asks for {asked}.",
        remedy="Leave out --quantization; vLLM reads it from the model.",
        judge=_quantization,
    ),
    rule(
        "quantization-mismatch",
        _S,
        r"Cannot find the config file for (?P<asked>[\w-]+)",
        r"Unknown quantization method: (?P<asked>[\w-]+)",
        explanation="--quantization asks for {asked}, but this model is not quantized that way.",
        remedy="Leave out --quantization, or use a model that was quantized with {asked}.",
        judge=_quantization,
    ),
    rule(
        "quantization-unsupported",
        _I,
        r"quantization method (?P<asked>[\w-]+) is not supported for the current GPU",
        r"(?<![\w-])(?P<asked>[\w-]{1,60}) quantization is currently not supported",
        r"is not supported for quantization method (?P<asked>[\w-]+)",
        explanation="This GPU or data type cannot run {asked} quantization.",
        remedy="Choose another precision for this GPU.",
        judge=_quantization,
    ),
    rule(
        "kv-cache-dtype-unsupported",
        _I,
        r"FP8 KV cache|type fp8\w+ not supported in this architecture|kv_cache_dtype not supported",
        r"(?i)(?:unsupported|invalid|unrecognized|unknown) kv[_ -]?cache[_ -]?d?type|"
        r"kv[_ -]cache[_ -]d?type.{0,80}not supported",
        r"(?i)(?:fp8|nvfp4|int8)\w{0,20} KV cache (?:is )?(?:only|not)",
        explanation="No attention kernel for this model, GPU and vLLM reads a KV cache of the type that was asked for.",
        remedy="Leave --kv-cache-dtype at `auto`.",
        moves={"kv-cache-dtype": "off"},
    ),
    rule(
        "block-size-unsupported",
        _I,
        r"No common block size for (?P<size>\d+)",
        r"Input shapes should have M >= \d+, N >= \d+ and K >= \d+",
        r"block_size not supported|share no supported KV cache block size|"
        r"KV cache block size (?P<size>\d+) is not supported",
        r"(?i)block[_ ]size (?:of )?\(?(?P<size>\d+)\)? (?:is not|not|must|should)",
        explanation="No attention kernel of this model and GPU works with this KV block size, although the flag is "
        "accepted.",
        remedy="Leave out --block-size, or use 16 or more.",
        moves={"block-size": "up"},
        judge=_block_size,
    ),
    rule(
        "attention-backend",
        _I,
        r"No valid (?:MLA |CPU )?(?:MLA )?(?:attention|prefill) backend found",
        r"Selected backend \S+ is not valid for this configuration",
        explanation="No attention kernel accepts this combination of model, GPU, data type and block size.",
        remedy="The reasons in brackets name the setting: return it to its default.",
        moves={"attention-backend": "off"},
        weight=EXACT,
        judge=_attention_backend,
    ),
    rule(
        "dtype-unsupported",
        _I,
        r"Bfloat16 is only supported on GPUs with compute capability|does not support (?:float16|bfloat16)|"
        r"Unknown dtype",
        r"expected m1 and m2 to have the same dtype|not implemented for '(?:Half|BFloat16|Float8\w*)'",
        explanation="This GPU or model cannot compute in the data type that was asked for.",
        remedy="Leave --dtype at `auto`, or use float16 on GPUs older than compute capability 8.0.",
        moves={"dtype": "off"},
    ),
    rule(
        "cuda-graph-mode",
        _I,
        r"CUDAGraphMode\.\w+ is not supported|No valid cudagraph sizes|piecewise CUDA graphs .{0,60}unavailable",
        explanation="The attention kernel of this model cannot be captured in the CUDA-graph mode that was asked for.",
        remedy="Leave the compilation settings at their defaults.",
        moves={"compilation-config": "off"},
    ),
    # --- flags -------------------------------------------------------------------------------------------------
    rule(
        "unknown-flag",
        _H,
        r"error: unrecognized arguments: (?P<flags>.+)",
        r"unexpected keyword argument '(?P<flags>\w+)'",
        explanation="This vLLM has no such flag: {flags}. Flags come and go between versions.",
        remedy="Compare with `vllm serve --help=all` of the installed version; remove or rename the flag.",
        weight=EXACT,
        judge=_flags,
    ),
    rule(
        "bad-flag-value",
        _H,
        r"error: (?:argument|ambiguous option:?) (?P<flags>\S+?)[:,]? (?P<what>.+)",
        r"error: the following arguments are required: (?P<flags>.+)",
        explanation="The command line was not understood: {flags}.",
        remedy="Correct the value; `vllm serve --help=all` lists what the flag takes.",
        weight=EXACT,
        judge=_flags,
    ),
    rule(
        "value-out-of-range",
        _S,
        r"(?P<what>Input should be (?!a valid dictionary).{3,80}?) "
        r"\[type=(?P<type>\w+), input_value=(?P<value>[^,\]]{0,80})",
        explanation="A value is outside the range that vLLM allows: {what}.",
        remedy="Choose a value inside the range.",
        judge=_field,
    ),
    rule(
        "plugin-name",
        _H,
        r"(?i)invalid (?:tool call|reasoning) parser|Unrecognized distributed executor backend|"
        r"Load format .{0,40}not supported",
        explanation="A fixed flag names something that this vLLM does not have.",
        remedy="Correct the flag; the message lists what exists.",
    ),
    # --- families ----------------------------------------------------------------------------------------------
    RESEMBLING,
)


def is_configuration_frame(frames: str) -> bool:
    """Whether a traceback ends in the modules in which vLLM validates its configuration, before any GPU work."""
    last = "\n".join(frames.splitlines()[-4:]).replace("\\", "/")
    return any(part in last for part in ("vllm/config/", "engine/arg_utils.py", "pydantic/", "vllm/config.py"))


def complaint(text: str) -> str:
    """The human part of an exception line, without class name and pydantic's trailer."""
    text = re.sub(r"\[type=\w+, input_value=.*$", "", text.strip()).rstrip()
    text = re.sub(r"^(?:[\w.]+(?:Error|Exception)(?:\([\w.]+\))?:\s*)+", "", text)
    return text.removeprefix("Value error, ").removeprefix("Assertion failed, ")


_MODEL_ARGUMENTS = frozenset({"model", "model_tag", "tokenizer", "host", "port", "served_model_name", "load_format"})


def named_settings(line: Line, log: Log) -> dict[str, str]:
    """The settings that a refusal names and that were set: each back to its default."""
    words = {word.replace("-", "_") for word in re.findall(r"(?<![a-z0-9])[a-z][a-z0-9]*(?:[_-][a-z0-9]+)+", line.text)}
    named = sorted(words & log.arguments.keys() - _MODEL_ARGUMENTS)
    return {name.replace("_", "-"): "off" for name in named}
