"""Grammars as data, their compilation, and masks for sequences and trees of tokens."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from tokenizers_for_tests import SPECIAL, byte_fallback, byte_level, write_directory

from cpmcu import Grammar, SamplingParams
from cpmcu.tokenizer import Tokenizer
from tests.unit.test_bad_words import models, output_of

llguidance = pytest.importorskip("llguidance")

from cpmcu.engine.grammar import GrammarCompiler, GrammarState, pack_masks  # noqa: E402

__all__ = ["models"]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_object(),
    Grammar.json_schema(SCHEMA),
    Grammar.regex(r"[a-f]+(-[0-9]{2,3})*"),
    Grammar.choice(["hello", "hello there", "he said", "你好 🙂"]),
    Grammar.lark('start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/'),
]


# ---- as data


def test_a_grammar_serialises_as_two_texts():
    assert Grammar.json_object() == Grammar("json_schema", '{"type": "object"}')
    assert Grammar.json_schema(SCHEMA).source == json.dumps(SCHEMA)
    assert Grammar.json_schema(json.dumps(SCHEMA)) == Grammar.json_schema(SCHEMA)
    assert Grammar.json_schema(True).source == "true"
    assert json.loads(Grammar.choice(("你", "b")).source) == ["你", "b"]
    for grammar in GRAMMARS:
        wire = json.dumps(dataclasses.asdict(grammar))
        assert Grammar(**json.loads(wire)) == grammar
        assert hash(Grammar(**json.loads(wire))) == hash(grammar)
        assert SamplingParams(grammar=grammar).resolve({}).grammar is grammar


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("ebnf", "x"), "kind is 'ebnf', but must be one of json_schema, regex"),
        (lambda: Grammar.regex(""), "the source of a regex grammar is '', but must be a text"),
        (lambda: Grammar.regex(5), "the source of a regex grammar is 5, but must be a text"),
        (lambda: Grammar.json_schema("{"), "source is not valid JSON"),
        (lambda: Grammar.json_schema("[1]"), r"a JSON schema is '\[1\]', but must be an object"),
        (
            lambda: Grammar.json_schema(None),
            "^a JSON schema is 'null', but must be an object, true",
        ),
        (lambda: Grammar.json_schema({"a": set()}), "the schema cannot be written as JSON"),
        (lambda: Grammar.choice([]), "a choice must be a list of at least one text"),
        (lambda: Grammar.choice(["a", ""]), "a choice holds '', but must hold texts"),
        (lambda: Grammar.choice(["a", 1]), "a choice holds 1, but must hold texts"),
        (lambda: Grammar.choice("yes"), "a choice is the text 'yes', but must be a list"),
        (lambda: Grammar.choice(None), "a choice is None, but must be a list of texts"),
        (lambda: Grammar.choice([{1}]), r"a choice is \[\{1\}\], but must be a list of texts"),
        (lambda: Grammar.lark(""), "the source of a lark grammar is ''"),
        (lambda: Grammar.json_schema('{"a":' * 100000), "source is not valid JSON"),
        (lambda: Grammar.regex("a\ud800"), "regex grammar holds half of a surrogate pair"),
        (lambda: Grammar.json_schema({"const": "\udfff"}), "holds half of a surrogate pair"),
        (lambda: Grammar.choice(["\ud800"]), "holds half of a surrogate pair"),
        (lambda: Grammar("choice", '["\\ud800"]'), r"the choice '\\ud800' holds half"),
        (lambda: SamplingParams(grammar="a+"), r"grammar is 'a\+', but must be a cpmcu.Grammar"),
    ],
)
def test_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- compilation


def read(directory, backend=byte_level, **config) -> Tokenizer:
    return Tokenizer.from_directory(write_directory(directory / "tokenizer", backend(), **config))


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda f: f.__name__)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return read(tmp_path_factory.mktemp("t"), request.param)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


PAIR = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


def endless(reference: str) -> str:
    """The pattern of the error for a reference that leads back to itself."""
    reason = (
        f"\"[$]ref\" is '{reference.replace('$', '[$]')}', which leads back to itself, expected"
    )
    return f"^the json schema cannot be used: a {reason} a schema of values$"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {
            "allOf": [{"$ref": "#/$defs/a"}],
            "$defs": {"a": {"type": "array", "items": {"$ref": "#"}}},
        },
    ],
)
def test_schemas_of_recursive_values(compiler: GrammarCompiler, schema: dict):
    assert not compiler.start(Grammar.json_schema(schema)).stopped


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("[a"), 'the regex cannot be used: .*invalid regex "\\[a".*unclosed'),
        (Grammar.regex("(?=a)b"), "the regex cannot be used: .*look"),
        (
            Grammar.regex("(" * 9999 + ")" * 9999),
            "the regex cannot be used: .*nested too deeply|nest",
        ),
        (Grammar.lark("start: " + "(" * 9999), "the lark cannot be used: .*too deeply nested"),
        (Grammar.json_schema('{"not":' * 500 + "{}" + "}" * 500), "recursion limit"),
        (Grammar.json_schema('{"const": NaN}'), "the json schema cannot be used: expected value"),
        (Grammar.json_schema(False), "the json schema cannot be used: Unsatisfiable schema"),
        (Grammar.lark("start: foo"), 'the lark cannot be used: .*unknown name: "foo"'),
        (Grammar.lark("begin: /a/"), "the lark cannot be used: .*start"),
        (Grammar.json_schema({"type": "foo"}), "the json schema cannot be used: Invalid type: foo"),
        (
            Grammar.json_schema({"if": {"type": "string"}, "then": False}),
            'the json schema cannot be used: Unimplemented keys: .*"if"',
        ),
        (
            Grammar.json_schema({"$ref": "http://example.com/schema"}),
            "the json schema cannot be used: ",
        ),
        (Grammar.json_schema({"$ref": "#"}), endless("#")),
        (Grammar.composed("start: @f", {"f": Grammar.json_schema({"$ref": "#"})}), endless("#")),
        (
            Grammar.json_schema({"description": "x", "anyOf": [{"oneOf": [{"$ref": "#"}]}]}),
            endless("#"),
        ),
        (Grammar.json_schema({"$ref": "#/$defs/a", "$defs": PAIR}), endless("#/$defs/[ab]")),
        (
            Grammar.json_schema({"type": "array", "minItems": 1, "items": {"$ref": "#/items"}}),
            endless("#/items"),
        ),
        (Grammar.lark("start: a\na: start"), "^the lark cannot be used: no text matches it, expec"),
        (Grammar.regex(r"[^\s\S]"), "^the regex cannot be used: no text matches it, expected"),
    ],
)
def test_unusable_grammars(compiler: GrammarCompiler, grammar: Grammar, message: str):
    for _ in range(2):  # the cache holds no failed grammar
        with pytest.raises(ValueError, match=message) as caught:
            compiler.start(grammar)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_without_the_package(tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'cpmcu\[grammar\]'"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size)


def test_more_grammars_than_the_cache_holds(compiler: GrammarCompiler):
    for i in range(200):
        state = compiler.start(Grammar.choice([f"{i}"]))
        assert len(compiler._compiled) <= 64
        assert [chr(c) for c in first_bytes(state, compiler)] == [str(i)[0]]


# ---- masks


def unpack(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def allowed(state: GrammarState) -> list[int]:
    return unpack(state.masks([0], [-1])[0]).tolist()


def first_bytes(state: GrammarState, compiler: GrammarCompiler) -> set[int]:
    texts = [compiler._tokenizer.decode_bytes([token]) for token in allowed(state)]
    return {text[0] for text in texts}


def walk(state: GrammarState, rng: np.random.Generator, eos: set[int], length: int) -> list[int]:
    """A random output; it ends if only end-of-sequence tokens are allowed."""
    tokens: list[int] = []
    while len(tokens) < length and not state.stopped:
        may = [t for t in allowed(state) if t not in eos] or allowed(state)
        tokens.append(int(rng.choice(may)))
        state.accept(tokens[-1])
    return tokens


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.source[:12])
def test_masks_are_the_accepted_tokens(compiler: GrammarCompiler, tokenizer, grammar: Grammar):
    """The bit of a token is set if and only if the grammar accepts the token.

    Exception: if the grammar forces the text, only its usual tokenisation is allowed.
    """
    rng, eos = np.random.default_rng(0), set(tokenizer.eos_token_ids)
    for _ in range(3):
        state = compiler.start(grammar)
        so_far: list[int] = []
        for _ in range(6):
            if state.stopped:
                break
            may = allowed(state)
            for token in {*rng.integers(tokenizer.vocab_size, size=30).tolist(), *may[:10]}:
                other = compiler.start(grammar)
                for earlier in so_far:
                    other.accept(earlier)
                if token in may:
                    other.accept(token)
                elif len(may) > 1:
                    with pytest.raises(RuntimeError, match=f"token {token} was drawn"):
                        other.accept(token)
            so_far += walk(state, rng, eos, 1)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.source[:12])
def test_masks_of_a_tree_equal_those_of_its_paths(
    compiler: GrammarCompiler, tokenizer, grammar: Grammar
):
    """The mask of a node equals that of a state after the tokens of the node's path."""
    rng, eos = np.random.default_rng(1), set(tokenizer.eos_token_ids)
    for _ in range(4):
        state, so_far = compiler.start(grammar), []
        so_far += walk(state, rng, eos, int(rng.integers(4)))
        if state.stopped:
            continue
        tokens, parents = [0], [-1]
        for _ in range(24):
            parent = int(rng.integers(len(tokens)))
            path = so_far + path_to(tokens, parents, parent)
            likely = (
                allowed(after(compiler, grammar, path)) if taken(compiler, grammar, path) else []
            )
            choices = [*likely, *rng.integers(-1, tokenizer.vocab_size, size=3).tolist()]
            tokens.append(int(rng.choice(choices)))
            parents.append(parent)
        before = allowed(state)
        masks = state.masks(tokens, parents)
        assert allowed(state) == before  # masks() does not change the state
        for node in range(len(tokens)):
            path = so_far + path_to(tokens, parents, node)
            if taken(compiler, grammar, path):
                assert unpack(masks[node]).tolist() == allowed(after(compiler, grammar, path))
            else:
                assert node not in masks


