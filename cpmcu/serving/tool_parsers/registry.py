"""Registry of tool parsers: name -> class, and the signs of its notation in a chat template.

To add a parser, add one file to this package. The first look-up imports all files. Code outside the
package may also call `register_tool_parser` before the server starts.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import cpmcu.serving.tool_parsers
from cpmcu.serving.tool_parsers.base import ToolParser
from cpmcu.serving.tool_parsers.calls import Tools

MakeParser = Callable[[Tools], ToolParser]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A registered parser."""

    name: str
    make: MakeParser  # makes the parser of one answer, from the tools of the request
    signs: tuple[str, ...]  # texts that each chat template of this notation contains, all of them
    tags: tuple[str, ...]  # tags that may be special tokens; the output text keeps them
    source: str  # the file that registered it


_formats: dict[str, ToolFormat] = {}


def register_tool_parser(
    name: str, *, signs: tuple[str, ...] = (), tags: tuple[str, ...] = ()
) -> Callable[[type[ToolParser]], type[ToolParser]]:
    """Registers the decorated class for `--tool-call-parser NAME`.

    "auto" chooses it if the chat template has all `signs`; without signs it never does. Raises
    ValueError if `name` is taken.
    """
    if name in ("auto", "none"):
        raise ValueError(f"a tool parser is named {name!r}, but auto and none have a meaning")

    def register(parser: type[ToolParser]) -> type[ToolParser]:
        source = inspect.getsourcefile(parser) or "<unknown>"
        known = _formats.get(name)
        if known is not None and getattr(known.make, "__qualname__", "") != parser.__qualname__:
            raise ValueError(
                f"tool parser {name!r} is registered twice: by {known.source} and by {source}"
            )
        _formats[name] = ToolFormat(name, parser, signs, tags, source)
        return parser

    return register


def registered_tool_parsers() -> dict[str, str]:
    """Returns the file that registered each tool parser, sorted by the parser's name."""
    package = cpmcu.serving.tool_parsers
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {name: _formats[name].source for name in sorted(_formats)}


def find_tool_format(name: str, template: str | None) -> ToolFormat | None:
    """Returns the format of --tool-call-parser `name`, or None for none.

    "auto" is the format whose signs the template has; of several, the one with the longest signs,
    since a notation may use another one's tags. Raises ValueError with the known names.
    """
    known = registered_tool_parsers()
    if name == "none":
        return None
    if name != "auto":
        if name not in known:
            raise ValueError(
                f"tool_call_parser is {name!r}, but must be auto, none or one of: "
                f"{', '.join(known)}"
            )
        return _formats[name]
    text = template or ""
    matching = [f for f in _formats.values() if f.signs and all(sign in text for sign in f.signs)]
    return max(matching, key=lambda f: len("".join(f.signs)), default=None)
