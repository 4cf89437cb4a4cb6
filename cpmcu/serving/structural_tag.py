"""Structural tags: formats of text and tags, as XGrammar describes them, become grammars.

A tag, trigger or end may name special tokens of the tokenizer. The grammar then has these tokens:
a model emits `<tool_call>` as one token, and no text of a grammar matches a special token.

vLLM and SGLang take a structural tag as a `response_format`, in one of two forms: `format` (a
format, see `_Builder`), or the older `structures` with `triggers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cpmcu.checks import shown
from cpmcu.grammar import Grammar

MAX_FORMATS = 1024  # maximum number of formats in one structural tag
MAX_DEPTH = 32
MAX_TAGS = 512

Object = Mapping[str, Any]
Ends = tuple[str, ...]  # texts of which one follows; empty: nothing follows
Piece = str | int  # part of a text: a text without special tokens, or the id of a special token


def to_grammar(
    value: Any, gbnf: Callable[[str], Grammar], names: Mapping[str, int] | None = None
) -> Grammar:
    """Returns the grammar of a structural tag. Raises ValueError.

    `value`: the object, or its text. `gbnf` makes the grammar of a text in GBNF. `names`: name ->
    id of the special tokens.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a structural tag is not valid JSON ({error})") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"a structural tag is {shown(value)}, but must be an object")
    kind = value.get("type", "structural_tag")
    if kind != "structural_tag":
        raise ValueError(f"the type of a structural tag is {shown(kind)}")
    builder = _Builder(gbnf, names or {})
    return builder.grammar(_triggered(value) if "structures" in value else _member(value, "format"))


