"""Names of MTP modules in the files of their target, other than those of Qwen3-Next and Qwen3.5.

| layout | prefix of module i | fc's input |
|---|---|---|
| DeepSeek's | `model.layers.{num_hidden_layers + i}.` | embedding, hidden state |
| MiMo's | `model.mtp_layers.{i}.` | hidden state, embedding |

The decoder layer of a module is like those of the target. Embedding table and lm_head are the
target's; copies of them are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpmcu.drafters.registry import DraftFiles, TargetModel, Tensors
from cpmcu.loading.progress import list_names
from cpmcu.models.common import SpecFields
from cpmcu.models.names import NameMap, Piece, canonical_names
from cpmcu.models.reader import ConfigReader

COUNT = "num_nextn_predict_layers"
CHAINED = "chain_mtp_hidden"  # in config.json: module m reads module m - 1, not the target
_LAYER = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
_MLP = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of the tensors of modules."""

    prefix: re.Pattern[str]  # its group is the number of the module
    first: int  # number of the first module in the names
    renamed: Mapping[str, str]  # name of a module's part -> engine's name
    copies: tuple[str, ...] = ()  # parts that are copies of the target's
    hidden_first: bool = False  # order of fc's input

    def split(self, name: str) -> tuple[int, str] | None:
        """(Module, name within it); None for a tensor of the target."""
        found = self.prefix.match(name)
        if found is None or int(found[1]) < self.first:
            return None
        return int(found[1]) - self.first, name[found.end() :]

    def names(self, num_modules: int) -> NameMap:
        """Maps the tensors of the first `num_modules` modules to the engine's names."""

        def engine_names(name: str, fields: SpecFields) -> Sequence[Piece]:
            split = self.split(name)
            if split is None or split[0] >= num_modules:
                return ()
            scope = "draft." if num_modules == 1 else f"draft.modules.{split[0]}."
            return canonical_names(scope + self._renamed(split[1]), fields)

        return engine_names

    def _renamed(self, name: str) -> str:
        if name.startswith(_LAYER):
            return "layers.0." + name
        part, _, leaf = name.rpartition(".")
        return f"{self.renamed.get(part, part)}.{leaf}"


def _deepseek(num_layers: int) -> Layout:
    names = {"enorm": "input_norm1", "hnorm": "input_norm2", "eh_proj": "fc"}
    return Layout(
        prefix=re.compile(r"model\.layers\.(\d+)\."),
        first=num_layers,
        renamed={**names, "shared_head.norm": "norm"},
        copies=("embed_tokens", "shared_head.head"),
    )


MIMO = Layout(
    prefix=re.compile(r"model\.mtp_layers\.(\d+)\."),
    first=0,
    renamed={
        "token_layernorm": "input_norm1",
        "hidden_layernorm": "input_norm2",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
    hidden_first=True,
)


def find_layout(config: Mapping[str, object], tensors: Tensors) -> Layout | None:
    """The layout of the modules in these files; None: they have none of a layout of this file."""
    if any(MIMO.split(name) for name in tensors):
        return MIMO
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int):
        layout = _deepseek(num_layers)
        if any((split := layout.split(name)) and "eh_proj" in split[1] for name in tensors):
            return layout
    return None


def count_modules(draft: DraftFiles, layout: Layout) -> int:
    """The number of modules. Raises ValueError unless each has all tensors of a dense layer."""
    modules: dict[int, set[str]] = {}
    for name in draft.tensors:
        if (split := layout.split(name)) is not None:
            modules.setdefault(split[0], set()).add(split[1].rpartition(".")[0])
    stated = ConfigReader(draft.config).positive_int(COUNT, default=len(modules))
    if sorted(modules) != list(range(stated)):
        raise ValueError(
            f"config.json: {COUNT} is {stated}, but the tensors are those of the MTP modules "
            f"{', '.join(map(str, sorted(modules)))}"
        )
    for number, parts in modules.items():
        if experts := sorted(part for part in parts if part.startswith("mlp.experts")):
            raise ValueError(f"MTP module {number} has {experts[0]}, expected a dense MLP")
        fused = {"self_attn.qkv_proj": _ATTENTION[:3], "mlp.gate_up_proj": _MLP[:2]}
        found = parts.union(*(split for part, split in fused.items() if part in parts))
        wanted = (*layout.renamed, *_LAYER[:2], *_ATTENTION, *_MLP)
        if missing := [part for part in wanted if part not in found]:
            raise ValueError(f"MTP module {number} has no {list_names(missing)}")
    return stated


def is_chained(draft: DraftFiles) -> bool:
    """Does module m read the hidden states of module m - 1?"""
    return ConfigReader(draft.config).flag(CHAINED)


def unread(draft: DraftFiles, layout: Layout, num_modules: int) -> dict[str, str]:
    """Tensors of modules that are not read -> reason."""
    reasons = {}
    for name in draft.tensors:
        split = layout.split(name)
        if split is None:
            continue
        if split[0] >= num_modules:
            reasons[name] = "enable_multi_layers_mtp is no"
        elif split[1].rpartition(".")[0] in layout.copies:
            reasons[name] = "the target's tensor is used"
    return reasons


def describe(target: TargetModel) -> str:
    """Prefixes of the names, for a message."""
    return f"mtp., model.mtp_layers. or model.layers.{target.fields.num_hidden_layers}."
