"""Writes an answer as the content blocks of /v1/messages, in a stream or as one list."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from cpmcu.serving.chat.answers import Part
from cpmcu.serving.http import strict_json
from cpmcu.serving.protocol.messages import (
    OutputBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingShown,
    ToolUseBlock,
)
from cpmcu.serving.tool_parsers.calls import CallDelta, ToolCall

# Anthropic signs thinking blocks and checks the signature in later turns. This server does not, but
# some clients drop or rewrite a block whose signature is empty.
UNSIGNED = "unsigned"

Event = dict[str, Any]

_INPUT = "input_json_delta"

_BLOCKS: dict[str, type[OutputBlock]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
}


class BlockWriter:
    """Converts the parts of an answer to events that start, extend and stop content blocks.

    A block ends where one of another type begins. The input of a call is sent once it is complete.
    For a tool in `eager`, it is sent as it comes, and may turn out not to be JSON.
    """

    def __init__(
        self, thinking_shown: ThinkingShown = "whole", eager: Collection[str] = ()
    ) -> None:
        self._thinking_shown = thinking_shown
        self._eager = eager
        # The arguments of the open call are sent as deltas: its tool is in `eager`.
        self._sends_deltas = False
        self._index = -1  # number of the last block; -1: there is none
        self._open: str | None = None  # type of the open block
        self._blank = ""  # white space that may turn out to be the gap before a call

    def push(self, part: Part, *, final: bool = False) -> Iterator[Event]:
        """Yields the events that `part` adds. `final`: the answer ends with it."""
        calls, deltas = deque(part.calls), deque(part.deltas)
        if part.reasoning and self._thinking_shown != "none":
            yield from self._thinking(part.reasoning)
        if self._open == "tool_use":  # the call goes on, or ends before the content
            if deltas and deltas[0].id is None:
                yield from self._input(deltas.popleft())
            if calls:
                yield from self._end_call(calls.popleft())
        yield from self._text(part.content)
        for delta in deltas:
            yield from self._begin_call(delta)
            if calls:
                yield from self._end_call(calls.popleft())
        if not final:
            return
        if self._blank and self._index < 0:
            yield from self._extend("text", {"text": ""}, "text_delta", text=self._blank)
        yield from self._stop()

    def _thinking(self, thought: str) -> Iterator[Event]:
        if self._thinking_shown == "empty":
            thought = ""
        start = {"thinking": "", "signature": ""}
        yield from self._extend("thinking", start, "thinking_delta", thinking=thought)

    def _text(self, text: str) -> Iterator[Event]:
        text = self._blank + text
        self._blank = ""
        if self._open != "text" and not text.strip():
            self._blank = text
        elif text:
            yield from self._extend("text", {"text": ""}, "text_delta", text=text)

    def _begin_call(self, delta: CallDelta) -> Iterator[Event]:
        self._blank = ""
        self._sends_deltas = delta.name in self._eager
        yield from self._stop()
        start: Event = {"id": delta.id, "name": delta.name, "input": {}}
        yield from self._extend("tool_use", start, _INPUT, partial_json="")
        yield from self._input(delta)

    def _input(self, delta: CallDelta) -> Iterator[Event]:
        if self._sends_deltas:
            yield from self._extend("tool_use", {}, _INPUT, partial_json=delta.arguments)

    def _end_call(self, call: ToolCall) -> Iterator[Event]:
        if not self._sends_deltas:
            yield from self._extend("tool_use", {}, _INPUT, partial_json=_checked(call.arguments))
        yield from self._stop()

    def _extend(self, kind: str, start: Event, delta: str, **fields: str) -> Iterator[Event]:
        """Yields a delta of a block of type `kind`, and the start of the block if it is new."""
        if self._open != kind:
            yield from self._stop()
            self._index, self._open = self._index + 1, kind
            yield self._event("start", content_block={"type": kind, **start})
        if any(fields.values()):
            yield self._event("delta", delta={"type": delta, **fields})

    def _stop(self) -> Iterator[Event]:
        kind, self._open = self._open, None
        if kind == "thinking":
            yield self._event("delta", delta={"type": "signature_delta", "signature": UNSIGNED})
        if kind is not None:
            yield self._event("stop")

    def _event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": self._index, **fields}


def blocks_of(part: Part, thinking_shown: ThinkingShown = "whole") -> list[OutputBlock]:
    """Returns the content blocks of a whole answer: those that its events build."""
    blocks: list[Event] = []
    for event in BlockWriter(thinking_shown).push(part, final=True):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta: dict[str, str] = event["delta"]
            kind = delta.pop("type")
            if kind == _INPUT:
                blocks[-1]["input"] = strict_json.read(delta["partial_json"])
            else:
                for name, text in delta.items():
                    blocks[-1][name] += text
    return [_BLOCKS[block["type"]](**block) for block in blocks]


def _checked(arguments: str) -> str:
    """Returns `arguments` if they are a JSON object, else an object that holds them as text.

    Anthropic's interface has this convention: the tool refuses the input, and the model sees why.
    """
    try:
        if isinstance(strict_json.read(arguments), dict):
            return arguments
    except ValueError:
        pass
    return strict_json.write({"INVALID_JSON": arguments})
