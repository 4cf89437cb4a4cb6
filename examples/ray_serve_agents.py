"""Several GPUs behind one address, for agents: prompts that begin alike meet the same prefix cache.

    pip install 'ray[serve,llm]'
    serve run examples.ray_serve_agents:build model=DIR draft_model_path=DIR replicas=4

An ingress reads the prompt of each request and hands the request to a replica, which is the whole
application of `cpmcu serve` on a GPU of its own. Ray's own prefix-aware router chooses the replica
(docs.ray.io: "PrefixCacheAffinityRouter"; alpha). It reads the attribute `prompt` of the argument.

Stored responses are in the replica that made them. So agents should send `store: false`, as Codex
does. /metrics and /health answer for one replica.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from cpmcu.config import EngineConfig, SpeculativeConfig
except ImportError as error:
    raise SystemExit(
        f"this example needs Ray and the server ({error}): pip install 'ray[serve,llm]' '.[server]'"
    ) from error
if __name__ == "__main__":
    raise SystemExit("run this example with: serve run examples.ray_serve_agents:build model=DIR")

SLOTS = 64  # concurrent sequences of a replica
ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
PROMPT_FIELDS = ("system", "instructions", "tools", "messages", "input", "prompt")
MOST_CHARACTERS = 200_000  # of a prompt that the router compares


@dataclasses.dataclass
class Asked:
    """A request. The router reads `prompt`."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str


def prompt_of(body: bytes) -> str:
    """What the model reads first, as text: equal beginnings give equal texts."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    parts = (json.dumps(fields[name]) for name in PROMPT_FIELDS if fields.get(name))
    return "".join(parts)[:MOST_CHARACTERS]


class Replica:
    """The server's application, called by method instead of over HTTP."""

    def __init__(self, engine: EngineConfig) -> None:
        from cpmcu.serving.app import create_app
        from cpmcu.serving.config import ServerConfig
        from cpmcu.serving.service import Service

        service = Service(engine, ServerConfig())
        service.load()
        self._app: Any = create_app(service)

    async def answer(self, asked: Asked) -> AsyncIterator[Any]:
        """Yields (status, headers), then the parts of the body."""
        scope = {"type": "http", "http_version": "1.1", "scheme": "http", "root_path": ""}
        scope |= {"method": asked.method, "path": asked.path, "query_string": asked.query}
        scope |= {"headers": asked.headers}
        messages: asyncio.Queue[Any] = asyncio.Queue()
        body = [{"type": "http.request", "body": asked.body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Any:
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
            task.result()  # raises what the application raised
        finally:
            left.set()  # if the client left, the application ends the request


ingress = FastAPI()


@serve.deployment(name="ingress")
@serve.ingress(ingress)
class Ingress:
    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)

    @ingress.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "OPTIONS"])
    async def forward(self, path: str, request: Request) -> Response:
        """Sends a request to a replica, and its answer back as it comes."""
        body = await request.body()
        query = request.scope["query_string"]
        asked = Asked(request.method, f"/{path}", query, request.headers.raw, body, prompt_of(body))
        answer = self._replicas.remote(asked)
        status, headers = await answer.__anext__()
        response = StreamingResponse(answer, status)
        response.raw_headers = headers
        return response


def build(arguments: dict[str, Any]) -> Any:
    """`arguments`: model, draft_model_path, device ("cuda" or "cpu"), replicas."""
    unknown = arguments.keys() - {"model", "draft_model_path", "device", "replicas"}
    if unknown:
        raise ValueError(
            f"unknown argument {sorted(unknown)[0]!r}, see examples/ray_serve_agents.py"
        )
    device = arguments.get("device", "cuda")
    engine = EngineConfig(
        model=arguments.get("model"),
        device=device,
        max_num_seqs=SLOTS,
        speculative_config=SpeculativeConfig(draft_model_path=arguments.get("draft_model_path")),
    )
    replicas = serve.deployment(
        Replica,
        name="cpmcu",
        num_replicas=int(arguments.get("replicas", 1)),
        max_ongoing_requests=4 * SLOTS,
        ray_actor_options={"num_gpus": 1 if device == "cuda" else 0},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"imbalanced_threshold": SLOTS},
        ),
    )
    return Ingress.bind(replicas.bind(engine))
