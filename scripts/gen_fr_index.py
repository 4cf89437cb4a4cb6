"""Counts the occurrences of a tokenizer's tokens in text, for FR-Spec (--frspec-path).

    python scripts/gen_fr_index.py --tokenizer DIR --text FILE_OR_FOLDER ... --out DIR \\
        --vocab-size 8192 32768

Writes token_counts.npy (int64, one count a token of the model's vocabulary) and, if torch is
installed, freq_N.pt for each N: the N most frequent ids in CPM.cu's format, with every
end-of-sequence id. A draft that shares its target's lm_head then uses N rows of it:

    python -m cpmcu.cli ... --frspec-path DIR --frspec-vocab-size 32768

The text should resemble the model's output. Special tokens that the tokenizer adds are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works from a source tree

from cpmcu.drafters.frspec import COUNTS_FILE, keep_eos, most_frequent
from cpmcu.tokenizer import Tokenizer

PIECE = 1 << 16  # characters encoded at a time
PROGRESS_SECONDS = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        run(parsed.tokenizer, parsed.text, parsed.out, parsed.vocab_size, parsed.max_characters)
    except (OSError, ValueError, ImportError) as error:
        print(f"gen_fr_index: {error}", file=sys.stderr)
        return 1
    return 0


def run(
    tokenizer_directory: Path, texts: list[Path], out: Path, sizes: list[int], limit: int = 0
) -> None:
    """Counts tokens and writes the files. Raises ValueError for an invalid size or missing text."""
    tokenizer = Tokenizer.from_directory(tokenizer_directory)
    vocab_size = model_vocab_size(tokenizer_directory, tokenizer)
    for size in sizes:
        if not len(tokenizer.eos_token_ids) <= size <= vocab_size:
            raise ValueError(f"--vocab-size is {size}, expected 1 to {vocab_size}")
    files = text_files(texts)
    if not files:
        raise ValueError(f"no text files in {', '.join(map(str, texts))}")
    counts = count_tokens(tokenizer, pieces(files, limit), vocab_size)
    if not counts.any():
        raise ValueError(f"the text in {', '.join(map(str, texts))} is empty")
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / COUNTS_FILE, counts)
    print(f"{out / COUNTS_FILE}: {counts.sum()} tokens, {np.count_nonzero(counts)} kinds")
    for size in sizes:
        ids = keep_eos(most_frequent(counts, size).tolist(), tokenizer.eos_token_ids)
        share = counts[ids].sum() / counts.sum()
        write_index(out / f"freq_{size}.pt", ids, share)


def model_vocab_size(directory: Path, tokenizer: Tokenizer) -> int:
    """Returns config.json's vocab_size, which may be padded, else the tokenizer's."""
    path = directory / "config.json"
    stated = json.loads(path.read_bytes()).get("vocab_size", 0) if path.is_file() else 0
    return max(int(stated), tokenizer.vocab_size)


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Lists the given files and the files below the given folders that are UTF-8 text."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files += [file for file in inside if not _is_binary(file)]
    return files


def pieces(files: Iterable[Path], limit: int) -> Iterator[str]:
    """Yields the text in whole lines, about PIECE characters each, up to `limit` (0: all)."""
    left = limit or sys.maxsize
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as stream:
            while left > 0 and (lines := stream.readlines(min(PIECE, left))):
                text = "".join(lines)[:left]
                left -= len(text)
                yield text


def count_tokens(
    tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int
) -> npt.NDArray[np.int64]:
    """Returns the counts [vocab_size] of the texts' tokens without special tokens."""
    counts = np.zeros(vocab_size, np.int64)
    begun = told = time.perf_counter()
    characters = 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        counts += np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
        characters += len(text)
        now = time.perf_counter()
        if now - told >= PROGRESS_SECONDS:
            told = now
            rate = characters / (now - begun) / 1e6
            print(f"{characters / 1e6:.1f} M characters ({rate:.1f} M/s)", file=sys.stderr)
    return counts


def write_index(path: Path, ids: list[int], share: float) -> None:
    """Writes freq_N.pt if torch is installed."""
    try:
        import torch  # optional
    except ImportError:
        print(f"{path} is not written: torch is not installed; {COUNTS_FILE} does the same")
        return
    torch.save(ids, path)
    print(f"{path}: {len(ids)} tokens, {share:.2%} of the text")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as stream:
        return b"\0" in stream.read(4096)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="the target's directory")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files or folders")
    parser.add_argument(
        "--out", type=Path, required=True, help="output directory, created if missing"
    )
    parser.add_argument("--vocab-size", type=int, nargs="*", default=[], help="each N of freq_N.pt")
    parser.add_argument("--max-characters", type=int, default=0, help="stop after so many; 0: all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
