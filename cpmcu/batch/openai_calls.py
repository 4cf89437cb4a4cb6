"""OpenAI's interface in this process: the server's application without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from cpmcu.serving.config import ServerConfig
from cpmcu.serving.model import Model

if TYPE_CHECKING:
    from starlette.types import Message

    from cpmcu.llm import LLM

_NO_LIMIT = 1 << 40


class OpenAICalls:
    """Answers requests as `cpmcu serve` does, on a thread with an event loop.

    Raises ImportError without the packages of the server.
    """

    def __init__(self, llm: LLM) -> None:
        try:
            from cpmcu.serving.app import create_app  # loads the web framework
            from cpmcu.serving.service import Service
        except ImportError as error:
            raise ImportError(
                f"a line in OpenAI's form needs the package {error.name!r}: "
                "pip install 'cpmcu[server]'"
            ) from error
        config = ServerConfig(max_queue=_NO_LIMIT, response_store=0)
        self._service = Service(llm.config, config)
        self._service.take(Model.of(llm, config))
        self._app = create_app(self._service)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cpmcu-batch")
        self._thread.start()

    def post(self, url: str, body: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """The `response` of a batch's result: status_code, request_id, body."""
        return asyncio.run_coroutine_threadsafe(self._post(url, json.dumps(body)), self._loop)

    def close(self) -> None:
        """Aborts open requests and ends the thread. The LLM stays open."""
        self._loop.call_soon_threadsafe(self._service.cancel_all)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._service.workers.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def _post(self, url: str, body: str) -> dict[str, Any]:
        sent = [{"type": "http.request", "body": body.encode(), "more_body": False}]
        status, headers, answer = 500, {}, bytearray()

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                answer.extend(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        await self._app(scope, receive, send)
        request_id = headers.get(b"x-request-id", b"").decode()
        return {"status_code": status, "request_id": request_id, "body": json.loads(answer)}
