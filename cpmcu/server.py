"""`python -m cpmcu.server`: one model behind an OpenAI-compatible HTTP interface.

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
from cpmcu.engine_flags import add_engine_flags, engine_config
from cpmcu.errors import sentence
from cpmcu.flags import FlagParser, add_flags, from_flags
from cpmcu.serving.config import ServerConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs the server until it is told to stop; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    try:
        config = from_flags(ServerConfig, parsed)
        engine = engine_config(parsed)
    except ValueError as error:
        parser.error(str(error))
    try:
        return _serve(config, engine)
    except Exception as error:
        if os.environ.get("CPMCU_DEBUG"):
            raise
        sys.stderr.write(f"{parser.prog}: {sentence(error)}\n")
        return 1


def make_parser() -> FlagParser:
    """The parser of all flags."""
    parser = FlagParser(
        prog="cpmcu.server", description="Serves a language model over OpenAI's HTTP interface."
    )
    add_flags(parser, ServerConfig, "server")
    add_engine_flags(parser)
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
