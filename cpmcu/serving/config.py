"""What the server has beyond the engine: address, names, keys, limits. Flags come from the fields.

Nothing here is imported from the web framework, so `--help` works without it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from cpmcu.checks import check_filled
from cpmcu.config import option

logger = logging.getLogger(__name__)

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
REASONING_PARSERS = ("auto", "none", "think")
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "minicpm4")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `cpmcu serve`. Raises ValueError for a value out of range."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for every interface",
        brief="address (default: 127.0.0.1; 0.0.0.0: all)",
    )
    port: int = option(
        8000, "port to listen on; 0: a free one, named in the log", brief="port (default: 8000)"
    )
    served_model_name: Sequence[str] = option(
        (),
        "name that clients give as model (default: the model's last path part); repeatable",
        brief="name that clients give as model; repeatable",
    )
    api_key: Sequence[str] = option(
        (),
        "key that clients must send, or @FILE with one a line; repeatable",
        metavar="KEY|@FILE",
        brief="key that clients must send; repeatable",
    )
    cors_origin: Sequence[str] = option(
        (), "web origin whose pages may call the server, or *; repeatable", metavar="ORIGIN"
    )
    chat_template: str | None = option(
        None,
        "Jinja file to use instead of the checkpoint's chat template",
        metavar="PATH",
        brief="Jinja file in place of the checkpoint's",
    )
    reasoning_parser: str = option(
        "auto",
        "how thinking is told from the answer; auto looks at the chat template",
        choices=REASONING_PARSERS,
        brief="how thinking is told from the answer",
    )
    tool_call_parser: str = option(
        "auto",
        "how tool calls are written; auto looks at the chat template",
        choices=TOOL_PARSERS,
        brief="how tool calls are written",
    )
    keep_billing_header: bool = option(
        False,
        "keep a first line of the system message that starts with x-anthropic-billing-header:; it "
        "differs in each request, so nothing behind it would be found in the prefix cache",
    )
    return_metrics: bool = option(
        False, "put metrics into every response, not only where return_metrics asks for them"
    )
    enable_force_include_usage: bool = option(
        False, "give the usage in every chunk of every stream, asked for or not"
    )
    root_path: str = option(
        "", "path under which a proxy offers the server, such as /llm; also taken as it is"
    )
    max_queue: int = option(
        256,
        "most outputs in work, running or waiting; beyond that requests get a 429",
        brief="most requests in work; beyond that: 429",
    )
    max_body_mib: int = option(16, "largest request body, in MiB")
    max_body_values: int = option(
        1 << 18, "most JSON values of a request body, such as token ids of prompts"
    )
    max_messages: int = option(4096, "most messages of a conversation")
    max_text_length: int = option(4_000_000, "longest text of a request, in characters")
    header_timeout: float = option(
        30.0, "seconds in which the headers of a request must arrive, from its first byte"
    )
    body_timeout: float = option(300.0, "seconds in which the body of a request must arrive")
    shutdown_timeout: float = option(
        30.0, "seconds that requests have to finish after SIGTERM or Ctrl-C, before they are ended"
    )
    ping_interval: float = option(15.0, "seconds of silence in a stream before a comment is sent")
    log_format: str = option("text", "lines for people, or JSON objects", choices=LOG_FORMATS)
    log_level: str = option(
        "info",
        "least severe lines that are logged",
        choices=LOG_LEVELS,
        brief="debug, info, warning or error",
    )

    def __post_init__(self) -> None:
        check_filled(
            "host", self.host, "an address such as 127.0.0.1, or 0.0.0.0 for every interface"
        )
        check_filled("chat_template", self.chat_template, "a file")
        for name in self.served_model_name:
            check_filled("served_model_name", name, "a name")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}, but must be 0 to 65535")
        for name in ("queue", "body_mib", "body_values", "messages", "text_length"):
            name = f"max_{name}"
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("header_timeout", "body_timeout", "shutdown_timeout", "ping_interval"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0 seconds")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ValueError(
                f"root_path is {self.root_path!r}, but must begin with / and not end with one"
            )
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(
                    f"cors_origin is {origin!r}, but must be * or like https://example.org"
                )

    def keys(self) -> list[str]:
        """The API keys, those of files included.

        Raises OSError for a file that cannot be read, ValueError for one that is not UTF-8 or has
        no keys, for an empty key, and for one that no HTTP header can carry.
        """
        keys: list[str] = []
        for value in self.api_key:
            if not value.startswith("@"):
                keys.append(value)
                continue
            try:
                lines = Path(value[1:]).read_text("utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(f"{value[1:]} is not UTF-8 text: {error}") from error
            lines = [line.strip() for line in lines]
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise ValueError(f"{value[1:]} has no API keys, expected one a line")
            keys += found
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must have ASCII letters, digits and signs, no spaces")
        return keys
