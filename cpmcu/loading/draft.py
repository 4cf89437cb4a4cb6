"""Finds the draft of a model, checks it against its target and makes a C.DrafterSpec."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmcu.config import (
    CHOSEN_SHAPE,
    HEAD_SHAPE,
    SHIPPED_SHAPE,
    SpeculativeConfig,
    TreeShape,
    num_candidates,
)
from cpmcu.drafters import frspec, hierarchical
from cpmcu.drafters.fill import fill_plan
from cpmcu.drafters.registry import (
    Drafter,
    DraftFiles,
    DraftPlan,
    TargetModel,
    find_drafter,
    get_drafter,
    registered_drafters,
)
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.hub import resolve_files, resolve_model
from cpmcu.loading.index import read_json
from cpmcu.loading.plan import MAX_LISTED, LoadPlan, engine_overrides, plan_load
from cpmcu.loading.progress import list_names
from cpmcu.loading.tensors import Checkpoint, TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.names import Piece
from cpmcu.models.reader import language_config
from cpmcu.models.registry import find_model
from cpmcu.shipped import shipped_draft
from cpmcu.verification import TARGET_MATCH, is_lossy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cpmcu import C

logger = logging.getLogger(__name__)

PREFIX = "draft."  # prefix of the engine's names of the draft's tensors
HEAD_PREFIX = PREFIX + "head."  # of those of the head that drafts for a draft model


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft that fits its target. Only headers have been read."""

    method: str  # name of the C++ drafter
    plan: DraftPlan
    shape: TreeShape
    window: int | None  # None: the drafter has no such option
    vocab_ids: list[int]  # of FR-Spec; empty: those of the plan
    files: DraftFiles | None
    head_quant: str = "auto"  # effective draft_head_quant
    prefix: str = PREFIX
    head: LoadedDraft | None = None  # the head that drafts for this draft model

    @property
    def title(self) -> str:
        """The draft's name for a user."""
        assert self.files is not None
        return f"{self.files.directory.name} ({self.method})"

    @property
    def with_files(self) -> list[LoadedDraft]:
        """The draft and its head, those that have weights."""
        drafts = [self, self.head] if self.head else [self]
        return [draft for draft in drafts if draft.files is not None]

    def owns(self, name: str) -> bool:
        """Is this the engine's name of a tensor of the draft itself?"""
        return name.startswith(self.prefix) and not (
            self.head is not None and name.startswith(self.head.prefix)
        )

    def spec(self, extension: Any, dtype: str) -> C.DrafterSpec:
        """The engine's specification of the drafter."""
        return self._spec(extension, dtype, self.method, self.plan)

    def _spec(self, extension: Any, dtype: str, method: str, plan: DraftPlan) -> C.DrafterSpec:
        shape, options, more = self._shape_of(plan), dict(plan.options), {}
        if plan.parts:
            more["parts"] = [
                self._spec(extension, dtype, part, its_plan) for part, its_plan in plan.parts
            ]
        elif plan.fields is not None:
            if not plan.chain:
                options["topk"] = shape.topk
            if self.window is not None:
                options["window"] = self.window
            if self.vocab_ids:
                options["vocab_ids"] = self.vocab_ids
            more["model"] = extension.ModelSpec(
                **plan.fields.to_kwargs(),
                dtype=dtype,
                linear_method=plan.quant.linear_method,
                linear_options=plan.quant.linear_options.to_dict(),
                linear_overrides=self._overrides(plan.fields),
            )
            if self.head is not None:
                more["parts"] = [self.head.spec(extension, dtype)]
        made: C.DrafterSpec = extension.DrafterSpec(
            method=plan.drafter or method,
            scope=self.prefix,
            depth=shape.depth,
            tree_size=shape.tree_size,
            options=options,
            **more,
        )
        return made

    def _shape_of(self, plan: DraftPlan) -> TreeShape:
        whole = self.shape
        if plan.depth is None or plan.depth >= whole.depth:
            return whole
        most = 1 + num_candidates(whole.topk, plan.depth)
        return TreeShape(plan.depth, whole.topk, min(whole.tree_size, most))

    def _overrides(self, fields: SpecFields) -> dict[str, str]:
        """Engine's module name -> linear method. The head gets the configured method."""
        overrides = engine_overrides(self.plan.quant.linear_overrides, self._names, fields)
        head = self.prefix + "lm_head"
        quantised = self.plan.quant.linear_method != "dense"
        if quantised and head not in overrides and not self.plan.shares_head:
            return overrides  # the file stores the head quantised
        bits = self.head_quant
        if bits == "auto":
            bits = "w4" if quantised or self.plan.quantises_head else "none"
        return overrides | {head: "dense" if bits == "none" else f"{bits}_rtn"}

    def _names(self, name: str, fields: SpecFields) -> Sequence[Piece]:
        """The plan's names, with this draft's prefix."""
        return [
            replace(piece, name=self.prefix + piece.name.removeprefix(PREFIX))
            for piece in self.plan.names(name, fields)
        ]

    def reads(self, name: str) -> bool:
        """Is this tensor one of the draft's, read or left out for a reason?"""
        assert self.plan.fields is not None
        return name in self.plan.ignored or bool(self.plan.names(name, self.plan.fields))

    def plan_load(
        self, expected: Mapping[str, TensorMeta], required: Iterable[str]
    ) -> LoadPlan | None:
        """The load plan of the draft's tensors; None if the draft has no weights.

        Raises ValueError for tensors that do not fit and for a head's tensors that the engine does
        not use.
        """
        if self.files is None or self.plan.fields is None:
            return None
        ignored = self.plan.ignored
        for name, reason in ignored.items():
            logger.info("%s: %s is not read: %s", self.files.directory.name, name, reason)

        def names(name: str, fields: SpecFields) -> Sequence[Piece]:
            return () if name in ignored else self._names(name, fields)

        checkpoint, quant = self.files.checkpoint, self.plan.quant
        if self.prefix != PREFIX and quant.repacks:
            raise ValueError(
                f"{self.files.directory}: {self.title} stores fc in the CPM.cu format of 4 bits, "
                "expected a dense head, or one in another format, for a draft model"
            )
        plan = plan_load(checkpoint, self.plan.fields, names, quant, expected, required)
        if not self.plan.refuses_unknown:
            return plan
        left = [name for name in plan.unused if not _is_zero_bias(checkpoint, name)]
        if left:
            reasons = [f"{name} ({plan.unused[name]})" for name in left]
            raise ValueError(
                f"{self.files.directory}: has {list_names(reasons, MAX_LISTED)}, expected only "
                f"tensors that heads of kind {self.method} have here: without the others the head "
                "would draft something else"
            )
        return plan


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Is the tensor a bias of zeros? Some quantisers add one to each layer."""
    return name.endswith(".bias") and not checkpoint.read(name).any()


def open_draft(
    speculation: SpeculativeConfig, directory: Path, target: TargetModel
) -> LoadedDraft | None:
    """The configured draft, else the shipped draft of a shipped model, else the target's own head.

    Returns None without a draft. Raises FileNotFoundError for missing files. Raises ValueError, in
    one sentence, for a draft that does not fit its target and for an impossible tree shape.
    """
    source = speculation.draft_model_path
    expected = "eagle3" if speculation.use_eagle3 else speculation.method
    shipped = None
    if not speculation.no_speculation and source is None:
        kind = expected if expected == "auto" else get_drafter(expected)[0]
        shipped = shipped_draft(directory, kind)
        if shipped is None and expected == "auto":
            expected = _own_head(directory, target, speculation) or expected
    if speculation.no_speculation or (source is None and not shipped and expected == "auto"):
        _check_unused_options(speculation)
        return None
    if shipped:
        source = str(shipped)
    if source is None and expected == "hierarchical":
        raise ValueError(
            "method hierarchical needs a draft model and its head, expected draft_model_path "
            "(model) and head_model_path (draft_model)"
        )
    files = None if source is None else _open_files(source)
    if files is None and expected != "auto" and _is_in_target(get_drafter(expected)[1]):
        files = _files_of(directory, target)
    try:
        method, drafter = _find(files, expected, speculation)
        plan = drafter.plan(files, target, speculation)
        named = CHOSEN_SHAPE if speculation.chooses_shapes else HEAD_SHAPE
        shape = _shape(speculation, plan, SHIPPED_SHAPE if shipped else named)
        head_quant = _head_quant(speculation, plan, target)
        vocab_ids = _frspec_ids(speculation, method, plan, files, target)
        drafted = vocab_ids or plan.options.get("vocab_ids", ())
        _check_width(shape, len(drafted) or target.fields.vocab_size)
        window = _window(speculation, method, plan)
        head = _open_head(speculation, files, plan, target) if plan.has_head and files else None
    except ValueError as error:
        if files is None or str(files.directory) in str(error):
            raise
        raise ValueError(f"{files.directory}: {error}") from error
    if speculation.fill is not None:
        method, plan = fill_plan(method, plan, speculation)
    return LoadedDraft(method, plan, shape, window, vocab_ids, files, head_quant, head=head)


def _open_head(
    speculation: SpeculativeConfig, model: DraftFiles, plan: DraftPlan, target: TargetModel
) -> LoadedDraft:
    """The head that drafts for a draft model: the configured one, else its shipped one."""
    assert plan.fields is not None
    path = speculation.head_model_path
    if path is None and (found := shipped_draft(model.directory)) is not None:
        path = str(found)
    if path is None:
        raise ValueError(
            "no head is given for the draft model, expected head_model_path (draft_model), an "
            "EAGLE head of this model"
        )
    shape = hierarchical.HEAD_SHAPE
    own = SpeculativeConfig(
        draft_model_path=path,
        spec_num_iter=shape.depth,
        spec_topk_per_iter=shape.topk,
        spec_tree_size=shape.tree_size,
    )
    stored = plan.quant.linear_overrides.get("lm_head", plan.quant.linear_method)
    of_head = TargetModel(
        model.config,
        plan.fields,
        target.device,
        target.max_model_len,
        target.eos_ids,
        quantised=plan.quant.linear_method != "dense",
        quantised_head=stored != "dense",
        checkpoint=model.checkpoint,
    )
    head = open_draft(own, model.directory, of_head)
    assert head is not None
    if head.method not in hierarchical.HEAD_KINDS:
        raise ValueError(
            f"the draft of the draft model, {path}, is of kind {head.method}, expected one of: "
            f"{', '.join(hierarchical.HEAD_KINDS)}"
        )
    return replace(head, prefix=HEAD_PREFIX)


def _shape(speculation: SpeculativeConfig, plan: DraftPlan, defaults: TreeShape) -> TreeShape:
    """Raises ValueError if a path would be longer than the drafter can draft."""
    longest, given = plan.longest, speculation.spec_num_iter
    if longest is None or speculation.fill is not None:
        return speculation.shape(chain=plan.chain, defaults=defaults)
    if given is not None and given > longest:
        raise ValueError(
            f"spec_num_iter (num_speculative_tokens) is {given}, expected at most {longest}, the "
            "number of MTP modules (enable_multi_layers_mtp no runs the first one several times)"
        )
    depth = min(defaults.depth, longest)
    topk = speculation.spec_topk_per_iter or defaults.topk
    size = min(defaults.tree_size, 1 + num_candidates(topk, given or depth))
    return speculation.shape(chain=plan.chain, defaults=TreeShape(depth, defaults.topk, size))


def drafts_by_default(directory: Path) -> bool:
    """Does the model in `directory` have a draft if none is named?"""
    if shipped_draft(directory) is not None:
        return True
    config = language_config(read_json(directory / "config.json"))
    fields = find_model(config).build(config, BuildOptions())
    target = TargetModel(config, fields, checkpoint=open_checkpoint(directory))
    return _own_head(directory, target, SpeculativeConfig()) is not None


def _is_in_target(drafter: Drafter) -> bool:
    return getattr(drafter, "in_target", False)


def _files_of(directory: Path, target: TargetModel) -> DraftFiles | None:
    """The target's checkpoint as that of a draft."""
    if target.checkpoint is None:
        return None
    return DraftFiles(directory, target.config, target.checkpoint)


