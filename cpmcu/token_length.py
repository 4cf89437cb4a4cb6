"""How many characters of a text one token can stand for, told by a tokenizer's parts alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Pre-tokenizers that lose no character, unless their behavior is "Removed".
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
# How many characters each normalizer makes one of, at most. NFC: a letter with three marks.
_SHRINKING = {"ByteLevel": 1, "Prepend": 1, "NFC": 4}


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Most characters of a text that become one token; None if that cannot be told.

    It can be told of BPE with a token for each byte, if no stage before it drops characters and no
    added token takes in the white space beside it.
    """
    from tokenizers import models, pre_tokenizers

    stages, normalizers = _stages(tokenizer.pre_tokenizer), _stages(tokenizer.normalizer)
    shrinking = [_shrinking(stage) for stage in normalizers]
    if not isinstance(tokenizer.model, models.BPE) or None in shrinking:
        return None
    if not all(s["type"] in _KEEPING and s.get("behavior") != "Removed" for s in stages):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = tokenizer.get_vocab()
    if any(stage["type"] == "ByteLevel" for stage in (*stages, *normalizers)):
        bytes_ = set(pre_tokenizers.ByteLevel.alphabet())
    else:
        bytes_ = {f"<0x{byte:02X}>" for byte in range(256 if tokenizer.model.byte_fallback else 0)}
    if not bytes_ or not bytes_ <= vocabulary.keys():
        return None
    longest = max(map(len, vocabulary))
    for factor in shrinking:
        longest *= factor or 1
    return longest


def _stages(part: Any) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer consists of, as tokenizer.json has it."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state.get("normalizers") or state.get("pretokenizers") or [state])


def _shrinking(stage: Mapping[str, Any]) -> int | None:
    """How many characters a normalizer makes one of, at most; None if that cannot be told."""
    if stage["type"] == "Replace":
        found, content = stage.get("pattern", {}).get("String"), stage.get("content", "")
        return 1 if found and len(content) >= len(found) else None
    return _SHRINKING.get(stage["type"])
