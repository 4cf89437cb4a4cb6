"""cpmcu: low-latency inference of one language model on one GPU.

The public API is `from cpmcu import LLM, SamplingParams`. Names are resolved on first use.
`import cpmcu` therefore loads neither the C++ extension nor a third-party package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpmcu.config import EngineConfig as EngineConfig
    from cpmcu.config import SpeculativeConfig as SpeculativeConfig
    from cpmcu.grammar import Grammar as Grammar
    from cpmcu.llm import LLM as LLM
    from cpmcu.outputs import CompletionOutput as CompletionOutput
    from cpmcu.outputs import RequestOutput as RequestOutput
    from cpmcu.outputs import StreamChunk as StreamChunk
    from cpmcu.sampling import SamplingParams as SamplingParams
    from cpmcu.sampling import ThinkingLimit as ThinkingLimit
    from cpmcu.spec_metrics import SpecDecodeMetrics as SpecDecodeMetrics

__version__ = "0.1.0"

_HOMES = {
    "LLM": "cpmcu.llm",
    "SamplingParams": "cpmcu.sampling",
    "ThinkingLimit": "cpmcu.sampling",
    "Grammar": "cpmcu.grammar",
    "EngineConfig": "cpmcu.config",
    "SpeculativeConfig": "cpmcu.config",
    "SpecDecodeMetrics": "cpmcu.spec_metrics",
    "RequestOutput": "cpmcu.outputs",
    "CompletionOutput": "cpmcu.outputs",
    "StreamChunk": "cpmcu.outputs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Grammar",
    "RequestOutput",
    "SamplingParams",
    "SpecDecodeMetrics",
    "SpeculativeConfig",
    "StreamChunk",
    "ThinkingLimit",
    "__version__",
    "get_include",
]


def get_include() -> str:
    """Returns the folder of the C++ headers that a plugin includes."""
    from pathlib import Path

    package = Path(__file__).resolve().parent
    installed = package / "include"
    return str(installed if installed.is_dir() else package.parent / "csrc")


def __getattr__(name: str) -> Any:
    """Imports a public name on first use.

    `C` is the extension. If it cannot be loaded, the ImportError of `cpmcu._extension.load` says
    how to build it.
    """
    if name in _HOMES:
        import importlib

        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name == "C":
        from cpmcu._extension import load

        return load()
    raise AttributeError(f"module 'cpmcu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
