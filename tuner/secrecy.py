"""What gives a secret away (its name, its form, its place in a URL) and texts without it; it keeps none."""

from __future__ import annotations

import json
import re

HIDDEN = "***"

_NAMES = (
    r"api[-_]?keys?|secret|passw(?:or)?d|passphrase|credentials?|authorization"
    r"|(?:access|secret|private|account|signing)[-_]?key(?:[-_]?id)?"
    # Not the special tokens of a tokenizer, which are no secrets.
    r"|(?<!\b(?:pad|eos|bos|unk|sep|cls|eot)[-_])(?<!\b(?:image|video|audio)[-_])token"
)
_SECRET_NAME = re.compile(rf"(?:{_NAMES})$", re.I)
_NAMED = re.compile(
    rf"""
    (?P<lead>
        (?:{_NAMES}) \\?["']? \s{{0,9}} (?:=>|[:=]) \s{{0,9}} (?:(?:bearer|basic|token)\s+)?  # api_key="…", password: …
      | (?<![\w-])--[\w.-]{{0,60}}(?:{_NAMES})\+?[ ](?!-)                             # --hf-token …
      | \bbearer[ ](?=[\w.~+/-]{{8}})
    )
    (?!(?:None|null|true|false)\b)
    (?: \\"[^"\\]*\\" | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | \[[^\]]*\] | [^\s"'\[\]{{}}(),;&][^\s"'\]}}),;&]{{2,}} )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_(?!overrides|processor|quantizer|tokenizer|transfer)[A-Za-z0-9]{8,}|nvapi-[\w-]{8,}"
    r"|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|(?<![/._-])sk-[A-Za-z0-9_-]{12,})"  # not /models/sk-something-large
)
"""Tokens that say by their own first letters what they are (Hugging Face, NVIDIA, GitHub, GitLab, Slack, AWS, JWT)."""
_USER_IN_URL = re.compile(r"""(?<=//)[^/\s?#"'<>]+(?=@)""")


def names_secret(name: str) -> bool:
    """Whether what goes by this name is a secret: a flag, a variable, a key in JSON."""
    return _SECRET_NAME.search(name.rstrip("+")) is not None  # `--flag.key+` appends to a list


def without_secrets(text: str) -> str:
    """Any text, with what looks like a secret blanked; JSON stays JSON."""
    if text.startswith(("{", "[")):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if document is not None:
            blanked = _blanked(document)
            return text if blanked == document else json.dumps(blanked, ensure_ascii=False)
    text = _USER_IN_URL.sub(HIDDEN, _FORMS.sub(HIDDEN, text))
    return _NAMED.sub(lambda match: match["lead"] + HIDDEN, text)


def _blanked(value: object, *, secret: bool = False) -> object:
    """Below the name of a secret every text is one; numbers and switches are none."""
    if isinstance(value, dict):
        return {key: _blanked(item, secret=secret or names_secret(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_blanked(item, secret=secret) for item in value]
    if isinstance(value, str) and value:
        return HIDDEN if secret else without_secrets(value)
    return value
