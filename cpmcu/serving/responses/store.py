"""The last responses of /v1/responses, in memory: for GET, cancel and `previous_response_id`.

Only the event loop's thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.responses import InputItem

_CHARACTERS = 1 << 20  # maximum number of characters of text for each response, on average


class Run(Protocol):
    """A response that may not have ended."""

    def response(self) -> dict[str, Any]:
        """The response object."""

    def cancel(self) -> None:
        """Ends the response."""


class Stored:
    """A response and its conversation.

    `items`: the conversation before the response. `run` is None once the response has ended.
    """

    def __init__(self, run: Run, items: Sequence[InputItem]) -> None:
        self.run: Run | None = run
        self.items = list(items)
        self.output: list[InputItem] = []
        self._ended: dict[str, Any] = {}

    @property
    def response(self) -> dict[str, Any]:
        """The response object."""
        return self._ended if self.run is None else self.run.response()

    @property
    def length(self) -> int:
        """Characters of the conversation."""
        return sum(item.length for item in (*self.items, *self.output))

    def end(self, response: dict[str, Any]) -> None:
        """Keeps the ended response."""
        self.run = None
        self._ended = response
        self.output = [InputItem.model_validate(item) for item in response["output"]]


class ResponseStore:
    """The last `limit` ended responses, and those that run.

    The text of all ended responses is limited, so a very large one displaces several others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._found: dict[str, Stored] = {}  # responses by id: ended ones in the order of their end
        self._outputs: dict[str, InputItem] = {}  # output items by id
        self._length = 0

    def begin(self, id: str, stored: Stored) -> None:
        """Adds a response that runs."""
        self._found[id] = stored

    def end(self, id: str, response: dict[str, Any]) -> None:
        """Keeps a response that has ended, unless it was removed; forgets the oldest ones."""
        stored = self._found.pop(id, None)
        if stored is None:
            return
        stored.end(response)
        self._found[id] = stored
        self._length += stored.length
        self._outputs.update({item.id: item for item in stored.output if item.id})
        ended = [name for name, each in self._found.items() if each.run is None]
        for name in ended[:-1]:
            if len(ended) <= self.limit and self._length <= self.limit * _CHARACTERS:
                break
            ended.remove(name)
            self.forget(name)

    def get(self, id: str) -> Stored:
        """Returns a response. Raises ApiError (404) if it is not here."""
        stored = self._found.get(id)
        if stored is None:
            raise self._unknown(f"Response with id {id[:64]!r} not found", "response_id", 404)
        return stored

    def previous(self, id: str) -> Stored:
        """Returns the response that a request continues. Raises ApiError (400)."""
        field = "previous_response_id"
        stored = self._found.get(id)
        if stored is None:
            raise self._unknown(f"{field} is {id[:64]!r}, which is not", field, 400)
        if stored.run is not None:
            raise ApiError(
                400, f"{field} is {id!r}, which has not ended.", param=field, code="invalid_value"
            )
        return stored

    def output(self, id: str, place: str) -> InputItem:
        """Returns an output item of a stored response. Raises ApiError (400)."""
        found = self._outputs.get(id)
        if found is None:
            raise self._unknown(f"{place}.id is {id[:64]!r}, which is not", f"{place}.id", 400)
        return found

    def forget(self, id: str) -> None:
        """Forgets a response if it is here."""
        stored = self._found.pop(id, None)
        if stored is not None and stored.run is None:
            self._length -= stored.length
            for item in stored.output:
                self._outputs.pop(item.id or "", None)

    def _unknown(self, what: str, param: str, status: int) -> ApiError:
        kept = f"the last {self.limit} responses" if self.limit else "no responses"
        return ApiError(
            status,
            f"{what} here: this server keeps {kept} (--response-store).",
            param=param,
            code="response_not_found",
        )
