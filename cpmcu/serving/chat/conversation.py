"""Renders a request's conversation to a prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.chat_template import ChatTemplate, ChatTemplateError, joined
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import ApiError
from cpmcu.serving.http.limits import check_text, check_values
from cpmcu.serving.protocol.chat import ChatMessage, ContentPart, Tool

logger = logging.getLogger(__name__)

_BILLING_HEADER = "x-anthropic-billing-header:"
# Variables that the server sets; a request cannot override them.
_OWN = {"messages", "tools", "add_generation_prompt"}


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The client's names of the fields of a conversation, for errors.

    `field`: the field of the messages. `places`: the place of each message; none: messages[i].
    `format_field`: the field that becomes the response_format. `limit_field`: the field of the most
    new tokens; None: that of the ChatRequest.
    """

    field: str = "messages"
    places: Sequence[str] = ()
    format_field: str = "response_format"
    limit_field: str | None = None

    def place(self, index: int, member: str) -> str:
        """The place of a message's member, such as messages[0].content."""
        return self.places[index] if self.places else f"{self.field}[{index}].{member}"


IN_MESSAGES = Origin()


def checked(
    messages: Sequence[ChatMessage], config: ServerConfig, origin: Origin = IN_MESSAGES
) -> list[ChatMessage]:
    """Returns the messages for the template.

    Raises ApiError (400) if there are too many messages or their text is too long.
    """
    if len(messages) > config.max_messages:
        raise ApiError(
            400,
            f"There are {len(messages)} messages, but at most {config.max_messages} are allowed.",
            param=origin.field,
            code="too_many_messages",
        )
    for i, message in enumerate(messages):
        for text in message.texts():
            check_text(text, origin.place(i, "content"), config.max_text_length)
        for call in message.tool_calls or []:
            check_values(call.function.arguments, origin.place(i, "tool_calls"))
    return list(messages) if config.keep_billing_header else without_billing_header(messages)


def without_billing_header(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages without a billing header, which some clients put before the system's text.

    The header is the first line of the first system message, and differs in each request. A text
    part that holds only the header is left out, too.
    """
    found = list(messages)
    at = next((i for i, message in enumerate(found) if message.role == "system"), None)
    if at is None:
        return found
    content = found[at].content
    parts = content if isinstance(content, list) else []
    text = content if isinstance(content, str) else parts[0].text if parts else None
    if text is None or not text.startswith(_BILLING_HEADER):
        return found
    _tell_of_billing_header()
    rest = text.partition("\n")[2]
    left: str | list[ContentPart] = rest
    if parts:
        first = [parts[0].model_copy(update={"text": rest})] if rest else []
        left = [*first, *parts[1:]]
    found[at] = found[at].model_copy(update={"content": left})
    return found


@functools.cache  # once
def _tell_of_billing_header() -> None:
    logger.info(
        "the system line %s is left out: it differs in each request, so that no prompt would be "
        "found in the prefix cache (--keep-billing-header keeps it)",
        _BILLING_HEADER,
    )


def render(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
    origin: Origin = IN_MESSAGES,
) -> str:
    """Returns the prompt's text with special tokens. Raises ApiError (400) if rendering fails."""
    if template is None:
        raise ApiError(
            400,
            "The model has no chat template: use /v1/completions, or start the server with "
            "--chat-template.",
            code="no_chat_template",
        )
    fields: dict[str, Any] = {k: v for k, v in variables.items() if k not in _OWN}
    fields["tools"] = [tool.model_dump(exclude_none=True) for tool in tools] or None

    def rendered(plain: Sequence[dict[str, Any]]) -> str:
        settled = with_known_roles(template, plain)
        if continue_final_message:
            return _continued(template, settled, fields)
        return template.render(settled, add_generation_prompt=add_generation_prompt, **fields)

    plain = [message.to_template() for message in messages]
    try:
        try:
            return rendered(plain)
        except ChatTemplateError:
            if not any(message.tool_calls for message in messages):
                raise
            if _join_thoughts(plain):
                with contextlib.suppress(ChatTemplateError):
                    return rendered(plain)  # gpt-oss: reasoning or text before a call, not both
            as_text = [message.to_template(arguments_as_text=True) for message in messages]
            with contextlib.suppress(ChatTemplateError):
                return rendered(as_text)  # some templates concatenate arguments as text
            if not _wrap_texts(plain):
                raise
            return rendered(plain)
    except ChatTemplateError as error:
        raise ApiError(400, f"{error}.", param=origin.field, code="chat_template_error") from error


def with_known_roles(
    template: ChatTemplate, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with roles that the template knows; the rule of every interface.

    * If the template does not know developers, their messages become system messages.
    * System messages at the beginning are merged into one. If the template leaves system messages
      out, it becomes a user message.
    * Later system messages keep their place if the template allows them there. Otherwise they
      become user messages, and merge with adjacent user messages: strict templates want turns.
    """
    roles = [message["role"] for message in messages]
    if "developer" in roles and not template.knows_role("developer"):
        roles = ["system" if role == "developer" else role for role in roles]
    found = [{**message, "role": role} for message, role in zip(messages, roles, strict=True)]
    count = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    if count > 1:
        found[:count] = [_one(found[:count])]
        count = 1
    if count and not template.knows_role("system"):
        count = 0
    elif template.takes_later_system or all(m["role"] != "system" for m in found[count:]):
        return found
    turns, joins = found[:count], False
    for message in found[count:]:
        converted = message["role"] == "system"
        if converted:
            message["role"] = "user"
        both_users = bool(turns) and turns[-1]["role"] == message["role"] == "user"
        if both_users and (converted or joins):
            turns[-1] = _one([turns[-1], message])
        else:
            turns.append(message)
        joins = converted
    return turns


def _one(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one message that has the texts of all."""
    texts = [joined(message).get("content") or "" for message in messages]
    return {**messages[0], "content": "\n\n".join(filter(None, texts))}


def _join_thoughts(messages: Sequence[dict[str, Any]]) -> bool:
    """Moves text before calls to the end of the reasoning. False: no message has both."""
    both = [m for m in messages if m.get("tool_calls") and m.get("thinking") and m.get("content")]
    for message in both:
        text = joined(message)["content"]
        message["thinking"] = message["reasoning_content"] = f"{message['thinking']}\n\n{text}"
        message["content"] = ""
    return bool(both)


def _wrap_texts(messages: Sequence[dict[str, Any]]) -> bool:
    """Wraps arguments that are a text in an object. Returns False if there are none.

    The arguments of a call that was cut off are not JSON. Templates that list each argument refuse
    a text, so the conversation could not go on.
    """
    functions = [call["function"] for each in messages for call in each.get("tool_calls", [])]
    texts = [function for function in functions if not isinstance(function["arguments"], dict)]
    for function in texts:
        function["arguments"] = {"arguments": function["arguments"]}
    return bool(texts)


def _continued(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], fields: Mapping[str, Any]
) -> str:
    """Returns the prompt up to the end of the last message, without the end of its turn."""
    mark = f"{uuid.uuid4().hex} "  # a template that trims messages removes its space
    message = joined(messages[-1])
    last = message.get("content") or ""
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
