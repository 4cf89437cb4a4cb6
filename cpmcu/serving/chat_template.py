"""Conversations to prompts, by the Jinja template that comes with a checkpoint.

Templates run sandboxed, with the helpers which the ecosystem's templates rely on. A template that
fails raises ChatTemplateError: a conversation never silently becomes some other prompt.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cpmcu.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A chat template is missing, malformed, or refuses a conversation."""


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError if `source` is not a template.

    Its text stays in the attribute `source`, that for conversations with tools in `tool_source`.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else None
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is malformed in line {error.lineno}: {error.message}"
            ) from error

    @classmethod
    def from_directory(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint directory, or None if it has none.

        `chat_template.jinja` wins over tokenizer_config.json, as elsewhere; of several named ones
        it is "default", and "tool_use" when tools are given.
        """
        path = Path(directory) / "chat_template.jinja"
        found: Any = tokenizer.config.get("chat_template")
        if path.is_file():
            found = path.read_text(encoding="utf-8")
        if not found:
            return None
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            default = named.get("default", next(iter(named.values())))
            return cls(default, tokenizer.special_tokens, named.get("tool_use"))
        return cls(found, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. `variables` go to the template as they are.

        Templates always know `documents`, which is None unless given.
        Tokenise it without adding special tokens: the template writes those the model wants.
        Raises ChatTemplateError if the template refuses or a message is malformed.
        """
        template = self._tool_template if tools and self._tool_template else self._template
        plain = [joined(message) for message in messages]
        try:
            own = {
                "messages": plain,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
            return template.render({"documents": None, **self._special_tokens, **variables, **own})
        except Exception as error:  # templates can raise anything Python can
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ChatTemplateError(
                f"the chat template failed for this conversation: {kind}{error}"
            ) from error


def joined(message: Message) -> dict[str, Any]:
    """A message whose content is a string: the texts of a list of parts are joined by newlines.

    Keys whose value is None are left out, which templates would write as "None". Raises
    ChatTemplateError for what is no message, and for parts that are not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"a message must be a mapping with a role, found {message!r}")
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content")
    if not isinstance(content, list):
        return found
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"content parts must be of type text, found {kind!r}")
        texts.append(part["text"])
    return {**found, "content": "\n".join(texts)}


class _Generation(Extension):
    """Tolerates {% generation %}, which marks the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
