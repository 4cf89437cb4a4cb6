"""python -m cpmcu.cli: completes a prompt, or holds a conversation, in the terminal.

The generated text, or the table asked for, goes to stdout, everything else to stderr. Exit status:
0, also after Ctrl-C; 1 for an error (one sentence; CPMCU_DEBUG=1 shows the traceback); 2 for wrong
flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from cpmcu.config import EngineConfig, option, shipped
from cpmcu.engine_flags import add_engine_flags, engine_config
from cpmcu.errors import forget_interrupt
from cpmcu.flags import FlagParser, add_flags, from_flags
from cpmcu.sampling import SamplingParams
from cpmcu.ui.display import Display

if TYPE_CHECKING:
    from cpmcu.llm import LLM

DEFAULT_PROMPT = "Who are you"
SHIPPED_PROMPT = '''import os


def walk_files(root):
    """Yield the path of every file below a directory."""
'''
DEFAULT_TOKENS, SHIPPED_TOKENS = 1024, 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CliOptions:
    """What the command line has beyond the engine's and the sampler's parameters."""

    prompt_text: str | None = option(
        None, "the prompt (default: one that suits the model)", metavar="TEXT"
    )
    prompt_file: str | None = option(
        None, "UTF-8 file with the prompt, - for stdin; wins over --prompt-text", metavar="PATH"
    )
    use_chat_template: bool | None = option(
        None,
        "give the prompt to the model's chat template as one user turn (default: yes; no for a "
        "shipped model, which completes code)",
    )
    use_stream: bool = option(True, "show text while it is generated")
    plain_output: bool = option(False, "no colours and no moving bars")
    chat: bool = option(False, "hold a conversation; Ctrl-C stops an answer, Ctrl-D leaves")
    env: bool = option(False, "print versions, build and devices, for a bug report, and exit")
    memory_plan: bool = option(False, "print where device memory goes, and exit")
    list_registered: bool = option(
        False, "print the registered models, schemes and C++ parts, and exit", flags=("--list",)
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    options, config, params = _configs(parser, parsed)
    debug = bool(os.environ.get("CPMCU_DEBUG"))
    display = Display(plain=options.plain_output, debug=debug)
    try:
        return _run(display, options, config, params)
    except KeyboardInterrupt:
        forget_interrupt()
        display.note("stopped")
        return 0
    except BrokenPipeError:  # the reader of stdout left, which is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        display.error(error)
        return 1


def make_parser() -> FlagParser:
    """The parser of all flags."""
    parser = FlagParser(
        prog="cpmcu", description="Runs a language model on one GPU, or on the CPU."
    )
    add_flags(parser, CliOptions, "what to do")
    add_engine_flags(parser, {"max_num_seqs": 1})
    tokens = f"{DEFAULT_TOKENS}; {SHIPPED_TOKENS} for a shipped model; no limit in --chat"
    add_flags(parser, SamplingParams, "sampling", {"max_tokens": tokens})
    return parser


def _configs(
    parser: FlagParser, parsed: argparse.Namespace
) -> tuple[CliOptions, EngineConfig, SamplingParams]:
    tokens = SHIPPED_TOKENS if _completes_code(parsed.model) else DEFAULT_TOKENS
    if parsed.max_tokens is None and not parsed.chat:
        parsed.max_tokens = tokens
    if parsed.max_num_seqs is None:
        parsed.max_num_seqs = 1
    try:
        options = from_flags(CliOptions, parsed)
        return options, engine_config(parsed), from_flags(SamplingParams, parsed)
    except ValueError as error:
        parser.error(str(error))


def _run(
    display: Display, options: CliOptions, config: EngineConfig, params: SamplingParams
) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed, but the output goes there")
    if options.env:
        from cpmcu.environment import environment

        display.table(("subject", "found"), environment())
        return 0
    if options.list_registered:
        from cpmcu.listing import registered

        display.table(("kind", "name", "file"), registered())
        return 0
    if sys.stdin is None and (options.chat or options.prompt_file == "-"):
        raise OSError("stdin is closed, but the input comes from there")
    prompt = None if options.chat or options.memory_plan else _prompt(options, config)
    from cpmcu.llm import LLM  # the engine: nothing above needs it

    with LLM(progress=display.load_progress(), **dataclasses.asdict(config)) as llm:
        if options.memory_plan:
            _show_plan(display, llm)
        elif prompt is None:
            _chat(display, llm, params)
        else:
            _complete(display, llm, options, params, prompt)
    return 0


def _completes_code(model: str | None) -> bool:
    """Is this one of the models that come with the package?"""
    return model is None or shipped(model) is not None


def _prompt(options: CliOptions, config: EngineConfig) -> str:
    if options.prompt_file is not None:
        piped = options.prompt_file == "-"
        try:
            source = 0 if piped else options.prompt_file
            with open(source, encoding="utf-8", closefd=not piped) as file:
                return file.read().strip()
        except UnicodeDecodeError as error:
            name = "the prompt from stdin" if piped else options.prompt_file
            raise ValueError(f"{name} is not UTF-8 text: {error}") from error
    if options.prompt_text is not None:
        return options.prompt_text
    return SHIPPED_PROMPT if _completes_code(config.model) else DEFAULT_PROMPT


def _complete(
    display: Display, llm: LLM, options: CliOptions, params: SamplingParams, prompt: str
) -> None:
    template = options.use_chat_template
    if template is None and not _completes_code(llm.config.model):
        template = llm.chat_template is not None
        if not template:
            display.note(f"{llm.directory.name} has no chat template: the prompt goes in as it is")
    if template:
        ids = llm.tokenize_chat([{"role": "user", "content": prompt}])
    else:
        ids = llm.tokenize(prompt)
        if options.prompt_file is None and options.prompt_text is None:
            display.note(prompt.rstrip("\n"))
    _answer(display, llm, ids, params, stream=options.use_stream)


def _answer(
    display: Display, llm: LLM, ids: list[int], params: SamplingParams, *, stream: bool
) -> str:
    """Generates and shows one answer and its summary; returns its text. Ctrl-C ends it."""
    progress = display.prefill_progress()
    text = ""
    result = None
    try:
        for chunk in llm.stream(ids, params, on_prefill=progress):
            text += chunk.text
            result = chunk.result
            if stream:
                display.text(chunk.text)
    except KeyboardInterrupt:
        pass
    finally:
        progress.finish()
    display.text(("" if stream else text) + ("" if text.endswith("\n") else "\n"))
    if result is None:
        display.note("stopped")
        return text
    if params.logprobs is not None:
        display.logprobs(result, _logprob_texts(llm, result))
    display.summary(result)
    return text


def _chat(display: Display, llm: LLM, params: SamplingParams) -> None:
    if llm.chat_template is None:
        raise ValueError(f"{llm.directory.name} has no chat template, which --chat needs")
    messages: list[dict[str, Any]] = []
    display.note("Ctrl-C stops an answer, Ctrl-D leaves, /new starts over")
    while True:
        try:
            line = display.ask().strip()
        except (EOFError, KeyboardInterrupt):
            display.note("")
            return
        if line == "/new":
            messages.clear()
        if not line or line == "/new":
            continue
        turn = {"role": "user", "content": line}
        try:
            ids = llm.tokenize_chat([*messages, turn])
        except ValueError as error:  # the template refuses this turn, the conversation goes on
            display.error(error)
            continue
        if len(ids) >= llm.max_length:
            display.error(
                f"the conversation has {len(ids)} tokens, but the model holds {llm.max_length}; "
                "/new starts over"
            )
            continue
        answer = _answer(display, llm, ids, params, stream=True)
        messages += [turn, {"role": "assistant", "content": answer}]


def _show_plan(display: Display, llm: LLM) -> None:
    from cpmcu.ui.tables import mebibytes

    rows = [
        (row["name"], row["group"], mebibytes(row["offset"]), mebibytes(row["bytes"]))
        for row in llm.memory_plan()
    ]
    display.table(("buffer", "group", "offset MiB", "size MiB"), rows)


def _logprob_texts(llm: LLM, result: Any) -> list[tuple[str, str]]:
    def text(token: int) -> str:
        return llm.tokenizer.decode([token], skip_special_tokens=False)

    return [
        (text(entry.token_id), ", ".join(f"{text(i)!r} {p:.4f}" for i, p in entry.top))
        for entry in result.outputs[0].logprobs or []
    ]


if __name__ == "__main__":
    sys.exit(main())
