"""Structural tags accept the texts of their formats, and no others."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers_for_tests import byte_fallback, byte_level, write_directory

from cpmcu import Grammar
from cpmcu.serving import structural_tag
from cpmcu.serving.errors import ApiError
from cpmcu.serving.request_grammar import KINDS, make
from cpmcu.tokenizer import Tokenizer
from tests.unit.test_bad_words import models, output_of
from tests.unit.test_composed_grammars import accepts, compiler, tokenizer

pytest.importorskip("llguidance")

from cpmcu.engine.grammar import GrammarCompiler, named_tokens

__all__ = ["compiler", "models", "tokenizer"]

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
F = {"begin": "<f=a>", "content": NUMBER, "end": "</f>"}
G = {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[a-z<]+"}, "end": "</f>"}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [F, G]}
TAG = {"type": "tag", "begin": "[", "content": ANY, "end": "]"}
LIST = {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}
TWO = {
    "type": "triggered_tags",
    "triggers": ["<f=", "{x"],
    "tags": [F, {"begin": "{x", "content": ANY, "end": ["}", "|"]}],
    "excludes": ["no"],
}
FORMATS = {
    "const": {"type": "const_string", "value": 'a "b/c"\n'},
    "grammar": {"type": "grammar", "grammar": 'root ::= "a" [0-9]+'},
    "calls": CALLS,
    "forced": {**CALLS, "at_least_one": True},
    "one": {**CALLS, "stop_after_first": True},
    "forced one": {**CALLS, "at_least_one": True, "stop_after_first": True},
    "two": TWO,
    "list": LIST,
    "some": {**LIST, "at_least_one": True},
    "sequence": {
        "type": "sequence",
        "elements": [TAG, {"type": "const_string", "value": "x"}, CALLS],
    },
    "or": {"type": "or", "elements": [NUMBER, TAG]},
    "nested": {"type": "tag", "begin": "(", "content": CALLS, "end": ")"},
    "list in a tag": {"type": "tag", "begin": "(", "content": LIST, "end": ")"},
    "no end": {"type": "tag", "begin": "(", "content": {**TAG, "end": [""]}, "end": ")"},
}
CASES = [
    ("const", ['a "b/c"\n'], ["", "a", 'a "b/c"\nx']),
    ("grammar", ["a1", "a12"], ["a", "b1"]),
    (
        "calls",
        ["", "text <f", "<f=a>1</f>", "x\n<f=a>-2</f>y<f=b>z<</f>end", "<f=b>q</f><f=a>3</f>"],
        ["<f=", "<f=c>1</f>", "<f=a>x</f>", "x<f=a>1</f>y<f=a>", "<f=b></f>"],
    ),
    ("forced", ["<f=a>1</f>", "<f=a>1</f> x <f=b>z</f>"], ["", "x", "x<f=a>1</f>"]),
    ("one", ["", "x", "x<f=a>1</f>"], ["<f=a>1</f>x", "<f=a>1</f><f=a>1</f>"]),
    ("forced one", ["<f=a>1</f>"], ["", "<f=a>1</f>x", "x<f=a>1</f>"]),
    (
        "two",
        ["a{xb}c", "{x|{x}<f=a>1</f>", "n", "{xno}"],
        ["no", "{x", "<f=a>1</f>no", "a{x<f=a>1</f>"],
    ),
    ("list", ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>z</f>"], ["x", "<f=a>1</f>,", ", <f=a>1</f>"]),
    ("some", ["<f=a>1</f>"], [""]),
    ("sequence", ["[a]x", "[]xtext<f=a>1</f>"], ["[a]", "[a]]x", "x", "[a]xt<f=c>"]),
    ("or", ["5", "[five]"], ["five", "5["]),
    ("nested", ["()", "(a<f=a>1</f>b)", "(<f=b>q</f>)"], ["(", "(a)b", "(<f=a>)</f>)"]),
    ("list in a tag", ["()", "(<f=a>1</f>)"], ["(x)", "<f=a>1</f>"]),
    ("no end", ["([a)", "([)"], ["[a]", "([a]", "([a))"]),
]


def grammar_of(form) -> Grammar:
    return structural_tag.to_grammar({"format": form}, KINDS["gbnf"])


@pytest.mark.parametrize(("name", "texts", "others"), CASES)
def test_texts_of_a_format(compiler, name, texts, others):
    grammar = grammar_of(FORMATS[name])
    for text in texts:
        assert accepts(compiler, grammar, text), text
    for text in others:
        assert not accepts(compiler, grammar, text), text


def test_the_older_form_is_the_same(compiler):
    structures = [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]
    old = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    new = {"format": {**CALLS, "tags": [F]}}
    found = [structural_tag.to_grammar(each, KINDS["gbnf"]) for each in (old, json.dumps(old), new)]
    assert found[0] == found[1] == found[2]
    assert accepts(compiler, found[0], "a<f=a>1</f>b")
    assert not accepts(compiler, found[0], "a<f=a>x</f>b")


def deep(depth: int):
    form = {"type": "const_string", "value": "a"}
    for _ in range(depth):
        form = {"type": "or", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "qwen_xml_parameter"}, "must be one of const_string"),
        ({}, "the type of a format is None"),
        ({"type": "const_string", "value": ""}, "value is ''"),
        ({"type": "regex"}, "pattern is None"),
        ({"type": "json_schema", "json_schema": 5}, "json_schema is 5"),
        ({"type": "grammar", "grammar": "root ::= ("}, "GBNF"),
        ({"type": "sequence", "elements": [ANY, NUMBER]}, "must be the last"),
        ({"type": "sequence", "elements": []}, "elements is"),
        ({"type": "or", "elements": [5]}, "elements holds 5"),
        ({**TAG, "end": ""}, "without an end"),
        ({**TAG, "end": 5}, "end is 5"),
        ({**TAG, "begin": "\ud800"}, "surrogate"),
        ({**CALLS, "triggers": ["<g="]}, "exactly one of the triggers"),
        ({**CALLS, "triggers": ["<f=", "<f"]}, "exactly one of the triggers"),
        ({**CALLS, "triggers": "<f="}, "triggers is '<f='"),
        ({**CALLS, "at_least_one": 1}, "at_least_one is 1"),
        ({**LIST, "separator": 5}, "separator is 5"),
        (deep(40), "at most 1024 formats"),
        ({"type": "or", "elements": [{"type": "or", "elements": [NUMBER] * 512}] * 3}, "1024"),
    ],
)
def test_wrong_formats(form, message):
    with pytest.raises(ApiError) as error:
        make("response_format", structural_tag.to_grammar, {"format": form}, KINDS["gbnf"])
    assert message in str(error.value) and error.value.status == 400


def test_tags_within_tags_are_written_once(compiler):
    """The time does not grow as a power of two with the depth."""
    form = ANY
    for _ in range(12):
        form = {**CALLS, "at_least_one": True, "tags": [{**G, "content": form}]}
    grammar = grammar_of(form)
    assert len(grammar.source) < 5000
    assert accepts(compiler, grammar, "<f=b>" * 12 + "x" + "</f>" * 12)


@pytest.mark.parametrize("value", [5, "{", "5", {"type": "text"}, {}, {"structures": []}])
def test_no_structural_tag(value):
    with pytest.raises(ValueError, match=r"must be|not valid JSON|is 'text'"):
        structural_tag.to_grammar(value, KINDS["gbnf"])


SPECIAL_CALL = {"begin": "<think>f=", "content": NUMBER, "end": "</think>"}
OPEN, CLOSE, OTHER = "OPEN", "CLOSE", "OTHER"  # the tokens of the tokenizer below
SPECIAL = [
    (
        {**CALLS, "triggers": ["<thi"], "tags": [SPECIAL_CALL]},
        [["text"], ["a<", OPEN, "f=1", CLOSE, "b"], [OPEN, "f=1", CLOSE, OPEN, "f=2", CLOSE]],
        [["<think>f=1</think>"], [OPEN, "f=1</think>"], [OPEN, "g"], [OTHER], ["a", CLOSE]],
    ),
    (
        {**CALLS, "triggers": ["<think>", "<f="], "tags": [SPECIAL_CALL, F]},
        [["x", OPEN, "f=1", CLOSE, "<f=a>2</f>"], ["<f=a>2</f>", OPEN, "f=1", CLOSE]],
        [["<f=", OPEN], [OPEN, "f=1</f>"], ["x<f=b"]],
    ),
    (
        {**CALLS, "triggers": ["<think>"], "tags": [SPECIAL_CALL], "at_least_one": True},
        [[OPEN, "f=1", CLOSE], [OPEN, "f=1", CLOSE, "x"]],
        [[], ["x"], ["x", OPEN, "f=1", CLOSE]],
    ),
    (
        {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"},
        [[OPEN, "a < b", CLOSE], [OPEN, CLOSE]],
        [[OPEN, "a"], [OPEN, "a</think>"], [OPEN, "a", CLOSE, "b"], ["<think>a</think>"]],
    ),
    (
        {"type": "tag", "begin": "(", "content": ANY, "end": ["\n</think>.", "]"]},
        [["(a\nb\n", CLOSE, "."], ["(a]"], ["(\n", CLOSE, "."]],
        [["(a", CLOSE, "."], ["(a\n", CLOSE], ["(a]b\n", CLOSE, "."]],
    ),
    (
        {"type": "tag", **G, "end": ["</think>", "!<|other|>", "."]},
        [["<f=b>ab", CLOSE], ["<f=b>a!", OTHER], ["<f=b>a."]],
        [["<f=b>", CLOSE], ["<f=b>a", OTHER], ["<f=b>a!"], ["<f=b>a.", CLOSE]],
    ),
    (
        {"type": "const_string", "value": "a<|other|>b"},
        [["a", OTHER, "b"]],
        [["a<|other|>b"], ["a", OTHER]],
    ),
]


@pytest.mark.parametrize(("form", "texts", "others"), SPECIAL)
def test_special_tokens_are_themselves(special_tokens, form, texts, others):
    """A tag's special tokens are matched as tokens, and their spelling is not."""
    tokenizer, compiler = special_tokens
    names = named_tokens(tokenizer.to_json())
    ids = {OPEN: names["<think>"], CLOSE: names["</think>"], OTHER: names["<|other|>"]}
    grammar = structural_tag.to_grammar({"format": form}, KINDS["gbnf"], names)
    for parts, expected in [*((text, True) for text in texts), *((text, False) for text in others)]:
        found = accepts(compiler, grammar, *(ids.get(part, part) for part in parts))
        assert found == expected, parts


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["bytes", "fallback"])
def special_tokens(request, tmp_path_factory) -> tuple[Tokenizer, GrammarCompiler]:
    """A tokenizer with special tokens, one of them not marked as special, and its compiler."""
    made = tokenizers.Tokenizer.from_str(request.param().to_str())
    made.add_special_tokens(["<think>", "<|other|>"])
    made.add_tokens(["</think>"])
    directory = write_directory(tmp_path_factory.mktemp("special"), made)
    tokenizer = Tokenizer.from_directory(directory)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_an_output_follows_a_structural_tag(models, temperature):
    """The output with a draft equals that without (`output_of`)."""
    form = {**CALLS, "at_least_one": True, "stop_after_first": True}
    output = output_of(models, temperature=temperature, grammar=grammar_of(form))
    assert output.text.startswith(("<f=a>", "<f=b>"))
    assert output.finish_reason == "length" or output.text.endswith("</f>")
    free = output_of(
        models, temperature=temperature, grammar=grammar_of({**CALLS, "triggers": ["<"]})
    )
    assert output_of(models, temperature=temperature).text[:9] == free.text[:9]
