"""`cpmcu convert`, `python -m cpmcu.convert`: converts a checkpoint; needs no GPU.

    cpmcu convert quantize MODEL OUT --method gptq --calibration FILE.txt
    cpmcu convert gptq-to-marlin MODEL OUT
    cpmcu convert minicpm-to-llama MODEL OUT

MODEL (or --src) is a directory or a Hugging Face repository id; quantize also takes a GGUF file.
If the exit status is not 0, OUT (or --dst) is unchanged.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | error, in one sentence; CPMCU_DEBUG=1 shows the traceback |
| 2 | wrong flags |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpmcu.convert.quantize_options import QuantizeOptions
from cpmcu.errors import INTERRUPTED, forget_interrupt
from cpmcu.flags import FOOTER, FlagParser, parse_bool
from cpmcu.ui.display import Display

if TYPE_CHECKING:
    from cpmcu.convert.output import Converted

CONVERSIONS = {
    "quantize": "a model of 16 bits to GPTQ of 4 or 8 bits, NVFP4 or MXFP4",
    "gptq-to-marlin": "4-bit GPTQ models and EAGLE heads to CPM.cu's Marlin format",
    "minicpm-to-llama": "a MiniCPM to an equivalent Llama",
}
DTYPES = ("auto", "float16", "bfloat16", "float32")
# Flags of one conversion.
_OWN = {
    "dtype": "minicpm-to-llama",
    **dict.fromkeys(
        (
            *("method", "format", "bits", "group_size", "calibration", "calibration_tokens"),
            *("verify", "device"),
        ),
        "quantize",
    ),
}


def main(arguments: Sequence[str] | None = None, verb: str | None = None) -> int:
    """Runs a conversion; returns the exit status. `verb`: set by `cpmcu convert`."""
    parser = make_parser(verb)
    parsed = parser.parse_args(arguments)
    for name, conversion in _OWN.items():
        if getattr(parsed, name) is not None and parsed.conversion != conversion:
            parser.error(
                f"--{name.replace('_', '-')} applies to {conversion}, not to {parsed.conversion}"
            )
    _name_places(parser, parsed)
    if parsed.conversion == "quantize":
        try:
            _options(parsed)
        except ValueError as error:
            parser.error(parser.named(str(error)))
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
        display.error(parser.named(str(error)) if type(error) is ValueError else error)
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
        usage=f"{prog if verb else 'python -m ' + prog} CONVERSION MODEL OUT [flags]",
        description="Converts checkpoints. "
        + " ".join(f"{name}: {what}." for name, what in CONVERSIONS.items()),
        epilog=FOOTER,
        words={"MODEL": "the source, as --src", "OUT": "directory to write, as --dst"},
    )
    parser.add_argument(
        "conversion", choices=CONVERSIONS, metavar="CONVERSION", help=" or ".join(CONVERSIONS)
    )
    parser.add_argument(
        "--src", "-m", metavar="PATH|REPO", help="directory or Hugging Face repository id"
    )
    parser.add_argument("--dst", metavar="DIR", help="directory to write")
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
    _add_quantize_flags(parser)
    return parser


def _add_quantize_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("quantize")
    group.add_argument(
        "--method",
        choices=("rtn", "gptq"),
        help="rtn: round to nearest (default); gptq: after a calibration text",
    )
    group.add_argument(
        "--format",
        choices=("gptq", "nvfp4", "mxfp4"),
        help="of the output: gptq, integers (default); nvfp4 or mxfp4, floats of 4 bits",
    )
    group.add_argument("--bits", type=int, metavar="N", help="of a weight: 4 (default) or 8")
    group.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="inputs that share a scale: 32, 64, 128 (default), or -1 for whole rows",
    )
    group.add_argument(
        "--calibration", type=Path, metavar="FILE.txt", help="text of the kind the model will see"
    )
    group.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="most tokens of the text that are used (default: 32768)",
    )
    group.add_argument(
        "--verify",
        nargs="?",
        const="",
        metavar="FILE.txt",
        help="compare log-probabilities with the original, over this or the calibration text",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="where to compute (default: auto)"
    )


def _name_places(parser: FlagParser, parsed: argparse.Namespace) -> None:
    """Puts MODEL and OUT into --src and --dst."""
    for word in parsed.plain_words:
        name = "src" if parsed.src is None else "dst"
        if getattr(parsed, name) is not None:
            parser.error(f"unexpected argument {word!r}: --src and --dst are given")
        setattr(parsed, name, word)
    for name, word in (("src", "MODEL"), ("dst", "OUT")):
        if getattr(parsed, name) is None:
            parser.error(f"{word} is missing (or --{name})")


def _convert(display: Display, parsed: argparse.Namespace) -> Converted:
    overwrite = bool(parsed.overwrite)
    if parsed.conversion == "quantize":
        return _quantize(display, parsed, overwrite)
    progress = display.load_progress("converting")
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


def _options(parsed: argparse.Namespace) -> QuantizeOptions:
    """The options of quantize. Raises ValueError for flags that are wrong together."""
    names = ("method", "format", "bits", "group_size", "calibration", "calibration_tokens")
    given = {name: getattr(parsed, name) for name in names}
    if parsed.verify is not None and _text(parsed) is None:
        raise ValueError("verify is set without a text, expected --verify FILE or --calibration")
    return QuantizeOptions(**{name: value for name, value in given.items() if value is not None})


def _text(parsed: argparse.Namespace) -> Path | None:
    """The text that the output is compared over."""
    return Path(parsed.verify) if parsed.verify else parsed.calibration


def _quantize(display: Display, parsed: argparse.Namespace, overwrite: bool) -> Converted:
    text = _text(parsed)
    from cpmcu.loading.loader import choose_device

    device = choose_device(parsed.device or "auto")
    try:
        from cpmcu.convert.quantize import quantize, read_text
        from cpmcu.loading.hub import resolve_model
    except ImportError as error:
        raise ImportError(f"quantize needs torch ({error}): pip install 'cpmcu[torch]'") from error
    options = dataclasses.replace(_options(parsed), device=device)
    if parsed.verify is not None and text is not None:  # checked before hours of rounding
        read_text(resolve_model(parsed.src), text, 2)
    done = quantize(
        parsed.src,
        parsed.dst,
        options,
        overwrite=overwrite,
        working=display.load_progress("quantising", time_left=True),
        writing=display.load_progress("writing"),
    )
    if parsed.verify is None or text is None:
        return done
    from cpmcu.convert.compare import TOKENS, compare
    from cpmcu.convert.output import Converted

    ids = read_text(done.directory, text, TOKENS)
    found = compare(
        parsed.src, done.directory, ids, device=device, progress=display.load_progress()
    )
    return Converted(done.directory, (*done.notes, *found.notes()))


if __name__ == "__main__":
    sys.exit(main())
