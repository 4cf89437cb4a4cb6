"""Flags of `cpmcu run`, `chat` and `plan` besides those of the engine and of sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cpmcu.config import option
from cpmcu.ui.launches import capability_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CliOptions:
    """Flags of the command line besides those of the engine and of sampling."""

    prompt_text: Sequence[str] = option(
        (),
        "the prompt, or the first message of a chat (default: a prompt that suits the model); "
        "repeatable with --json",
        flags=("--prompt-text", "--prompt", "-p"),
        metavar="TEXT",
        brief="the prompt; piped input is appended to it",
    )
    prompt_file: str | None = option(
        None,
        "UTF-8 file with the prompt, - for stdin; overrides --prompt-text",
        metavar="PATH",
        brief="UTF-8 file with the prompt, - for stdin",
    )
    system_prompt: str | None = option(
        None,
        "system message before the conversation; needs a chat template",
        brief="system message before the conversation",
    )
    use_chat_template: bool | None = option(
        None,
        "render the prompt with the model's chat template, as one user turn (default: yes; no for "
        "a shipped model, which completes code)",
        brief="no: use the prompt unchanged",
    )
    use_stream: bool = option(True, "show text while it is generated")
    chat: bool = option(
        False,
        "hold a conversation; Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands",
        brief="hold a conversation",
    )
    stats: bool = option(
        False,
        "show all times, speeds and acceptance, instead of one line",
        brief="show all times and acceptance",
    )
    json: bool = option(
        False,
        "print one JSON object on stdout instead of text: text, token_ids, finish_reason, usage, "
        "timings; several prompts give its member results",
        brief="print the answer, usage and times as JSON",
    )
    batch: str | None = option(
        None,
        "JSON Lines file of requests, each with an id, a prompt or messages, and sampling fields; "
        "OpenAI's batch files as well; - is stdin",
        metavar="FILE.jsonl",
        brief="answer the requests of a JSON Lines file",
    )
    output: str | None = option(
        None,
        "file for the results of --batch (default: stdout); ids that it has are skipped",
        metavar="FILE.jsonl",
    )
    plain_output: bool = option(False, "no colours and no progress bars")
    env: bool = option(
        False,
        "print versions, build and devices, for a bug report, and exit",
        brief="print versions, build and devices, and exit",
    )
    memory_plan: bool = option(
        False,
        "print the use of device memory by group, and exit",
        brief="print the use of device memory, and exit",
    )
    full: bool = option(False, "with --memory-plan: every buffer")
    launches: bool = option(
        False,
        "with --memory-plan: instead of memory, print the launches of a pass, what is fused in "
        "each, and the weights that it reads for one token; layers with the same launches are "
        "shown once",
        brief="",
    )
    architecture: str | None = option(
        None,
        "with --memory-plan: plan for cpu, sm_80, sm_90 and so on (default: the device's), in the "
        "GB of --memory-limit; needs no such device",
        metavar="ARCH",
        brief="",
    )
    list_registered: bool = option(
        False,
        "print the registered models, schemes and C++ parts, and exit",
        flags=("--list",),
        brief="print registered models and parts, and exit",
    )

    def __post_init__(self) -> None:
        several = len(self.prompt_text) > 1
        if several and not self.json:
            raise ValueError(
                f"prompt_text is given {len(self.prompt_text)} times without --json: several "
                "prompts need it"
            )
        if self.output is not None and self.batch is None:
            raise ValueError("--output is given without --batch, expected both")
        if self.full and not self.memory_plan:
            raise ValueError("--full is given without --memory-plan, expected both")
        if self.launches and not self.memory_plan:
            raise ValueError("--launches is given without --memory-plan, expected both")
        if self.architecture is not None:
            if not self.memory_plan:
                raise ValueError("--architecture is given without --memory-plan, expected both")
            capability_of(self.architecture)  # raises
        for flag, given in (("--json", self.json), ("--batch", self.batch is not None)):
            if given and self.chat:
                raise ValueError(f"{flag} is given with --chat, expected one of them")
        if self.batch is not None and self.json:
            raise ValueError("--json is given with --batch, whose results are JSON: leave it out")
        if self.batch is not None and (self.prompt_text or self.prompt_file is not None):
            raise ValueError("a prompt is given with --batch, whose file has the prompts")
