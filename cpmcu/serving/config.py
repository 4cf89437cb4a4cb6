"""Options of the server: address, names, keys, limits. Each field becomes a flag.

This module does not import the web framework, so `--help` works without it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence

from cpmcu.checks import check_filled
from cpmcu.config import option
from cpmcu.sampling import MAX_LOGPROBS
from cpmcu.serving.reasoning_parsers.registry import find_reasoning_parser
from cpmcu.serving.tool_parsers.registry import find_tool_format
from cpmcu.text.files import read_text

logger = logging.getLogger(__name__)

LOG_FORMATS = ("text", "json")
_ORIGIN = r"[a-z][a-z0-9+.-]*://[^/\s]+"  # applications may have other schemes than http
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `cpmcu serve`. Raises ValueError for a value out of range."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0: all interfaces",
        brief="address (default: 127.0.0.1; 0.0.0.0: all)",
    )
    port: int = option(
        8000, "port to listen on; 0: a free port, which is logged", brief="port (default: 8000)"
    )
    uds: str | None = option(
        None, "Unix domain socket to listen on, in place of host and port", metavar="PATH"
    )
    served_model_name: Sequence[str] = option(
        (),
        "model name that clients send (default: last part of the model's path); repeatable",
        brief="model name that clients send; repeatable",
    )
    api_key: Sequence[str] = option(
        (),
        "API key that clients must send, or @FILE with one key a line; repeatable",
        metavar="KEY|@FILE",
        brief="API key that clients must send; repeatable",
    )
    cors_origin: Sequence[str] = option(
        (), "web origin whose pages may call the server, or *; repeatable", metavar="ORIGIN"
    )
    allowed_hosts: Sequence[str] = option(
        (),
        "name by which clients reach the server (their Host header), or *; repeatable (default: any"
        " name; on a loopback address without a key: names of the machine itself)",
        metavar="NAME",
    )
    chat_template: str | None = option(
        None,
        "Jinja file that replaces the checkpoint's chat template",
        metavar="PATH",
        brief="Jinja file that replaces the checkpoint's",
    )
    reasoning_parser: str = option(
        "auto",
        "parser that separates reasoning from content; auto: chosen from the chat template; none: "
        "no parser; cpmcu list prints the names",
        metavar="NAME",
        brief="parser that separates reasoning from content",
    )
    tool_call_parser: str = option(
        "auto",
        "notation of the model's tool calls; auto: chosen from the chat template; none: calls stay "
        "text; cpmcu list prints the names",
        metavar="NAME",
        brief="notation of the model's tool calls",
    )
    keep_billing_header: bool = option(
        False,
        "keep a first line of the system message that starts with x-anthropic-billing-header:; it "
        "differs in each request, so nothing behind it would be found in the prefix cache",
    )
    response_store: int = option(
        256,
        "number of ended responses of /v1/responses that are kept in memory; 0: none, so that "
        "previous_response_id and GET /v1/responses/ID are not possible",
        metavar="N",
    )
    return_metrics: bool = option(
        False, "add metrics to every response, also without return_metrics in the request"
    )
    enable_force_include_usage: bool = option(
        False, "send usage in every chunk of every stream, also if not requested"
    )
    return_tokens_as_token_ids: bool = option(
        False, "name the tokens of log-probabilities token_id:N, unless a request says otherwise"
    )
    cut_max_tokens: bool = option(
        False,
        "answer a chat, completion or response whose max_tokens is above the context length, with "
        "as many tokens as there is room for; default: refuse it, as OpenAI does",
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        f"most likeliest tokens that a request may ask for at a position; above {MAX_LOGPROBS}, "
        f"and -1: {MAX_LOGPROBS}",
    )
    root_path: str = option(
        "", "path prefix of the server behind a proxy, such as /llm; accepted with and without it"
    )
    max_queue: int = option(
        256,
        "largest number of outputs running or waiting; further requests get a 429",
        brief="most requests running or waiting, else 429",
    )
    max_body_mib: int = option(16, "largest request body, in MiB")
    max_body_values: int = option(
        1 << 18, "largest number of JSON values in a request body, such as token ids"
    )
    max_messages: int = option(4096, "largest number of messages in a conversation")
    max_text_length: int = option(4_000_000, "longest text of a request, in characters")
    header_timeout: float = option(
        30.0, "seconds from a request's first byte within which its headers must arrive"
    )
    body_timeout: float = option(300.0, "seconds within which a request's body must arrive")
    shutdown_timeout: float = option(
        30.0, "seconds that requests may run after SIGTERM or Ctrl-C before they are aborted"
    )
    ping_interval: float = option(15.0, "seconds without an event before a stream sends a comment")
    log_format: str = option("text", "plain text lines or JSON objects", choices=LOG_FORMATS)
    log_level: str = option("info", "lowest level that is logged", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        check_filled(
            "host", self.host, "an address such as 127.0.0.1, or 0.0.0.0 for every interface"
        )
        check_filled("uds", self.uds, "the path of a socket")
        check_filled("chat_template", self.chat_template, "a file")
        for name in self.served_model_name:
            check_filled("served_model_name", name, "a name")
        find_reasoning_parser(self.reasoning_parser, None)
        find_tool_format(self.tool_call_parser, None)
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}, but must be 0 to 65535")
        for name in ("queue", "body_mib", "body_values", "messages", "text_length"):
            name = f"max_{name}"
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs is {self.max_logprobs}, but must be at least -1")
        if self.response_store < 0:
            raise ValueError(f"response_store is {self.response_store}, but must be at least 0")
        for name in ("header_timeout", "body_timeout", "shutdown_timeout", "ping_interval"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0 seconds")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ValueError(
                f"root_path is {self.root_path!r}, but must begin with / and not end with one"
            )
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not re.fullmatch(_ORIGIN, origin):
                raise ValueError(
                    f"cors_origin is {origin!r}, but must be * or like https://example.org"
                )

    @property
    def most_logprobs(self) -> int:
        """Maximum number of likeliest tokens that a request may ask for at a position."""
        return MAX_LOGPROBS if self.max_logprobs == -1 else min(self.max_logprobs, MAX_LOGPROBS)

    def keys(self) -> list[str]:
        """Returns the API keys, including the keys of files.

        Raises OSError if a file cannot be read. Raises ValueError if a file is not UTF-8 or has no
        keys, or if a key is empty or not valid in an HTTP header.
        """
        keys: list[str] = []
        for value in self.api_key:
            if not value.startswith("@"):
                keys.append(value)
                continue
            lines = [line.strip() for line in read_text(value[1:]).splitlines()]
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise ValueError(f"{value[1:]} has no API keys, expected one a line")
            keys += found
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must have ASCII letters, digits and signs, no spaces")
        return keys