def _own_head(directory: Path, target: TargetModel, speculation: SpeculativeConfig) -> str | None:
    """The method of a draft head in the target's checkpoint. Warns if there is one without use."""
    files = _files_of(directory, target)
    if files is None:
        return None
    for name in registered_drafters():
        _, drafter = get_drafter(name)
        if _is_in_target(drafter) and drafter.matches(files.config, files.tensors):
            try:
                drafter.plan(files, target, speculation)
            except ValueError as error:
                logger.warning("%s: nothing is drafted: %s", directory.name, error)
                return None
            return name
    return None


def _window(speculation: SpeculativeConfig, method: str, plan: DraftPlan) -> int | None:
    given = speculation.spec_window_size
    if plan.window is not None:
        return plan.window if given is None else given
    if given:
        raise ValueError(f"spec_window_size is {given}, expected none for a draft of kind {method}")
    return None


def _check_unused_options(speculation: SpeculativeConfig) -> None:
    """Without a draft: warns of options for trees.

    Raises ValueError for FR-Spec options and a lossy verify strategy.
    """
    if speculation.no_speculation:
        return
    if is_lossy(speculation.verify_strategy):
        raise ValueError(
            f"verify_strategy is {speculation.verify_strategy!r}, but there is no draft whose "
            f"tokens it could accept: name one, or expect {TARGET_MATCH!r}"
        )
    if speculation.frspec_path is not None or speculation.frspec_vocab_size:
        raise ValueError(
            "frspec_path or frspec_vocab_size is given without a draft, expected draft_model_path "
            "too"
        )
    names = (
        *("spec_num_iter", "spec_topk_per_iter", "spec_tree_size", "spec_window_size", "fill"),
        *("prompt_lookup_min", "prompt_lookup_max", "enable_multi_layers_mtp"),
    )
    idle = [name for name in names if getattr(speculation, name) is not None]
    if idle:
        logger.warning("%s has no effect: no draft is given", ", ".join(idle))


