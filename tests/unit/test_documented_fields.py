"""The documents of the server name every field that the official clients can send.

A client that is newer than CHECKED may have more fields: the test is then skipped, and names them.
"""

from __future__ import annotations

import importlib.metadata
import re
import typing
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsStreaming as ChatParams,
)
from openai.types.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from cpmcu.serving.protocol.chat import ChatRequest
from cpmcu.serving.protocol.completion import CompletionRequest
from cpmcu.serving.protocol.messages import CountRequest, MessagesRequest
from cpmcu.serving.protocol.responses import ResponsesRequest

DOCS = Path(__file__).parents[2] / "docs"
CHECKED = {"openai": (3, 3), "anthropic": (2, 13)}  # the newest versions that the documents cover


def is_newer(client: str) -> bool:
    version = importlib.metadata.version(client).split(".")[:2]
    return tuple(map(int, version)) > CHECKED[client]


@pytest.mark.parametrize(
    ("params", "request_model", "documents"),
    [
        (ChatParams, ChatRequest, ["server.md"]),
        (CompletionCreateParamsStreaming, CompletionRequest, ["server.md"]),
        (ResponseCreateParamsStreaming, ResponsesRequest, ["responses.md", "server.md"]),
        (InputTokenCountParams, ResponsesRequest, ["responses.md", "server.md"]),
        (MessageCreateParamsStreaming, MessagesRequest, ["messages.md"]),
        (MessageCountTokensParams, CountRequest, ["messages.md"]),
    ],
    ids=["chat", "completions", "responses", "input_tokens", "messages", "count_tokens"],
)
def test_every_field_of_the_clients(params, request_model, documents):
    fields = set(typing.get_type_hints(params))
    text = "\n".join((DOCS / name).read_text("utf-8") for name in documents)
    named = set(re.findall("`([a-z_]+)`", text))
    known = {*request_model.model_fields, *request_model.ignored_fields}
    known |= {*request_model.refused_fields}
    if request_model is CountRequest:  # takes the fields that determine the prompt, no others
        known |= {*MessagesRequest.model_fields}
    assert len(fields) > 5
    client = params.__module__.split(".")[0]
    if is_newer(client) and not fields <= named & known:
        pytest.skip(f"a newer {client} also has {sorted(fields - named | fields - known)}")
    assert fields - named == set(), "fields that the documents do not name"
    assert fields - known == set(), "fields that are neither read, ignored nor refused"
