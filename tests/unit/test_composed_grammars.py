"""Composed grammars (tool calls, reasoning before the answer) and grammars that are too large."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from tokenizers_for_tests import byte_fallback, byte_level, write_directory

from cpmcu import Grammar
from cpmcu.grammar import GrammarError
from cpmcu.serving.errors import ApiError
from cpmcu.serving.request_grammar import after_thinking, of_arguments, of_calls, or_calls
from cpmcu.tokenizer import Tokenizer

pytest.importorskip("llguidance")

from cpmcu.engine.grammar import GrammarCompiler

TREE = {
    "type": "object",
    "properties": {"leaf": {"$ref": "#/$defs/Leaf"}, "next": {"$ref": "#"}},
    "required": ["leaf"],
    "additionalProperties": False,
    "$defs": {"Leaf": {"type": "integer"}},
}
OTHER = {**TREE, "$defs": {"Leaf": {"type": "boolean"}}}
TAGS = ("<think>", "</think>")
COMPACT = {"whitespace_flexible": False}


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["bytes", "fallback"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_directory(write_directory(tmp_path_factory.mktemp("t"), request.param()))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def accepts(compiler: GrammarCompiler, grammar: Grammar, *parts: str | int) -> bool:
    """Does the grammar accept the whole text? `parts`: texts and single token ids."""
    state = compiler.start(grammar)
    matcher = state._matcher
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else compiler._tokenizer.greedy_tokenize(part)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('[{"name":"f","parameters":{"leaf":1}}]', True),
        ('[{"name":"f","parameters":{"leaf":1,"next":{"leaf":2,"next":{"leaf":3}}}}]', True),
        (
            '[{"name":"f","parameters":{"leaf":1,"next":{"name":"f","parameters":{"leaf":1}}}}]',
            False,
        ),
        ('[{"name":"f","parameters":{"leaf":true}}]', False),
        ('[{"name":"@tool_0\\"","parameters":{"leaf":true}}]', True),
        ('[{"name":"@tool_0\\"","parameters":{"leaf":1}}]', False),
        (
            '[{"name":"f","parameters":{"leaf":1}},{"name":"@tool_0\\"","parameters":{"leaf":false}}]',
            2,
        ),
        ('[{"name":"g","parameters":{"leaf":1}}]', False),
        ("[]", False),
    ],
)
def test_tool_calls(compiler, text: str, fits: bool | int):
    tools = {"f": TREE, '@tool_0"': OTHER}
    assert accepts(compiler, of_calls(tools, several=True), text) == bool(fits)
    assert accepts(compiler, of_calls(tools, several=False), text) == (fits is True)
    if fits:
        json.loads(text)


def test_the_error_names_the_tool_with_the_invalid_schema(compiler):
    wrong = of_calls({"f": TREE, "g": {"$ref": "#/$defs/none"}}, several=True)
    for grammar in (wrong, after_thinking(wrong, TAGS, (None, None), begun=True)):
        with pytest.raises(ValueError, match=r"^the json schema of tool_g cannot be used: .*none"):
            compiler.start(grammar)
    answer = after_thinking(Grammar.regex("a("), TAGS, (None, None), begun=True)
    with pytest.raises(ValueError, match=r"^the regex cannot be used: .*unclosed"):
        compiler.start(answer)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"leaf": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"$ref": "#/$defs/Any", "$defs": {"Any": {}}},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_says(compiler, parameters: dict):
    grammar = of_arguments(parameters)
    assert accepts(compiler, grammar, '{"leaf":1}')
    for text in ('"text"', "5", "null", "[1]", "true"):
        assert not accepts(compiler, grammar, text)


def test_parameters_of_another_type_are_refused():
    for stated in ("string", ["null", "array"], 5):
        with pytest.raises(ApiError, match=r"have type .*, but must be an object"):
            of_arguments({"type": stated})


@pytest.mark.parametrize(
    ("text", "begun", "fits"),
    [
        ("<think>a < b </ think>\n</think>\n\n12", False, True),
        ("<think></think>12", False, True),
        ("12", False, True),
        ("<think>so 12", False, False),
        ("hm</think>12", False, False),
        ("hm</think>12", True, True),
        ("</think>\n\n12", True, True),
        ("12", True, False),
        ("hm</think>so 12", True, False),
    ],
)
def test_thinking_in_text(compiler, text: str, begun: bool, fits: bool):
    grammar = after_thinking(Grammar.regex("[0-9]+"), TAGS, (None, None), begun=begun)
    assert accepts(compiler, grammar, text) == fits


def form(kind: object, name: str, required: bool = True) -> dict:
    """The schema that pydantic writes for a model with a literal field."""
    properties = {"kind": {"const": kind, "type": "string"}, name: {"type": "integer"}}
    fields = ["kind", name] if required else [name]
    frame = {"required": fields, "additionalProperties": False}
    return {"type": "object", "properties": properties, **frame}


def union(*forms: object) -> dict:
    """Returns a schema with a `oneOf` of references to the forms."""
    places = [{"$ref": f"#/$defs/f{i}"} for i in range(len(forms))]
    defs = {f"f{i}": each for i, each in enumerate(forms)}
    return {"oneOf": places, "$defs": defs, "x-guidance": COMPACT}


def test_mutually_exclusive_alternatives(compiler):
    told = union(form("circle", "radius"), form("square", "side"), {"type": "null"})
    for grammar, frame in (
        (Grammar.json_schema(told), "%s"),
        (of_calls({"f": told}, several=False), '[{"name":"f","parameters":%s}]'),
    ):
        assert accepts(compiler, grammar, frame % '{"kind":"circle","radius":1}')
        assert accepts(compiler, grammar, frame % '{"kind":"square","side":1}')
        # The arguments of a call are an object, whatever the schema says.
        assert accepts(compiler, grammar, frame % "null") == (frame == "%s")
        assert not accepts(compiler, grammar, frame % '{"kind":"square","radius":1}')


@pytest.mark.parametrize(
    "forms",
    [
        (form("circle", "radius"), form("circle", "side")),
        (form("circle", "radius"), form("square", "side", required=False)),
        ({"type": "number"}, {"type": "integer"}),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
        (form("circle", "radius"), True),
        ({"type": "object", "required": 5}, {"type": "object", "required": [["a"]], "enum": 5}),
    ],
    ids=["same", "optional", "number", "enum", "anything", "wrong"],
)
def test_overlapping_alternatives(compiler, forms):
    """`oneOf` is not equivalent to `anyOf` here, so the schema is refused."""
    with pytest.raises(ValueError, match=r"^the json schema cannot be used: .*(oneOf|Expected)"):
        compiler.start(Grammar.json_schema(union(*forms)))


def test_thinking_in_tokens(compiler, tokenizer):
    begin, end = (tokenizer.id_of(name) for name in ("<|im_start|>", "<|im_end|>"))
    grammar = after_thinking(Grammar.choice(["yes", "no"]), TAGS, (begin, end), begun=False)
    assert accepts(compiler, grammar, begin, "so </think>, hm", end, "\n\nyes")
    assert accepts(compiler, grammar, "no")
    assert not accepts(compiler, grammar, begin, "so </think>yes")
    assert not accepts(compiler, grammar, "so", end, "yes")
    begun = after_thinking(Grammar.choice(["yes", "no"]), TAGS, (begin, end), begun=True)
    assert accepts(compiler, begun, "so", end, "yes")
    assert not accepts(compiler, begun, "yes")


CALL = '<tool_call>\n{"name": "f"}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("12", True),
        (CALL, True),
        (f"{CALL}\n{CALL}", True),
        ("<tool_call>", True),
        ("12 <tool_call>", False),
        ("so 12", False),
        ("<tool", False),
        ("", False),
    ],
)
def test_an_answer_or_calls(compiler, text: str, fits: bool):
    tags = {"<tool_call>": None, "</tool_call>": None}
    grammar = or_calls(Grammar.regex("[0-9]+"), ("<tool_call>",), tags)
    assert accepts(compiler, grammar, text) == fits
    thinking = after_thinking(grammar, TAGS, (None, None), begun=True)
    assert accepts(compiler, thinking, f"hm</think>\n\n{text}") == fits
    assert not accepts(compiler, thinking, text)


def test_an_answer_or_calls_between_tokens(compiler, tokenizer):
    begin, end = (tokenizer.id_of(name) for name in ("<|im_start|>", "<|im_end|>"))
    grammar = or_calls(Grammar.regex("[0-9]+"), ("<a>", "<c>"), {"<a>": begin, "</a>": end})
    for parts in (["12"], [begin, "f()", end], [begin, "f", end, "\n", begin, end], ["<c>f"]):
        assert accepts(compiler, grammar, *parts)
    for parts in ([end, "f"], ["f", begin], ["12", begin], ["<a>f"]):
        assert not accepts(compiler, grammar, *parts)


def test_a_composed_grammar_serialises_as_two_texts():
    grammar = Grammar.composed(
        "start: @a @b", {"a": Grammar.regex("x"), "b": Grammar.choice(["y"])}
    )
    assert Grammar(**json.loads(json.dumps(dataclasses.asdict(grammar)))) == grammar
    assert grammar.parts() == (
        "start: @a @b",
        {"a": Grammar.regex("x"), "b": Grammar.choice(["y"])},
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("[]", r"a composed grammar is '\[\]', but must be"),
        ('{"start": "start: @a"}', "a composed grammar is .*, but must be"),
        ('{"start": "start: @a", "parts": {"a": "regex"}}', "a composed grammar is .*, but must"),
        (
            '{"start": 5, "parts": {"a": ["regex", "x"]}}',
            "must have a Lark grammar and at least one",
        ),
        ('{"start": "start: @a", "parts": {}}', "must have a Lark grammar and at least one part"),
        ('{"start": "start: @A", "parts": {"A": ["regex", "x"]}}', "a part of a grammar is called"),
        ('{"start": "start: @a", "parts": {"a": ["regex", ""]}}', "the source of a regex grammar"),
    ],
)
def test_error_messages(source: str, message: str):
    with pytest.raises(ValueError, match=message):
        Grammar("composed", source)


def test_parts_of_the_same_name(compiler):
    inner = Grammar.composed("start: @a", {"a": Grammar.regex("x")})
    outer = Grammar.composed("start: @a @b", {"a": Grammar.regex("y"), "b": inner})
    with pytest.raises(ValueError, match="two parts of a grammar have the same name"):
        compiler.start(outer)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("a{200000}"),
        Grammar.regex("[ab]a{100000}"),
        Grammar.lark('start: "a"{1000000}'),
        Grammar.json_schema({"type": "string", "pattern": "^a{200000}$"}),
    ],
    ids=lambda grammar: grammar.source[:20],
)
def test_excessive_repetitions(compiler, grammar: Grammar):
    with pytest.raises(ValueError, match=r"^the [a-z ]+ cannot be used: .*(forces|too|Too)"):
        compiler.start(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("[a-z]{1,100000}"),
        Grammar.regex("a{1,5000}"),
        Grammar.json_schema({"type": "string", "maxLength": 1000000}),
        Grammar.json_schema({"type": "array", "maxItems": 1000000, "items": {"type": "integer"}}),
        Grammar.choice([f"a longer value {i}" for i in range(5000)]),
        Grammar.choice(["x" * 5000, "y"]),
    ],
    ids=lambda grammar: grammar.source[:20],
)
def test_large_usable_grammars(compiler, grammar: Grammar):
    assert compiler.start(grammar).masks([0], [-1])


def test_a_grammar_that_becomes_too_complex_fails_its_request(compiler, tokenizer):
    """The error fails only the request with this grammar."""
    grammar = Grammar.regex("(x|y){40}((a{0,100}){0,100}){50,100}")
    state = compiler.start(grammar)
    rng = np.random.default_rng(0)
    with pytest.raises(GrammarError, match=r"^the grammar cannot be followed: .*too many"):
        for _ in range(200):
            (mask,) = state.masks([0], [-1]).values()
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = [t for t in np.flatnonzero(bits) if t not in tokenizer.eos_token_ids]
            state.accept(int(rng.choice(allowed)))
    assert compiler.start(grammar).masks([0], [-1])
