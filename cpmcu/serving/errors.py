"""Errors in OpenAI's format, and in Anthropic's for the paths of /v1/messages."""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cpmcu.checks import PromptTooLongError, shown_json
from cpmcu.serving.http.request_id import request_id
from cpmcu.serving.validation_words import wanted

CLIENT_LEFT = 499  # nginx's status for a request whose client disconnected

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

_MESSAGES = "/v1/messages"
# Anthropic's types; other statuses below 500: invalid_request_error, from 500: api_error.
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error response: HTTP status, message, and the request field that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
        too_long: PromptTooLongError | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.too_long = too_long
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    def body(self) -> dict[str, Any]:
        """Returns the error as a JSON object."""
        body = error_body(self.status, str(self), param=self.param, code=self.code)
        if self.too_long is not None:  # llama.cpp's members, by which clients cut the prompt
            sizes = {"n_prompt_tokens": self.too_long.tokens, "n_ctx": self.too_long.most}
            body["error"] |= sizes
        return body

    def response(self, path: str) -> JSONResponse:
        """Returns the error as an HTTP response in the format of the interface at `path`."""
        ours = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
        body = self.messages_body() if ours else self.body()
        return JSONResponse(body, self.status, self.headers)

    def messages_body(self) -> dict[str, Any]:
        """Returns the error as a JSON object in Anthropic's format."""
        message = _printable(str(self))
        if self.too_long is not None:
            message = _prompt_too_long(self.too_long)
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _MESSAGES_TYPES.get(self.status, other)
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.code == "thread_not_found":  # clients then send all messages
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error, "request_id": request_id.get()}


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns an error as a JSON object in OpenAI's format."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _printable(message), "type": kind, "param": param, "code": code}}


def _printable(message: str) -> str:
    """Returns a message in which each unpaired surrogate is replaced by its escape."""
    return message.encode("utf-8", "backslashreplace").decode()


def _prompt_too_long(error: PromptTooLongError) -> str:
    """Returns Anthropic's sentence, by which clients know that they must shorten the prompt."""
    # Clients parse both numbers, so "at least" is written after them.
    end = f"; it has at least {error.tokens} tokens" if error.at_least else ""
    return (
        f"prompt is too long: {error.tokens} tokens > {error.most} maximum, prompt and output "
        f"together{end}."
    )


def internal_error() -> ApiError:
    """The response to an error inside the server. It contains no details."""
    return ApiError(500, "The server failed to answer this request; its log says why.")


def server_stopping() -> ApiError:
    """The response to a request that arrives or is unfinished when the server stops."""
    return ApiError(503, "The server is stopping.", code="stopping", retry_after=5)


def client_left() -> ApiError:
    """The error that ends a request whose client disconnected. Only the log has it."""
    return ApiError(CLIENT_LEFT, "The client has left.")


def refused(param: str, message: str) -> ApiError:
    """Returns a 400 for one field."""
    return ApiError(400, message, param=param, code="unsupported_value")


def unknown_part(place: str, kind: str, text_kinds: Sequence[str]) -> ApiError:
    """Returns a 400 for a part of a message without a text."""
    why = "but its text is missing" if kind in text_kinds else "but only text is known"
    return refused(place, f"{place} has a part of type {kind[:64]!r}, {why}.")


