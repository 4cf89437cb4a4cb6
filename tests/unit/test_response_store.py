"""The store of responses: its limit, the order of forgetting, and the ids of items."""

from __future__ import annotations

import pytest

from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.responses import InputItem
from cpmcu.serving.responses.store import ResponseStore, Stored


class Run:
    """A response that runs."""

    def response(self):
        return {"status": "in_progress", "output": []}


def message(id, text="b"):
    part = {"type": "output_text", "text": text}
    return {"id": id, "type": "message", "role": "assistant", "content": [part]}


def begin(store, id, text="a"):
    store.begin(id, Stored(Run(), [InputItem(role="user", content=text)]))


def end(store, id, text="b"):
    store.end(id, {"id": id, "status": "completed", "output": [message(f"msg_{id}", text)]})


def add(store, id, text="a"):
    begin(store, id, text)
    end(store, id)


def known(store, names):
    found = ""
    for name in names:
        try:
            store.get(name)
            store.output(f"msg_{name}", "input[0]")
        except ApiError:
            continue
        found += name
    return found


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_oldest_are_forgotten(limit):
    store = ResponseStore(limit)
    for count, name in enumerate("abcdefghij", 1):
        add(store, name)
        assert known(store, "abcdefghij") == "abcdefghij"[max(0, count - limit) : count]


def test_responses_that_run_are_not_forgotten():
    store = ResponseStore(2)
    begin(store, "x")
    for name in "abc":
        add(store, name)
    assert store.get("x").response == {"status": "in_progress", "output": []}
    end(store, "x")
    assert known(store, "abcx") == "cx"


def test_the_end_of_a_forgotten_response():
    store = ResponseStore(2)
    begin(store, "a")
    store.forget("a")
    end(store, "a")
    assert known(store, "a") == ""
    store.forget("a")


def test_long_texts_take_more_room():
    store = ResponseStore(4)
    for name in "abc":
        add(store, name)
    add(store, "d", "x" * (4 << 20))
    assert known(store, "abcd") == "d"
    store.forget("d")
    for name in "efgh":
        add(store, name)
    assert known(store, "efgh") == "efgh"


def test_errors():
    store = ResponseStore(3)
    begin(store, "x")
    for call, status, param in (
        (lambda: store.get("y"), 404, "response_id"),
        (lambda: store.previous("y"), 400, "previous_response_id"),
        (lambda: store.previous("x"), 400, "previous_response_id"),
        (lambda: store.output("y", "input[2]"), 400, "input[2].id"),
    ):
        with pytest.raises(ApiError) as caught:
            call()
        assert (caught.value.status, caught.value.param) == (status, param)
    with pytest.raises(ApiError, match="keeps the last 3 responses"):
        store.get("y")
    with pytest.raises(ApiError, match="keeps no responses"):
        ResponseStore(0).previous("y")
