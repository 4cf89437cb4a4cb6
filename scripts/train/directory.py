"""Where a recipe writes: flags that say it, and a look before the long work begins."""

from __future__ import annotations

import argparse
from pathlib import Path

from cpmcu.convert.output import check_destination


def add_out_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what a run before has written there"
    )


def check_out(args: argparse.Namespace, *sources: Path | None, holds: str = "config.json") -> None:
    """SystemExit if --out is not empty and may not be replaced, or holds what is read."""
    read = [source for source in (*args.corpus, *sources) if source is not None]
    try:
        check_destination(args.out, read, overwrite=args.overwrite, holds=holds)
    except ValueError as error:
        raise SystemExit(str(error)) from error
