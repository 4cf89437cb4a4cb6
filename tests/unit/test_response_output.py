"""Output items of /v1/responses, and the events that tell of them."""

from __future__ import annotations

import copy

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers_for_tests import byte_level, write_directory

from cpmcu.serving.chat.answers import Part
from cpmcu.serving.responses.output import ResponseOutput
from cpmcu.serving.tool_parsers.calls import CallDelta, ToolCall
from cpmcu.text.token_text import TokensUpTo, TokenTexts, tokens_up_to
from cpmcu.tokenizer import Tokenizer


def thought(text):
    return Part(text, "", ())


def said(text):
    return Part("", text, ())


def called(*names, text="", content=""):
    """Complete calls; the call of `f` is the first one, that of `g` the second one."""
    calls = [ToolCall(name, '{"a": 1}', id=f"call_{name}") for name in names]
    deltas = [CallDelta("fgh".index(c.name), c.arguments, c.id, c.name) for c in calls]
    return Part(text, content, calls, deltas)


def begun(arguments):
    return Part("", "", (), [CallDelta(0, arguments, "call_f", "f")])


def goes_on(arguments, done=False, **more):
    calls = [ToolCall("f", "", id="call_f")] if done else []
    return Part("", more.get("content", ""), calls, [CallDelta(0, arguments)])


STORIES = {
    "text": [said("a"), said("b"), said("")],
    "nothing": [said("")],
    "white space": [said(" "), said("\n")],
    "thinking": [thought("h"), thought("m"), said("\n"), said("ok")],
    "only thinking": [thought("hm")],
    "calls": [called("f"), called("g", "h")],
    "white space around calls": [said("\n"), called("f"), said("\n")],
    "all": [thought("h"), said("I look."), said("\n"), called("f"), said("b"), called("g")],
    "in one piece": [called("f", "g", text="hm", content="I look.")],
    "arguments in pieces": [begun('{"a'), goes_on('": 1'), goes_on("}", done=True), called("g")],
    "text behind arguments": [begun("{"), goes_on("}", done=True, content="ok")],
    "a call without arguments": [begun(""), goes_on("{}", done=True)],
}


def told(parts, status="completed", sealed=False):
    """Returns (items, events), each event as it was when it was sent."""
    output = ResponseOutput(seal_reasoning=sealed, texts=None)
    events = []
    for part in parts:
        events += [copy.deepcopy(event) for event in output.add(part)]
        open_items = [item for item in output.items() if item["status"] == "in_progress"]
        assert len(open_items) <= 1
    events += [copy.deepcopy(event) for event in output.end(status)]
    return output.items(), events


