"""A language model as drafter: any supported model with the target's vocabulary."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel, Tensors, register_drafter
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.names import Piece
from cpmcu.models.registry import find_model
from cpmcu.quant.registry import plan_quant

logger = logging.getLogger(__name__)


@register_drafter("model")
class DraftModel:
    """A draft that is a whole language model."""

    has_checkpoint = True

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        of_heads = ("fc.weight", "fc.qweight", "hidden_norm.weight")
        names = {name.replace("model.language_model.", "model.", 1) for name in tensors}
        return (
            "model.embed_tokens.weight" in names
            and any(name.startswith("model.layers.0.") for name in names)
            and not any(name.startswith("pre_projection.") for name in names)
            and not any(name.endswith(of_heads) and not _is_left_out(name) for name in names)
        )

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        assert draft is not None
        family = find_model(draft.config)
        options = BuildOptions(
            device=target.device,
            max_model_len=target.max_model_len or target.fields.max_position_embeddings,
            has_lm_head=any(name.startswith("lm_head.") for name in draft.tensors),
        )
        fields = family.build(draft.config, options)
        if fields.vocab_size != target.fields.vocab_size:
            raise ValueError(
                f"config.json: vocab_size is {fields.vocab_size}, expected "
                f"{target.fields.vocab_size}, the target's: they must share the tokenizer"
            )

        if any(kind == "gated_delta_net" for layer in fields.layers for kind, _ in layer):
            raise ValueError(
                "config.json: the draft has gated delta nets, expected a draft of attention layers "
                "alone: a draft with a recurrent state is not supported yet"
            )
        if target.checkpoint is not None:
            _compare_tokenizers(draft.directory, target.checkpoint.directory)

        def names(name: str, fields: SpecFields) -> Sequence[Piece]:
            return [
                replace(piece, name="draft." + piece.name) for piece in family.names(name, fields)
            ]

        tied = {}
        if fields.tie_word_embeddings and "lm_head.weight" in draft.tensors:
            tied["lm_head.weight"] = "tie_word_embeddings is true: the head is the embedding table"
        own = {name: meta for name, meta in draft.tensors.items() if family.names(name, fields)}
        quant = plan_quant(draft.config, own)
        return DraftPlan(fields=fields, names=names, ignored=tied, quant=quant)


def _is_left_out(name: str) -> bool:
    """Is a tensor a model's own draft head, or of its vision tower?"""
    return name.startswith(("mtp.", "model.visual.", "visual."))


def _compare_tokenizers(draft: Path, target: Path) -> None:
    """Warns if both directories have a tokenizer and the vocabularies differ."""
    files = [directory / "tokenizer.json" for directory in (draft, target)]
    if not all(file.is_file() for file in files):
        return
    contents = [file.read_bytes() for file in files]
    if contents[0] != contents[1] and _vocabulary(contents[0]) != _vocabulary(contents[1]):
        logger.warning(
            "the vocabulary of %s is not that of %s: drafted ids may be other tokens of the "
            "target, and few drafts accepted",
            *files,
        )


def _vocabulary(content: bytes) -> object:
    """Returns (vocabulary, added tokens) of a tokenizer.json; None for a damaged file."""
    try:
        tokenizer = json.loads(content)
        added = tokenizer.get("added_tokens") or []
        return tokenizer["model"]["vocab"], {token["id"]: token["content"] for token in added}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
