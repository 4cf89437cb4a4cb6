"""/v1/responses."""

from __future__ import annotations

import asyncio
import itertools
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from cpmcu.checks import shown
from cpmcu.serving.chat.job import ChatJob, num_prompt_tokens, prepare
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.http import sse
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.response_object import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from cpmcu.serving.protocol.responses import InputItem, ResponsesRequest
from cpmcu.serving.replies import answer, service_of
from cpmcu.serving.responses.items import Placed, missing, to_chat
from cpmcu.serving.responses.run import ResponseRun
from cpmcu.serving.responses.store import Stored
from cpmcu.serving.service import Service

router = APIRouter(tags=["generation"])

_STORED: dict[int | str, dict[str, Any]] = {
    400: ERRORS[400],
    404: {**ERRORS[404], "description": "No such response"},
}


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses={**ERRORS, 200: {"content": sse.CONTENT}},
)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    body.check()
    service.check_model(body.model)
    if body.background and not service.responses.limit:
        raise refused("background", "background needs stored responses: --response-store above 0.")
    before, new = _items(body, service)
    length = sum(item.length for _, item in (*before, *new)) + len(body.instructions or "")
    loop = asyncio.get_running_loop()
    job = await service.workers.run(request, length, _prepare, service, body, [*before, *new], loop)
    keep = body.wants_store and service.responses.limit > 0
    run = ResponseRun(body, job, service, service.responses.end)
    if keep:
        items = [item for _, item in (*before, *new)]
        service.responses.begin(run.id, Stored(run, items))
    try:
        if body.background:
            run.start_in_background()
            return _written(run.response())
        ending = sse.Ending(run.failed, b"")
        return await answer(
            request,
            job.generation,
            body.stream,
            run.events,
            run.whole,
            ending=ending,
            cancel=run.end,
        )
    except BaseException:  # the client does not learn the id
        run.end()
        service.responses.forget(run.id)
        raise


def _items(body: ResponsesRequest, service: Service) -> tuple[list[Placed], list[Placed]]:
    """Returns the items of the response that `body` continues, and its own."""
    before: list[Placed] = []
    if body.previous_response_id is not None:
        previous = service.responses.previous(body.previous_response_id)
        before = [("previous_response_id", item) for item in (*previous.items, *previous.output)]
    new = [(f"input[{i}]", item) for i, item in enumerate(body.items)]
    for i, (place, item) in enumerate(new):
        if item.kind == "item_reference":
            if item.id is None:
                raise missing(place, "id")
            new[i] = (place, service.responses.output(item.id, place))
    return before, new


def _prepare(
    service: Service,
    body: ResponsesRequest,
    items: list[Placed],
    loop: asyncio.AbstractEventLoop,
) -> ChatJob:
    """Translates and prepares a request. Slow, so it runs off the event loop."""
    chat, origin = to_chat(body, items)
    return prepare(service, chat, loop, origin)


@router.post("/v1/responses/input_tokens", responses=ERRORS)
async def count_input_tokens(body: ResponsesRequest, request: Request) -> InputTokens:
    """Counts the tokens of a conversation's prompt."""
    service = service_of(request)
    body.check()
    service.check_model(body.model)
    items = [*itertools.chain(*_items(body, service))]
    length = sum(item.length for _, item in items) + len(body.instructions or "")
    count = await service.workers.run(request, length, _count, service, body, items)
    return InputTokens(input_tokens=count)


def _count(service: Service, body: ResponsesRequest, items: list[Placed]) -> int:
    return num_prompt_tokens(service, *to_chat(body, items))


def _written(value: Any) -> Response:
    return Response(sse.encoded(value), media_type="application/json")


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=_STORED)
async def get_response(response_id: str, request: Request) -> Response:
    """A stored response; one that runs has its output so far."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise refused("stream", "A stored response cannot be streamed: leave stream out.")
    return _written(service_of(request).responses.get(response_id).response)


@router.delete("/v1/responses/{response_id}", responses=_STORED)
async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    """Forgets a stored response. One that runs is cancelled."""
    store = service_of(request).responses
    run = store.get(response_id).run
    store.forget(response_id)
    if run is not None:
        run.cancel()
    return DeletedResponse(id=response_id)


@router.post(
    "/v1/responses/{response_id}/cancel",
    response_model=ResponseObject,
    responses=_STORED,
)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancels a response that runs."""
    stored = service_of(request).responses.get(response_id)
    if stored.run is not None:
        stored.run.cancel()
    elif not stored.response["background"]:
        raise ApiError(
            400,
            "Cannot cancel a synchronous response: background is false.",
            param="response_id",
            code="response_ended",
        )
    elif (status := stored.response["status"]) != "cancelled":
        raise ApiError(
            400,
            f"The response {response_id!r} has ended: its status is {status}.",
            param="response_id",
            code="response_ended",
        )
    return _written(stored.response)


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_model=ItemList,
    responses=_STORED,
)
async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items of the conversation before a response, the last one first unless order is asc."""
    stored = service_of(request).responses.get(response_id)
    items = [_listed(response_id, i, item) for i, item in enumerate(stored.items)]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(
            400, f"after is {shown(after)}, expected the id of an input item.", param="after"
        )
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    found = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }
    return _written(found)


def _listed(response_id: str, index: int, item: InputItem) -> dict[str, Any]:
    """Returns an item with the members that clients expect: id, status, lists of parts."""
    found = {
        "id": f"item_{index}_{response_id}",
        "status": "completed",
        **item.model_dump(exclude_none=True),
        "type": item.kind,
    }
    if item.kind != "message":
        return found
    answer = item.role == "assistant"
    if isinstance(item.content, str):
        kind = "output_text" if answer else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    if answer:
        found["content"] = [{**part, "annotations": []} for part in found["content"]]
    return found
