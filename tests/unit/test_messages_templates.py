"""A session of Claude Code in the chat templates of model families."""

from __future__ import annotations

import family_templates
import pytest

from cpmcu.chat_template import ChatTemplate
from cpmcu.serving.chat.conversation import checked, render
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.messages.conversation import to_chat
from cpmcu.serving.protocol.messages import MessagesRequest
from tests.reference import claude_code

FAMILIES = [
    "QWEN3",
    "QWEN35",
    "MINICPM4",
    "MINICPM5",
    "LLAMA31",
    "MISTRAL_LIST",
    "MISTRAL_NAMED",
]


def prompt(family: str, body: dict, *, open_turn: bool) -> str:
    chat, origin = to_chat(MessagesRequest.model_validate(body))
    return render(
        ChatTemplate(getattr(family_templates, family), {"bos_token": "<s>", "eos_token": "</s>"}),
        checked(chat.messages, ServerConfig(), origin),
        tools=chat.tools_wanted,
        variables=chat.chat_template_kwargs,
        add_generation_prompt=open_turn,
        continue_final_message=False,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_begins_with_the_prompt_of_the_one_before(family):
    """If so, the prefix cache has all of a prompt but its newest messages."""
    body = claude_code.first_request("m", "Read a.txt, please.")
    use = {"type": "tool_use", "id": "abcdefghi", "name": "Read", "input": {"path": "a.txt"}}
    answer = [{"type": "text", "text": ""}, use]
    more = claude_code.next_request(body, answer, {"abcdefghi": "The result."})
    more["system"] = claude_code.first_request("m", "", number=2)["system"]
    first, second = prompt(family, body, open_turn=False), prompt(family, more, open_turn=True)
    assert second.startswith(first)
    rest = second[len(first) :]
    for text in ("Read", "a.txt", "The result.", "9 tokens left"):
        assert text in rest
    assert "Read a.txt, please." in first and "x-anthropic-billing-header" not in first
    assert "cache_control" not in second
