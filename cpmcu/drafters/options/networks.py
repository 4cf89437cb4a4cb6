"""Options of drafters that are networks: draft models and heads."""

from __future__ import annotations

import dataclasses

from cpmcu.drafters.options import register_options
from cpmcu.drafters.options.trees import TreeOptions
from cpmcu.options import option

HEAD_QUANTS = ("auto", "none", "w8", "w4")


@register_options("model", "draft_model")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkOptions(TreeOptions):
    """Options of a draft model. A head has further ones."""

    spec_window_size: int | None = option(
        None,
        "most recent KV entries that a draft head's attention sees (each tree node has one entry); "
        "0: all (default: 1024; draft model: 0; an MTP head sees all)",
    )
    draft_quant: str = option(
        "auto",
        "quantise a draft's 16-bit layers at load time; changes no text; auto: w4 if the target is "
        "quantised and the draft's hidden_size is 2048 or more, else none",
        choices=("auto", "none", "w4"),
    )
    draft_head_quant: str = option(
        "auto",
        "quantise the draft's lm_head at load time; changes no text; auto: w4 if the draft (or the "
        "target of an MTP head) is quantised and the target's lm_head is not, else none",
        choices=HEAD_QUANTS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrSpecOptions(NetworkOptions):
    """Options of a head that may share the target's lm_head: FR-Spec chooses rows of it."""

    frspec_path: str | None = option(
        None,
        "FR-Spec: list of the frequent tokens that the draft chooses from: freq_N.pt, .npy, or a "
        "directory or Hugging Face id with such files",
        metavar="PATH|REPO",
    )
    frspec_vocab_size: int = option(
        0,
        "number of frequent tokens; 0: all of --frspec-path, or the whole vocabulary without it",
        brief="",
    )


@register_options("eagle")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleOptions(FrSpecOptions):
    """Options of an EAGLE head."""
