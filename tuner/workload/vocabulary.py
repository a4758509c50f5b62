"""Which token ids a prompt may be made of: never special, multimodal or padding ids; there is no tokenizer here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

from tuner.errors import InputError

MIN_ORDINARY = 64
"""Fewer ordinary ids than this cannot keep the first 16 tokens of different prompts apart."""

PROBE_TEXT = " ".join(a + b for a in ascii_lowercase for b in ascii_lowercase)
"""Plain letters: whatever a tokenizer makes of them is ordinary by construction (see `vocabulary_from_tokens`)."""

_ID_KEY = re.compile(r"token_(?:id|ids|index|indices)$")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids from 0 to `size` − 1 without `excluded`."""

    size: int
    excluded: frozenset[int] = frozenset()

    def ordinary(self) -> tuple[int, ...]:
        """The usable ids in ascending order; raises `InputError` when there are too few to tell prompts apart."""
        ids = tuple(token for token in range(self.size) if token not in self.excluded)
        if len(ids) < MIN_ORDINARY:
            raise InputError(
                where="the model's tokenizer",
                field="vocabulary",
                value=len(ids),
                rule=f"prompts need at least {MIN_ORDINARY} ordinary token ids",
                remedy="Check config.json and the tokenizer files of the model.",
            )
        return ids


def ordinary_vocabulary(model_dir: Path | None) -> Vocabulary | None:
    """The vocabulary of a model folder, or None where it is not local or does not say its size.

    Excluded are added and special tokens (tokenizer.json, tokenizer_config.json, tekken.json), every id that
    config.json names in any `*token_id*` or `*token_index` entry (begin, end, padding, image, audio, …), and ids that
    the tokenizer does not have (embedding rows that only pad).
    """
    if model_dir is None or not (model_dir / "config.json").is_file():
        return None
    config = _json(model_dir / "config.json")
    tokenizer = _json(model_dir / "tokenizer.json")
    size = _vocab_size(config)
    known = _tokenizer_ids(tokenizer)
    if size is None and not known:
        return None
    if size is None or (known and max(known) + 1 < size):
        size = max(known) + 1
    excluded = (
        set(_named_ids(config))
        | set(_added_ids(tokenizer))
        | set(_added_ids(_json(model_dir / "tokenizer_config.json")))
    )
    excluded |= set(range(_tekken_specials(_json(model_dir / "tekken.json"))))
    if known:
        excluded |= set(range(size)) - known
    return Vocabulary(size, frozenset(token for token in excluded if 0 <= token < size))


def vocabulary_from_tokens(tokens: Iterable[int]) -> Vocabulary:
    """The vocabulary seen when a server's `/tokenize` (without special tokens) answered for `PROBE_TEXT`.

    For models whose files are not local. It is small, but every id in it stands for plain text.
    """
    seen = frozenset(tokens)
    size = max(seen, default=-1) + 1
    return Vocabulary(size, frozenset(range(size)) - seen)


def _json(path: Path) -> Mapping[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            where=str(path),
            field="file",
            value=path.name,
            rule=f"the model's file cannot be read as JSON ({error})",
            remedy="Check that the model was downloaded completely.",
        ) from None
    return document if isinstance(document, dict) else {}


def _vocab_size(config: Mapping[str, object]) -> int | None:
    for section in (config, config.get("text_config"), config.get("llm_config"), config.get("language_config")):
        size = section.get("vocab_size") if isinstance(section, Mapping) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def _named_ids(value: object, key: str = "") -> Iterable[int]:
    if isinstance(value, Mapping):
        for inner_key, inner in value.items():
            yield from _named_ids(inner, str(inner_key))
    elif _ID_KEY.search(key):
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(item, int) and not isinstance(item, bool):
                yield item


def _added_ids(document: Mapping[str, object]) -> Iterable[int]:
    """`added_tokens` is a list of objects with `id`; `added_tokens_decoder` maps the id, as text, to an object."""
    added = document.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        token = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(token, int):
            yield token
    decoder = document.get("added_tokens_decoder")
    for key in decoder if isinstance(decoder, dict) else ():
        if str(key).isdecimal():
            yield int(key)


def _tokenizer_ids(tokenizer: Mapping[str, object]) -> set[int]:
    """Ids of tokenizer.json: `model.vocab` maps pieces to ids, or lists pieces (Unigram); plus the added ones."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        ids = {token for token in vocab.values() if isinstance(token, int)}
    elif isinstance(vocab, list):
        ids = set(range(len(vocab)))
    else:
        return set()
    return ids | set(_added_ids(tokenizer))


def _tekken_specials(document: Mapping[str, object]) -> int:
    """Mistral's tekken.json: the first `default_num_special_tokens` ids are special."""
    config = document.get("config")
    count = config.get("default_num_special_tokens") if isinstance(config, dict) else None
    return count if isinstance(count, int) else 0
