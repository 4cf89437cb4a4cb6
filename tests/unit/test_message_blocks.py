"""Answers as content blocks of /v1/messages: a stream builds the same blocks as a whole answer."""

from __future__ import annotations

import json

import pytest
from answer_pieces import pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.messages.blocks import BlockWriter, blocks_of
from cpmcu.serving.protocol.messages import ThinkingShown
from cpmcu.serving.reasoning_parsers.think import ThinkParser
from cpmcu.serving.tool_parsers.forced import ForcedCalls
from cpmcu.serving.tool_parsers.hermes import HermesParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "你"}}\n</tool_call>'


DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}
MEMBERS = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("name", "input")}


def parser(forced: str | None = None) -> AnswerParser:
    return AnswerParser(
        ThinkParser(), ForcedCalls(forced, {forced: {}}) if forced else HermesParser({})
    )


def built(events: list[dict]) -> list[dict]:
    """Builds blocks as a client does; checks the order of the events and their indices."""
    blocks, is_open = [], False
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open
            is_open = True
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        assert is_open and event["index"] == len(blocks) - 1
        if kind == "delta":
            delta = event["delta"]
            assert delta.pop("type") in DELTAS[blocks[-1]["type"]]
            (name,) = delta
            assert delta[name], "a delta is empty"
            blocks[-1]["json" if name == "partial_json" else name] += delta[name]
        elif kind == "stop":
            is_open = False
            text = blocks[-1].pop("json")
            if text:
                blocks[-1]["input"] = json.loads(text)
    assert not is_open
    return blocks


def whole(text: str, forced: str | None = None, shown: ThinkingShown = "whole") -> list[dict]:
    part = parser(forced).push(text, final=True)
    return [block.model_dump() for block in blocks_of(part, shown)]


def events(text: str, cuts: list[int], forced: str | None = None, *options) -> list[dict]:
    """The events of a text that comes in pieces. BlockWriter takes `options`."""
    source, writer, found = parser(forced), BlockWriter(*options), []
    parts = pieces(text, cuts)
    for i, piece in enumerate(parts):
        final = i == len(parts) - 1
        found += writer.push(source.push(piece, final=final), final=final)
    return found


def streamed(text: str, cuts: list[int], forced: str | None = None, *options) -> list[dict]:
    return built(events(text, cuts, forced, *options))


def plain(blocks: list[dict]) -> list[tuple]:
    """Returns (type, content) of each block, without ids."""
    return [(block["type"], *(block[name] for name in MEMBERS[block["type"]])) for block in blocks]


ADD = ("tool_use", "add", {"a": 1, "b": "你"})
THOUGHT = ("thinking", "Hm.", "unsigned")


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        ("plain", [("text", "plain")]),
        (" \n", [("text", " \n")]),
        ("a\n\nb ", [("text", "a\n\nb ")]),
        ("<think>\nHm.\n</think>\n\nSo.", [THOUGHT, ("text", "So.")]),
        ("<think>Hm.</think>", [THOUGHT]),
        ("<think>Hm.</think>\n\n" + CALL, [THOUGHT, ADD]),
        ("\n" + CALL, [ADD]),
        (CALL + "\n" + CALL, [ADD, ADD]),
        (f"Let me see.\n{CALL}\n{CALL}\n", [("text", "Let me see.\n"), ADD, ADD]),
        ("<tool_call>{broken</tool_call>", [("text", "<tool_call>{broken</tool_call>")]),
    ],
)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_a_stream_builds_the_blocks_of_the_whole(text, blocks, cuts):
    assert plain(whole(text)) == blocks
    assert plain(streamed(text, cuts)) == blocks
    assert plain(streamed(text, cuts, None, "whole", {"add"})) == blocks


@pytest.mark.parametrize("cuts", [[], [1, 5, 60]])
def test_text_after_a_call_is_a_block_of_its_own(cuts):
    assert plain(streamed(CALL + " Done.", [len(CALL), *cuts])) == [ADD, ("text", "Done.")]


@pytest.mark.parametrize("cuts", [[], [3, 9, 12]])
@pytest.mark.parametrize(
    ("shown", "first"), [("empty", [("thinking", "", "unsigned")]), ("none", [])]
)
def test_hidden_thinking(shown, first, cuts):
    text = "<think>Hm, well.</think>So."
    blocks = [*first, ("text", "So.")]
    assert plain(streamed(text, cuts, None, shown)) == blocks
    assert plain(whole(text, None, shown)) == blocks


@pytest.mark.parametrize("cuts", [[], [1, 4]])
@pytest.mark.parametrize("arguments", ['{"a": ', "3", '{"a": NaN}', '{"a": "\n"}'])
def test_arguments_that_are_no_json_object(arguments, cuts):
    """They become INVALID_JSON, as in Anthropic's API. The tool then refuses the input."""
    blocks = [("tool_use", "add", {"INVALID_JSON": arguments})]
    assert plain(streamed(arguments, cuts, "add")) == plain(whole(arguments, "add")) == blocks
    deltas = [event.get("delta", {}) for event in events(arguments, cuts, "add", "whole", {"add"})]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == arguments


def test_a_call_begins_before_it_is_complete():
    """The input of a call is one piece, or with eager_input_streaming sent as generated."""
    cuts = [*range(len(CALL))]
    for eager, most in (((), 1), (("sub",), 1), (("add",), 99)):
        found = events(CALL, cuts, None, "whole", eager)
        (start, *deltas, stop) = found
        assert (start["content_block"]["name"], stop["type"]) == ("add", "content_block_stop")
        assert 0 < len(deltas) <= most
        assert (len(deltas) > 5) == (most > 1)


def test_calls_have_different_ids():
    first, second = whole(CALL + CALL)
    assert first["id"] != second["id"]
