"""Grammars of outputs: JSON, a JSON schema, a regex, a choice of texts, a Lark grammar, or a
composition of these.

A `Grammar` is data. `cpmcu/engine/grammar.py` compiles it for a tokenizer; this needs llguidance
(the extra `cpmcu[grammar]`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from cpmcu.checks import shown

GrammarKind = Literal["json_schema", "regex", "choice", "lark", "composed"]

_LABEL = re.compile("[a-z][a-z0-9_]*")


class GrammarError(RuntimeError):
    """An output cannot continue under its grammar. The error ends the request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole output must match. Use one of the class methods to make one.

    `source` is JSON text for "json_schema", "choice" (a list of strings) and "composed" (see
    `composed`). For other kinds it is the pattern or grammar itself. Both fields are strings, so
    `dataclasses.asdict` and `Grammar(**fields)` serialise a grammar. Raises ValueError for errors
    that do not depend on the tokenizer. Other errors are raised when the request is prepared.
    """

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise ValueError(f"a grammar's kind is {self.kind!r}, but must be one of {kinds}")
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(
                f"the source of a {self.kind} grammar is {self.source!r}, but must be a text of at "
                "least one letter"
            )
        if not _is_unicode(self.source):
            raise ValueError(f"the source of a {self.kind} grammar holds half of a surrogate pair")
        if self.kind == "json_schema" and not isinstance(_parse(self.source), (dict, bool)):
            raise ValueError(
                f"a JSON schema is {shown(self.source)}, but must be an object, true or false"
            )
        if self.kind == "choice":
            choices = _parse(self.source)
            if not isinstance(choices, list) or not choices:
                raise ValueError("a choice must be a list of at least one text")
            for text in choices:
                if not isinstance(text, str) or not text:
                    raise ValueError(
                        f"a choice holds {text!r}, but must hold texts of at least one letter"
                    )
                if not _is_unicode(text):
                    raise ValueError(f"the choice {text!r} holds half of a surrogate pair")
        if self.kind == "composed":
            self.parts()

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that a schema accepts, with properties in the schema's order.

        `schema` is JSON text or the parsed JSON.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            source = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema cannot be written as JSON: {error}") from error
        return cls("json_schema", source)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression (Rust's syntax) matches from beginning to end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of several texts."""
        if isinstance(choices, str):
            raise ValueError(f"a choice is the text {choices!r}, but must be a list of texts")
        try:
            source = json.dumps(list(choices), ensure_ascii=False)
        except TypeError as error:
            raise ValueError(
                f"a choice is {shown(choices)}, but must be a list of texts"
            ) from error
        return cls("choice", source)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A context-free grammar in llguidance's dialect of Lark, beginning at `start`."""
        return cls("lark", grammar)

    @classmethod
    def composed(cls, start: str, parts: Mapping[str, Grammar]) -> Grammar:
        """A Lark grammar in which `@label` refers to a grammar of `parts` (label -> grammar).

        Each JSON schema stays a separate document, so its `$ref`s resolve within it.
        """
        source = {"start": start, "parts": {k: [p.kind, p.source] for k, p in parts.items()}}
        return cls("composed", json.dumps(source, ensure_ascii=False))

    def parts(self) -> tuple[str, dict[str, Grammar]]:
        """The arguments of `composed`. Raises ValueError if `source` does not hold them."""
        found = _parse(self.source)
        try:
            start, members = found["start"], dict(found["parts"])
            parts = {label: Grammar(*member) for label, member in members.items()}
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"a composed grammar is {shown(self.source)}, but must be "
                '{"start": LARK, "parts": {LABEL: [KIND, SOURCE]}}'
            ) from error
        if not isinstance(start, str) or not parts:
            raise ValueError("a composed grammar must have a Lark grammar and at least one part")
        for label in parts:
            if not _LABEL.fullmatch(label):
                raise ValueError(
                    f"a part of a grammar is called {label!r}, but must have a name of small "
                    "letters, digits and underscores"
                )
        return start, parts


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a grammar's source is not valid JSON: {error}") from error
