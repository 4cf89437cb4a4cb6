"""Output items of /v1/responses: built from pieces of an answer, with the events that tell of them.

A response has one answer. Its reasoning, text and calls become items in the order of arrival.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from cpmcu.outputs import TokenLogprobs
from cpmcu.serving.chat.answers import Part
from cpmcu.serving.http import strict_json
from cpmcu.serving.logprobs import entries
from cpmcu.serving.responses.items import seal
from cpmcu.serving.tool_parsers.calls import CallDelta
from cpmcu.text.token_text import TokenTexts

Event = dict[str, Any]


class ResponseOutput:
    """The output items of one response.

    `seal_reasoning`: reasoning items have `encrypted_content`. `texts`: None without
    log-probabilities. `as_ids`: these name tokens by their ids.
    """

    def __init__(
        self, *, seal_reasoning: bool, texts: TokenTexts | None, as_ids: bool = False
    ) -> None:
        self._seal = seal_reasoning
        self._texts = texts
        self._as_ids = as_ids
        self._items: list[dict[str, Any]] = []
        self._open: _TextItem | _Call | None = None
        self._num_calls = 0  # number of complete calls
        self._blank = ""  # white space that becomes text if more text follows
        # Log-probabilities of tokens that belong to no item yet.
        self._scores: list[dict[str, Any]] = []

    def items(self) -> list[dict[str, Any]]:
        """The items so far."""
        opened = self._open
        if opened is None:
            return self._items
        return [*self._items[:-1], opened.item("in_progress", self._seal)]

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        found = [item for item in self.items() if item["type"] == "reasoning"]
        return "".join(part["text"] for item in found for part in item["content"])

    def add(self, part: Part, scores: Sequence[TokenLogprobs] | None = None) -> Iterator[Event]:
        """Adds a piece of the answer, and the log-probabilities of its tokens."""
        if self._texts is not None:
            texts = self._texts
            shown = [score for score in scores or () if not texts.is_special(score.token_id)]
            self._scores += entries(texts, shown, as_ids=self._as_ids)
        if part.reasoning:
            yield from self._add_text("reasoning", part.reasoning)
        deltas = deque(part.deltas)
        if deltas and deltas[0].id is None:  # the open call goes on before anything else
            yield from self._add_to_call(deltas.popleft())
        if part.content:
            yield from self._add_content(part.content)
        for delta in deltas:
            yield from self._add_to_call(delta)
        self._num_calls += len(part.calls)
        opened = self._open
        if isinstance(opened, _Call) and opened.number < self._num_calls and opened.is_whole():
            yield from self._close("completed")

    def end(self, status: str) -> Iterator[Event]:
        """Ends the last item. A completed answer without text and calls gets an empty text."""
        silent = not any(item["type"] != "reasoning" for item in self._items)
        if silent and (self._blank or status == "completed"):
            yield from self._add_text("message", self._blank)
        yield from self._close(status)

    def _add_content(self, text: str) -> Iterator[Event]:
        text, self._blank = self._blank + text, ""
        writing = isinstance(self._open, _TextItem) and self._open.kind == "message"
        if not writing and not text.strip():
            self._blank = text
            return
        yield from self._add_text("message", text)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        opened = self._open
        if not isinstance(opened, _TextItem) or opened.kind != kind:
            yield from self._close("completed")
            opened = self._open = _TextItem(kind, len(self._items))
            self._items.append(opened.item("in_progress", False))
            yield self._event("output_item.added", item={**self._items[-1], "content": []})
            yield self._event("content_part.added", part=opened.part("", []))
        scores = self._take_scores(text)
        opened.pieces.append(text)
        opened.scores += scores
        if text:
            more = {"logprobs": scores} if kind == "message" else {}
            yield self._event(f"{opened.text_kind}.delta", delta=text, **more)

    def _take_scores(self, text: str) -> list[dict[str, Any]]:
        """Removes the tokens up to the end of `text`, and returns those that it consists of.

        Text of tags and calls is in no item, so its tokens are skipped.
        """
        spans, end = [], 0
        for score in self._scores:
            spans.append((end, end + len(score["bytes"]), score))
            end = spans[-1][1]
        sought = text.encode()
        begin = b"".join(bytes(score["bytes"]) for score in self._scores).rfind(sought)
        if begin < 0:  # not found: half a character at the end became U+FFFD
            taken, self._scores = self._scores, []
            return taken
        until = begin + len(sought)
        self._scores = [score for first, _, score in spans if first >= until]
        return [score for first, last, score in spans if last > begin and first < until]

    def _close(self, status: str) -> Iterator[Event]:
        opened = self._open
        if opened is None:
            return
        if isinstance(opened, _Call) and opened.is_whole():
            status = "completed"
        item = self._items[-1] = opened.item(status, self._seal)
        if isinstance(opened, _Call):
            more = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **more)
        else:
            part = item["content"][0]
            more = {"logprobs": opened.scores} if opened.kind == "message" else {}
            yield self._event(f"{opened.text_kind}.done", text=part["text"], **more)
            yield self._event("content_part.done", part=part)
        yield self._event("output_item.done", item=item)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> Event:
        """Returns an event of the open item."""
        opened = self._open
        assert opened is not None
        place: dict[str, Any] = {"output_index": opened.index}
        if not kind.startswith("output_item"):
            place["item_id"] = opened.id
            if isinstance(opened, _TextItem):
                place["content_index"] = 0
        return {"type": f"response.{kind}", **place, **fields}

    def _add_to_call(self, delta: CallDelta) -> Iterator[Event]:
        if delta.id is not None:
            self._blank = ""
            yield from self._close("completed")
            opened = self._open = _Call(delta, len(self._items))
            self._items.append(opened.item("in_progress", False))
            yield self._event("output_item.added", item=self._items[-1])
        assert isinstance(self._open, _Call)
        if delta.arguments:
            self._open.pieces.append(delta.arguments)
            yield self._event("function_call_arguments.delta", delta=delta.arguments)


class _TextItem:
    """An item that receives text: a message or reasoning."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"
        self.text_kind = "output_text" if kind == "message" else "reasoning_text"
        self.pieces: list[str] = []
        self.scores: list[dict[str, Any]] = []

    def part(self, text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
        """The content part with `text`."""
        part: dict[str, Any] = {"type": self.text_kind, "text": text}
        return {**part, "annotations": [], "logprobs": scores} if self.kind == "message" else part

    def item(self, status: str, sealed: bool) -> dict[str, Any]:
        """The item with its text so far."""
        text = "".join(self.pieces)
        item = {"id": self.id, "type": self.kind, "status": status}
        content = [self.part(text, self.scores)]
        if self.kind == "message":
            return {**item, "role": "assistant", "content": content}
        secret = {"encrypted_content": seal(text)} if sealed else {}
        return {**item, "summary": [], "content": content, **secret}


class _Call:
    """A call that receives its arguments."""

    def __init__(self, begin: CallDelta, index: int) -> None:
        self.number = begin.index
        self.index = index
        self.id = f"fc_{uuid.uuid4().hex}"
        self.pieces: list[str] = []
        self._call_id, self._name = begin.id, begin.name

    def is_whole(self) -> bool:
        """Are the arguments JSON? They are not if the output was cut off."""
        try:
            strict_json.read("".join(self.pieces))
        except ValueError:
            return False
        return True

    def item(self, status: str, sealed: bool) -> dict[str, Any]:
        """The item with its arguments so far."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self.pieces),
        }