def path_to(tokens: list[int], parents: list[int], node: int) -> list[int]:
    return [] if node == 0 else [*path_to(tokens, parents, parents[node]), tokens[node]]


def after(compiler: GrammarCompiler, grammar: Grammar, path: list[int]) -> GrammarState:
    state = compiler.start(grammar)
    for token in path:
        state.accept(token)
    return state


def taken(compiler: GrammarCompiler, grammar: Grammar, path: list[int]) -> bool:
    """Are all tokens of the path allowed, and may another token follow?"""
    state = compiler.start(grammar)
    for token in path:
        if state.stopped or token not in allowed(state):
            return False
        state.accept(token)
    return not state.stopped


def test_outputs_match_the_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer):
    import jsonschema

    rng, eos = np.random.default_rng(2), set(tokenizer.eos_token_ids)
    schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    schema["properties"] = {**SCHEMA["properties"], "n": {"type": "integer", "maximum": 99}}
    for _ in range(30):
        state = compiler.start(Grammar.json_schema(schema))
        text = compiler._named().decode_str(walk(state, rng, eos, 200))
        if state.stopped:
            jsonschema.validate(json.loads(text.removesuffix("</s>")), SCHEMA)
    seen = set()
    for _ in range(40):
        state = compiler.start(Grammar.choice(["yes", "no", "no.", "(maybe)*"]))
        seen.add(compiler._named().decode_str(walk(state, rng, eos, 50)).removesuffix("</s>"))
    assert seen <= {"yes", "no", "no.", "(maybe)*"} and len(seen) >= 3


