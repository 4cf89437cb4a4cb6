"""Registry of reasoning parsers: name -> class with the tags around reasoning.

To add a parser, add one file to this package. The first look-up imports all files. Code outside the
package may also call `register_reasoning_parser` before the server starts.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import cpmcu.serving.reasoning_parsers
from cpmcu.serving.reasoning_parsers.base import ReasoningParser

# Name -> (class, file that registered it).
_parsers: dict[str, tuple[type[ReasoningParser], str]] = {}


def register_reasoning_parser(
    *names: str,
) -> Callable[[type[ReasoningParser]], type[ReasoningParser]]:
    """Registers the decorated class for `--reasoning-parser NAME`.

    "auto" chooses it if the chat template has its sign, or end tag. Raises ValueError if a name is
    taken.
    """
    if not names or "auto" in names or "none" in names:
        raise ValueError(
            f"a reasoning parser is named {', '.join(names) or 'nothing'}, but must have a name, "
            "and auto and none have a meaning"
        )

    def register(parser: type[ReasoningParser]) -> type[ReasoningParser]:
        source = inspect.getsourcefile(parser) or "<unknown>"
        for name in names:
            known = _parsers.get(name)
            if known is not None and known[0].__qualname__ != parser.__qualname__:
                raise ValueError(
                    f"reasoning parser {name!r} is registered twice: by {known[1]} and by {source}"
                )
        for name in names:
            _parsers[name] = (parser, source)
        return parser

    return register


def registered_reasoning_parsers() -> dict[str, str]:
    """Reasoning parser -> file that registered it, sorted by name."""
    package = cpmcu.serving.reasoning_parsers
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {name: _parsers[name][1] for name in sorted(_parsers)}


def find_reasoning_parser(name: str, template: str | None) -> type[ReasoningParser] | None:
    """Returns the class of --reasoning-parser `name`, or None for none.

    "auto" is the class whose sign, or end tag, the template has; of several, the longest.
    Raises ValueError with the known names.
    """
    known = registered_reasoning_parsers()
    if name == "none":
        return None
    if name != "auto":
        if name not in known:
            raise ValueError(
                f"reasoning_parser is {name!r}, but must be auto, none or one of: "
                f"{', '.join(known)}"
            )
        return _parsers[name][0]
    parsers = [p for p, _ in _parsers.values() if (p.sign or p.end) in (template or "")]
    return max(parsers, key=lambda parser: len(parser.sign or parser.end), default=None)
