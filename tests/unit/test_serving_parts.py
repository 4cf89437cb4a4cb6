"""Parts of the server without a server: bytes of tokens, flags, prompts of conversations."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tokenizers_for_tests import TEXT, byte_fallback, byte_level, write_directory

from cpmcu import server
from cpmcu.chat_template import ChatTemplate
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.flags import from_flags
from cpmcu.outputs import TokenLogprobs
from cpmcu.serving import request_grammar, routes, runtime
from cpmcu.serving.app import create_app
from cpmcu.serving.chat.conversation import render
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import ApiError
from cpmcu.serving.http.request_log import RequestLog
from cpmcu.serving.logprobs import Logprobs
from cpmcu.serving.messages.conversation import to_chat as messages_to_chat
from cpmcu.serving.protocol import base, chat, completion, responses
from cpmcu.serving.protocol.messages import MessagesRequest
from cpmcu.serving.protocol.responses import ResponsesRequest
from cpmcu.serving.reasoning_parsers.think import ThinkParser
from cpmcu.serving.responses.items import to_chat as responses_to_chat
from cpmcu.serving.service import Service
from cpmcu.serving.tool_parsers.registry import find_tool_format
from cpmcu.text.token_text import TokenTexts
from cpmcu.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
MESSAGES = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text(make, tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, make()))
    texts = TokenTexts(tokenizer)
    text = TEXT + " €ß"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(texts.bytes_of(token) for token in ids).decode()
    assert joined.removeprefix(" ") == text
    assert any("\ufffd" in texts.text_of(token) for token in ids)
    end = tokenizer.id_of("</s>")
    assert (texts.text_of(end), texts.is_special(end)) == ("</s>", True)
    assert not any(texts.is_special(token) for token in ids)
    assert texts.bytes_of(tokenizer.vocab_size + 5) == b""


def test_no_two_of_the_likeliest_tokens_share_a_name(tmp_path):
    """The chosen token has the plain name, so clients find its log-probability under it."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_fallback()))
    letter, byte = tokenizer.id_of("a"), tokenizer.id_of("<0x61>")
    half, other = tokenizer.id_of("<0xE4>"), tokenizer.id_of("<0xBD>")
    assert None not in (letter, byte, half, other)
    top = ((letter, -0.5), (byte, -1.5), (half, -2.5), (other, -3.5))
    writer = Logprobs(TokenTexts(tokenizer), 3)
    found = writer.write([(token, TokenLogprobs(token, value, top)) for token, value in top])
    assert found.tokens == ["a", "a", "bytes:\\xe4", "bytes:\\xbd"]
    first = {"a": -0.5, f"token_id:{byte}": -1.5, "bytes:\\xe4": -2.5}
    assert found.top_logprobs[0] == found.top_logprobs[2] == first
    assert found.top_logprobs[1] == {f"token_id:{letter}": -0.5, "a": -1.5, "bytes:\\xe4": -2.5}
    assert found.top_logprobs[3] == {**first, "bytes:\\xbd": -3.5}
    for name, (_, value), each in zip(found.tokens, top, found.top_logprobs):
        assert each[name] == value
    by_id = Logprobs(TokenTexts(tokenizer), 0, as_ids=True).write(
        [(byte, TokenLogprobs(byte, -1.0))]
    )
    assert (by_id.tokens, by_id.top_logprobs) == (
        [f"token_id:{byte}"],
        [{f"token_id:{byte}": -1.0}],
    )


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("hello a", [0, 0, 5]),  # <s>, then "▁hello" for "hello"
        (" the a", [0, 0, 1, 4]),
        ("<s>a", [0, 3, 3]),  # the first <s> is taken for the one in the text
        ("a<|im_end|>\na b", [0, 0, 1, 11, 11, 12, 13, 14]),
        ("你é", [0, 0, 0, 1]),
    ],
)
def test_offsets_into_an_echoed_prompt(text, offsets, tmp_path):
    directory = write_directory(tmp_path, byte_fallback(), add_bos_token=True)
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode(text)
    writer = Logprobs(TokenTexts(tokenizer), 0, echo=text, num_echoed=len(ids))
    output = tokenizer.encode("a", add_special_tokens=False)
    found = writer.write([(token, None) for token in [*ids, *output]])
    assert found.text_offset == [*offsets, len(text)]