def test_choices_with_any_characters(compiler: GrammarCompiler, tokenizer: Tokenizer):
    letters = [*map(chr, range(1, 256)), "\u2028", "\ufeff", "你", "🙂"]
    choices = [f"a{letter}" for letter in letters]
    grammar = Grammar.choice(choices)
    for choice in choices:
        state = compiler.start(grammar)
        for token in compiler._tokenizer.tokenize_str(choice):
            assert token in allowed(state), choice
            state.accept(token)
        assert state.stopped


@pytest.mark.parametrize("text", ["<s>", "a<|im_end|>b", "<html><s>x</s></html>", "</s>", "<unk>"])
@pytest.mark.parametrize("kind", ["choice", "regex", "lark", "json"])
def test_text_that_looks_like_a_special_token(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, kind: str
):
    """The grammar matches it as ordinary text with other tokens."""
    grammar = {
        "choice": Grammar.choice([text]),
        "regex": Grammar.regex(text.replace("|", "[|]")),
        "lark": Grammar.lark(f"start: {json.dumps(text)}"),
        "json": Grammar.json_schema({"const": text, "x-guidance": {"whitespace_flexible": False}}),
    }[kind]
    tokens = walk(compiler.start(grammar), np.random.default_rng(3), set(), 60)
    special = {tokenizer.id_of(name) for name in SPECIAL}
    assert not special & set(tokens)
    said = compiler._tokenizer.decode_str(tokens)
    assert said == (json.dumps(text) if kind == "json" else text)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
@pytest.mark.parametrize("name", ["he", "h"])
def test_a_special_token_that_is_a_piece_of_others(tmp_path, backend, name: str):
    tokenizer = read(tmp_path, backend, pad_token=name)
    grammar = Grammar.choice(["hello"])
    tokens = walk(
        GrammarCompiler(tokenizer, tokenizer.vocab_size).start(grammar),
        np.random.default_rng(5),
        set(),
        9,
    )
    assert tokenizer.decode(tokens, skip_special_tokens=False).strip() == "hello"


