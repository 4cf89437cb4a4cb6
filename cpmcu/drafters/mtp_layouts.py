"""Names of MTP modules in the files of their target, other than those of Qwen3-Next and Qwen3.5.

| layout | prefix of module i | fc's input |
|---|---|---|
| DeepSeek's | `model.layers.{num_hidden_layers + i}.` | embedding, hidden state |
| MiMo's | `model.mtp_layers.{i}.` | hidden state, embedding |
| Nemotron's | `mtp.layers.{2 i}.` and `mtp.layers.{2 i + 1}.` | embedding, hidden state |

The decoder layer of a module is like those of the target. Nemotron's module is a layer of attention
and one of experts. Embedding table and lm_head are the target's; copies of them are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpmcu.drafters.registry import DraftFiles, TargetModel, Tensors
from cpmcu.loading.progress import list_names
from cpmcu.models.common import SpecFields
from cpmcu.models.experts import expert_names
from cpmcu.models.names import NameMap, Piece
from cpmcu.models.reader import ConfigReader

COUNT = "num_nextn_predict_layers"
# In config.json: module m reads hidden states of module m - 1, not the target's.
CHAINED = "chain_mtp_hidden"
_LAYER = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
_MLP = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
# Nemotron's names in a layer of attention and in one of experts -> those of a decoder layer.
_NEMOTRON = (
    {"norm.": "input_layernorm.", "mixer.": "self_attn."},
    {
        "norm.": "post_attention_layernorm.",
        "mixer.shared_experts.": "mlp.shared_expert.",
        "mixer.gate.e_score_correction_bias": "mlp.gate.correction_bias",
        "mixer.": "mlp.",
    },
)
# Keys of Nemotron's config.json -> the kinds of the layers of a module.
_KINDS = {
    "mtp_layers_block_type": (["attention", "moe"], ["full_attention", "moe"]),
    "mtp_hybrid_override_pattern": ("*E",),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of the tensors of modules."""

    prefix: re.Pattern[str]  # matches the start of a name; its group is the number of the module
    first: int  # number of the first module in the names
    renamed: Mapping[str, str]  # name of a module's part -> engine's name
    copies: tuple[str, ...] = ()  # parts that are copies of the target's
    # `fc` reads hidden states, then the embedding; False: the embedding first.
    hidden_first: bool = False
    mlp: tuple[str, ...] = _MLP  # parts of the second block
    has_experts: bool = False

    def split(self, name: str) -> tuple[int, str] | None:
        """Returns (module, name within it); None for a tensor of the target."""
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
            return expert_names(scope + self._renamed(split[1]), fields)

        return engine_names

    def _renamed(self, name: str) -> str:
        if name.startswith(_LAYER):
            return "layers.0." + name
        part, _, leaf = name.rpartition(".")
        return f"{self.renamed.get(part, part)}.{leaf}"


@dataclass(frozen=True, slots=True)
class NemotronLayout(Layout):
    """Two layers of the files are a module."""

    def split(self, name: str) -> tuple[int, str] | None:
        """Splits like Layout.split. The name within the module is that of a decoder layer."""
        found = self.prefix.match(name)
        if found is None:
            return None
        module, second = divmod(int(found[1]), 2)
        rest = name[found.end() :]
        for own, engine in _NEMOTRON[second].items():
            if rest.startswith(own):
                return module, engine + rest.removeprefix(own)
        return module, rest


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

NEMOTRON = NemotronLayout(
    prefix=re.compile(r"mtp\.layers\.(\d+)\."),
    first=0,
    renamed={
        "enorm": "input_norm1",
        "hnorm": "input_norm2",
        "eh_proj": "fc",
        "final_layernorm": "norm",
    },
    mlp=("mlp.gate", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    has_experts=True,
)


def find_layout(config: Mapping[str, object], tensors: Tensors) -> Layout | None:
    """The layout of the MTP modules in these files; None: no layout that this module knows."""
    if any(MIMO.split(name) for name in tensors):
        return MIMO
    if any(NEMOTRON.split(name) and ".mixer." in name for name in tensors):
        return NEMOTRON
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int):
        layout = _deepseek(num_layers)
        if any((split := layout.split(name)) and "eh_proj" in split[1] for name in tensors):
            return layout
    return None


def count_modules(draft: DraftFiles, layout: Layout) -> int:
    """The number of modules. Raises ValueError unless each has all tensors of a layer."""
    if layout.has_experts:
        for key, kinds in _KINDS.items():
            if draft.config.get(key, kinds[0]) not in kinds:
                raise ConfigReader(draft.config).fail(key, f"{kinds[0]!r}, a module of two layers")
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
        experts = sorted(part for part in parts if part.startswith("mlp.experts"))
        if experts and not layout.has_experts:
            raise ValueError(f"MTP module {number} has {experts[0]}, expected a dense MLP")
        fused = {"self_attn.qkv_proj": _ATTENTION[:3], "mlp.gate_up_proj": _MLP[:2]}
        found = parts.union(*(split for part, split in fused.items() if part in parts))
        wanted = (*layout.renamed, *_LAYER[:2], *_ATTENTION, *layout.mlp)
        if missing := [part for part in wanted if part not in found]:
            raise ValueError(f"MTP module {number} has no {list_names(missing)}")
    return stated


def is_chained(draft: DraftFiles) -> bool:
    """Does module m read the hidden states of module m - 1?"""
    return ConfigReader(draft.config).flag(CHAINED)


def unread(draft: DraftFiles, layout: Layout, num_modules: int) -> dict[str, str]:
    """Returns the reasons why tensors of modules are not read, by tensor."""
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
