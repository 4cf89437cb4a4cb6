"""Tool parsers find the same calls for every division of a text, and lose no text."""

from __future__ import annotations

import time

import pytest
from answer_pieces import parsed, pieces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.tool_parsers.calls import CallDelta
from cpmcu.serving.tool_parsers.registry import find_tool_format
from cpmcu.serving.tool_parsers.xml_values import to_json, types_of

TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"$ref": "#/$defs/Flag"},
            "o": {"type": ["object", "null"]},
            "u": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
            "any": {},
        },
        "$defs": {"Flag": {"type": "boolean"}},
    },
    "g": {},
    "m.g": {},
}
DEEP = "[" * 3000
F = ("f", {"a": "</x>", "b": [1, None]})

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "</x>", "b": [1, null]}}\n</tool_call>'
AS_TEXT = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
OTHER_ORDER = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
TAG_IN_TEXT = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}</tool_call>'

TWO = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
FENCED = "a\n```python\nb\n```\nc"
CODE = f"{BEGIN}\n```python\nf(a='x', b=[1, {{'c': None}}])\n```\n{END}"

XML = """<tool_call>
<function=f>
<parameter=a>
 if a < b: "é"
</parameter>
<parameter=n>
5
</parameter>
</function>
</tool_call>"""
XML_F = ("f", {"a": ' if a < b: "é"', "n": 5})
WRITTEN = "</parameter> or </function> is text, and so is\n</parameter>\n<other>"


def element(value: str, key: str = "a") -> str:
    """A call of f with one parameter, in the notation of qwen3_coder."""
    parameter = f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{parameter}</function>\n</tool_call>"


MINI = '<function name="f"><param name="a">Bei jing</param><param name="n">5</param></function>'
MINI_F = ("f", {"a": "Bei jing", "n": 5})
CDATA = '<function name="f"><param name="a"><![CDATA[{}]]></param></function>'

LIST = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "abcdefghi"}, {"name": "g"}]'
NAMED = '[TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]m.g[CALL_ID]abcdefghi[ARGS]{}'

