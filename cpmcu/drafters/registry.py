"""Registry of drafters, and the plan from which a C.DrafterSpec is made.

The kind of a draft follows from its config.json and tensors, not from its path. To add a drafter,
add one file to this package and one with the same registered name to csrc/speculative/drafters.
Code outside the package may also call `register_drafter` before the model is loaded.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cpmcu.drafters
from cpmcu.checks import shown
from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.options import name_of
from cpmcu.drafters.options.trees import TreeShape
from cpmcu.loading.tensors import Checkpoint, TensorMeta
from cpmcu.models.common import SpecFields
from cpmcu.models.names import NameMap, Piece
from cpmcu.quant.registry import DENSE, QuantPlan

Tensors = Mapping[str, TensorMeta]


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft's directory, config.json and weight headers."""

    directory: Path
    config: Mapping[str, Any]  # contents of config.json
    checkpoint: Checkpoint
    is_default: bool = False  # the shipped draft of a shipped target, not named by flags

    @property
    def tensors(self) -> dict[str, TensorMeta]:
        """Dtype and shape of each tensor, by name."""
        return {name: stored.meta for name, stored in self.checkpoint.tensors.items()}


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The target model, which verifies drafts."""

    config: Mapping[str, Any]  # contents of config.json
    fields: SpecFields
    device: str = "cpu"
    max_model_len: int = 0  # maximum number of tokens of a sequence; 0: the model's own limit
    eos_ids: tuple[int, ...] = ()  # ids of end-of-sequence tokens in the checkpoint's configs
    quantised: bool = False  # the checkpoint stores quantised layers
    quantised_head: bool = False  # the checkpoint stores lm_head quantised
    checkpoint: Checkpoint | None = None  # for comparing tensors; None: assume equal tensors


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Layers, tensors and options of a draft."""

    fields: SpecFields | None = None  # fields of the draft's layers; None: the draft has no weights
    # Maps a checkpoint's names to the engine's names "draft.*".
    names: NameMap = lambda name, fields: (Piece(name),)
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor that is not needed -> reason
    refuses_unknown: bool = False  # a tensor that is neither used nor in `ignored` is an error
    # The draft uses the target's lm_head, so FR-Spec can select rows of it.
    shares_head: bool = False
    quantises_head: bool = False  # draft_head_quant auto is w4, even if the draft is dense
    # Default of spec_window_size, in KV entries; None: the draft has no window.
    window: int | None = 0
    chain: bool = False  # drafts have no branches
    # The largest shape; None: that of the options of trees or chains.
    shape: TreeShape | None = None
    drafter: str | None = None  # name of the C++ drafter; None: the name of this drafter
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the C++ drafter
    # The parts of a combined drafter, as (registered name, plan).
    parts: tuple[tuple[str, DraftPlan], ...] = ()
    longest: int | None = None  # maximum number of tokens of a path; None: no maximum
    quant: QuantPlan = DENSE  # how the draft's layers are quantised
    # Begins the engine's names of the draft's tensors, in place of "draft." in `names`.
    scope: str = "draft."
    # The fields below are set when the plan is completed (networks.py).
    files: DraftFiles | None = None  # files of the weights; None: the draft has no weights
    head_quant: str = "auto"  # value of draft_head_quant in effect
    rounds_layers: bool = False  # 16-bit layers are quantised at load (draft_quant)


class Drafter(Protocol):
    """Interface of a drafter; each file of this package implements it.

    A class with `only_by_name = True` is used only if --spec-method names it, or if no other kind
    has such files. A drafter that extends the drafts of another kind needs this, because both kinds
    have the same files.

    A class with `in_target = True` is a head in the target's own checkpoint. It drafts by default,
    and `draft_model_path` may name another directory with such a head. `needs` says which files
    it needs, if that is more than a draft's directory.

    `also_named` has methods of other kinds under which users know such files.
    """

    has_checkpoint: bool

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        """Is a draft with these files of this kind? Not called if `has_checkpoint` is False."""

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        """The plan of a draft. `draft` is None if `has_checkpoint` is False.

        Raises ValueError in one sentence (found, expected) for a draft of another target.
        """


