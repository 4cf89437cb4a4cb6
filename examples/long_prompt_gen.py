"""Writes a long prompt: the sources of this repository in random order, and a question.

python examples/long_prompt_gen.py -o prompt.txt -l 350000 -q "Summarize the code"
python -m cpmcu.cli --prompt-file prompt.txt --model DIR
python examples/openai_long_prompt.py prompt.txt
"""

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".md"}


def long_prompt(length: int, question: str, seed: int | None = None) -> str:
    """A prompt of `length` characters. Raises ValueError if the question alone is longer."""
    end = f"\n\n{question}"
    if length < len(end):
        raise ValueError(f"length is {length}, but the question alone takes {len(end)} characters")
    folders = ("cpmcu", "csrc", "docs", "scripts", "tests")
    files = [p for f in folders for p in sorted((ROOT / f).rglob("*")) if p.suffix in SUFFIXES]
    rng = random.Random(seed)
    text = ""
    while len(text) < length - len(end):  # again from the start if the sources are too short
        for path in rng.sample(files, len(files)):
            text += f"# {path.relative_to(ROOT)}\n{path.read_text('utf-8')}\n"
    return text[: length - len(end)] + end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("prompt.txt"))
    parser.add_argument("-l", "--length", type=int, default=350_000, help="characters")
    parser.add_argument("-q", "--question", default="Summarize the code")
    parser.add_argument("--seed", type=int, help="for the same order again")
    args = parser.parse_args()
    try:
        args.output.write_text(long_prompt(args.length, args.question, args.seed), "utf-8")
    except ValueError as error:
        sys.exit(f"long_prompt_gen.py: {error}")
    except OSError as error:
        sys.exit(f"long_prompt_gen.py: {args.output} cannot be written: {error.strerror}")
    print(f"{args.output}: {args.length} characters")


if __name__ == "__main__":
    main()