# Notation, text, content, calls.
CALLS = [
    ("hermes", HERMES, "", [F]),
    ("hermes", f"Hm.\n{HERMES}\n{HERMES}\n", "Hm.\n", [F, F]),
    ("hermes", f"{HERMES}\n and then", "and then", [F]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [F]),
    ("hermes", HERMES.replace("}}", "}"), "", [F]),  # the last bracket is missing
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name":"f"}\n{"name":"g"}</tool_call>', "", [("f", {}), ("g", {})]),
    ("hermes", HERMES.replace("arguments", "parameters"), "", [F]),
    ("hermes", AS_TEXT, "", [("f", {"a": 1})]),
    ("hermes", OTHER_ORDER, "", [("f", {"a": 1})]),
    ("hermes", TAG_IN_TEXT, "", [("f", {"a": '</tool_call>"'})]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", ' \n{"name": "f", "arguments": {}}', "", [("f", {})]),
    ("llama3_json", f"\n<|python_tag|> {TWO}<|eom_id|>", "", [("f", {}), ("g", {})]),
    ("llama3_json", TWO, "", [("f", {}), ("g", {})]),
    ("llama3_json", f"{TWO}; and more", "; and more", [("f", {}), ("g", {})]),
    (
        "llama3_json",
        TWO.replace('"g"', '"Alice"'),
        '; {"name": "Alice", "parameters": {}}',
        [("f", {})],
    ),
    ("minicpm4", CODE, "", [("f", {"a": "x", "b": [1, {"c": None}]})]),
    ("minicpm4", f"Ja.{BEGIN}\nf()\nm.g(x=-1)\n{END}", "Ja.", [("f", {}), ("m.g", {"x": -1})]),
    ("minicpm4", f"{BEGIN}```\nf(a='''{FENCED}''')\n```{END}", "", [("f", {"a": FENCED})]),
    ("minicpm4", f"{BEGIN}f(a='''\n```'''){END}", "", [("f", {"a": "\n```"})]),
    ("minicpm4", f"{BEGIN}f(a='x\u2028y\x0c\x85z'){END}", "", [("f", {"a": "x\u2028y\x0c\x85z"})]),
    ("minicpm4", f"{BEGIN}[f(a=1), g()]{END}", "", [("f", {"a": 1}), ("g", {})]),
    ("minicpm4", f"{BEGIN}f(a=[true, null]){END}", "", [("f", {"a": [True, None]})]),
    ("qwen3_coder", f"Hm.\n\n{XML}\n{XML}", "Hm.\n\n", [XML_F, XML_F]),
    ("qwen3_coder", XML.replace("<tool_call>\n", ""), "", [XML_F]),
    ("qwen3_coder", XML.replace("</parameter>\n</function>", "</function>"), "", [XML_F]),
    ("qwen3_coder", XML.replace("\n</function>", ""), "", [XML_F]),
    ("qwen3_coder", XML.removesuffix("\n</tool_call>") + " done", "done", [XML_F]),
    ("qwen3_coder", "<tool_call><function=g></function></tool_call>", "", [("g", {})]),
    ("qwen3_coder", element(WRITTEN), "", [("f", {"a": WRITTEN})]),
    ("qwen3_coder", element("\nx\n\n"), "", [("f", {"a": "\nx\n\n"})]),
    ("qwen3_coder", element(""), "", [("f", {"a": ""})]),
    ("qwen3_coder", element("x").replace("\n", ""), "", [("f", {"a": "x"})]),
    (
        "qwen3_coder",
        "<tool_call><function=f>so</function>",
        "so</function>",
        [("f", {})],
    ),
    ("minicpm5", f"Hm. {MINI}\n{MINI}", "Hm. ", [MINI_F, MINI_F]),
    ("minicpm5", MINI.replace('"', "'").replace("><param", ">\n  <param"), "", [MINI_F]),
    (
        "minicpm5",
        CDATA.format("<b>\n&amp; ]]> </param>"),
        "",
        [("f", {"a": "<b>\n&amp; ]]> </param>"})],
    ),
    (
        "minicpm5",
        MINI.replace("Bei jing", "a &lt; b &amp;&amp; c"),
        "",
        [("f", {"a": "a < b && c", "n": 5})],
    ),
    ("minicpm5", '<function name="g"></function>.', ".", [("g", {})]),
    ("mistral", f"So:{LIST}", "So:", [("f", {"a": "]"}), ("g", {})]),
    ("mistral", NAMED, "", [("f", {"a": "}"}), ("m.g", {})]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}} ok', "ok", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f {"a": 1}', "", [("f", {"a": 1})]),
]
NO_CALLS = {
    "hermes": [
        "no call",
        "a <tool_c",
        "<tool_call>{1}</tool_call>!",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>["f"]</tool_call>',
        f"<tool_call>{DEEP}</tool_call>",
        f'<tool_call>{{"name": "f", "arguments": "{DEEP}"}}</tool_call>',
        f'<tool_call>{{"name": "{"f" * 300}", "arguments": 5}}</tool_call>',
        r'<tool_call>{"name": "\ud83d"}</tool_call>',
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\ud83d\"}"}</tool_call>',
    ],
    "llama3_json": [
        'See {"name": "f", "parameters": {}}',
        '{"x": 1}',
        ' \n{"x": 1}\n',
        ' <|python_tag|> {"x": 1}',
        "<|python_tag|>print(1)",
        "<|python_t",
        '{"name": "Alice", "age": 30}',
        '{"name": "Alice", "parameters": {"age": 30}}',
        '{"name": "f", "par',
        '{"name": "f"}; 5',
        '{"a": ' + DEEP,
        "   ",
    ],
    "minicpm4": [
        f"{BEGIN}{body}{END}" for body in ("f(1)", "f(a=g())", "f(**{})", "import os", "f(", "")
    ]
    + [f"{BEGIN}f(a={value}){END}" for value in ("1e999", r"'\ud83d'", "b''", "-" * 900 + "1")]
    + [f"{BEGIN}f(a=1", f"{BEGIN}f(a=(1{END[:-1]}"],
    "qwen3_coder": [
        "<tool_call>\n\n<function>\n</tool_call>",
        "<tool_call>\n",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=\n",
        f"<tool_call><function={'f' * 300}></function></tool_call>",
        "use <function=h></function>",
        '<tool_call>{"name": "f"}</tool_call>',
    ],
    "minicpm5": ["<function", "<function=f>", "<function name='f\">", '<function name="">'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [1]", "[TOOL_CALLS]f[ARGS] x", "[TOOL_CALLS] f"],
}
CALLS += [(notation, text, text, []) for notation, texts in NO_CALLS.items() for text in texts]

