"""The flags --out and --overwrite, and their check before the long work begins."""

from __future__ import annotations

import argparse
from pathlib import Path

from cpmcu.convert.output import check_destination


def add_out_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the files of a previous run"
    )


def check_out(args: argparse.Namespace, *sources: Path | None, holds: str = "config.json") -> None:
    """Raises SystemExit if --out is not empty and must be kept, or overlaps an input folder."""
    folders = (*getattr(args, "corpus", ()), *sources)
    read = [source for source in folders if source is not None]
    try:
        check_destination(args.out, read, overwrite=args.overwrite, holds=holds)
    except ValueError as error:
        raise SystemExit(str(error)) from error
