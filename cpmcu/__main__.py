"""`cpmcu` and `python -m cpmcu`: one program, whose verbs are the programs of this package.

`cpmcu serve` is `python -m cpmcu.server`, `cpmcu bench` and `cpmcu convert` are the programs of
those names, and the other verbs are `python -m cpmcu.cli`, with all their flags. Exit status: 0; 2
for an unknown verb; else that of the program.
"""

from __future__ import annotations

import difflib
import sys

from cpmcu import __version__

_VERBS = {
    "run": "complete or answer a prompt",
    "chat": "hold a conversation in the terminal",
    "serve": "serve a model over OpenAI's HTTP interface, with a chat page",
    "bench": "measure loading, prefill and decoding against the hardware",
    "convert": "turn a checkpoint into another form",
    "plan": "show where device memory goes",
    "env": "show versions, build and devices, for a bug report",
    "list": "show registered models, quantisation schemes and C++ parts",
}
_EXAMPLES = (
    'cpmcu run "def fibonacci(n):"',
    'cpmcu run openbmb/MiniCPM4-0.5B "Why is the sky blue?"',
    'cat report.txt | cpmcu run DIR "Summarise this text:"',
    "cpmcu chat DIR --temperature 0.7",
    "cpmcu serve DIR --port 8000",
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the verb that the first argument names; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    if not given or given[0] in ("-h", "--help", "--help-all"):
        return _show(help_text())
    if given[0] == "--version":
        return _show(f"cpmcu {__version__}\n")
    verb, rest = given[0], given[1:]
    if verb not in _VERBS:
        near = difflib.get_close_matches(verb, _VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f", expected one of {', '.join(_VERBS)}"
        sys.stderr.write(f"cpmcu: unknown verb {verb!r}{hint} (--help lists them)\n")
        return 2
    try:
        return _run(verb, rest)
    except KeyboardInterrupt:  # while the program was imported, which has its own way later
        from cpmcu.errors import INTERRUPTED, forget_interrupt

        forget_interrupt()
        sys.stderr.write("stopped\n")
        return INTERRUPTED


def help_text() -> str:
    """The verbs, and examples."""
    verbs = [f"  {verb:<10}{what}" for verb, what in _VERBS.items()]
    examples = [f"  {example}" for example in _EXAMPLES]
    return "\n".join(
        [
            "usage: cpmcu VERB [MODEL] [flags]",
            "",
            f"cpmcu {__version__} runs a language model on one GPU, or on the CPU.",
            "",
            "verbs:",
            *verbs,
            "",
            "MODEL is a directory in Hugging Face format, a repository id, or the name of a",
            "shipped model. Without one the shipped model runs, which completes Python code.",
            "",
            "examples:",
            *examples,
            "",
            "cpmcu VERB --help shows the flags of a verb, --help-all explains every flag.",
            "cpmcu --version shows the version.",
            "",
        ]
    )


def _show(text: str) -> int:
    from cpmcu.errors import reader_left, sentence

    try:
        if sys.stdout is None:
            raise OSError("stdout is closed, but the output goes there")
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_left()
    except OSError as error:
        sys.stderr.write(f"cpmcu: {sentence(error)}\n")
        return 1
    return 0


def _run(verb: str, arguments: list[str]) -> int:
    # Each program is imported only when it is the one that runs.
    if verb == "serve":
        from cpmcu import server

        return server.main(arguments, verb)
    if verb == "bench":
        from cpmcu import bench

        return bench.main(arguments, verb)
    if verb == "convert":
        from cpmcu.convert import __main__ as convert

        return convert.main(arguments, verb)
    from cpmcu import cli

    return cli.main(arguments, verb)


if __name__ == "__main__":
    sys.exit(main())
