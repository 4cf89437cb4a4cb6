"""MiniCPM4-8B with CPM.cu's switches, on the command line or as a server.

    python examples/minicpm4.py generate --prompt-file prompt.txt
    python examples/minicpm4.py serve --apply-eagle-quant no --port 8000

--apply-quant, --apply-eagle and --apply-eagle-quant are on unless switched off; other flags are
those of `python -m cpmcu.cli` and `python -m cpmcu.server`. One of them is --apply-sparse, which
CPM.cu has on; cpmcu has sparse attention on the CPU only.
"""

import argparse
import runpy
import sys

try:
    from cpmcu.flags import FlagParser, parse_bool
except ImportError:
    sys.exit("minicpm4.py needs cpmcu: pip install . at the root of the repository")

MODEL = "openbmb/MiniCPM4-8B"
DRAFT = "openbmb/MiniCPM4-8B-Eagle-FRSpec"
QUANT_DRAFT = f"{DRAFT}-QAT-cpmcu"  # also has the token frequencies for both drafts


def flags(args: argparse.Namespace) -> list[str]:
    """Converts the switches to cpmcu's flags."""
    found = ["--model", f"{MODEL}-marlin-cpmcu" if args.apply_quant else MODEL]
    found += ["--minicpm4-yarn", "yes" if args.minicpm4_yarn else "no"]
    if args.apply_eagle:
        found += ["--draft-model-path", QUANT_DRAFT if args.apply_eagle_quant else DRAFT]
        found += ["--frspec-path", QUANT_DRAFT, "--frspec-vocab-size", "32768"]
    return found


def main() -> None:
    parser = FlagParser(prog="minicpm4.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["generate", "serve"])
    for name in ("apply-quant", "apply-eagle", "apply-eagle-quant", "minicpm4-yarn"):
        parser.add_argument(
            f"--{name}", type=parse_bool, nargs="?", const=True, default=True, metavar="yes|no"
        )
    args, rest = parser.parse_known_args()
    program = "cpmcu.cli" if args.what == "generate" else "cpmcu.server"
    sys.argv = [program, *flags(args), *rest]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
