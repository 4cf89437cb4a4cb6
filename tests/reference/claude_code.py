"""Requests with the form of Claude Code 2.1's; recorded in November 2026, with other texts.

`scale` multiplies the lengths of texts; 1: the recorded lengths.
"""

from __future__ import annotations

from typing import Any

HEADERS = {
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "User-Agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "x-app": "cli",
}
PATH = "/v1/messages?beta=true"
_NAMES = (
    "Agent Bash CronCreate CronDelete CronList Edit EnterWorktree ExitWorktree NotebookEdit Read "
    "ReportFindings ScheduleWakeup SendMessage Skill TaskCreate TaskGet TaskList TaskOutput "
    "TaskStop TaskUpdate WebFetch WebSearch Workflow Write mcp__files__list_directory"
)
TOOLS = _NAMES.split()
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def words(length: int, scale: float) -> str:
    """A text of about `length * scale` characters."""
    return ("Read before you write. " * length)[: max(8, round(length * scale))]


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def tool(name: str, scale: float) -> dict[str, Any]:
    properties = {
        "path": {"type": "string", "description": words(80, scale)},
        "mode": {"type": "string", "enum": ["fast", "careful"]},
        "edits": {
            "type": "array",
            "items": {"type": "object", "properties": {"old": {"type": "string"}}},
        },
        "force": {"type": "boolean", "default": False},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": ["path"],
        "additionalProperties": False,
    }
    return {"name": name, "description": words(1200, scale), "input_schema": schema}


def first_request(model: str, question: str, *, scale: float = 1.0, number: int = 1) -> dict:
    """The first request of a session. `number` is in the billing header, which changes."""
    reminder = f"<system-reminder>\n{words(280, scale)}\n</system-reminder>"
    header = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cc_entrypoint=sdk-cli;"
    return {
        "model": model,
        "messages": [
            {"role": "user", "content": [text(reminder), text(question, **EPHEMERAL)]},
            {"role": "system", "content": words(6000, scale)},
        ],
        "system": [
            text(header),
            text("You are an agent.", **EPHEMERAL),
            text("\n" + words(5500, scale), **EPHEMERAL),
        ],
        "tools": [tool(name, scale) for name in TOOLS],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def next_request(request: dict, answer: list[dict], results: dict[str, str]) -> dict:
    """The request after an answer, with the results of its calls by id."""
    (first, system) = request["messages"][:2]
    plain = [text(block["text"]) for block in first["content"]]  # the mark moves on
    blocks = [
        {"type": "tool_result", "tool_use_id": call_id, "content": content}
        for call_id, content in results.items()
    ]
    blocks[-1] |= EPHEMERAL
    left = {"role": "system", "content": "<total_tokens>9 tokens left</total_tokens>"}
    added = [{"role": "assistant", "content": answer}, {"role": "user", "content": blocks}, left]
    return {**request, "messages": [{**first, "content": plain}, system, *added]}