def replayed(events):
    """The items that a client builds from the events alone, which it checks."""
    items, done = [], {}
    for event in events:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        assert index not in done, "an event follows the end of its item"
        if kind == "output_item.added":
            assert index == len(items) and event["item"]["status"] == "in_progress"
            items.append(copy.deepcopy(event["item"]))
            continue
        item = items[index]
        if kind == "output_item.done":
            assert event["item"]["status"] != "in_progress"
            done[index] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "content_part.done":
            assert event["part"]["text"] == item["content"][0]["text"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind.endswith("text.delta"):
            assert event["delta"]
            item["content"][event["content_index"]]["text"] += event["delta"]
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            assert event["text"] == item["content"][0]["text"]
    assert sorted(done) == list(range(len(items))), "an item has no end"
    for index, item in enumerate(items):
        assert {**item, "status": done[index]["status"]} == done[index]
    return [done[index] for index in range(len(items))]


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_events_tell_of_the_items(story, status):
    items, events = told(STORIES[story], status)
    assert replayed(events) == items


def test_pieces_do_not_matter():
    """The same answer in one piece gives the same items."""

    def plain(parts):
        return [{**item, "id": ""} for item in told(parts)[0]]

    pieces = [thought("h"), thought("m"), said("I "), said("look."), begun('{"a": '), goes_on("1}")]
    whole = called("f", text="hm", content="I look.")
    assert plain(pieces) == plain([whole])


def test_calls_that_are_cut_off():
    """The last call of an incomplete response is incomplete unless its arguments are JSON."""

    def statuses(parts, status):
        return [item["status"] for item in told(parts, status)[0]]

    cut = [called("f"), Part("", "", (), [CallDelta(1, '{"a', "call_g", "g")])]
    assert statuses(cut, "incomplete") == ["completed", "incomplete"]
    assert statuses([begun("{}")], "incomplete") == ["completed"]
    # At its end a parser takes a cut call for complete.
    cut = [begun('{"a'), goes_on("", done=True)]
    assert statuses(cut, "incomplete") == ["incomplete"]
    assert statuses(cut, "completed") == ["completed"]  # the model's own mistake


def test_a_call_is_told_as_soon_as_it_is_complete():
    output = ResponseOutput(seal_reasoning=False, texts=None)
    assert [event["type"] for event in output.add(called("f"))][-1] == "response.output_item.done"


@pytest.mark.parametrize("story", STORIES)
def test_openai_reads_every_event(story):
    adapter = TypeAdapter(ResponseStreamEvent)
    items, events = told(STORIES[story])
    for number, event in enumerate(events):
        read = adapter.validate_python({**event, "sequence_number": number})
        assert read.type == event["type"]
        # Some releases of the client want the function's name here, others have no such member.
        assert set(read.model_extra or {}) <= {"name"}
    frame = {"id": "r", "created_at": 1, "model": "m", "object": "response", "tools": []}
    Response.model_validate(
        {**frame, "output": items, "parallel_tool_calls": True, "tool_choice": "auto"}
    )


def kinds_of(story, status="completed"):
    return [(item["type"], item["status"]) for item in told(STORIES[story], status)[0]]


def test_statuses_and_order():
    assert kinds_of("all") == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
    ]
    assert kinds_of("text", "incomplete") == [("message", "incomplete")]
    assert kinds_of("only thinking", "incomplete") == [("reasoning", "incomplete")]
    assert kinds_of("calls", "incomplete") == 3 * [("function_call", "completed")]


def test_white_space():
    """White space alone is a text only if there is nothing else."""
    assert kinds_of("white space around calls") == [("function_call", "completed")]
    items, _ = told(STORIES["white space"])
    assert items[0]["content"][0]["text"] == " \n"
    assert kinds_of("nothing") == [("message", "completed")]
    assert kinds_of("nothing", "incomplete") == []
    assert [kind for kind, _ in kinds_of("only thinking")] == ["reasoning", "message"]


def test_sealed_reasoning_is_in_the_last_event():
    items, events = told(STORIES["thinking"], sealed=True)
    done = next(event for event in events if event["type"] == "response.output_item.done")
    assert done["item"]["encrypted_content"] and done["item"] == items[0]
    assert "encrypted_content" not in told(STORIES["thinking"])[0][0]


def test_tokens_of_reasoning(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()))
    texts = TokenTexts(tokenizer)
    whole = "<think>\nwe think 三</think>\n\nfour"
    tokens = tokenizer.encode(whole, add_special_tokens=False)
    count = tokens_up_to(texts, tokens, "we think 三")
    before = b"".join(map(texts.bytes_of, tokens[: count - 1]))
    assert (
        len(before)
        < whole.encode().index(b"</think>")
        <= len(before + texts.bytes_of(tokens[count - 1]))
    )
    assert tokens_up_to(texts, tokens, "") == 0
    assert tokens_up_to(texts, tokens, whole) == len(tokens)
    assert tokens_up_to(texts, [], "a") == 0
    for length in (1, 40):
        thought = "we think 三 " * length
        tokens = tokenizer.encode(f"<think>\n{thought}</think>", add_special_tokens=False)
        counter, counts, size, given = TokensUpTo(texts), [], 0, ""
        for token in tokens:  # a character comes with its last byte
            size += len(texts.bytes_of(token))
            begun = thought.encode()[: max(0, size - len("<think>\n"))].decode(errors="ignore")
            counter.add([token], begun.removeprefix(given))
            counts.append(counter.count)
            given = begun
        assert counts == sorted(counts) and len(set(counts)) > 5
        assert counter.count == tokens_up_to(texts, tokens, thought)
