"""Renders a request's conversation to a prompt."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.chat_template import ChatTemplate, ChatTemplateError, joined
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import ApiError
from cpmcu.serving.limits import check_text, check_values
from cpmcu.serving.protocol.chat import ChatMessage, Tool

_OWN = {"messages", "tools", "add_generation_prompt"}  # set here; a request cannot override them


def check_messages(messages: Sequence[ChatMessage], config: ServerConfig) -> None:
    """Raises ApiError (400) if there are too many messages or their text is too long."""
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
        for call in message.tool_calls or []:
            check_values(call.function.arguments, f"messages[{i}].tool_calls")


def render(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """Returns the prompt's text with special tokens. Raises ApiError (400) if rendering fails."""
    if template is None:
        raise ApiError(
            400,
            "The model has no chat template: use /v1/completions, or start the server with "
            "--chat-template.",
            code="no_chat_template",
        )
    plain = [message.to_template() for message in messages]
    fields: dict[str, Any] = {k: v for k, v in variables.items() if k not in _OWN}
    fields["tools"] = [tool.model_dump(exclude_none=True) for tool in tools] or None
    try:
        if continue_final_message:
            return _continued(template, plain, fields)
        return template.render(plain, add_generation_prompt=add_generation_prompt, **fields)
    except ChatTemplateError as error:
        raise ApiError(400, f"{error}.", param="messages", code="chat_template_error") from error


def _continued(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], fields: Mapping[str, Any]
) -> str:
    """Returns the prompt up to the end of the last message, without the end of its turn."""
    mark = f"{uuid.uuid4().hex} "  # its space is missing if the template trims messages
    message = joined(messages[-1])
    last = message["content"]
    marked = [*messages[:-1], {**message, "content": last + mark}]
    text = template.render(marked, add_generation_prompt=False, **fields)
    begun, found, closing = text.rpartition(mark.rstrip())
    if not found:
        raise ApiError(
            400,
            "continue_final_message: the chat template leaves the last message out.",
            param="continue_final_message",
            code="chat_template_error",
        )
    if closing.startswith(" "):
        return begun
    return begun[: len(begun) - (len(last.lstrip()) - len(last.strip()))]
