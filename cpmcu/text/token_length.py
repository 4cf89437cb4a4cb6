"""Upper bound on the characters of one token, derived from the parts of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Pre-tokenizers that drop no characters, unless their behavior is "Removed".
_LOSSLESS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
# Maximum number of characters that a normalizer merges into one. NFC: a letter with three marks.
_SHRINKING = {"ByteLevel": 1, "Prepend": 1, "NFC": 4}


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Maximum number of characters that become one token; None if there is no known bound.

    BPE with a token for each byte has a bound if no earlier stage drops characters and no added
    token absorbs adjacent white space.
    """
    from tokenizers import models, pre_tokenizers

    stages, normalizers = _stages(tokenizer.pre_tokenizer), _stages(tokenizer.normalizer)
    shrinking = [_shrinking(stage) for stage in normalizers]
    if not isinstance(tokenizer.model, models.BPE) or None in shrinking:
        return None
    if not all(s["type"] in _LOSSLESS and s.get("behavior") != "Removed" for s in stages):
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
    """The stages of a normalizer or pre-tokenizer, as tokenizer.json lists them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state.get("normalizers") or state.get("pretokenizers") or [state])


def _shrinking(stage: Mapping[str, Any]) -> int | None:
    """Maximum number of characters that a normalizer merges into one; None: not known."""
    if stage["type"] == "Replace":
        found, content = stage.get("pattern", {}).get("String"), stage.get("content", "")
        return 1 if found and len(content) >= len(found) else None
    return _SHRINKING.get(stage["type"])
