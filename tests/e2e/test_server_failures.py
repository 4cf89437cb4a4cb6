"""Errors inside the server: the client's message, the log, and the next request."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from tests.e2e.calls import CHAT, HELLO, error_of


def test_an_engine_that_is_broken(monkeypatch):
    """/health reports the failure at once, and requests get a 503."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu", num_threads=1), ServerConfig())
    service.load()

    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            runner = service.model.llm._runner
            monkeypatch.setattr(runner, "_launch", fail)
            monkeypatch.setattr(runner._scheduler, "release", fail)
            error_of(await client.post(CHAT, json=HELLO), 500)
            runner._thread.join(timeout=60)
            reply = await client.get("/health")
            assert (reply.status_code, reply.json()["status"]) == (503, "failed")
            reply = await client.post(CHAT, json=HELLO)
            assert error_of(reply, 503)["code"] == "engine_stopped"

    asyncio.run(run())
    service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails(monkeypatch, caplog, stream):
    """Running requests get an error without details, and the next one is answered."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu", num_threads=1), ServerConfig())
    service.load()
    runner = service.model.llm._runner
    collect, calls = runner._collect, []

    def fail_once() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a secret")
        collect()

    monkeypatch.setattr(runner, "_collect", fail_once)

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": "x = 1\n", "max_tokens": 50, "ignore_eos": True, "stream": stream}
            reply = await client.post("/v1/completions", json=body)
            assert "secret" not in reply.text
            if stream:
                *_, event, done, end = reply.text.split("\n\n")
                error = json.loads(event.removeprefix("data: "))["error"]
                assert (error["type"], done, end) == ("server_error", "data: [DONE]", "")
            else:
                assert error_of(reply, 500)["type"] == "server_error"
            reply = await client.post("/v1/completions", json={**body, "stream": False})
            assert reply.json()["usage"]["completion_tokens"] == 50
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())
    # The client may have its answer a moment before the engine's thread has counted it.
    deadline = time.monotonic() + 60
    while service.model.llm.engine_load().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.model.llm.engine_load().running == 0
    service.close()
    assert "a secret" in caplog.text


def test_a_request_that_fails_once_it_is_queued_is_ended(monkeypatch):
    """A queued request that fails in the route is removed from the engine."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu", num_threads=1), ServerConfig())
    service.load()
    queued = []

    def fail(*arguments: object) -> None:
        queued.extend(service._running)
        raise OverflowError("a secret")

    monkeypatch.setattr(service.metrics, "started", fail)

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": "x = 1\n", "max_tokens": 1900, "ignore_eos": True}
            error_of(await client.post("/v1/completions", json=body), 500)

    asyncio.run(run())
    assert all(request.cancelled for request in queued[0].requests)
    service.close()


def test_internal_errors_have_no_details(monkeypatch):
    """A 500 has no details; the log has them all."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu"), ServerConfig())

    def fail() -> bytes:
        raise RuntimeError("a secret")

    monkeypatch.setattr(service.metrics, "render", fail)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/metrics")

    reply = asyncio.run(run())
    assert error_of(reply, 500)["type"] == "server_error"
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"]
