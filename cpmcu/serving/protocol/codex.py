"""The entries of `models` in /v1/models, from which Codex learns the context length.

Codex rejects the list if a member is missing. It takes its system message from the entry, too.
"""

from __future__ import annotations

from typing import Any

from cpmcu.serving.protocol.base import ApiModel

_INSTRUCTIONS = """\
You are a coding agent. You work in a terminal, in the user's repository, with the tools you are \
given.

- Read before you write: look at the files that matter, and at AGENTS.md if there is one.
- Make the smallest change that does what the user asked. Keep the style of the code around it.
- Use the tools to run commands and tests. Do not guess what a file or a command prints.
- If a command fails, read its message and correct the cause. Do not repeat it unchanged.
- Never delete or overwrite work that the user did not ask you to change.
- Go on until the task is done. Then say in a few sentences what you changed and how you checked it.
"""


class CodexModel(ApiModel):
    """A served model as Codex lists it."""

    slug: str
    display_name: str
    description: str = "Served by cpmcu"
    context_window: int
    max_context_window: int
    base_instructions: str = _INSTRUCTIONS
    supported_reasoning_levels: list[Any] = []
    default_reasoning_level: str | None = None
    supports_reasoning_summaries: bool = False
    shell_type: str = "shell_command"
    apply_patch_tool_type: str | None = None
    experimental_supported_tools: list[str] = []
    supports_parallel_tool_calls: bool = True
    input_modalities: list[str] = ["text"]
    support_verbosity: bool = False
    default_verbosity: str | None = None
    truncation_policy: dict[str, Any] = {"mode": "bytes", "limit": 10_000}
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    upgrade: None = None


def codex_model(name: str, max_length: int, priority: int) -> CodexModel:
    """Returns the entry of a model's name."""
    return CodexModel(
        slug=name,
        display_name=name,
        context_window=max_length,
        max_context_window=max_length,
        priority=priority,
    )