def _open_files(model: str) -> DraftFiles:
    directory = resolve_model(model)
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: has no config.json, expected a draft's directory")
    return DraftFiles(directory, language_config(read_json(path)), open_checkpoint(directory))


def _find(
    files: DraftFiles | None, expected: str, speculation: SpeculativeConfig
) -> tuple[str, Drafter]:
    if expected == "auto":
        assert files is not None
        method, drafter = find_drafter(files)
        if speculation.use_eagle3 is False and method == "eagle3":
            raise ValueError("the draft is eagle3, but use_eagle3 is no")
        return method, drafter
    method, drafter = get_drafter(expected)
    if not drafter.has_checkpoint:
        if files is not None:
            raise ValueError(f"method {expected} has no weights, expected no draft_model_path")
        return method, drafter
    if files is None:
        raise ValueError(f"method {expected} needs weights, expected draft_model_path")
    if _is_in_target(drafter):  # its plan says what is missing
        return method, drafter
    return find_drafter(files, method)


def _check_width(shape: TreeShape, vocab_size: int) -> None:
    """Raises ValueError if the draft's vocabulary is smaller than topk."""
    if vocab_size < shape.topk:
        raise ValueError(
            f"only {vocab_size} tokens are drafted, expected at least {shape.topk}, the "
            "children of a node (spec_topk_per_iter sets fewer)"
        )