# Calls whose arguments are no JSON: what the model wrote, or what came before the output ended.
RAW = [
    ("hermes", '{"a": NaN1}', '<tool_call>{"name": "f", "arguments": {"a": NaN1}}</tool_call>'),
    ("hermes", '{"a": "b', '<tool_call>{"name": "f", "arguments": {"a": "b'),
    ("hermes", '{"a": 1\n', '<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call>'),
    ("llama3_json", '{"a": "\\', '{"name": "f", "parameters": {"a": "\\'),
    ("mistral", '{"a": [', '[TOOL_CALLS]f[ARGS]{"a": ['),
    ("qwen3_coder", '{"a": "x', "<tool_call><function=f><parameter=a>x"),
    ("qwen3_coder", '{"n": 1', "<tool_call><function=f><parameter=n>1"),
    ("qwen3_coder", '{"n": 1', "<tool_call><function=f><parameter=n>1</parameter>\n"),
    ("minicpm5", '{"a": "x', '<function name="f"><param name="a"><![CDATA[x'),
]


def parser_of(notation: str) -> AnswerParser:
    kind = find_tool_format(notation, None)
    assert kind is not None
    return AnswerParser(None, kind.make(TOOLS))


@pytest.mark.parametrize(("notation", "text", "content", "calls"), CALLS)
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
@example(cuts=list(range(400)))
def test_calls_and_content(notation, text, content, calls, cuts):
    assert parsed(parser_of(notation), pieces(text, cuts)) == ("", content, calls)


@pytest.mark.parametrize(("notation", "arguments", "text"), RAW)
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_arguments_that_are_no_json(notation, arguments, text, cuts):
    """A call that has begun in a stream cannot be taken back."""
    assert parsed(parser_of(notation), pieces(text, cuts)) == ("", "", [("f", arguments)])


FRAGMENTS = """
<tool_call> </tool_call> <function= f g > </function> <parameter= a </parameter> <function <param
</param> <![CDATA[ ]]> {"name":"f","arguments":{ " } { [ ] , \\ [TOOL_CALLS] [ARGS] f(a=1) ;
<|tool_call_start|> <|tool_call_end|> <|python_tag|> é🙂 1 &lt;
"""
PARTS = [*FRAGMENTS.split(), "\n", " ", ' name="']


@pytest.mark.parametrize("notation", list(NO_CALLS))
@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_text_and_any_division(notation, parts, cuts):
    """The whole text, single characters and any pieces give the same."""
    text = "".join(parts)
    whole = parsed(parser_of(notation), [text])
    assert parsed(parser_of(notation), pieces(text, cuts)) == whole
    assert parsed(parser_of(notation), list(text) or [""]) == whole
    if not whole[2]:
        assert whole[1] == text


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("hermes", HERMES),
        ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}'),
        ("mistral", NAMED),
        ("mistral", LIST),
        ("qwen3_coder", XML),
        ("minicpm5", CDATA.format("x")),
    ],
)
def test_a_call_begins_before_its_arguments_are_complete(notation, text):
    parser = parser_of(notation)
    deltas = [delta for letter in text for delta in parser.push(letter).deltas]
    assert (deltas[0].name, deltas[0].id is None, deltas[0].arguments[1:]) == ("f", False, "")
    of_first = [delta.arguments for delta in deltas if delta.index == 0]
    assert "".join(of_first).startswith('{"a": "') and len(of_first) > 3


