"""`cpmcu serve` and `python -m cpmcu.server`: one model behind an OpenAI-compatible HTTP interface.

The socket opens before the model is loaded; until then /health returns 503.

| exit status | meaning |
|---|---|
| 0 | SIGTERM or Ctrl-C |
| 1 | error, in one sentence; CPMCU_DEBUG=1 shows the traceback |
| 2 | wrong flags |
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from cpmcu.checks import is_installed
from cpmcu.config import EngineConfig
from cpmcu.errors import sentence
from cpmcu.flags import FOOTER, FlagParser, add_flags, from_flags
from cpmcu.flags.engine import MODEL_WORD, add_engine_flags, engine_config, named_model
from cpmcu.flags.startup import add_startup_flags, prepare
from cpmcu.serving.config import ServerConfig
from cpmcu.shipped import chat_model

_PACKAGES = ("fastapi", "uvicorn", "anyio", "pydantic", "prometheus_client")


def main(arguments: list[str] | None = None, verb: str | None = None) -> int:
    """Runs the server until SIGTERM or Ctrl-C; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    file = prepare(arguments, _prog(verb))
    parser = make_parser(verb)
    parsed = parser.parse_args(arguments, file=file)
    try:
        parsed.model = named_model(parsed) or chat_model()
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
        prog=_prog(verb),
        usage=None if verb else "python -m cpmcu.server [flags]",
        words=MODEL_WORD if verb else None,
        description="Serves a language model over OpenAI's and Anthropic's HTTP interfaces.",
        epilog=FOOTER,
    )
    add_flags(parser, ServerConfig, "server")
    parser.hide("max_body_values", "header_timeout", "ping_interval")
    add_engine_flags(parser)
    add_startup_flags(parser)
    parser.briefs["max_num_seqs"] = "most concurrent sequences (default: 8)"
    return parser


def _prog(verb: str | None) -> str:
    return f"cpmcu {verb}" if verb else "cpmcu.server"


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the program before the server has started, when nothing needs an orderly end.

    Raises no exception. Imports run callbacks of weak references, in which CPython ignores it.
    """
    os._exit(0)


def _serve(config: ServerConfig, engine: EngineConfig) -> int:
    for name in _PACKAGES:  # they are imported while the model is loaded
        if not is_installed(name):
            raise ImportError(_to_install(name))
    try:
        from cpmcu.serving import runtime

        return runtime.run(config, engine)
    except ImportError as error:
        if error.name is None or error.name.startswith("cpmcu"):
            raise
        raise ImportError(_to_install(error.name)) from error


def _to_install(package: str) -> str:
    name = package.replace("_", "-")
    return f"the server needs the package {name!r}: pip install 'cpmcu[server]'"


if __name__ == "__main__":
    sys.exit(main())
