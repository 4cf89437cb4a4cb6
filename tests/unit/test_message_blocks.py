"""Answers as content blocks of /v1/messages: a stream builds the same blocks as a whole answer."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.serving.answers import AnswerParser, ForcedCalls, Part
from cpmcu.serving.message_blocks import BlockWriter, blocks_of
from cpmcu.serving.protocol.messages import ThinkingShown
from cpmcu.serving.reasoning import ReasoningSplitter
from cpmcu.serving.tools import NOTATIONS, ToolCall, ToolParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "你"}}\n</tool_call>'


DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}
MEMBERS = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("name", "input")}


def parser(forced: str | None = None) -> AnswerParser:
    calls = ForcedCalls(forced) if forced else ToolParser(NOTATIONS["hermes"])
    return AnswerParser(ReasoningSplitter(("<think>", "</think>")), calls)


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


def whole(part: Part, shown: ThinkingShown = "whole") -> list[dict]:
    return [block.model_dump() for block in blocks_of(part, shown)]


def streamed(
    text: str, cuts: list[int], forced: str | None = None, shown: ThinkingShown = "whole"
) -> list[dict]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)] or [""]
    source, writer, events = parser(forced), BlockWriter(shown), []
    for i, piece in enumerate(pieces):
        final = i == len(pieces) - 1
        events += writer.push(source.push(piece, final=final), final=final)
    return built(events)


def plain(blocks: list[dict]) -> list[tuple]:
    """(type, content) of each block, without ids."""
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
    assert plain(whole(parser().push(text, final=True))) == blocks
    assert plain(streamed(text, cuts)) == blocks


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
    assert plain(streamed(text, cuts, shown=shown)) == blocks
    assert plain(whole(parser().push(text, final=True), shown)) == blocks


@pytest.mark.parametrize("cuts", [[], [1, 4]])
def test_a_forced_call_that_was_cut_off_is_text(cuts):
    assert plain(streamed('{"a": 1}', cuts, "add")) == [("tool_use", "add", {"a": 1})]
    for text in ('{"a": ', "3", '{"a": NaN}'):
        assert plain(streamed(text, cuts, "add")) == [("text", text)]
        assert plain(whole(parser("add").push(text, final=True))) == [("text", text)]


def test_calls_keep_the_ids_of_the_parser():
    call = ToolCall("f", "{}", "abc")
    assert whole(Part("", "", [call])) == [
        {"type": "tool_use", "id": "abc", "name": "f", "input": {}}
    ]