def of_body(error: ValidationError) -> RequestValidationError:
    """Returns the error of a model that a route validated itself, as one of the request's body."""
    return RequestValidationError(
        [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    )


def add_handlers(app: FastAPI) -> None:
    """Makes `app` answer every error in the format of its interface."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        if compressed := _of_coding(request):
            return compressed.response(request.scope["path"])
        sent = request.headers.get("content-type", "")
        return _from_validation(error, sent).response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            message = f"There is no {request.url.path!r} here."
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}."
        elif error.status_code == 400 and isinstance(error.__cause__, (ValueError, RecursionError)):
            # FastAPI raises this for a body that is not UTF-8 or is nested too deeply.
            found = _of_coding(request) or _invalid_json()
            return found.response(request.scope["path"])
        else:
            message = str(error.detail)
        found = ApiError(error.status_code, message, headers=error.headers)
        return found.response(request.scope["path"])


def _of_coding(request: Request) -> ApiError | None:
    """Returns the error of a compressed body, which no route reads."""
    coding = request.headers.get("content-encoding", "identity")
    if coding == "identity":
        return None
    message = f"The request body is encoded as {coding[:64]!r}: send it without Content-Encoding."
    return ApiError(415, message, code="unsupported_encoding")


def _invalid_json(reason: str = "") -> ApiError:
    return ApiError(400, f"The request body is not valid JSON{reason}.", code="invalid_json")


def _from_validation(error: RequestValidationError, content_type: str) -> ApiError:
    """Returns the first validation error of a body as one sentence that names the field."""
    errors = _innermost(error.errors())
    first = errors[0]
    if first["type"] == "json_invalid":
        position, reason = first["loc"][-1], first["ctx"]["error"]
        return _invalid_json(f": at character {position}: {reason}")
    loc = [part for part in first["loc"] if part not in ("body", "query", "path")]
    path = list(itertools.takewhile(_is_field, loc))
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    if not param:
        return ApiError(400, _not_an_object(first["input"], content_type), code="invalid_body")
    forms = _forms(errors, path)
    found = _shown(first["input"])
    code = str(first["type"])  # pydantic's, such as less_than_equal
    if first["type"] == "missing" and path == loc:
        message = f"{param} is missing."
    elif forms:
        message = f"{param} is {found}, but must be {' or '.join(forms)}."
        code = "invalid_value"  # the value is refused for several reasons
    elif first["type"] == "missing":
        message = f"{param} holds {found}, but has no {loc[-1]}."
    else:
        must = wanted(first["type"], first.get("ctx", {}))
        message = f"{param} {'is' if path == loc else 'holds'} {found}, but {must}."
    return ApiError(400, message, param=param, code=code)


def _not_an_object(found: Any, content_type: str) -> str:
    """The message for a body that is empty, is no object, or was not read as JSON."""
    if isinstance(found, bytes):  # FastAPI parses a body only if its type is JSON
        sent = f"{content_type!r:.80}" if content_type else "missing"
        return f"The header Content-Type is {sent}, but must be 'application/json'."
    kind = "empty or null" if found is None else _shown(found)
    return f"The request body is {kind}, but must be a JSON object."


# pydantic's names of union members (they appear in `loc` as parts of a field) -> their forms.
_FORMS = {
    "str": "a text",
    "bool": "true or false",
    "dict[str,any]": "an object",
    "list[str]": "a list of texts",
    "list[int]": "a list of token ids",
    "list[list[int]]": "a list of lists of token ids",
    "list[ItemPart]": 'a list of parts like {"type": "input_text", "text": "a"}',
    "list[ContentPart]": 'a list of parts like {"type": "text", "text": "a"}',
    "list[InputItem]": 'a list of items like {"role": "user", "content": "a"}',
    "ToolChoice": 'an object like {"type": "function", "name": "f"}',
    "list[Block]": 'a list of blocks like {"type": "text", "text": "a"}',
    "list[ResultBlock]": 'a list of blocks like {"type": "text", "text": "a"}',
    "NamedTool": 'an object like {"type": "function", "function": {"name": "f"}}',
    "AllowedTools": 'an object like {"type": "allowed_tools", "allowed_tools": {...}}',
}
# Lists for which the errors of the elements are reported.
_LISTS = ("list[InputItem]", "list[ItemPart]", "list[Block]", "list[ResultBlock]")
_SHOWN_LENGTH = 64
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN_LENGTH


def _innermost(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the errors within the elements of lists of objects, if there are any.

    A union of a text and such a list has errors of both alternatives. The list's name is removed
    from the place of an error.
    """

    def depth(error: Mapping[str, Any]) -> int:
        return sum(part in _LISTS for part in error["loc"][:-1])

    deepest = max(map(depth, errors))
    found: list[Mapping[str, Any]] = []
    for error in errors:
        if depth(error) == deepest:
            *outer, last = error["loc"]
            found.append({**error, "loc": [p for p in outer if p not in _LISTS] + [last]})
    return found


def _is_field(part: int | str) -> bool:
    return isinstance(part, int) or (
        re.fullmatch("[a-z_]+", part) is not None and part not in _FORMS
    )


def _forms(errors: Sequence[Mapping[str, Any]], path: list[int | str]) -> list[str]:
    """Returns the forms allowed at `path` if it is a union."""
    forms = []
    for error in errors:
        loc = list(error["loc"][1:])
        if loc[: len(path)] == path and len(loc) > len(path):
            literal = error["type"] == "literal_error" and len(loc) == len(path) + 1
            form = error["ctx"]["expected"] if literal else _FORMS.get(str(loc[len(path)]))
            forms += [form] if form is not None else []
    return list(dict.fromkeys(forms))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return shown_json(value)
    text = _repr.repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."
