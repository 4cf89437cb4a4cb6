"""The first line of a system message that some clients change in every request."""

from __future__ import annotations

import pytest

from cpmcu.serving.chat.conversation import checked
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.protocol.chat import ChatMessage

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=12;"
USER = {"role": "user", "content": HEADER}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def contents(*messages: dict[str, object], keep: bool = False) -> list[object]:
    read = [ChatMessage.model_validate(message) for message in messages]
    config = ServerConfig(keep_billing_header=keep)
    return [message.model_dump(exclude_none=True)["content"] for message in checked(read, config)]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("Be brief.", "Be brief."),
        (f"{HEADER}\nBe brief.\nNow.", "Be brief.\nNow."),
        (HEADER, ""),
        (f"Be brief.\n{HEADER}", f"Be brief.\n{HEADER}"),
        (HEADER.title(), HEADER.title()),
        ([part(HEADER), part("Be brief.")], [part("Be brief.")]),
        ([part(f"{HEADER}\nYou"), part(HEADER)], [part("You"), part(HEADER)]),
        ([part("You"), part(HEADER)], [part("You"), part(HEADER)]),
        ([], []),
    ],
)
def test_only_that_line_is_left_out(content, left):
    system = {"role": "system", "content": content}
    assert contents(system, USER) == [left, HEADER]
    assert contents(USER, system, {**system}) == [HEADER, left, content]
    assert contents(system, USER, keep=True) == [content, HEADER]


def test_a_conversation_without_a_system_message():
    assert contents(USER) == [HEADER]
