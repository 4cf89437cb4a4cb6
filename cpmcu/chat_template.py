"""Renders conversations to prompts with a checkpoint's Jinja chat template.

Templates run in a sandbox with limits (cpmcu/text/template_sandbox.py). They get the functions
that transformers provides. A failing template raises ChatTemplateError; there is no fallback
prompt.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from cpmcu.checks import one_line, shown
from cpmcu.errors import one_sentence
from cpmcu.text.template_sandbox import Sandbox, limited
from cpmcu.tokenizer import Tokenizer

Message = Mapping[str, Any]

_FOLDER = "additional_chat_templates"
_ASKED = {"role": "user", "content": "a"}
_ANSWERED = {"role": "assistant", "content": "b"}


class ChatTemplateError(ValueError):
    """A chat template is missing, malformed, or refuses a conversation."""


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError if `source` is not a template.

    `source` is the template's text; `tool_source` is used for conversations with tools.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        # Messages of `_probe` -> the prompt that the template makes.
        self._probes: dict[str, str] = {}
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else None
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is malformed in line {error.lineno}: "
                f"{one_line(error.message or '')}"
            ) from error
        except Exception as error:  # for example, a template that is nested too deeply
            raise ChatTemplateError(
                f"the chat template cannot be compiled: {type(error).__name__}: {one_line(error)}"
            ) from error

    @classmethod
    @one_sentence()
    def from_directory(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint directory, or None if it has none.

        The files `chat_template.jinja` and `additional_chat_templates/NAME.jinja` override
        tokenizer_config.json. Of several named templates, "default" is used, and "tool_use" if
        tools are given. Raises ChatTemplateError if a template cannot be read or compiled, or if
        tokenizer_config.json holds another type.
        """
        named = _in_files(Path(directory))
        if "default" not in named:
            named = {**_in_config(tokenizer.config.get("chat_template")), **named}
        default = named.get("default", next(iter(named.values()), None))
        if not default:
            return None
        try:
            return cls(default, tokenizer.special_tokens, named.get("tool_use"))
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{directory}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. `variables` are passed to the template.

        `documents` is defined in every template and None unless given. Tokenise the prompt without
        adding special tokens: the template writes them. Raises ChatTemplateError if the template
        refuses the conversation or a message is malformed.
        """
        given = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tool_template if tools and self._tool_template else self._template
        plain = [self._plain(message) for message in messages]
        filled = [_filled(message) for message in plain]
        if filled == plain:
            return _rendered(template, plain, given)
        # Some templates test for null, so it is passed on, as in transformers. Others fail or write
        # "None".
        try:
            text = _rendered(template, plain, given)
        except ChatTemplateError:
            return _rendered(template, filled, given)
        if "None" in text:
            safe = _rendered(template, filled, given)
            return text if text.count("None") <= safe.count("None") else safe
        return text

    def _plain(self, message: Message) -> dict[str, Any]:
        """The message for the template. Parts become text unless the template takes parts."""
        found = joined(message)
        parts = message.get("content")
        if isinstance(parts, list) and self.takes_parts(found["role"]):
            return {**found, "content": [dict(part) for part in parts]}
        return found

    def takes_parts(self, role: str) -> bool:
        """Does the template take a list of parts as the content of a message with this role?"""
        texts = ("cpmcu-part-1", "cpmcu-part-2")
        parts = [{"type": "text", "text": text} for text in texts]
        text = self._probe({"role": role, "content": parts})
        return all(text.count(part) == 1 for part in texts) and "text'" not in text

    def knows_role(self, role: str) -> bool:
        """Does the template write the content of messages with this role?"""
        return "cpmcu-mark" in self._probe({"role": role, "content": "cpmcu-mark"})

    @functools.cached_property
    def takes_later_system(self) -> bool:
        """Does the template take a system message after the conversation has begun?"""
        later = {"role": "system", "content": "cpmcu-mark"}
        return "cpmcu-mark" in self._probe(_ASKED, _ANSWERED, later, _ASKED)

    def _probe(self, *messages: dict[str, Any]) -> str:
        """The prompt of a conversation; "" if the template refuses it. Adds a missing question."""
        key = json.dumps(messages)
        if key not in self._probes:
            first, rest = messages[0], list(messages[1:])
            if first["role"] in ("system", "developer") and not rest:
                rest = [_ASKED]
            before = [_ASKED] if first["role"] == "assistant" else []
            given: dict[str, Any] = {"documents": None, **self._special_tokens, "tools": None}
            given["add_generation_prompt"] = False
            try:
                self._probes[key] = _rendered(self._template, [*before, first, *rest], given)
            except ChatTemplateError:
                self._probes[key] = ""
        return self._probes[key]


def _rendered(template: Template, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
    """Raises ChatTemplateError if the template fails."""
    given = {**given, "messages": messages}
    try:
        with limited(given):
            return template.render(given)
    except Exception as error:  # a template can raise any exception
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ChatTemplateError(
            f"the chat template failed for this conversation: {kind}{one_line(error)}"
        ) from error


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message.get("content", "") is None else message


def joined(message: Message) -> dict[str, Any]:
    """The message with string content: the texts of a list of parts, without a separator.

    Keys with value None are dropped, because templates would print "None". Only the content of an
    assistant's message may stay None. Raises ChatTemplateError if `message` is not a message or a
    part is not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"a message must be a mapping with a role, found {shown(message)}")
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content")
    if message["role"] == "assistant" and "content" in message and content is None:
        found["content"] = None
    if not isinstance(content, list):
        return found
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"content parts must be of type text, found {shown(kind)}")
        texts.append(part["text"])
    return {**found, "content": "".join(texts)}


def _in_files(directory: Path) -> dict[str, str]:
    """Returns the templates in the files of a checkpoint directory, by name."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(directory.glob(f"{_FOLDER}/*.jinja"))}
    found = {}
    for name, path in files.items():
        try:
            if path.is_file():
                found[name] = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{path} cannot be read: {error}") from error
    return found


def _in_config(stated: Any) -> dict[str, str]:
    """Returns tokenizer_config.json's templates by name. Other types raise ChatTemplateError."""
    if not stated or isinstance(stated, str):
        return {"default": stated} if stated else {}
    pairs: list[tuple[Any, Any]] = [(None, None)]
    if isinstance(stated, Mapping):
        pairs = list(stated.items())
    elif isinstance(stated, list) and all(isinstance(entry, Mapping) for entry in stated):
        pairs = [(entry.get("name"), entry.get("template")) for entry in stated]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ChatTemplateError(
            f"tokenizer_config.json: chat_template is {shown(stated)}, but must be a text or "
            "texts with names"
        )
    return dict(pairs)


class _Generation(Extension):
    """Ignores the tag {% generation %}, which marks the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.limit_filters()
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` without the HTML escapes of Jinja's version."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 64:
        raise TemplateError(f"strftime_now got {shown(form)}, expected a format of 64 letters")
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise TemplateError(message)
