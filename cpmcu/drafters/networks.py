"""Completes the plan of a draft: its shape; for a network the window and the head's rows, bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters import frspec
from cpmcu.drafters.options import options_of
from cpmcu.drafters.options.networks import FrSpecOptions, NetworkOptions
from cpmcu.drafters.options.trees import (
    CHOSEN_SHAPE,
    HEAD_SHAPE,
    SHIPPED_SHAPE,
    ChainOptions,
    TreeOptions,
    TreeShape,
    num_candidates,
)
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel
from cpmcu.loading.hub import resolve_files

# Least hidden_size for which draft_quant auto is w4. Reading narrower layers takes almost no time.
WIDE = 2048


def complete(
    method: str,
    plan: DraftPlan,
    files: DraftFiles | None,
    target: TargetModel,
    speculation: SpeculativeConfig,
    *,
    is_part: bool = False,
) -> DraftPlan:
    """The plan with every field that the drafter left open. Its parts have its shape.

    `is_part`: an addition will limit the length of paths.

    Raises ValueError for an impossible shape, and for options that the draft does not have.
    """
    shape = plan.shape or _shape(method, plan, files, speculation, is_part)
    parts = tuple(
        (name, part)
        if part.shape is not None
        else (name, complete(name, replace(part, shape=shape), files, target, speculation))
        for name, part in plan.parts
    )
    plan = replace(plan, shape=shape, parts=parts)
    if plan.fields is None:
        return plan
    options: dict[str, Any] = dict(plan.options)
    kind = options_of(method)
    given = speculation.of(kind if issubclass(kind, NetworkOptions) else NetworkOptions)
    if not plan.chain:
        options.setdefault("topk", shape.topk)
    if plan.window is not None:
        window = given.spec_window_size
        options["window"] = plan.window if window is None else window
    elif given.spec_window_size:
        raise ValueError(
            f"spec_window_size is {given.spec_window_size}, expected none for a draft of kind "
            f"{method}"
        )
    if issubclass(kind, FrSpecOptions):
        rows = speculation.of(kind)
        head_quant = _head_quant(rows, plan, target)
        if ids := _frspec_ids(rows, method, plan, files, target):
            options["vocab_ids"] = ids
    else:
        head_quant = given.draft_head_quant
    drafted = len(options.get("vocab_ids", ())) or target.fields.vocab_size
    if drafted < shape.topk:
        raise ValueError(
            f"only {drafted} tokens are drafted, expected at least {shape.topk}, the children of "
            "a node (spec_topk_per_iter sets fewer)"
        )
    return replace(
        plan,
        options=options,
        head_quant=head_quant,
        rounds_layers=_rounds_layers(given.draft_quant, plan, target),
        files=plan.files or files,
    )


def _shape(
    method: str,
    plan: DraftPlan,
    files: DraftFiles | None,
    speculation: SpeculativeConfig,
    is_part: bool,
) -> TreeShape:
    """Raises ValueError if a path would be longer than the drafter can draft."""
    defaults = default_shape(files, speculation)
    if plan.chain:
        kind = options_of(method)
        chains = kind if issubclass(kind, ChainOptions) else ChainOptions
        return speculation.of(chains).chain(chains.chain_depth)
    trees = speculation.of(TreeOptions)
    longest, given = plan.longest, trees.spec_num_iter
    if longest is None or is_part:
        return trees.tree(defaults)
    if given is not None and given > longest:
        raise ValueError(
            f"spec_num_iter (num_speculative_tokens) is {given}, expected at most {longest}, the "
            "number of MTP modules (enable_multi_layers_mtp no runs the first one several times)"
        )
    depth = min(defaults.depth, longest)
    topk = trees.spec_topk_per_iter or defaults.topk
    size = min(defaults.tree_size, 1 + num_candidates(topk, given or depth))
    return trees.tree(TreeShape(depth, defaults.topk, size))


def default_shape(files: DraftFiles | None, speculation: SpeculativeConfig) -> TreeShape:
    """The shape of trees if none is given."""
    if files is not None and files.is_default:
        return SHIPPED_SHAPE
    return CHOSEN_SHAPE if speculation.chooses_shapes else HEAD_SHAPE


def _rounds_layers(asked: str, plan: DraftPlan, target: TargetModel) -> bool:
    """Are the draft's layers quantised at load? Raises ValueError if its files quantise them."""
    quant = plan.quant
    stored = {quant.linear_method, *quant.linear_overrides.values()} - {"dense"}
    if stored and asked == "w4":
        raise ValueError(
            f"draft_quant is 'w4', but the draft's files store its layers as {quant.scheme}, "
            "expected 'auto' or 'none'"
        )
    is_wide = plan.fields is not None and plan.fields.hidden_size >= WIDE
    return not stored and (asked == "w4" or (asked == "auto" and target.quantised and is_wide))


def _head_quant(given: FrSpecOptions, plan: DraftPlan, target: TargetModel) -> str:
    """The effective draft_head_quant: "none" if the draft shares the target's quantised head.

    Raises ValueError if the draft needs rows of a target's lm_head that is stored quantised.
    """
    asked = given.draft_head_quant
    shares = plan.shares_head or plan.options.get("own_head") is False
    if not shares or not target.quantised_head:
        return asked
    stored = "the target's checkpoint stores lm_head quantised, of which no rows can be taken"
    if plan.options.get("vocab_ids"):
        raise ValueError(
            f"the draft has d2t without an lm_head of its own, but {stored}; expected a target "
            "whose lm_head is dense"
        )
    if given.frspec_path is not None or given.frspec_vocab_size:
        raise ValueError(
            f"frspec_path or frspec_vocab_size is given, but {stored}; expected neither of them"
        )
    if asked not in ("auto", "none"):
        raise ValueError(f"draft_head_quant is {asked!r}, but {stored}; expected 'auto' or 'none'")
    return "none"


def _frspec_ids(
    given: FrSpecOptions,
    method: str,
    plan: DraftPlan,
    files: DraftFiles | None,
    target: TargetModel,
) -> list[int]:
    number = given.frspec_vocab_size
    if given.frspec_path is None and number == 0:
        return []
    if not plan.shares_head or files is None:
        raise ValueError(
            f"FR-Spec is configured, expected a head that shares the target's lm_head and "
            f"vocabulary; this draft ({method}) does not"
        )
    patterns = ["freq_*.pt" if number == 0 else f"freq_{number}.pt", frspec.COUNTS_FILE]
    path = frspec.resolve(
        given.frspec_path, files.directory, lambda repo: resolve_files(repo, patterns)
    )
    return frspec.frequent_ids(path, number, target.fields.vocab_size, target.eos_ids)
