"""Registry: Hugging Face architecture -> function that builds its specification.

To add a model, add one file to this package. The first look-up imports all files. Code outside the
package may also call `register_model` before the model is loaded.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cpmcu.models
from cpmcu.checks import shown
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.names import NameMap, canonical_names

Builder = Callable[[Mapping[str, Any], BuildOptions], SpecFields]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The readers of one architecture: for its config and for its tensor names."""

    architecture: str
    build: Builder
    names: NameMap
    source: str  # file that registered it


_families: dict[str, ModelFamily] = {}

_ENDINGS = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
# Parts of the names of architectures of draft heads.
_DRAFTS = ("dflash", "dspark", "eagle", "speculator")
# Block that the engine does not have -> architectures that need it.
_MISSING = {
    "latent attention (MLA)": (
        *("DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "KimiLinear"),
        *("LongcatFlash", "MiniCPM3", "Mistral4"),
    ),
    "hyper-connections": ("DeepseekV4", "Glm5Next", "Qwen4Exp"),
    "Mamba-1": ("FalconMamba", "Jamba", "Mamba"),
    "LayerNorm": ("Cohere", "Cohere2", "Cohere2Moe", "Nemotron"),
}


def register_model(
    *architectures: str, names: NameMap = canonical_names
) -> Callable[[Builder], Builder]:
    """Registers the decorated function for these `architectures` strings of config.json.

    The function gets the parsed config.json and the `BuildOptions` and returns `SpecFields`.
    `names` maps a checkpoint's tensor names to the engine's; the default is for Llama names.
    Raises ValueError if no architecture is given or one is registered for another function.
    """
    if not architectures:
        raise ValueError("register_model needs at least one architecture name, found none")

    def register(build: Builder) -> Builder:
        source = inspect.getsourcefile(build) or "<unknown>"
        for architecture in architectures:
            known = _families.get(architecture)
            if known is not None and _identity(known.build) != _identity(build):
                raise ValueError(
                    f"architecture {architecture!r} is registered twice: by {known.source} "
                    f"and by {source}"
                )
        for architecture in architectures:
            _families[architecture] = ModelFamily(architecture, build, names, source)
        return build

    return register


def find_model(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config.json. Raises ValueError if no architecture is supported."""
    found = config.get("architectures")
    if not isinstance(found, list) or not found or not all(isinstance(a, str) for a in found):
        raise ValueError(
            f"config.json: architectures is {shown(found)}, expected a list with the name "
            f"of one of: {', '.join(registered_models())}"
        )
    _scan()
    for architecture in found:
        if architecture in _families:
            return _families[architecture]
    if (missing := _missing_block(found[0])) is not None:
        raise ValueError(
            f"config.json: architecture {shown(found[0])} is not supported: it needs {missing}, "
            f"expected one of the families {', '.join(_family_names())}"
        )
    if any(part in found[0].lower() for part in _DRAFTS):
        raise ValueError(
            f"config.json: architecture {shown(found[0])} is that of a draft, expected a model: "
            "name the draft's target, and the draft with --draft-model-path"
        )
    near = difflib.get_close_matches(found[0], _families, n=1, cutoff=0.0)
    raise ValueError(
        f"config.json: architecture {shown(', '.join(found))} is not supported, expected one of "
        f"the families {', '.join(_family_names())}; the nearest name is {near[0]}, `cpmcu list` "
        "shows all, and docs/adding_model.md tells how to add one"
    )


def _missing_block(architecture: str) -> str | None:
    name = _ENDINGS.sub("", architecture)
    return next((block for block, families in _MISSING.items() if name in families), None)


def _family_names() -> list[str]:
    """The registered architectures without their endings, such as ForCausalLM."""
    return sorted({_ENDINGS.sub("", architecture) for architecture in registered_models()})


def registered_models() -> dict[str, str]:
    """Returns the file that registered each architecture, sorted by the architecture's name."""
    _scan()
    return {name: _families[name].source for name in sorted(_families)}


def _scan() -> None:
    # Importing an imported module again costs a dictionary look-up.
    for module in pkgutil.iter_modules(cpmcu.models.__path__, "cpmcu.models."):
        importlib.import_module(module.name)


def _identity(build: Builder) -> tuple[str, str]:
    # A module that is reloaded (in notebooks) may register its function again.
    return (build.__module__, getattr(build, "__qualname__", repr(build)))