class Addition(Protocol):
    """An addition to the drafts of any drafter, asked for by options (fill)."""

    def is_given(self, speculation: SpeculativeConfig) -> bool:
        """Do the options ask for it?"""

    def extend(
        self,
        method: str,
        plan: DraftPlan,
        files: DraftFiles | None,
        speculation: SpeculativeConfig,
    ) -> tuple[str, DraftPlan]:
        """Returns (C++ drafter's name, plan) for the drafter `method` and its complete plan."""


_drafters: dict[str, tuple[Drafter, str]] = {}
_additions: dict[str, Addition] = {}


def register_addition(kind: type[Addition]) -> type[Addition]:
    """Registers the decorated class, constructed without arguments."""
    _additions[kind.__qualname__] = kind()
    return kind


def registered_additions() -> list[Addition]:
    """All additions, by name."""
    registered_drafters()
    return [_additions[name] for name in sorted(_additions)]


def register_drafter(name: str) -> Callable[[type[Drafter]], type[Drafter]]:
    """Registers the decorated class (constructed without arguments) as the C++ drafter `name`.

    Raises ValueError if another class is registered as `name`.
    """

    def register(drafter: type[Drafter]) -> type[Drafter]:
        source = inspect.getsourcefile(drafter) or "<unknown>"
        if name in _drafters and type(_drafters[name][0]).__qualname__ != drafter.__qualname__:
            raise ValueError(
                f"drafter {name!r} is registered twice: by {_drafters[name][1]} and by {source}"
            )
        _drafters[name] = (drafter(), source)
        return drafter

    return register


def registered_drafters() -> dict[str, str]:
    """Returns the file that registered each drafter, sorted by the drafter's name."""
    for module in pkgutil.iter_modules(cpmcu.drafters.__path__, "cpmcu.drafters."):
        importlib.import_module(module.name)
    return {name: _drafters[name][1] for name in sorted(_drafters)}


def get_drafter(method: str) -> tuple[str, Drafter]:
    """Returns (registered name, drafter) for the method name of a user.

    Raises ValueError with the registered names if there is no such drafter.
    """
    known = registered_drafters()
    name = name_of(method)
    if name not in known:
        near = difflib.get_close_matches(method, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"the speculative method is {method!r}{hint}, expected auto or one of: "
            + ", ".join(known)
        )
    return name, _drafters[name][0]


def find_drafter(draft: DraftFiles, expected: str | None = None) -> tuple[str, Drafter]:
    """Returns (registered name, drafter) for a draft's files.

    Raises ValueError if there is no single match or the match is not the `expected` drafter.
    """
    known = registered_drafters()
    matching = [
        name
        for name, (drafter, _) in _drafters.items()
        if drafter.has_checkpoint and drafter.matches(draft.config, draft.tensors)
    ]
    if expected in matching:
        return expected, _drafters[expected][0]
    if expected is not None:
        for name in matching:
            if expected in getattr(_drafters[name][0], "also_named", ()):
                return name, _drafters[name][0]
        found = " or ".join(matching) or "of no known kind"
        raise ValueError(
            f"the draft is {found}, expected {expected}: name no method, or another draft"
        )
    others = [n for n in matching if not getattr(_drafters[n][0], "only_by_name", False)]
    matching = others or matching
    if not matching:
        with_files = ", ".join(name for name in known if _drafters[name][0].has_checkpoint)
        raise ValueError(
            f"architectures is {shown(draft.config.get('architectures'))} and the tensors begin "
            f"{_some(draft.tensors)}, expected a draft of one of the kinds: {with_files}"
        )
    if len(matching) > 1:
        raise ValueError(
            f"the draft fits several kinds ({', '.join(matching)}), expected exactly one: name it "
            "with --spec-method"
        )
    return matching[0], _drafters[matching[0]][0]


def _some(tensors: Sequence[str] | Tensors) -> str:
    return ", ".join(sorted(tensors)[:4])
