"""A draft that was found, as the engine's C.DrafterSpec and as plans for loading its tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.finding import find_draft
from cpmcu.drafters.options.trees import TreeShape
from cpmcu.drafters.registry import DraftFiles, DraftPlan, TargetModel
from cpmcu.loading.plan import MAX_LISTED, LoadPlan, by_engine_names, plan_load
from cpmcu.loading.progress import list_names
from cpmcu.loading.tensors import Checkpoint, TensorMeta
from cpmcu.models.common import SpecFields
from cpmcu.models.names import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cpmcu import C

logger = logging.getLogger(__name__)

PREFIX = "draft."  # begins the engine's names of the tensors of all drafts


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft that fits its target, or a part of one. Only headers have been read."""

    method: str  # name of the C++ drafter, or of its kind
    plan: DraftPlan

    @property
    def shape(self) -> TreeShape:
        """The largest shape."""
        assert self.plan.shape is not None
        return self.plan.shape

    @property
    def parts(self) -> list[LoadedDraft]:
        """The parts of a combined draft."""
        return [LoadedDraft(method, plan) for method, plan in self.plan.parts]

    @property
    def files(self) -> DraftFiles | None:
        """The files of the draft, or of the first part that has any."""
        return next((draft.plan.files for draft in self.with_files), None)

    @property
    def title(self) -> str:
        """The draft's name for a user."""
        assert self.plan.files is not None
        return f"{self.plan.files.directory.name} ({self.method})"

    @property
    def with_files(self) -> list[LoadedDraft]:
        """The draft and its parts, those that have weights."""
        return [draft for draft in self._all() if draft.plan.files is not None]

    def _all(self) -> Iterator[LoadedDraft]:
        yield self
        for part in self.parts:
            yield from part._all()

    def owns(self, name: str) -> bool:
        """Is this the engine's name of a tensor of the draft itself?"""
        scope = self.plan.scope
        return name.startswith(scope) and not any(
            part.plan.scope != scope and part.owns(name) for part in self.parts
        )

    def spec(self, extension: Any, dtype: str) -> C.DrafterSpec:
        """The engine's specification of the drafter."""
        plan, more = self.plan, {}
        if plan.fields is not None:
            more["model"] = extension.ModelSpec(
                **plan.fields.to_kwargs(),
                dtype=dtype,
                linear_method="w4_rtn" if plan.rounds_layers else plan.quant.linear_method,
                linear_options=plan.quant.linear_options.to_dict(),
                module_options={
                    name: own.to_dict()
                    for name, own in by_engine_names(
                        plan.quant.module_options, self._names, plan.fields
                    ).items()
                },
                linear_overrides=self._overrides(plan.fields),
            )
        if plan.parts:
            more["parts"] = [part.spec(extension, dtype) for part in self.parts]
        made: C.DrafterSpec = extension.DrafterSpec(
            method=plan.drafter or self.method,
            scope=plan.scope,
            depth=self.shape.depth,
            tree_size=self.shape.tree_size,
            options=dict(plan.options),
            **more,
        )
        return made

    def _overrides(self, fields: SpecFields) -> dict[str, str]:
        """Engine's module name -> linear method. The head gets the configured method."""
        overrides = by_engine_names(self.plan.quant.linear_overrides, self._names, fields)
        head = self.plan.scope + "lm_head"
        quantised = self.plan.quant.linear_method != "dense"
        if quantised and head not in overrides and not self.plan.shares_head:
            return overrides  # the file stores the head quantised
        bits = self.plan.head_quant
        if bits == "auto":
            in_4_bits = quantised or self.plan.rounds_layers or self.plan.quantises_head
            bits = "w4" if in_4_bits else "none"
        return overrides | {head: "dense" if bits == "none" else f"{bits}_rtn"}

    def _names(self, name: str, fields: SpecFields) -> Sequence[Piece]:
        """The plan's names, with this draft's prefix."""
        return [
            replace(piece, name=self.plan.scope + piece.name.removeprefix(PREFIX))
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
        files = self.plan.files
        if files is None or self.plan.fields is None:
            return None
        ignored = self.plan.ignored
        for name, reason in ignored.items():
            logger.info("%s: %s is not read: %s", files.directory.name, name, reason)

        def names(name: str, fields: SpecFields) -> Sequence[Piece]:
            return () if name in ignored else self._names(name, fields)

        checkpoint, quant = files.checkpoint, self.plan.quant
        plan = plan_load(checkpoint, self.plan.fields, names, quant, expected, required)
        if not self.plan.refuses_unknown:
            return plan
        left = [name for name in plan.unused if not _is_zero_bias(checkpoint, name)]
        if left:
            reasons = [f"{name} ({plan.unused[name]})" for name in left]
            raise ValueError(
                f"{files.directory}: has {list_names(reasons, MAX_LISTED)}, expected only "
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
    """The draft of a model (`find_draft`, which raises)."""
    found = find_draft(speculation, directory, target)
    if found is None:
        return None
    draft = LoadedDraft(found.method, found.plan)
    for part in draft.with_files:
        if part.plan.rounds_layers:
            logger.info("%s: rounded to 4 bits; draft_quant none keeps 16 bits", part.title)
    return draft
