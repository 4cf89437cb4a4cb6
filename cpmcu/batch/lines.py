"""Lines of batch files: requests in cpmcu's form or in OpenAI's, and results.

| form | request | result |
|---|---|---|
| cpmcu's | id, prompt or messages, fields of SamplingParams | id, members of `result_object` |
| OpenAI's | custom_id, method, url, body | id, custom_id, response, error |
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cpmcu.checks import one_line, shown, shown_json
from cpmcu.grammar import Grammar
from cpmcu.sampling import SamplingParams
from cpmcu.text.files import MOST_BYTES

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_OWN = {"id", "prompt", "messages", "chat_template_kwargs"} | _SAMPLING
_OPENAI = {"custom_id", "method", "url", "body"}
_GRAMMARS = {
    "json_schema": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "lark": Grammar.lark,
}

_MOST_HELD = 256 << 20  # bytes of a pipe's lines and of the objects that hold them
_OBJECTS = 128  # bytes of the objects that hold a line
_SHOWN = 200  # bytes of a file that a message may show

Id = str | int
# Each call yields (number from 1, line) from the start.
Lines = Callable[[], Iterator[tuple[int, bytes]]]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch file. `url` is None in cpmcu's form.

    `fields`: the body, or in cpmcu's form the members of the line but for its id.
    """

    id: Id
    fields: Mapping[str, Any]
    url: str | None = None


def read_request(text: bytes) -> BatchRequest:
    """Reads a line of UTF-8. Raises ValueError if it is no request."""
    line = _object(text)
    if "custom_id" in line or "body" in line:
        return _openai_request(line)
    if "id" not in line:
        raise ValueError("there is no id, expected an id, and a prompt or messages")
    for name in line:
        if name not in _OWN:
            near = difflib.get_close_matches(name, _OWN, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown member {shown(name)}{hint}")
    if ("prompt" in line) == ("messages" in line):
        found = "a prompt and messages" if "prompt" in line else "no prompt and no messages"
        raise ValueError(f"there are {found}, expected one of them")
    fields = {name: value for name, value in line.items() if name != "id"}
    return BatchRequest(_id("id", line["id"]), fields)


def sampling_of(request: BatchRequest, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a request in cpmcu's form. `defaults`: for members not given.

    Raises ValueError for a value out of range.
    """
    given = {name: value for name, value in request.fields.items() if name in _SAMPLING}
    if given.get("grammar") is not None:
        given["grammar"] = _grammar(given["grammar"])
    if isinstance(given.get("logit_bias"), dict):
        biases = given["logit_bias"].items()
        given["logit_bias"] = {_token(token): bias for token, bias in biases}
    return dataclasses.replace(defaults, **given)


def answered(path: Path) -> set[Id]:
    """The ids of the results in an output file, which is created if it is missing.

    A last line that is cut off, as after a kill, is removed from the file. A pipe or a device, such
    as /dev/stdout, has no results. Raises ValueError for a file with other lines, OSError for one
    that cannot be read or written.
    """
    found: set[Id] = set()
    if path.exists() and not path.is_file() and not path.is_dir():
        return found
    with open(path, "a+b") as file:
        file.seek(0)
        if (start := file.read(_SHOWN)) and not start.startswith(b"{"):
            raise _no_result(path, 1, start.splitlines()[0])
        begin = file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(begin)
                break
            begin += len(line)
            try:
                found.add(_result_id(_object(line)))
            except (ValueError, KeyError):
                raise _no_result(path, number, line) from None
    return found


def _no_result(path: Path, number: int, line: bytes) -> ValueError:
    return ValueError(
        f"{path} line {number} is {shown(line.decode('utf-8', 'replace').strip())}, "
        "expected a result of a batch: name another --output"
    )


def request_lines(path: Path) -> Lines:
    """Returns a function that reads the lines that are not blank.

    Lines of a pipe, which can be read once only, are held in memory. Raises OSError for a file that
    cannot be read, and ValueError for a pipe that needs more than _MOST_HELD bytes. While the lines
    are read, too, a line of more than MOST_BYTES raises ValueError.
    """
    if path.is_file():
        with open(path, "rb"):
            return partial(_numbered, path)
    lines, size = [], 0
    for number, line in _numbered(path):
        lines.append((number, line))
        size += len(line) + _OBJECTS
        if size > _MOST_HELD:
            raise ValueError(
                f"{path} needs more than {_MOST_HELD >> 20} MiB of memory, since it can be read "
                "only once: write it to a file"
            )
    return lambda: iter(lines)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), 1):
            if len(line) > MOST_BYTES:
                raise ValueError(
                    f"{path} line {number} has more than {MOST_BYTES >> 20} MiB, "
                    "expected a request a line"
                )
            if line.strip():
                yield number, line


def _openai_request(line: Mapping[str, Any]) -> BatchRequest:
    for name in ("custom_id", "url", "body"):
        if name not in line:
            raise ValueError(f"there is no {name}, expected custom_id, method, url and body")
    for name in line:
        if name not in _OPENAI:
            raise ValueError(f"unknown member {shown(name)}, expected {', '.join(sorted(_OPENAI))}")
    if line.get("method", "POST") != "POST":
        raise ValueError(f"method is {shown(line['method'])}, expected 'POST'")
    url, body = line["url"], line["body"]
    if url not in URLS:
        raise ValueError(f"url is {shown(url)}, expected one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {shown(body)}, expected an object")
    if body.get("stream"):
        raise ValueError("stream is true, expected false: a batch has whole answers")
    return BatchRequest(_id("custom_id", line["custom_id"]), body, url)


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {shown_json(value)}, expected a JSON object")
    return value


def _result_id(line: Mapping[str, Any]) -> Id:
    """Raises ValueError or KeyError if the line is no result, such as a request."""
    name, answer = ("custom_id", "response") if "custom_id" in line else ("id", "text")
    if answer not in line:
        raise KeyError(answer)
    return _id(name, line[name])


def _id(name: str, value: Any) -> Id:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise ValueError(f"{name} is {shown_json(value)}, expected a text or an integer")
    return value


def _grammar(value: Any) -> Grammar:
    kinds = ", ".join(_GRAMMARS)
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= _GRAMMARS.keys():
        raise ValueError(f"grammar is {shown(value)}, expected an object with one of {kinds}")
    ((kind, source),) = value.items()
    return _GRAMMARS[kind](source)


def _token(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"logit_bias names {shown(text)}, expected token ids") from None
