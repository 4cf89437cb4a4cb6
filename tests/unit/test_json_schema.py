"""Keywords of JSON schemas that restrict nothing; llguidance refuses them as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpmcu.engine.json_schema import resolved, simplified

LEAF = {"type": "integer"}
HARMLESS: list[dict[str, Any]] = [
    *(
        {"type": "string", "format": name}
        for name in ("binary", "path", "password", "int64", "iri")
    ),
    {"type": "array", "items": {"type": "string", "format": "uri-reference"}},
    {"type": "array", "uniqueItems": False, "prefixItems": [{"format": "regex"}]},
    {"$schema": "https://json-schema.org/draft-07/schema#", "type": "string"},
    {"$schema": "http://json-schema.org/schema#", "type": "string"},
    {"$schema": "http://json-schema.org/draft-07/schema", "type": "string"},
    {"$schema": "https://example.org/mine", "type": "string"},
    {"$ref": "#/$defs/Größe", "$defs": {"Größe": LEAF}},
    {"$ref": "#/$defs/List[int]", "$defs": {"List[int]": LEAF}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": LEAF}},
    {"$ref": "#/$defs/100%25", "$defs": {"100%": LEAF}},
    {"anyOf": [{"properties": {"format": {"format": "byte"}}}, {"not": {"format": "x"}}]},
]


@pytest.mark.parametrize("schema", HARMLESS, ids=str)
def test_what_restricts_nothing_is_left_out(schema: dict[str, Any]) -> None:
    matcher = pytest.importorskip("llguidance").LLMatcher
    if "not" not in json.dumps(schema):  # llguidance does not support "not"
        found = matcher.grammar_from_json_schema(simplified(json.dumps(schema)))
        assert not matcher.validate_grammar(found, None)
    again = simplified(json.dumps(schema))
    assert simplified(again) == again


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date-time"},
        {"type": "array", "uniqueItems": True},
        {"enum": [{"format": "path"}, {"uniqueItems": False}], "const": {"format": "path"}},
        {"properties": {"format": {"type": "string"}, "uniqueItems": False, "$ref": True}},
        {"default": {"$schema": "x", "format": "y"}, "format": ["not", "a", "text"]},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"$ref": "https://example.org/Größe"},
        True,
    ],
    ids=str,
)
def test_other_schemas_stay_letter_for_letter(schema: Any) -> None:
    source = json.dumps(schema, indent=1, ensure_ascii=False)
    assert simplified(source) == source


def test_a_deep_schema_stays() -> None:
    source = '{"not": ' * 5000 + "{}" + "}" * 5000
    assert simplified(source) == source


def test_references_are_followed_through_their_encoding() -> None:
    root = {"$defs": {"Größe": LEAF, "a/b": LEAF}}
    for reference in ("#/$defs/Größe", "#/$defs/Gr%C3%B6%C3%9Fe", "#/$defs/a~1b", "#/$defs/a%7E1b"):
        assert resolved({"$ref": reference}, root) == LEAF
