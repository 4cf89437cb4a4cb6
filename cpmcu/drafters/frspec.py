"""FR-Spec: a draft with the target's lm_head uses only the rows of the most frequent tokens.

| file | content |
|---|---|
| freq_N.pt | CPM.cu's format: torch.save of a list of ids, most frequent first |
| *.npy | ids |
| *.npy, for example token_counts.npy | counts [V]; the N tokens with the highest counts are used |

`scripts/gen_fr_index.py` writes `freq_N.pt` and `token_counts.npy`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cpmcu.checks import one_line
from cpmcu.loading.torch_files import DAMAGED

Ids = npt.NDArray[np.int64]

COUNTS_FILE = "token_counts.npy"


def frequent_ids(path: Path, num_tokens: int, vocab_size: int, eos_ids: Sequence[int]) -> list[int]:
    """Ids of the drafted tokens, most frequent first, with all eos ids.

    `path`: a file, or a directory with freq_N.pt or token_counts.npy. `num_tokens` 0: all ids of
    the file. Raises FileNotFoundError, ValueError, or RuntimeError if torch is missing.
    """
    file = _choose(path, num_tokens) if path.is_dir() else path
    if file.suffix == ".npy":
        ids = _from_numpy(file, num_tokens, vocab_size)
    else:
        ids = _from_torch(file)
    if num_tokens and len(ids) != num_tokens:
        raise ValueError(f"{file}: has {len(ids)} tokens, expected frspec_vocab_size {num_tokens}")
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        found = f"ids {ids.min()} to {ids.max()}" if len(ids) else "no ids"
        raise ValueError(f"{file}: has {found}, expected some of 0 to {vocab_size - 1}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{file}: has ids twice, expected each token once")
    return keep_eos([int(i) for i in ids], [i for i in eos_ids if i < vocab_size])


def keep_eos(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The ids, with the least frequent ones replaced by missing eos ids."""
    missing = [token for token in dict.fromkeys(eos_ids) if token not in set(ids)]
    others = [token for token in ids if token not in eos_ids]
    dropped = set(others[len(others) - len(missing) :]) if missing else set()
    return ([token for token in ids if token not in dropped] + missing)[: len(ids)]


def most_frequent(counts: npt.NDArray[np.int64], num_tokens: int) -> Ids:
    """The tokens with the highest counts. If two counts are equal, the lower id comes first."""
    order: Ids = np.argsort(-counts, kind="stable")[:num_tokens].astype(np.int64)
    return order


def resolve(
    frspec_path: str | None, draft_directory: Path, download: Callable[[str], Path]
) -> Path:
    """The file or directory to read. `download`: repo id -> local directory.

    Raises FileNotFoundError if there is neither.
    """
    if frspec_path is None:
        return draft_directory
    path = Path(frspec_path).expanduser()
    if path.exists():
        return path
    try:
        return download(frspec_path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"frspec_path: {error}") from error


def _choose(directory: Path, num_tokens: int) -> Path:
    found = sorted(directory.glob("freq_*.pt"))
    counts = directory / COUNTS_FILE
    if num_tokens:
        file = directory / f"freq_{num_tokens}.pt"
        if file.is_file() or counts.is_file():
            return file if file.is_file() else counts
        wanted = f"freq_{num_tokens}.pt or {COUNTS_FILE}"
    elif len(found) == 1:
        return found[0]
    else:
        wanted = "exactly one freq_N.pt where frspec_vocab_size is not given"
    names = ", ".join(file.name for file in found) or "no freq_N.pt"
    raise FileNotFoundError(f"{directory}: has {names}, expected {wanted}")


def _from_numpy(file: Path, num_tokens: int, vocab_size: int) -> Ids:
    try:
        values = np.lib.format.open_memmap(file, mode="r")  # refuses a shape beyond the file
    except Exception as error:  # numpy parses the header as Python, so any exception is possible
        raise ValueError(
            f"{file}: is not a numpy file ({one_line(error)}), expected an array"
        ) from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"{file}: has shape {list(values.shape)} of {values.dtype}, expected a list of integers"
        )
    numbers: Ids = values.astype(np.int64)
    if file.name == COUNTS_FILE and len(numbers) < vocab_size:  # the vocabulary is padded
        numbers = np.pad(numbers, (0, vocab_size - len(numbers)))
    if len(numbers) != vocab_size and (num_tokens == 0 or len(numbers) == num_tokens):
        return numbers
    if len(numbers) != vocab_size:
        raise ValueError(
            f"{file}: has {len(numbers)} numbers, expected counts of the {vocab_size} tokens or "
            f"{num_tokens} ids"
        )
    if not 0 < num_tokens <= vocab_size:
        raise ValueError(
            f"frspec_vocab_size is {num_tokens}, but must be 1 to {vocab_size} with the counts in "
            f"{file}"
        )
    return most_frequent(numbers, num_tokens)


def _from_torch(file: Path) -> Ids:
    try:
        import torch  # slow to import
    except ImportError as error:
        raise RuntimeError(
            f"{file}: reading this file needs torch, which is not installed; install it (pip "
            f"install torch) or give {COUNTS_FILE}"
        ) from error
    try:
        ids = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *DAMAGED) as error:
        raise ValueError(
            f"{file}: torch cannot read it as plain data, expected a list of token ids"
        ) from error
    if isinstance(ids, torch.Tensor):
        ids = ids.flatten().tolist()
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{file}: holds a {type(ids).__name__}, expected a list of token ids")
    if any(abs(i) >= 2**63 for i in ids):
        raise ValueError(f"{file}: has ids beyond 64 bits, expected token ids")
    return np.asarray(ids, np.int64)
