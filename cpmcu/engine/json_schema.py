"""Facts about JSON schemas that llguidance does not detect, and keywords that it need not refuse.

A keyword that restricts nothing is left out: a `format` that is only an annotation,
`uniqueItems: false`, a `$schema` with an unusual spelling. A `$ref` is encoded as a URI.

`oneOf` allows values that match exactly one alternative. If no value matches two alternatives, as
in the unions that pydantic writes, `anyOf` allows the same values. llguidance does not detect this
through a `$ref`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

_MAX_REFS = 16  # maximum length of a chain of references to references
_MAX_ALTERNATIVES = 64  # maximum number of alternatives, since all pairs are compared
# Formats that llguidance enforces. By the standard, any other is an annotation.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"}
_FORMATS |= {"uuid", "uri"}
# Keywords whose values hold schemas: by name, in a list, alone.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_IN_LIST = {"anyOf", "oneOf", "allOf", "prefixItems"}
_ALONE = {"items", "additionalItems", "additionalProperties", "unevaluatedProperties", "not"}
_ALONE |= {"unevaluatedItems", "contains", "propertyNames", "if", "then", "else"}
_DRAFT = re.compile(r"draft[-/](?:0?([3-7])|(\d{4}-\d\d))/")


def simplified(source: str) -> str:
    """A schema (JSON text) without keywords that restrict nothing; the same text if it has none."""
    try:
        root = json.loads(source)
        found = _simplified(root)
        return source if found == root else json.dumps(found, ensure_ascii=False)
    except RecursionError:
        return source


def _simplified(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key == "uniqueItems" and value is False:
            continue
        if key == "$schema" and isinstance(value, str):
            if (value := _known_draft(value)) is None:
                continue
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            value = "#" + quote(unquote(value[1:]), safe="/~!$&'()*+,;=:@?")
        elif key in _BY_NAME and isinstance(value, Mapping):
            value = {name: _simplified(each) for name, each in value.items()}
        elif key in _IN_LIST | {"items"} and isinstance(value, list):
            value = [_simplified(each) for each in value]
        elif key in _ALONE:
            value = _simplified(value)
        found[key] = value
    return found


def _known_draft(uri: str) -> str | None:
    """The usual spelling of a draft's URI; None for another URI."""
    match = _DRAFT.search(uri + "/")
    if match is None or "json-schema.org" not in uri:
        return None
    if match[2] is not None:
        return f"https://json-schema.org/draft/{match[2]}/schema"
    return f"http://json-schema.org/draft-0{match[1]}/schema#"


def one_of_is_any_of(source: str) -> bool:
    """Does a schema (JSON text) have `oneOf`s, all with mutually exclusive alternatives?"""
    if '"oneOf"' not in source:
        return False
    root = json.loads(source)
    found = list(_one_ofs(root))
    if not found or max(map(len, found)) > _MAX_ALTERNATIVES:
        return False
    try:
        return all(
            _exclusive(resolved(one, root), resolved(other, root), root)
            for alternatives in found
            for one, other in itertools.combinations(alternatives, 2)
        )
    except RecursionError:  # a deeply nested constant
        return False


def endless_reference(source: str) -> str | None:
    """A `$ref` of a schema (JSON text) that leads back to itself before any value begins, or None.

    Members of anyOf, oneOf and allOf describe the same value as the schema that has them.
    """
    root = json.loads(source)
    done: set[int] = set()  # ids of schemas from which no endless path starts
    for start in _schemas(root):
        path = [(start, "", _same_value(start, root))]
        while path:
            schema, _, following = path[-1]
            reference, target = next(following, (None, None))
            if reference is None:
                done.add(id(schema))
                path.pop()
            elif any(target is each for each, _, _ in path):
                return reference or next(found for _, found, _ in reversed(path) if found)
            elif isinstance(target, Mapping) and id(target) not in done:
                path.append((target, reference, _same_value(target, root)))
    return None


def _schemas(root: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a schema."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, Mapping):
            pending += node.values()
            yield node


def _same_value(schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that describe the same value, each with the reference to it, or ""."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield reference, _target(reference, root)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(members := schema.get(key), list):
            yield from (("", member) for member in members)


def _one_ofs(root: Any) -> Iterator[list[Any]]:
    for schema in _schemas(root):
        if isinstance(schema.get("oneOf"), list):
            yield schema["oneOf"]


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema, or the target of its `$ref` within `root`; {} if there is no target."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _target(reference, root)
    return {}


def _target(reference: str, root: Any) -> Any:
    """Returns the value within `root` that a `$ref` names; None if there is none."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _exclusive(one: Mapping[str, Any], other: Mapping[str, Any], root: Any) -> bool:
    """Returns whether no value fits both schemas.

    Compares their types, their values, and the values of properties that both require.
    """
    if _apart(_types(one), _types(other)) or _apart(_values(one), _values(other)):
        return True
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    shared = _texts(one.get("required")) & _texts(other.get("required"))
    return any(_apart(*(_property(each, name, root) for each in (one, other))) for name in shared)


def _property(schema: Mapping[str, Any], name: str, root: Any) -> set[str] | None:
    properties = schema.get("properties")
    stated = properties.get(name) if isinstance(properties, Mapping) else None
    return _values(resolved(stated, root))


def _apart(one: set[str] | None, other: set[str] | None) -> bool:
    return one is not None and other is not None and not one & other


def _texts(stated: Any) -> set[str]:
    """The strings in a list. llguidance reports an invalid schema later."""
    return {each for each in stated if isinstance(each, str)} if isinstance(stated, list) else set()


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema allows; None if it has no `type`."""
    stated = schema.get("type")
    found = {stated} if isinstance(stated, str) else _texts(stated)
    return found | ({"integer"} if "number" in found else set()) or None


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema allows, as JSON; None if it has no `const` or `enum`."""
    stated = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(stated, list) or not stated:
        return None
    return {json.dumps(value, sort_keys=True) for value in stated}
