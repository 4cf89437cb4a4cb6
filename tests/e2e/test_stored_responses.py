"""Stored responses: previous_response_id, GET, DELETE, cancel, in the background, input items."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest

from tests.e2e.calls import error_of
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue, start

PATH = "/v1/responses"
MODEL = "tiny-python-minicpm"
LONG = {"input": "x = ", "max_output_tokens": 1900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def few():
    """A server that keeps two responses."""
    with start("--response-store", "2", "--max-num-seqs", "2") as running:
        yield running


@pytest.fixture(scope="module")
def none():
    """A server that keeps no responses."""
    with start("--response-store", "0") as running:
        yield running


def post(server, **body):
    reply = server.post(PATH, {"max_output_tokens": 4, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stored(server, id):
    return server.get(f"{PATH}/{id}").json()


def wait_for(server, id, seconds=60.0):
    end = time.monotonic() + seconds
    while (found := stored(server, id))["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end, "the response does not end"
        time.sleep(0.02)
    return found


def test_a_stored_response(few):
    client = few.client()
    made = client.responses.create(model=MODEL, input="import", max_output_tokens=5, temperature=0)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="keeps the last 2 responses"):
            call(made.id)


def test_streams_are_stored_before_their_last_event(few):
    for event in few.client().responses.create(
        model=MODEL, input="import", max_output_tokens=5, stream=True
    ):
        if event.type == "response.incomplete":
            assert stored(few, event.response.id) == event.response.to_dict()
            break
    else:
        pytest.fail("the stream has no end")


def test_the_next_turn_has_the_whole_conversation(few):
    """Three turns by id give the tokens of the same conversation sent whole."""
    common = {"temperature": 0.7, "seed": 3, "max_output_tokens": 12}
    items, previous = [], None
    for text in ("import os\n", "class A:\n", "def f(x):\n"):
        new = {"role": "user", "content": text}
        items.append(new)
        by_id = post(few, input=text, previous_response_id=previous, instructions="# x", **common)
        whole = post(few, input=items, instructions="# x", store=False, **common)
        assert by_id["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert by_id["output"][0]["content"] == whole["output"][0]["content"]
        assert by_id["previous_response_id"] == previous
        items.append(by_id["output"][0])
        previous = by_id["id"]
    without = post(few, input="y", previous_response_id=previous)
    assert without["instructions"] is None  # instructions do not carry over


def test_the_oldest_responses_are_forgotten(few):
    ids = [post(few, input="x")["id"] for _ in range(3)]
    assert [few.get(f"{PATH}/{id}").status_code for id in ids] == [404, 200, 200]
    error = error_of(few.post(PATH, {"input": "x", "previous_response_id": ids[0]}), 400)
    assert error["code"] == "response_not_found"
    assert "--response-store" in error["message"]
    post(few, input="x", store=False)
    assert few.get(f"{PATH}/{ids[1]}").status_code == 200


def test_nothing_is_stored_if_not_asked_for(few, none):
    made = post(few, input="x", store=False)
    assert made["store"] is False
    assert few.get(f"{PATH}/{made['id']}").status_code == 404
    made = post(none, input="x")
    assert made["store"] is False
    error = error_of(none.get(f"{PATH}/{made['id']}"), 404)
    assert "keeps no responses" in error["message"]
    error = error_of(none.post(PATH, {"input": "x", "previous_response_id": made["id"]}), 400)
    assert error["param"] == "previous_response_id"
    assert error_of(none.post(PATH, {"input": "x", "background": True}), 400)


def test_references_to_items(scripted):
    """Clients name items of stored responses by their id, calls too."""
    client = scripted.client()
    fields = {"model": "scripted", "temperature": 0}
    tools = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "sub")]
    first = client.responses.create(input=cue("call"), tools=tools, **fields)
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    question = {"role": "user", "content": cue("story")}
    items = [{"role": "user", "content": cue("call")}, *named, *results, question]
    by_name = client.responses.create(input=items, tools=tools, **fields)
    by_id = client.responses.create(
        input=[*results, question], previous_response_id=first.id, tools=tools, **fields
    )
    assert by_name.output_text == by_id.output_text == SCRIPTS["story"]
    assert by_name.usage.input_tokens == by_id.usage.input_tokens


def test_input_items(few):
    first = post(few, input="a")
    second = post(few, input=[{"role": "user", "content": "b"}], previous_response_id=first["id"])
    client = few.client()
    page = client.responses.input_items.list(second["id"], order="asc", limit=2)
    assert page.has_more and len(page.data) == 2
    found = list(page)  # the client asks for the next page itself
    assert [(item.role, item.content[0].text) for item in found] == [
        ("user", "a"),
        ("assistant", first["output"][0]["content"][0]["text"]),
        ("user", "b"),
    ]
    assert len({item.id for item in found}) == 3
    assert found[1].id == first["output"][0]["id"]
    assert (found[1].status, found[1].content[0].annotations) == ("completed", [])
    down = client.responses.input_items.list(second["id"])
    assert [item.id for item in down] == [item.id for item in reversed(found)]
    for query, param in (("limit=0", "limit"), ("after=zz", "after")):
        reply = few.get(f"{PATH}/{second['id']}/input_items?{query}")
        assert error_of(reply, 400)["param"] == param


# ---- cancel


def test_in_the_background(few):
    made = post(few, **LONG, background=True)
    assert (made["status"], made["usage"]) == ("queued", None)
    error = error_of(few.post(PATH, {"input": "x", "previous_response_id": made["id"]}), 400)
    assert "has not ended" in error["message"]
    while not stored(few, made["id"])["output"]:
        time.sleep(0.02)
    cancelled = few.client().responses.cancel(made["id"])
    assert cancelled.status == "cancelled"
    final = wait_for(few, made["id"])
    few.wait_idle()
    final = stored(few, made["id"])
    assert final["status"] == "cancelled" and final["output"][0]["status"] == "incomplete"
    assert 0 < final["usage"]["output_tokens"] < 4000
    assert few.client().responses.cancel(made["id"]).status == "cancelled"  # twice is once
    ended = post(few, input="x", background=True)
    assert wait_for(few, ended["id"])["status"] == "incomplete"
    assert error_of(few.post(f"{PATH}/{ended['id']}/cancel", None), 400)["code"] == "response_ended"
    error = error_of(few.post(f"{PATH}/{post(few, input='x')['id']}/cancel", None), 400)
    assert "synchronous" in error["message"]
    assert "resp_x' not found" in error_of(few.get(f"{PATH}/resp_x"), 404)["message"]


def test_cancel_ends_a_stream(few):
    kinds, text, id = [], "", ""
    for event in few.client().responses.create(
        model=MODEL, stream=True, extra_body={"ignore_eos": True}, input="x", max_output_tokens=1900
    ):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            if not text:
                few.client().responses.cancel(id)
            text += event.delta
        elif event.type == "response.created":
            id = event.response.id
    assert kinds[-1] == "response.incomplete"
    assert event.response.status == "cancelled"
    assert event.response.output_text == text
    few.wait_left()
    assert stored(few, id)["status"] == "cancelled"


def test_delete_ends_a_response(few):
    made = post(few, **LONG, background=True)
    assert few.metric("vllm:num_requests_running") + few.metric("vllm:num_requests_waiting")
    assert httpx.delete(f"{few.url}{PATH}/{made['id']}", timeout=60).json() == {
        "id": made["id"],
        "object": "response",
        "deleted": True,
    }
    few.wait_left()
    assert few.get(f"{PATH}/{made['id']}").status_code == 404


def test_a_client_that_leaves(few):
    """The response of a client that leaves is cancelled and stored."""
    with httpx.stream("POST", few.url + PATH, json={**LONG, "stream": True}, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data:"))
        id = json.loads(next(lines)[6:])["response"]["id"]
        for _ in range(5):
            next(lines)
    few.wait_left()
    assert wait_for(few, id)["status"] == "cancelled"
    few.leave(PATH, LONG, running=1)
    few.wait_left()
    assert "Traceback" not in few.log


def test_a_stopping_server_ends_responses(few):
    with start("--shutdown-timeout", "0.5") as server:
        with httpx.stream(
            "POST", server.url + PATH, json={**LONG, "stream": True}, timeout=60
        ) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data:"))
            next(lines)
            server.process.terminate()
            *_, last = lines
        last = json.loads(last[6:])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "server ended" in last["response"]["error"]["message"]
        assert server.process.wait(60) == 0
