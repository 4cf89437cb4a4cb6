"""A conversation of a request as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.serving.chat_template import ChatTemplate, ChatTemplateError
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import ApiError
from cpmcu.serving.limits import check_text
from cpmcu.serving.protocol.chat import ChatMessage, Tool

_OWN = {"messages", "tools", "add_generation_prompt"}  # set here, whatever a request gives


def check_messages(messages: Sequence[ChatMessage], config: ServerConfig) -> None:
    """Raises ApiError (400) for too many messages, or too long ones."""
    if len(messages) > config.max_messages:
        raise ApiError(
            400,
            f"There are {len(messages)} messages, but at most {config.max_messages} are allowed.",
            param="messages",
            code="too_many_messages",
        )
    for i, message in enumerate(messages):
        for text in message.texts():
            check_text(text, f"messages[{i}].content", config.max_text_length)


def render(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The prompt's text, special tokens included. Raises ApiError (400) if there can be none."""
    if template is None:
        raise ApiError(
            400,
            "The model has no chat template: use /v1/completions, or start the server with "
            "--chat-template.",
            code="no_chat_template",
        )
    plain = [message.to_template() for message in messages]
    try:
        text = template.render(
            plain,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            **{name: value for name, value in variables.items() if name not in _OWN},
        )
    except ChatTemplateError as error:
        raise ApiError(400, f"{error}.", param="messages", code="chat_template_error") from error
    if not continue_final_message:
        return text
    content = plain[-1]["content"]
    last = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    # Templates may trim a message; what comes after it closes the turn.
    begin = text.rfind(last.strip())
    if begin < 0:
        raise ApiError(
            400,
            "continue_final_message: the chat template changes the last message.",
            param="continue_final_message",
            code="chat_template_error",
        )
    return text[: begin + len(last.strip())]