@pytest.mark.parametrize(
    ("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_an_open_server_without_keys_is_warned_of(host, warned, caplog):
    with runtime.listen(host, 0) as listener:
        runtime.warn_if_open(listener)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == warned
    assert all("it listens on 0.0.0.0: give --api-key KEY" in message for message in found)


def test_every_field_of_the_configuration_is_a_flag():
    parser = server.make_parser()
    flags = ["--host", "::1", "--port", "1", "--api-key", "a", "--api-key", "b", "--max_queue", "3"]
    parsed = parser.parse_args([*flags, "--model", "x", "--max-num-seqs", "4", "--return-metrics"])
    config = from_flags(ServerConfig, parsed)
    assert (config.host, config.port, config.api_key, config.max_queue) == ("::1", 1, ("a", "b"), 3)
    assert config.return_metrics
    text = parser.format_full_help()
    for field in dataclasses.fields(ServerConfig):
        assert f"--{field.name.replace('_', '-')} " in text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("port", 65536, "port is 65536"),
        ("host", "", "host is '', but must be an address"),
        ("served_model_name", ("a", ""), "served_model_name is '', but must be a name"),
        ("max_queue", 0, "max_queue is 0"),
        ("max_body_mib", 0, "max_body_mib"),
        ("shutdown_timeout", 0.0, "shutdown_timeout is 0.0"),
        ("ping_interval", float("inf"), "ping_interval"),
        ("cors_origin", ("http://x/y",), "cors_origin"),
        ("root_path", "llm", "root_path is 'llm', but must begin with / and not end with one"),
        ("root_path", "/llm/", "root_path is '/llm/'"),
        ("tool_call_parser", "qwen", "tool_call_parser is 'qwen', but must be auto, none or one"),
        ("reasoning_parser", "", "reasoning_parser is '', but must be auto, none or one of: deeps"),
    ],
)
def test_invalid_configurations_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**{field: value})


def test_the_document_names_everything():
    """The documents have every endpoint, field (taken or refused), limit, metric and flag."""
    names = ("server.md", "server_flags.md", "responses.md", "prefix_cache.md")
    text = "".join((ROOT / "docs" / name).read_text("utf-8") for name in names)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"[\w/{}:-]+", " ".join(re.findall(r"`([^`]+)`", text))))
    fields = {*chat.ChatRequest.model_fields, *completion.CompletionRequest.model_fields}
    fields |= base.REFUSED.keys() | base.IGNORED
    asked = responses.ResponsesRequest
    fields |= {*asked.model_fields, *asked.refused_fields, *asked.ignored_fields}
    assert not fields - named
    assert not {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(ServerConfig)} - named
    limits = {base.MAX_CHOICES, base.MAX_LOGPROBS, base.MAX_STOPS, base.MAX_STOP_LENGTH}
    limits |= {base.MAX_BIASES, base.MAX_SALT_LENGTH}
    assert not limits - set(map(int, re.findall(r"\b\d+\b", text)))
    service = Service(EngineConfig(device="cpu"), ServerConfig())
    assert not set(create_app(service).openapi()["paths"]) - named
    shown = re.findall(
        r"^# TYPE ((?:vllm|cpmcu):\w+) (\w+)$", service.metrics.render().decode(), re.MULTILINE
    )
    found = {name for name, kind in shown if not name.endswith("_created")}
    assert not found - named


def test_a_model_under_other_names_with_another_template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token }}{{ messages[0].content }}<|tool_call_start|>")
    names = ("a", "b")
    config = ServerConfig(
        chat_template=str(path), served_model_name=names, reasoning_parser="think"
    )
    service = Service(EngineConfig(device="cpu", num_threads=1), config)
    try:
        service.load()
        model = service.model
        assert model.template.render([{"role": "user", "content": "x"}]).startswith("<s>x")
        assert model.reasoning_parser is ThinkParser
        assert model.tool_format is find_tool_format("minicpm4", None)
        assert service.names == names
        service.check_model("b")
        with pytest.raises(ApiError, match="not served here") as caught:
            service.check_model("tiny-python-minicpm")
        assert caught.value.status == 404
    finally:
        service.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [(None, "No such file"), ("{% if %}", "t.jinja: the chat template is mal")],
)
def test_a_template_is_read_before_the_model_is_loaded(source, message, tmp_path, monkeypatch):
    monkeypatch.setattr("cpmcu.serving.model.LLM", None)
    if source is not None:
        (tmp_path / "t.jinja").write_text(source)
    service = Service(EngineConfig(), ServerConfig(chat_template=str(tmp_path / "t.jinja")))
    with pytest.raises((OSError, ValueError), match=message):
        service.load()


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content CUT}}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("cut", ["", "| trim"])
@pytest.mark.parametrize(
    "last", ["end", "im", "|", "s", "user", "", None, "import os\n    ", " a "]
)
def test_a_last_message_that_goes_on(cut, last):
    """The prompt ends with the rendered last message, without the end of its turn."""
    template = ChatTemplate(MARKED.replace("CUT", cut), {})
    messages = [chat.ChatMessage(role="user", content="end of user")]
    messages.append(chat.ChatMessage(role="assistant", content=last))
    text = render(
        template,
        messages,
        tools=[],
        variables={},
        add_generation_prompt=True,
        continue_final_message=True,
    )
    begin = "<|im_start|>user\nend of user<|im_end|>\n<|im_start|>assistant\n"
    assert text == (begin + last.strip() if cut and last else begin + (last or ""))


