"""Engine configuration: one frozen dataclass that LLM, the CLI and the server share.

Each field's metadata is its help text, and where the flag differs from the field's name, its flag
(see `cpmcu/flags.py`): a flag is added by adding a field.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

DTYPES = ("auto", "float16", "bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")

_MODEL_HELP = (
    "local directory or Hugging Face repository id (default: the small Python code model that "
    "ships with cpmcu)"
)


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that can become a command-line flag.

    `flags` replaces the flag derived from the field's name; an empty tuple means no flag.
    """
    metadata = {"help": help, "flags": flags, "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def shipped_model() -> Path:
    """Directory of the model that comes with the package."""
    return Path(__file__).parent / "assets" / "tiny-python-minicpm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and run. Raises ValueError for a value out of range."""

    model: str | None = option(
        None, _MODEL_HELP, flags=("--model-path", "--model"), metavar="PATH|REPO"
    )
    revision: str | None = option(None, "branch, tag or commit of the Hugging Face repository")
    device: str = option("auto", "where to run; auto takes a GPU if there is one", choices=DEVICES)
    device_index: int = option(0, "which CUDA device, counted from 0")
    dtype: str = option(
        "auto", "type of weights and activations; auto keeps the checkpoint's", choices=DTYPES
    )
    memory_limit: float = option(
        0.9, "share of the memory that is free at start which the engine may take, in (0, 1]"
    )
    chunk_length: int = option(2048, "tokens of one prefill step")
    max_model_len: int = option(
        0, "most tokens of one sequence, prompt and output; 0: what the model was made for"
    )
    max_num_seqs: int = option(8, "most sequences that run at the same time")
    cuda_graph: bool = option(True, "replay decode steps as CUDA graphs")
    num_threads: int = option(0, "threads of the CPU back end; 0: all cores")
    minicpm4_yarn: bool = option(
        False, "replace the checkpoint's rope scaling with MiniCPM4's factors for long contexts"
    )

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        if not 0.0 < self.memory_limit <= 1.0:
            raise ValueError(
                f"memory_limit is {self.memory_limit}, but must be a share in (0, 1] of the free "
                "memory"
            )
        _at_least("chunk_length", self.chunk_length, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_model_len", self.max_model_len, 0)
        _at_least("num_threads", self.num_threads, 0)
        _at_least("device_index", self.device_index, 0)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}")


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}, but must be at least {minimum}")