def test_a_lark_grammar_may_name_special_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer):
    end = tokenizer.id_of("<|im_end|>")
    assert end is not None
    for name in ("<|im_end|>", f"<[{end}]>"):
        state = compiler.start(Grammar.lark(f'start: "a" {name} "b"'))
        tokens = walk(state, np.random.default_rng(4), set(), 9)
        assert tokens[1] == end and len(tokens) == 3
    with pytest.raises(ValueError, match=r"the lark cannot be used: .*unknown special token"):
        compiler.start(Grammar.lark("start: <|nothing|>"))


def test_end_of_sequence_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer):
    """An end-of-sequence token is allowed exactly where the grammar accepts."""
    (eos,) = tokenizer.eos_token_ids
    state = compiler.start(Grammar.regex("ab?"))
    assert eos not in allowed(state)
    with pytest.raises(RuntimeError, match="does not allow it"):
        compiler.start(Grammar.regex("ab?")).accept(eos)
    every = range(tokenizer.vocab_size)
    a, b = (next(t for t in every if text_of(compiler, t) == letter) for letter in "ab")
    state.accept(a)
    assert not state.stopped and {text_of(compiler, t) for t in allowed(state)} == {"</s>", "b"}
    ended = after(compiler, Grammar.regex("ab?"), [a, eos])
    assert ended.stopped and ended.masks([0], [-1]) == {}
    state.accept(b)
    assert state.stopped  # no token may follow, so the output ends without an end-of-sequence token
    with pytest.raises(RuntimeError):
        state.accept(b)


def text_of(compiler: GrammarCompiler, token: int) -> str:
    return str(compiler._named().decode_str([token]))


@pytest.mark.parametrize("extra", [-5, 0, 1, 100])
def test_vocabularies_of_another_size(tmp_path, extra: int):
    """The model's vocabulary may be larger or smaller than the tokenizer's."""
    tokenizer = read(tmp_path)
    vocab_size = tokenizer.vocab_size + extra
    state = GrammarCompiler(tokenizer, vocab_size).start(Grammar.regex("(.|\n)*"))
    assert state.num_words == -(-vocab_size // 32)
    (mask,) = state.masks([0], [-1]).values()
    assert len(mask) == state.num_words
    tokens = unpack(mask)
    assert 200 < len(tokens) <= tokenizer.vocab_size and tokens.max() < tokenizer.vocab_size


def test_several_end_of_sequence_tokens(tmp_path):
    tokenizer = read(tmp_path)
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    tokenizer = Tokenizer.from_directory(tmp_path / "tokenizer")
    assert set(tokenizer.eos_token_ids) == {1, 3}
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size).start(Grammar.regex("a*"))
    assert {1, 3} <= set(allowed(state)) and not {0, 2} & set(allowed(state))
    state.accept(3)
    assert state.stopped


def test_a_tokenizer_without_a_decoder(tmp_path):
    directory = write_directory(tmp_path, byte_level())
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": None}))
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be used with a grammar: "):
        GrammarCompiler(tokenizer, 400)


def test_pack_masks():
    masks = [{0: np.array([5, 6], np.uint32), 2: np.array([7, 8], np.uint32)}, {}]
    masks.append({1: np.array([9, 1], np.uint32)})
    rows, words = pack_masks(masks, num_nodes=3)
    assert rows == [0, -1, 1, -1, -1, -1, -1, 2, -1]
    assert words.tolist() == [[5, 6], [7, 8], [9, 1]] and words.dtype == np.uint32
    rows, words = pack_masks([{}, {}], num_nodes=1)
    assert rows == [-1, -1] and words.shape == (0, 0)


ONE_WAY = [
    'start: a "." b\na[max_tokens=4]: /(?s:.*)/\nb[max_tokens=9]: /(?s:.*)/',
    'start: a b\na[stop=":"]: /(?s:.*)/\nb[stop=")"]: /(?s:.*)/',
    "start[max_tokens=12]: /(?s:.*)/",  # as guidance sends gen(max_tokens=12)
]


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("source", ONE_WAY)
def test_rules_with_limits_are_followed_under_speculation(models, source, temperature):
    """The matchers of such grammars cannot take a drafted token back."""
    grammar = Grammar.lark(source)
    output = output_of(models, temperature=temperature, grammar=grammar)
    if source == ONE_WAY[2]:
        assert 0 < len(output.token_ids) <= 13
        assert output.finish_reason == "stop"
    elif source == ONE_WAY[1]:
        assert ")" not in output.text.partition(":")[2][:-1]
    assert output.text