@pytest.mark.parametrize(
    ("content", "message"),
    [("x", "leaves the last message out"), ([{"type": "image_url"}], "of type text, found")],
)
def test_a_last_message_that_cannot_go_on(content, message):
    messages = [chat.ChatMessage(role="assistant", content=content)]
    more = {"tools": [], "variables": {}, "add_generation_prompt": False}
    with pytest.raises(ApiError, match=message):
        render(ChatTemplate("x", {}), messages, continue_final_message=True, **more)


@pytest.mark.parametrize("started", [False, True])
def test_a_request_that_is_cut_off(started, caplog):
    """If the stopping server cancels a request that has no response yet, it gets a 503."""
    sent = []

    async def app(scope, receive, send):
        if started:
            await send({"type": "http.response.start", "status": 200})
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    async def run():
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        task = asyncio.create_task(RequestLog(app)(scope, None, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(run())
    assert [message.get("status") for message in sent] == ([200] if started else [503, None])
    assert "request cancelled" in caplog.text and "Traceback" not in caplog.text


def test_a_route_is_added_by_adding_a_file(tmp_path, monkeypatch):
    """A router of another package works too; paths in PUBLIC need no key."""
    (tmp_path / "extra.py").write_text(
        "from fastapi import APIRouter\n"
        "router = APIRouter()\n"
        "PUBLIC = ('/open',)\n"
        "@router.get('/open')\nasync def a() -> str:\n    return 'a'\n"
        "@router.get('/closed')\nasync def b() -> str:\n    return 'b'\n"
    )
    monkeypatch.setattr(routes, "__path__", [*routes.__path__, str(tmp_path)])
    service = Service(EngineConfig(device="cpu"), ServerConfig(api_key=("k",)))

    async def run() -> list[int]:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                (await client.get(path)).status_code for path in ("/open", "/closed", "/health")
            ]

    assert asyncio.run(run()) == [200, 401, 503]


def test_a_lossy_verify_strategy_is_named():
    """The header of every response and the metrics name it."""
    info = "spec_decode_verify_strategy_info{"

    async def run(**fields: str) -> tuple[str | None, str]:
        config = EngineConfig(device="cpu", speculative_config=SpeculativeConfig(**fields))
        service = Service(config, ServerConfig())
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply, metrics = await client.get("/version"), await client.get("/metrics")
        (line,) = (line for line in metrics.text.splitlines() if info in line)
        return reply.headers.get("x-verify-strategy"), line

    header, line = asyncio.run(run(verify_strategy="topp"))
    assert header == "topp; lossy"
    assert 'lossy="true"' in line and 'verify_strategy="topp"' in line
    header, line = asyncio.run(run())
    assert header is None
    assert 'lossy="false"' in line and 'verify_strategy="target_match"' in line


def test_the_help_needs_no_web_framework():
    program = (
        "import sys\nfrom cpmcu.server import make_parser\nmake_parser()\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("request_type", "fields", "param"),
    [
        (ResponsesRequest, {"input": "a", "text": {"format": FORM}}, "text.format"),
        (MessagesRequest, {**MESSAGES, "output_config": {"format": FORM}}, "output_config.format"),
        (MessagesRequest, {**MESSAGES, "output_format": FORM}, "output_format"),
    ],
)
def test_errors_name_the_format_as_the_client_does(monkeypatch, request_type, fields, param):
    monkeypatch.setattr(request_grammar, "available", lambda: False)
    body = request_type.model_validate(fields)
    items = [("input[0]", item) for item in getattr(body, "items", [])]
    chat, origin = responses_to_chat(body, items) if items else messages_to_chat(body)
    with pytest.raises(ApiError, match=f"^{param} needs structured output") as raised:
        chat.sampling_fields(origin.format_field)
    assert raised.value.param == param
