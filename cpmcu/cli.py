"""python -m cpmcu.cli: completes a prompt, or holds a conversation, in the terminal.

`cpmcu run`, `chat`, `plan`, `env` and `list` are the same program. Generated text and tables go to
stdout, all other output to stderr. Ctrl-C during an answer of a chat stops only the answer.

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
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmcu.config import EngineConfig
from cpmcu.errors import INTERRUPTED, check_stdout, forget_interrupt, reader_left, sentence
from cpmcu.flags import FOOTER, FlagParser, add_flags, from_flags
from cpmcu.flags.engine import MODEL_WORD, add_engine_flags, engine_config, named_model
from cpmcu.flags.startup import add_startup_flags, prepare
from cpmcu.sampling import SamplingParams
from cpmcu.shipped import chat_model, shipped, shipped_model
from cpmcu.terminal.options import CliOptions
from cpmcu.terminal.prompt import DEFAULT_PROMPT, SHIPPED_PROMPT, model_and_prompt, read_prompts
from cpmcu.ui.display import Display

if TYPE_CHECKING:
    from cpmcu.llm import LLM

DEFAULT_TOKENS, SHIPPED_TOKENS = 1024, 200


@dataclasses.dataclass(frozen=True, slots=True)
class Verb:
    """A verb of `cpmcu` that this program implements."""

    does: str
    words: dict[str, str]
    # The boolean field of CliOptions that the verb sets; None: it sets none.
    sets: str | None = None


_PROMPT = {"PROMPT": "same as --prompt-text"}
VERBS = {
    "run": Verb("Completes or answers a prompt.", {**MODEL_WORD, **_PROMPT}),
    "chat": Verb("Holds a conversation, which PROMPT begins.", {**MODEL_WORD, **_PROMPT}, "chat"),
    "plan": Verb("Prints the use of device memory, or launches.", MODEL_WORD, "memory_plan"),
    "env": Verb("Prints versions, build and devices, for a bug report.", {}, "env"),
    "list": Verb("Prints registered models, schemes and C++ parts.", {}, "list_registered"),
}


def main(arguments: list[str] | None = None, verb: str | None = None) -> int:
    """Runs the command line; returns the exit status. `verb`: set by `cpmcu VERB`."""
    file = prepare(arguments, f"cpmcu {verb}" if verb else "cpmcu")
    parser = make_parser(verb)
    parsed = parser.parse_args(arguments, file=file)
    options, config, params = _configs(parser, parsed, verb)
    debug = bool(os.environ.get("CPMCU_DEBUG"))
    display = Display(plain=options.plain_output, debug=debug)
    try:
        status = _run(display, options, config, params)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        forget_interrupt()
        display.note("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        reader_left()
        return 0
    except Exception as error:
        if debug:
            raise
        display.error(parser.named(sentence(error)))
        return 1


def make_parser(verb: str | None = None) -> FlagParser:
    """The parser of all flags. The verbs `env` and `list` have no flags."""
    if verb is None:
        parser = FlagParser(
            prog="cpmcu",
            usage="python -m cpmcu.cli [flags]",
            description="Runs a language model on one GPU, or on the CPU.",
            epilog=FOOTER,
        )
    else:
        found = VERBS[verb]
        parser = FlagParser(
            prog=f"cpmcu {verb}",
            words=found.words,
            description=found.does,
            epilog=FOOTER if found.words else "",
        )
        if not found.words:
            return parser
    add_flags(parser, CliOptions, "what to do")
    add_engine_flags(parser, {"max_num_seqs": 1})
    add_startup_flags(parser, "what to do")
    tokens = f"{DEFAULT_TOKENS}; {SHIPPED_TOKENS} for a shipped model; no limit in a chat"
    add_flags(parser, SamplingParams, "sampling", {"max_tokens": tokens})
    parser.hide("prefix_cache", "prefix_cache_dir", "prefix_cache_decoded")
    parser.hide("prefix_cache_host_gb", "prefix_cache_disk_gb")
    if verb is not None:
        parser.hide(*(each.sets for each in VERBS.values() if each.sets))
        if verb != "run":
            parser.hide("json", "batch", "output", "n")
    if verb == "chat":
        parser.briefs["prompt_text"] = "the first message"
        parser.briefs["prompt_file"] = "UTF-8 file with the first message"
    if verb == "plan":
        parser.briefs["full"] = "show every buffer, not only large buffers"
        parser.briefs["launches"] = "show the launches of a pass, not memory"
        parser.briefs["architecture"] = "plan for sm_80, sm_90 and so on, which need not be here"
        parser.hide("prompt_text", "prompt_file", "system_prompt", "use_chat_template")
        parser.hide("use_stream", "stats")
        parser.hide(*(field.name for field in dataclasses.fields(SamplingParams)))
    elif verb is not None:
        parser.hide("full", "launches", "architecture")
    return parser


def _configs(
    parser: FlagParser, parsed: argparse.Namespace, verb: str | None = None
) -> tuple[CliOptions, EngineConfig, SamplingParams]:
    switch = VERBS[verb].sets if verb is not None else None
    if switch is not None:
        setattr(parsed, switch, True)
    if verb is not None and not VERBS[verb].words:
        return from_flags(CliOptions, parsed), EngineConfig(), SamplingParams()
    try:
        if verb == "plan" or (parsed.batch is not None and len(parsed.plain_words) < 2):
            parsed.model = named_model(parsed)
        else:
            _take_words(parsed)
            if parsed.model is None and parsed.chat:
                parsed.model = chat_model()
        if parsed.max_tokens is None and not parsed.chat:
            code = _completes_code(parsed.model)
            parsed.max_tokens = SHIPPED_TOKENS if code else DEFAULT_TOKENS
        options, params = from_flags(CliOptions, parsed), from_flags(SamplingParams, parsed)
        if params.max_tokens == 0:
            raise ValueError("max_tokens is 0, but must be at least 1")
        if params.n > 1 and not options.json and options.batch is None:
            raise ValueError(f"n is {params.n} without --json: several outputs need it")
        if parsed.max_num_seqs is None and options.batch is None and not options.json:
            parsed.max_num_seqs = 1
        config = engine_config(parsed)
        _template(options, config)  # raises if the flags contradict each other
        return options, config, params
    except ValueError as error:
        parser.error(parser.named(str(error)))


def _take_words(parsed: argparse.Namespace) -> None:
    """Sets model and prompt from `[MODEL] [PROMPT]`, which override a file of flags."""
    typed: dict[str, Any] = {
        name: None if name in parsed.from_file else getattr(parsed, name)
        for name in ("model", "prompt_text", "prompt_file")
    }
    texts = typed["prompt_text"] or []
    model, prompt = model_and_prompt(
        parsed.plain_words, typed["model"], texts[0] if texts else None, typed["prompt_file"]
    )
    if model is not None:
        parsed.model = model
    if prompt is not None and not texts:
        parsed.prompt_text = [prompt]
    if prompt is not None and typed["prompt_file"] is None:
        parsed.prompt_file = None


def _run(
    display: Display, options: CliOptions, config: EngineConfig, params: SamplingParams
) -> int:
    check_stdout()
    if options.env:
        from cpmcu.terminal.environment import environment

        display.table(("subject", "found"), environment())
        return 0
    if options.list_registered:
        from cpmcu.terminal.listing import registered

        display.table(("kind", "name", "file"), registered())
        return 0
    if options.memory_plan:
        _show_plan(display, config, options)
        return 0
    if sys.stdin is None and (options.chat or options.prompt_file == "-"):
        raise OSError("stdin is closed, but the input comes from there")
    template = _template(options, config)
    if options.batch is not None:
        return _answer_file(display, options, config, params, template)
    prompts = _prompts(display, options)
    with _load(display, config, needs_template=bool(template)) as llm:
        if options.chat:
            _chat(display, llm, options, params, prompts[0] if prompts else None)
            return 0
        return _complete(display, llm, options, params, prompts, template)


def _load(display: Display, config: EngineConfig, *, needs_template: bool = False) -> LLM:
    """Loads the model.

    If a chat template is needed and missing, raises ValueError before weights are read.
    """
    from cpmcu.llm import LLM  # loads the engine's library

    def check(llm: LLM) -> None:
        if needs_template and llm.chat_template is None:
            raise ValueError(
                f"{llm.directory.name} has no chat template, which a conversation needs"
            )

    progress = display.load_progress()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return LLM(progress=progress, before_weights=check, **fields)


def _completes_code(model: str | None) -> bool:
    """Is the model a shipped one, which completes code?"""
    return model is None or shipped(model) is not None


def _prompts(display: Display, options: CliOptions) -> list[str]:
    """The given prompts; [] if there are none. In a chat, stdin holds the messages."""
    if options.chat and options.prompt_file is None:
        return list(options.prompt_text)
    return read_prompts(
        options.prompt_file, options.prompt_text, display.note, append_piped=not options.chat
    )


def _template(options: CliOptions, config: EngineConfig) -> bool | None:
    """Is the prompt rendered with the chat template? None: yes, if the model has a template."""
    template = options.use_chat_template
    for flag, needs in (("--chat", options.chat), ("--system-prompt", options.system_prompt)):
        if needs and template is False:
            raise ValueError(f"{flag} needs a chat template, but --use-chat-template is no")
        if needs:
            template = True
    if template is None and _completes_code(config.model):
        return False
    return template


def _complete(
    display: Display,
    llm: LLM,
    options: CliOptions,
    params: SamplingParams,
    given: list[str],
    template: bool | None,
) -> int:
    from cpmcu.terminal.answering import show_answer

    default = SHIPPED_PROMPT if _completes_code(llm.config.model) else DEFAULT_PROMPT
    renders = _renders(display, llm, template)
    prompts = [_ids_of(llm, options, prompt, renders) for prompt in given or [default]]
    if options.json:
        display.text(json.dumps(_results(display, llm, params, prompts), ensure_ascii=False) + "\n")
        return 0
    if not given and not renders:
        display.note(default.rstrip("\n"))
    answer = show_answer(
        display,
        llm,
        prompts[0],
        params,
        stream=options.use_stream,
        full_statistics=options.stats,
    )
    return INTERRUPTED if answer.result is None else 0


def _renders(display: Display, llm: LLM, template: bool | None) -> bool:
    """Is a prompt rendered with the chat template? Tells the user if the model has none.

    `template`: the result of `_template`.
    """
    if template is None and llm.chat_template is None:
        display.note(f"{llm.directory.name} has no chat template: the prompt is used unchanged")
    return llm.chat_template is not None if template is None else template


def _ids_of(llm: LLM, options: CliOptions, prompt: str, renders: bool) -> list[int]:
    if not renders:
        return llm.tokenize(prompt, llm.max_length)
    turns = [*_system_turn(options), {"role": "user", "content": prompt}]
    return llm.tokenize_chat(turns, llm.max_length)


def _results(
    display: Display, llm: LLM, params: SamplingParams, prompts: list[list[int]]
) -> dict[str, Any]:
    """The object that --json prints."""
    from cpmcu.terminal.answering import wait_for_pass
    from cpmcu.terminal.result_json import result_object

    try:
        results = [result_object(result) for result in llm.generate(prompts, params)]
    except KeyboardInterrupt:
        wait_for_pass(display, llm)
        raise
    return results[0] if len(results) == 1 else {"results": results}


def _answer_file(
    display: Display,
    options: CliOptions,
    config: EngineConfig,
    params: SamplingParams,
    template: bool | None,
) -> int:
    from cpmcu.batch.lines import answered, request_lines
    from cpmcu.batch.run import BatchRun

    assert options.batch is not None
    source = Path("/dev/stdin" if options.batch == "-" else options.batch)
    output = Path(options.output) if options.output else None
    # Both files are read before the model is loaded, which takes long.
    lines = request_lines(source)
    if output is not None and output.is_file() and output.samefile(source):
        raise ValueError(f"--output is {output}, the file of --batch, expected another file")
    skipped = set() if output is None else answered(output)
    with _load(display, config, needs_template=bool(template)) as llm:
        renders = _renders(display, llm, template)

        def ids_of(prompt: str) -> list[int]:
            return _ids_of(llm, options, prompt, renders)

        batch = BatchRun(display, llm, params, ids_of, skipped)
        return 0 if batch.run(lines, output) else 1


def _chat(
    display: Display, llm: LLM, options: CliOptions, params: SamplingParams, first: str | None
) -> None:
    from cpmcu.terminal.chat import Chat

    chat = Chat(
        display,
        llm,
        params,
        opening=_system_turn(options),
        stream=options.use_stream,
        full_statistics=options.stats,
    )
    chat.run(first)


def _system_turn(options: CliOptions) -> list[dict[str, str]]:
    if options.system_prompt is None:
        return []
    return [{"role": "system", "content": options.system_prompt}]


def _show_plan(display: Display, config: EngineConfig, options: CliOptions) -> None:
    from cpmcu import C  # loads the engine's library
    from cpmcu.loading.loader import load_model
    from cpmcu.ui import launches, plan

    model = str(shipped_model()) if config.model is None else config.model
    name = options.architecture
    capability = None if name is None else launches.capability_of(name)
    plans_for = None if options.launches else capability
    if plans_for is not None and config.memory_limit <= 1:
        raise ValueError(
            f"memory_limit is {config.memory_limit} with --architecture, expected GB above 1: the "
            "memory of a device that need not be here"
        )
    engine = load_model(model, config=config, reads_weights=False, plans_for=plans_for).engine
    if options.launches:
        passes = {
            "decode": engine.launches(capability=capability),
            "prefill": engine.launches(prefill=True, capability=capability),
        }
        display.table(launches.COLUMNS, launches.launch_rows(passes))
        return
    for rank in range(engine.num_ranks):
        if engine.num_ranks > 1:
            display.note(f"GPU {rank} of {engine.num_ranks}")
        rows = plan.plan_rows(engine.memory_plan(rank), full=options.full)
        display.table(plan.COLUMNS, rows)
    tokens = engine.num_pages * C.PAGE_SIZE
    length = min(engine.max_model_len, tokens)
    display.note(f"a sequence can have {length} tokens, prompt and output together")
    many = engine.max_num_seqs > 1
    display.note(
        f"{engine.max_num_seqs} {'sequences run' if many else 'sequence runs'} at a time; the KV "
        f"cache and the prefix cache share room for {tokens} tokens; a prefill pass has up to "
        f"{engine.chunk_length}"
    )


if __name__ == "__main__":
    sys.exit(main())
