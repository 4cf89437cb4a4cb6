"""`cpmcu VERB` and `python -m cpmcu VERB`: runs one of the programs of this package.

| verb | program |
|---|---|
| serve | python -m cpmcu.server |
| bench | python -m cpmcu.bench |
| convert | python -m cpmcu.convert |
| completion | cpmcu.terminal.completion |
| others | python -m cpmcu.cli |

Exit status: 2 for an unknown verb, else the status of the program.
"""

from __future__ import annotations

import difflib
import sys

from cpmcu import __version__

_VERBS = {
    "run": "complete or answer a prompt",
    "chat": "hold a conversation in the terminal",
    "serve": "serve a model over OpenAI's and Anthropic's HTTP interfaces",
    "bench": "measure loading, prefill and decoding against the hardware",
    "convert": "turn a checkpoint into another form",
    "plan": "show the use of device memory",
    "env": "show versions, build and devices, for a bug report",
    "list": "show registered models, quantisation schemes and C++ parts",
    "completion": "print a completion script for bash, zsh or fish",
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
    except KeyboardInterrupt:  # during the import; the program itself handles it later
        from cpmcu.errors import INTERRUPTED, forget_interrupt

        forget_interrupt()
        sys.stderr.write("stopped\n")
        return INTERRUPTED


def help_text() -> str:
    """Usage, verbs and examples."""
    verbs = [f"  {verb:<12}{what}" for verb, what in _VERBS.items()]
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
            "shipped model. The default is the shipped model, which completes Python code.",
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
    from cpmcu.errors import show_text

    return show_text(text, "cpmcu")


def _run(verb: str, arguments: list[str]) -> int:
    # Only the program that runs is imported.
    if verb == "serve":
        from cpmcu import server

        return server.main(arguments, verb)
    if verb == "bench":
        from cpmcu import bench

        return bench.main(arguments, verb)
    if verb == "convert":
        from cpmcu.convert import __main__ as convert

        return convert.main(arguments, verb)
    if verb == "completion":
        from cpmcu.terminal import completion

        return _show(completion.script(arguments, _VERBS))
    from cpmcu import cli

    return cli.main(arguments, verb)


if __name__ == "__main__":
    sys.exit(main())
