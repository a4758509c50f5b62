"""The file that `vllm serve --config` reads; it writes text and no file."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tuner.records import Config
from tuner.serve_args.flags import ServeFlags, Takes
from tuner.serve_args.words import check_known, list_items, merged


def to_vllm_yaml(model: str, config: Config, flags: ServeFlags, comments: Mapping[str, str] | None = None) -> str:
    """YAML with the model and every flag, each below its comment (by knob name; `model` and "" (the head) too).

    Written so that every version since 0.26 reads it alike. A switch that is off stands as its negative flag set to
    true, because vLLM drops `flag: false` without a word where the negative is not spelled `--no-flag`. JSON is quoted
    text, which is passed on as one argument.
    """
    check_known(config, flags)
    notes = comments or {}
    lines = [
        *_comment(notes.get("", "")),
        *_comment(notes.get("model", "")),
        f"model: {json.dumps(model, ensure_ascii=False)}",
    ]
    for name, value in merged(config).items():
        flag = flags.flags[name]
        lines += _comment(notes.get(name, ""))
        lines += [line for knob in config if knob.startswith(f"{name}.") for line in _comment(notes.get(knob, ""))]
        if flag.boolean:
            if value or flag.negation:
                lines.append(f"{name if value else str(flag.negation).lstrip('-')}: true")
        elif flag.takes is Takes.LIST:
            lines.append(f"{name}: [{', '.join(json.dumps(item, ensure_ascii=False) for item in list_items(value))}]")
        else:
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.splitlines()]
