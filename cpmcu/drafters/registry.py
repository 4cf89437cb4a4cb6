"""Which kind of draft a directory holds, and how it becomes a C.DrafterSpec.

Decided by the config's architectures and the tensors, never by the path. Adding a drafter is adding
one file to this package (and one to csrc/speculative/drafters, whose name it registers under); code
outside may call `register_drafter` too, before the model is loaded.
"""

from __future__ import annotations

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
from cpmcu.loading.tensors import Checkpoint, TensorMeta
from cpmcu.models.common import SpecFields
from cpmcu.models.names import NameMap, Piece
from cpmcu.quant.registry import DENSE, QuantPlan

Tensors = Mapping[str, TensorMeta]

_ALIASES = {"draft_model": "model"}  # vLLM's name -> ours


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft's directory, read as far as the headers of its weights."""

    directory: Path
    config: Mapping[str, Any]  # config.json
    checkpoint: Checkpoint

    @property
    def tensors(self) -> dict[str, TensorMeta]:
        """Name -> dtype and shape."""
        return {name: stored.meta for name, stored in self.checkpoint.tensors.items()}


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that verifies."""

    config: Mapping[str, Any]  # config.json
    fields: SpecFields
    device: str = "cpu"
    max_model_len: int = 0  # tokens that the engine will hold of a sequence; 0: the model's own
    eos_ids: tuple[int, ...] = ()  # of the checkpoint's configs
    quantised_head: bool = False  # the checkpoint stores lm_head quantised
    checkpoint: Checkpoint | None = None  # to compare tensors with; None: take them as equal


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a draft is run and loaded."""

    fields: SpecFields | None = None  # of its own layers; None: it has no weights
    names: NameMap = lambda name, fields: (Piece(name),)  # to the engine's, which begin "draft."
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensors not needed -> reason
    refuses_unknown: bool = False  # a tensor that is neither used nor in `ignored` is an error
    shares_head: bool = False  # logits by the target's lm_head, so FR-Spec can shorten it
    window: int = 0  # where spec_window_size is not given
    chain: bool = False  # drafts one path only
    options: Mapping[str, Any] = field(default_factory=dict)  # what its C++ half takes by name
    # The parts of a combined drafter: their names in C++ and plans. The tensors of a part that
    # has some are described by the fields above, too.
    parts: tuple[tuple[str, DraftPlan], ...] = ()
    quant: QuantPlan = DENSE  # of its own layers


class Drafter(Protocol):
    """What a file of this package implements.

    A class with `only_by_name = True` is used only if it is named (--spec-method). A drafter that
    adds something to the drafts of another kind reads that kind's files, so it needs this.
    """

    has_checkpoint: bool

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        """Is this draft of this kind? Not asked if `has_checkpoint` is false."""

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        """`draft` is None if `has_checkpoint` is false.

        Raises ValueError with one sentence (found, expected) for a draft of another target.
        """


_drafters: dict[str, tuple[Drafter, str]] = {}


def register_drafter(name: str) -> Callable[[type[Drafter]], type[Drafter]]:
    """Registers the decorated class (made without arguments) as the drafter `name` of C++.

    Raises ValueError if a class of another name already has it.
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
    """Drafter -> file that registered it, sorted by name."""
    for module in pkgutil.iter_modules(cpmcu.drafters.__path__, "cpmcu.drafters."):
        importlib.import_module(module.name)
    return {name: _drafters[name][1] for name in sorted(_drafters)}


def get_drafter(method: str) -> tuple[str, Drafter]:
    """The registered name and the drafter that a user calls `method`.

    Raises ValueError that names those there are.
    """
    known = registered_drafters()
    name = _ALIASES.get(method, method)
    if name not in known:
        raise ValueError(
            f"the speculative method is {method!r}, expected auto or one of: {', '.join(known)}"
        )
    return name, _drafters[name][0]


def find_drafter(draft: DraftFiles, expected: str | None = None) -> tuple[str, Drafter]:
    """The drafter of a draft's files.

    Raises ValueError if there is none or if it is not the `expected` one.
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
        found = " or ".join(matching) or "of no known kind"
        raise ValueError(f"the draft is {found}, but {expected} was asked for")
    matching = [n for n in matching if not getattr(_drafters[n][0], "only_by_name", False)]
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