def _triggered(value: Object) -> Object:
    """Returns the format that the older form means."""
    tags = [
        {
            "begin": _text(structure, "begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _text(structure, "end"),
        }
        for structure in _objects(value, "structures")
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Builder:
    """Writes a Lark grammar, one expression for each format.

    An expression includes the text that ends it, `ends`. The terminals of free text exclude the
    triggers and ends, so free text ends at the first of them.
    """

    def __init__(self, gbnf: Callable[[str], Grammar], names: Mapping[str, int]) -> None:
        self._gbnf = gbnf
        self._names = names
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._name = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._lines: list[str] = []
        self._parts: dict[str, Grammar] = {}
        self._formats = 0
        self._depth = 0

    def grammar(self, form: Object) -> Grammar:
        start = "\n".join([f"start: {self._expression(form, ())}", *self._lines])
        return Grammar.composed(start, self._parts) if self._parts else Grammar.lark(start)

    def _expression(self, form: Object, ends: Ends) -> str:
        makers: dict[str, Callable[[Object, Ends], str]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._ebnf,
            "any_text": self._any,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        kind = form.get("type")
        if kind not in makers:
            raise ValueError(
                f"the type of a format is {shown(kind)}, but must be one of {', '.join(makers)}"
            )
        self._formats += 1
        self._depth += 1
        if self._formats > MAX_FORMATS or self._depth > MAX_DEPTH:
            raise ValueError(
                f"a structural tag may have at most {MAX_FORMATS} formats, within each other at "
                f"most {MAX_DEPTH}"
            )
        found = makers[kind](form, ends)
        self._depth -= 1
        return found

    # ---- formats

    def _const(self, form: Object, ends: Ends) -> str:
        return self._then(self._literal(_text(form, "value")), ends)

    def _schema(self, form: Object, ends: Ends) -> str:
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"json_schema is {shown(schema)}, but must be a schema")
        return self._then(self._part(Grammar.json_schema(schema)), ends)

    def _regex(self, form: Object, ends: Ends) -> str:
        # The ends are part of the pattern: a terminal of the content alone would match past them.
        pattern = f"(?:{_text(form, 'pattern')})"
        plain, named = self._sorted(ends)
        found = [] if ends and not plain else [self._part(Grammar.regex(pattern + _any_of(plain)))]
        for head, rest in named:
            found.append(f"{self._part(Grammar.regex(pattern + _escaped(head)))} {_joined(rest)}")
        return _one_of(found)

    def _ebnf(self, form: Object, ends: Ends) -> str:
        return self._then(self._part(self._gbnf(_text(form, "grammar"))), ends)

    def _any(self, form: Object, ends: Ends) -> str:
        return self._free(_excluded(form), ends)

    def _sequence(self, form: Object, ends: Ends) -> str:
        elements = _objects(form, "elements")
        for element in elements[:-1]:
            if _is_open(element):
                raise ValueError(
                    f"an element of type {element['type']} has no end: it must be the last of a "
                    "sequence, or the content of a tag"
                )
        *first, last = elements
        return " ".join(
            [*(self._expression(each, ()) for each in first), self._expression(last, ends)]
        )

    def _or(self, form: Object, ends: Ends) -> str:
        return _one_of([self._expression(each, ends) for each in _objects(form, "elements")])

    def _tag(self, form: Object, ends: Ends) -> str:
        return f"{self._literal(_begin(form))} {self._after_begin(form, ends)}"

    def _triggered_tags(self, form: Object, ends: Ends) -> str:
        triggers = _texts(form, "triggers")
        tags = [(_begin(tag), tag) for tag in _objects(form, "tags")]
        for begin, _ in tags:
            if sum(begin.startswith(trigger) for trigger in triggers) != 1:
                raise ValueError(
                    f"a tag begins with {shown(begin)}, but must begin with exactly one of the "
                    "triggers"
                )
        excluded = _excluded(form)
        rests = [(begin, self._rule(self._after_begin(tag, ()))) for begin, tag in tags]
        banned = (*triggers, *excluded, *ends)
        # The key is the text that is found first, the value the texts that may follow it.
        found: dict[tuple[Piece, ...], list[str]] = {}
        for begin, rest in rests:
            trigger = next(trigger for trigger in triggers if begin.startswith(trigger))
            first_found, others = self._cut(begin, len(trigger))
            found.setdefault(first_found, []).append(f"{_joined(others)} {rest}")
        later = [f"{self._until(lead, banned)} {_one_of(mine)}" for lead, mine in found.items()]
        first = _one_of([f"{self._literal(begin)} {rest}" for begin, rest in rests])
        next_tag = self._rule(_one_of(later))
        last = self._free((*triggers, *excluded), ends)
        at_least_one = _flag(form, "at_least_one")
        if _flag(form, "stop_after_first"):
            if at_least_one:
                return self._then(first, ends)
            return f"({self._then(next_tag, ends)} | {last})"
        return f"{first} {next_tag}* {last}" if at_least_one else f"{next_tag}* {last}"

    def _tags_with_separator(self, form: Object, ends: Ends) -> str:
        tag = self._rule(_one_of([self._tag(tag, ()) for tag in _objects(form, "tags")]))
        separator = form.get("separator", "")
        if not isinstance(separator, str):
            raise ValueError(f"separator is {shown(separator)}, but must be a text")
        more = "" if _flag(form, "stop_after_first") else f" ({self._literal(separator)} {tag})*"
        some = f"{tag}{more}"
        return self._then(some if _flag(form, "at_least_one") else f"({some})?", ends)

    # ---- parts of an expression

    def _after_begin(self, tag: Object, ends: Ends) -> str:
        """Returns the expression of a tag's content and end."""
        if isinstance(tag.get("end"), list):
            closing = tuple(_texts(tag, "end", empty=True))
        else:
            closing = (_text(tag, "end", empty=True),)
        content = _member(tag, "content")
        if "" in closing:  # the content has an end of its own
            if _is_open(content) and not ends:
                raise ValueError("a tag without an end has content without an end")
            return self._expression(content, ends)
        return self._then(self._expression(content, closing), ends)

    def _free(self, excluded: Sequence[str], ends: Ends) -> str:
        """Any text without those of `excluded`, up to and with the first of `ends`."""
        plain, named = self._sorted(ends)
        found = [self._until((head, *rest), (*excluded, *plain)) for head, rest in named]
        if ends and not plain:
            return _one_of(found)
        banned = [f"/(?s:.*){_any_of(excluded)}(?s:.*)/"] if excluded else []
        if plain:
            banned.append(f"/(?s:.*){_any_of(plain)}(?s:.+)/")
        text = f"/(?s:.*){_any_of(plain)}/" if plain else "/(?s:.+)/"
        terminal = self._terminal(" & ~".join([text, *banned]))
        return _one_of([terminal if plain else f"{terminal}?", *found])

    def _until(self, pieces: Sequence[Piece], banned: Sequence[str]) -> str:
        """Any text up to and with the first `pieces`, without another text of `banned` before."""
        head, *rest = pieces if isinstance(pieces[0], str) else ("", *pieces)
        if not rest:  # the text itself may be one of `banned`
            text = f"/(?s:.*){_escaped(str(head))}/ & ~/(?s:.*){_any_of(banned)}(?s:.+)/"
            return self._terminal(text)
        without = f" & ~/(?s:.*){_any_of(banned)}(?s:.*)/" if banned else ""
        if head:
            return f"{self._terminal(f'/(?s:.*){_escaped(str(head))}/{without}')} {_joined(rest)}"
        return f"{self._terminal(f'/(?s:.+)/{without}')}? {_joined(rest)}"

    def _then(self, expression: str, ends: Ends) -> str:
        if not ends:
            return expression
        return f"{expression} {_one_of([self._literal(end) for end in ends])}"

    def _literal(self, text: str) -> str:
        return _joined(self._pieces(text))

    def _pieces(self, text: str) -> list[Piece]:
        """A text, cut at its special tokens."""
        found: list[Piece] = []
        at = 0
        for match in self._name.finditer(text):
            if match.start() > at:
                found.append(text[at : match.start()])
            found.append(self._names[match[0]])
            at = match.end()
        return [*found, text[at:]] if at < len(text) or not found else found

    def _cut(self, text: str, length: int) -> tuple[tuple[Piece, ...], list[Piece]]:
        """The pieces of the first `length` characters, and the others.

        A special token whose name begins among the first is one of them.
        """
        end = length
        for match in self._name.finditer(text):
            if match.start() < length < match.end():
                end = match.end()
        return tuple(self._pieces(text[:end])), self._pieces(text[end:])

    def _sorted(self, ends: Ends) -> tuple[Ends, list[tuple[str, list[Piece]]]]:
        """The ends that are text; of each other end, the text before its token, and the rest."""
        plain, named = [], []
        for end in ends:
            pieces = self._pieces(end)
            if pieces == [end]:
                plain.append(end)
            else:
                head = pieces[0] if isinstance(pieces[0], str) else ""
                named.append((head, pieces[1:] if head else pieces))
        return tuple(plain), named

    def _part(self, grammar: Grammar) -> str:
        label = f"part_{len(self._parts)}"
        self._parts[label] = grammar
        return f"@{label}"

    def _rule(self, expression: str) -> str:
        return self._define(f"rule_{len(self._lines)}", expression)

    def _terminal(self, expression: str) -> str:
        return self._define(f"TEXT_{len(self._lines)}", expression)

    def _define(self, name: str, expression: str) -> str:
        self._lines.append(f"{name}: {expression}")
        return name


def _is_open(form: Object) -> bool:
    """Can any text follow text of this format, as far as the format is concerned?"""
    kind = form.get("type")
    if kind in ("sequence", "or"):
        elements = _objects(form, "elements")
        return any(map(_is_open, elements[-1:] if kind == "sequence" else elements))
    if kind == "tag":
        return form.get("end") in ("", [""]) and _is_open(_member(form, "content"))
    if kind == "triggered_tags":
        return not (_flag(form, "stop_after_first") and _flag(form, "at_least_one"))
    return kind == "any_text"


def _excluded(form: Object) -> list[str]:
    names = [name for name in ("excludes", "excluded_str", "excluded_strs") if form.get(name)]
    return [text for name in names for text in _texts(form, name)]


def _one_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def _joined(pieces: Sequence[Piece]) -> str:
    """Returns one piece after the other in the notation of Lark."""
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
    )


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of one of several texts, or of no text."""
    return f"({'|'.join(map(_escaped, texts))})" if texts else ""


def _escaped(text: str) -> str:
    """Returns a pattern that matches exactly this text."""
    return "".join(
        each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text
    )


# ---- members of objects, which raise ValueError


def _member(form: Object, name: str) -> Object:
    found = form.get(name)
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is {shown(found)}, but must be an object")
    return found


def _objects(form: Object, name: str) -> list[Object]:
    found = form.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TAGS:
        raise ValueError(f"{name} is {shown(found)}, but must be a list of 1 to {MAX_TAGS} objects")
    for each in found:
        if not isinstance(each, Mapping):
            raise ValueError(f"{name} holds {shown(each)}, but must hold objects")
    return found


def _text(form: Object, name: str, *, empty: bool = False) -> str:
    found = form.get(name)
    if not isinstance(found, str) or (not found and not empty):
        raise ValueError(f"{name} is {shown(found)}, but must be a text")
    if any("\ud800" <= each <= "\udfff" for each in found):
        raise ValueError(f"{name} holds half of a surrogate pair")
    return found


def _texts(form: Object, name: str, *, empty: bool = False) -> list[str]:
    found = form.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TAGS:
        raise ValueError(f"{name} is {shown(found)}, but must be a list of 1 to {MAX_TAGS} texts")
    return [_text({name: each}, name, empty=empty) for each in found]


def _begin(tag: Object) -> str:
    return _text(tag, "begin", empty=True)


def _flag(form: Object, name: str) -> bool:
    found = form.get(name, False)
    if not isinstance(found, bool):
        raise ValueError(f"{name} is {shown(found)}, but must be true or false")
    return found
