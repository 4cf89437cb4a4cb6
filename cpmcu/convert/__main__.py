"""`cpmcu convert`, `python -m cpmcu.convert`: converts a checkpoint; needs no GPU.

    python -m cpmcu.convert gptq-to-marlin --src DIR --dst DIR2
    python -m cpmcu.convert minicpm-to-llama --src DIR --dst DIR2

The source is a directory or a Hugging Face repository id. If the exit status is not 0, the
destination is unchanged.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | error, in one sentence; CPMCU_DEBUG=1 shows the traceback |
| 2 | wrong flags |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmcu.errors import INTERRUPTED, forget_interrupt
from cpmcu.flags import FOOTER, FlagParser, parse_bool
from cpmcu.ui.display import Display

if TYPE_CHECKING:
    from cpmcu.convert.output import Converted

CONVERSIONS = {
    "gptq-to-marlin": "4-bit GPTQ models and EAGLE heads to CPM.cu's Marlin format",
    "minicpm-to-llama": "a MiniCPM to an equivalent Llama",
}
DTYPES = ("auto", "float16", "bfloat16", "float32")


def main(arguments: Sequence[str] | None = None, verb: str | None = None) -> int:
    """Runs a conversion; returns the exit status. `verb`: set by `cpmcu convert`."""
    parser = make_parser(verb)
    parsed = parser.parse_args(arguments)
    if parsed.dtype is not None and parsed.conversion != "minicpm-to-llama":
        parser.error(f"--dtype does not apply to {parsed.conversion}, which keeps all dtypes")
    debug = bool(os.environ.get("CPMCU_DEBUG"))
    display = Display(plain=bool(parsed.plain_output), debug=debug)
    try:
        done = _convert(display, parsed)
    except KeyboardInterrupt:
        forget_interrupt()
        display.note(f"stopped: {parsed.dst} is unchanged")
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        display.error(error)
        return 1
    for note in done.notes:
        display.note(note)
    display.note(f"written: {done.directory}")
    return 0


def make_parser(verb: str | None = None) -> FlagParser:
    """The parser of all flags."""
    prog = f"cpmcu {verb}" if verb else "cpmcu.convert"
    parser = FlagParser(
        prog=prog,
        usage=f"{prog if verb else 'python -m ' + prog} CONVERSION --src DIR --dst DIR [flags]",
        description="Converts checkpoints. "
        + " ".join(f"{name}: {what}." for name, what in CONVERSIONS.items()),
        epilog=FOOTER,
    )
    parser.add_argument(
        "conversion", choices=CONVERSIONS, metavar="CONVERSION", help=" or ".join(CONVERSIONS)
    )
    parser.add_argument(
        "--src", required=True, metavar="PATH|REPO", help="directory or Hugging Face repository id"
    )
    parser.add_argument("--dst", required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--overwrite",
        nargs="?",
        const=True,
        type=parse_bool,
        metavar="yes|no",
        help="replace the model in --dst (default: no)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="minicpm-to-llama: dtype of all floating-point tensors (default: auto, unchanged)",
    )
    parser.add_argument(
        "--plain-output",
        nargs="?",
        const=True,
        type=parse_bool,
        metavar="yes|no",
        help="no progress bars (default: no)",
    )
    return parser


def _convert(display: Display, parsed: argparse.Namespace) -> Converted:
    progress = display.load_progress("converting")
    overwrite = bool(parsed.overwrite)
    if parsed.conversion == "gptq-to-marlin":
        from cpmcu.convert.gptq_to_marlin import gptq_to_marlin  # loads numpy

        return gptq_to_marlin(parsed.src, parsed.dst, overwrite=overwrite, progress=progress)
    from cpmcu.convert.minicpm_to_llama import minicpm_to_llama

    return minicpm_to_llama(
        parsed.src,
        parsed.dst,
        dtype=parsed.dtype or "auto",
        overwrite=overwrite,
        progress=progress,
    )


if __name__ == "__main__":
    sys.exit(main())