def test_objects_of_deltas():
    function = {"name": "f", "arguments": "{"}
    found = CallDelta(1, "{", "i", "f").to_dict()
    assert found == {"index": 1, "id": "i", "type": "function", "function": function}
    assert CallDelta(1, "}").to_dict() == {"index": 1, "function": {"arguments": "}"}}


@pytest.mark.parametrize("notation", ["hermes", "llama3_json", "qwen3_coder", "minicpm4"])
def test_a_long_call_takes_no_more_time_per_token(notation):
    begin = '{"name": "f", "parameters": {"a": "'
    begins = {
        "hermes": f"<tool_call>{begin}",
        "qwen3_coder": "<function=f><parameter=a>",
        "minicpm4": f'{BEGIN}f(a="',
    }
    ends = {"qwen3_coder": "</parameter></function>", "minicpm4": f'"){END}'}
    num_words = 20_000
    parts = [begins.get(notation, begin), *["word "] * num_words, ends.get(notation, '"}}')]
    parser = parser_of(notation)
    start = time.process_time()
    found = parsed(parser, parts)
    assert time.process_time() - start < 2
    assert found == ("", "", [("f", {"a": "word " * num_words})])


def test_the_parser_of_a_template():
    def name(template: str | None, parser: str = "auto") -> str | None:
        found = find_tool_format(parser, template)
        return None if found is None else found.name

    assert name("<tool_call>") == "hermes"
    assert name("<tool_call>\n<function=example>") == "qwen3_coder"
    assert name('<function name="f"><param name="k">') == "minicpm5"
    assert name("x <|tool_call_start|>") == "minicpm4"
    assert name('{"name": f, "parameters": dictionary') == "llama3_json"
    assert name("[TOOL_CALLS]") == "mistral"
    assert name("nothing") is name(None) is None
    assert name("<tool_call>", "none") is None
    assert name(None, "minicpm4") == "minicpm4"
    with pytest.raises(ValueError, match="tool_call_parser is 'x', but must be auto, none or one"):
        find_tool_format("x", None)


def test_ids_of_mistral_have_nine_letters():
    """Mistral's templates refuse ids of another length."""
    first, second = parser_of("mistral").push(NAMED, final=True).calls
    assert len(first.id) == 9 and first.id.isalnum()
    assert second.id == "abcdefghi"


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("a", "5", '"5"'),
        ("a", "null", '"null"'),
        ("n", "5", "5"),
        ("n", " 5\n", "5"),
        ("n", "five", '"five"'),
        ("x", "1.10", "1.10"),
        ("x", "12345678901234567890.5", "12345678901234567890.5"),
        ("x", "1e999", '"1e999"'),
        ("b", "true", "true"),
        ("b", "False", "false"),
        ("b", "5", "5"),
        ("o", "None", "null"),
        ("o", "{'a': [True, None, 'é']}", '{"a": [true, null, "é"]}'),
        ("o", '{"a": 1}', '{"a": 1}'),
        ("o", "{1, 2}", '"{1, 2}"'),
        ("u", "[1]", "[1]"),
        ("u", "5", '"5"'),
        ("u", '"5"', '"\\"5\\""'),
        ("u", "None", "null"),
        ("any", "5", "5"),
        ("any", "text", '"text"'),
        ("unknown", DEEP, f'"{DEEP}"'),
    ],
)
def test_types_of_parameters(key, text, expected):
    assert to_json(text, types_of(TOOLS, "f", key)) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"oneOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{}, {"type": "array"}]}, {"array"}),
        ({"$ref": "#/properties/k"}, set()),
        (True, set()),
        ({"type": 5}, set()),
    ],
)
def test_types_of_a_schema(schema, types):
    tools = {"f": {"properties": {"k": schema}}}
    assert types_of(tools, "f", "k") == types
    assert types_of(tools, "f", "other") == types_of(tools, "g", "k") == set()
