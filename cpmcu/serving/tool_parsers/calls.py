"""Values that tool parsers return: a call, and the part of a call that a piece of text adds."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]  # name of a tool -> JSON schema of its parameters


def new_id() -> str:
    """Returns the id of a new call, as OpenAI writes it."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is a JSON object as a string, as in OpenAI's API.

    If the output was cut off or the model's JSON is malformed, `arguments` is not JSON.
    """

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=new_id)

    def to_dict(self) -> dict[str, Any]:
        """Returns OpenAI's object of the call."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of call `index`. Only the first part of a call has an id and a name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns OpenAI's object of the delta."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Results of one piece of text: content, deltas of calls, and the calls it completes."""

    content: str
    deltas: Sequence[CallDelta] = ()
    calls: Sequence[ToolCall] = ()
