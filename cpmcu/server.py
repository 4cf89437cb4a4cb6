"""`cpmcu serve` and `python -m cpmcu.server`: one model behind an OpenAI-compatible HTTP interface.

The socket opens before the model is loaded (/health says 503 until then). Exit status: 0 after
SIGTERM or Ctrl-C, 1 for an error in one sentence (with CPMCU_DEBUG=1, a traceback); 2 for wrong
flags.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from cpmcu.config import EngineConfig
from cpmcu.engine_flags import MODEL_WORD, add_engine_flags, engine_config, named_model
from cpmcu.errors import sentence
from cpmcu.flags import FOOTER, FlagParser, add_flags, from_flags
from cpmcu.serving.config import ServerConfig


def main(arguments: list[str] | None = None, verb: str | None = None) -> int:
    """Runs the server until it is told to stop, as a verb of `cpmcu` or without; returns the exit
    status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    parser = make_parser(verb)
    parsed = parser.parse_args(arguments)
    try:
        parsed.model = named_model(parsed)
        config = from_flags(ServerConfig, parsed)
        engine = engine_config(parsed)
    except ValueError as error:
        parser.error(parser.named(str(error)))
    try:
        return _serve(config, engine)
    except Exception as error:
        if os.environ.get("CPMCU_DEBUG"):
            raise
        sys.stderr.write(f"{parser.prog}: {sentence(error)}\n")
        return 1


def make_parser(verb: str | None = None) -> FlagParser:
    """The parser of all flags."""
    parser = FlagParser(
        prog=f"cpmcu {verb}" if verb else "cpmcu.server",
        usage=None if verb else "python -m cpmcu.server [flags]",
        words=MODEL_WORD if verb else None,
        description="Serves a language model over OpenAI's HTTP interface.",
        epilog=FOOTER,
    )
    add_flags(parser, ServerConfig, "server")
    add_engine_flags(parser)
    parser.briefs["max_num_seqs"] = "most sequences that run at once (default: 8)"
    return parser


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the program while there is no server yet.

    Not by KeyboardInterrupt: CPython makes exit status -2 of one that came while a text was
    executed, as libraries do when they are imported, though it was caught.
    """
    for each in (signal.SIGINT, signal.SIGTERM):  # another shall not make an error of the end
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(0)


def _serve(config: ServerConfig, engine: EngineConfig) -> int:
    try:
        from cpmcu.serving import runtime
    except ImportError as error:
        if error.name is not None and error.name.startswith("cpmcu"):
            raise
        raise ImportError(
            f"the server needs the package {error.name!r}: pip install 'cpmcu[server]'"
        ) from error
    return runtime.run(config, engine)


if __name__ == "__main__":
    sys.exit(main())