def _head_quant(speculation: SpeculativeConfig, plan: DraftPlan, target: TargetModel) -> str:
    """The effective draft_head_quant: "none" if the draft shares the target's quantised head.

    Raises ValueError if the draft needs rows of a target's lm_head that is stored quantised.
    """
    asked = speculation.draft_head_quant
    shares = plan.shares_head or plan.options.get("own_head") is False
    if not shares or not target.quantised_head:
        return asked
    stored = "the target's checkpoint stores lm_head quantised, of which no rows can be taken"
    if plan.options.get("vocab_ids"):
        raise ValueError(
            f"the draft has d2t without an lm_head of its own, but {stored}; expected a target "
            "whose lm_head is dense"
        )
    if speculation.frspec_path is not None or speculation.frspec_vocab_size:
        raise ValueError(
            f"frspec_path or frspec_vocab_size is given, but {stored}; expected neither of them"
        )
    if asked not in ("auto", "none"):
        raise ValueError(f"draft_head_quant is {asked!r}, but {stored}; expected 'auto' or 'none'")
    return "none"


def _frspec_ids(
    speculation: SpeculativeConfig,
    method: str,
    plan: DraftPlan,
    files: DraftFiles | None,
    target: TargetModel,
) -> list[int]:
    number = speculation.frspec_vocab_size
    if speculation.frspec_path is None and number == 0:
        return []
    if not plan.shares_head or files is None:
        raise ValueError(
            f"FR-Spec is configured, expected a head that shares the target's lm_head and "
            f"vocabulary; this draft ({method}) does not"
        )
    patterns = ["freq_*.pt" if number == 0 else f"freq_{number}.pt", frspec.COUNTS_FILE]
    path = frspec.resolve(
        speculation.frspec_path, files.directory, lambda repo: resolve_files(repo, patterns)
    )
    return frspec.frequent_ids(path, number, target.fields.vocab_size, target.eos_ids)
