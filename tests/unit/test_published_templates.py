"""Chat templates as published with models: the prompts are those of transformers.

The templates are data beside the repository; without them the tests are skipped. Three rules differ
from transformers. A developer becomes the system if the template has no developer. Several system
messages at the beginning become one. An empty list of calls counts as no list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.chat_template import ChatTemplate
from cpmcu.serving.chat.conversation import render
from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.chat import ChatMessage, Tool

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
# Templates named __json_schema need tools in every conversation.
NAMES = sorted(p.stem for p in FOLDER.glob("*.jinja") if "__json_schema" not in p.stem)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<p>"}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": PARAMETERS},
}
ASKED: dict[str, Any] = {"role": "user", "content": "Hi"}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "Yo"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "2"}


def call(content: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"x": 1}'}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [ASKED, ANSWERED, ASKED],
    "system": [{"role": "system", "content": "be-kind"}, ASKED],
    "tools": [ASKED],
    "call": [ASKED, call(""), RESULT],
    "null": [ASKED, call(None), RESULT],
    "parts": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("A", "B")]}],
    "thinking": [ASKED, {**ANSWERED, "reasoning_content": "T"}, ASKED],
}
TOOLS = ("tools", "call", "null")
# transformers writes these for values that a template does not expect. No prompt has them here.
PYTHON_TEXT = ("None", "{'type'", "{'x'")


def of_transformers(source: str, name: str, *, as_text: bool) -> str | None:
    """The prompt with the arguments as an object or as text; None: the template refuses it."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = []
    for message in CONVERSATIONS[name]:
        calls = [
            {**each, "function": {"name": "f", "arguments": '{"x": 1}' if as_text else {"x": 1}}}
            for each in message.get("tool_calls", [])
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    try:
        prompts, _ = utils.render_jinja_template(
            [messages],
            tools=[TOOL] if name in TOOLS else None,
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
        )
    except Exception:
        return None
    return str(prompts[0])


@pytest.mark.skipif(not NAMES, reason="no published templates beside the repository")
@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text("utf-8")
    template = ChatTemplate(source, SPECIAL)
    for conversation, messages in CONVERSATIONS.items():
        expected = of_transformers(source, conversation, as_text=False)
        if expected is None:
            expected = of_transformers(source, conversation, as_text=True)
        try:
            found = render(
                template,
                [ChatMessage.model_validate(message) for message in messages],
                tools=[Tool.model_validate(TOOL)] if conversation in TOOLS else [],
                variables={},
                add_generation_prompt=True,
                continue_final_message=False,
            )
        except ApiError as error:
            assert expected is None, (conversation, str(error))
            continue
        if found == expected:
            continue
        wanted = {"parts": ("A", "B"), "system": ("be-kind",)}
        texts = () if "guard" in name else wanted.get(conversation, ())  # a guard judges turns
        assert (
            expected is None
            or any(text in expected for text in PYTHON_TEXT)
            or not all(text in expected for text in texts)  # transformers loses them
        ), conversation
        assert not any(text in found for text in PYTHON_TEXT), conversation
        assert all(text in found for text in texts), conversation


@pytest.mark.skipif(not NAMES, reason="no published templates beside the repository")
@pytest.mark.parametrize("name", [name for name in NAMES if "guard" not in name])
def test_instructions_reach_the_prompt_or_are_refused(name: str) -> None:
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text("utf-8"), SPECIAL)
    first = {"role": "developer", "content": "be-brief"}
    later = {"role": "system", "content": "be-kind"}
    for messages in ([first, ASKED], [first, later, ASKED], [ASKED, ANSWERED, later, ASKED]):
        try:
            found = render(
                template,
                [ChatMessage.model_validate(message) for message in messages],
                tools=[],
                variables={},
                add_generation_prompt=True,
                continue_final_message=False,
            )
        except ApiError as error:
            assert "chat template failed" in str(error)
            continue
        for message in messages:
            assert message["content"] in found
