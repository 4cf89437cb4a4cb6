"""Command-line flags generated from dataclass fields.

Every flag may be spelt with dashes or underscores. A boolean flag takes an optional value
(`--cuda-graph`, `--cuda-graph no`). A field of type `Sequence[str]` is a repeatable flag. `--help`
shows the fields that have a `brief`; `--help-all` explains every flag.

No library makes the flags. jsonargparse, cyclopts and pydantic-settings have one help text, not a
short and a full one. Their imports take 134, 100 and 242 ms; the import of argparse takes 13 ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from cpmcu import __version__
from cpmcu.checks import shown
from cpmcu.errors import show_text
from cpmcu.flags.help import Briefs, flag_text, short_help

_TRUE = {"1", "true", "yes", "on", "y", "t"}
_FALSE = {"0", "false", "no", "off", "n", "f"}

FOOTER = """\
--help-all explains every flag, --version shows the version.
A flag shown without a value also takes yes or no: --cuda-graph no."""

T = TypeVar("T")


def parse_bool(text: str) -> bool:
    """Reads yes/no, true/false, on/off or 1/0. Raises ArgumentTypeError for other text."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected yes or no, found {text!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class FileFlags:
    """Flags of a file: name without the leading dashes -> value."""

    name: str  # name of the file
    values: Mapping[str, Any]


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser with one-sentence errors that accepts underscores in flags.

    `words`: name -> brief of the optional positional arguments, such as MODEL. The parsed namespace
    holds their values in the list `plain_words`.
    """

    def __init__(self, *, words: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **kwargs)
        self.words = dict(words or {})
        self.briefs: Briefs = {}
        self._given: dict[str, str] = {}
        self._file = ""  # prefix of errors while a file's flags are parsed
        if self.words:
            explained = "; ".join(f"{word}: {text}" for word, text in self.words.items())
            self.add_argument_group("arguments", explained)
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action="help", help="show the most used flags, and exit")
        group.add_argument("--help-all", action=_HelpAll, help="explain every flag, and exit")
        version = f"cpmcu {__version__}"
        group.add_argument("--version", action="version", version=version, help="show the version")

    def hide(self, *names: str) -> None:
        """Hides the flags with these destinations in `--help`."""
        self.briefs.update(dict.fromkeys(names, ""))

    def one_line_usage(self) -> str:
        """The usage line, without flags."""
        if self.usage is not None:
            return self.usage
        positionals = [flag_text(action) for action in self._actions if not action.option_strings]
        words = [*positionals, *(f"[{word}]" for word in self.words)]
        return " ".join([self.prog, *words, "[flags]"])

    def format_help(self) -> str:
        """The text of `--help`: the flags with a brief, or all flags if there is no brief."""
        own = dict.fromkeys(("help", "help_all", "version"), "")
        briefs = {**own, **self.briefs} if self.epilog else self.briefs  # the epilog has `own`
        return short_help(self, self.one_line_usage(), briefs, self.words)

    def format_full_help(self) -> str:
        """The text of `--help-all`."""
        self.usage = self.one_line_usage()
        return super().format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a message. If stdout cannot take a help text, exits with a sentence."""
        if file is not sys.stdout:
            super()._print_message(message, file)
        elif status := show_text(message, self.prog):
            self.exit(status)

    def named(self, message: str) -> str:
        """`message` with field names replaced by the flags as typed.

        A field name without an underscore may be an English word. It is replaced only if it is the
        subject at the beginning of the message. Field names of files are not replaced.
        """
        if message.startswith("speculative_config: "):  # keys of the JSON are not flags
            return message
        for action in self._actions:
            if not action.option_strings:
                continue
            name, flag = action.dest, self._given.get(action.dest)
            if flag is None and "speculative_config" in self._given and name.startswith("spec_"):
                continue  # the field may come from the JSON
            pattern = rf"\b{name}\b" if "_" in name else rf"^{name}(?=(\[\d+\])? (is|holds) )"
            flag = flag or action.option_strings[0]
            message = re.sub(rf"(?<!-)(?<!\.json: ){pattern}(\[\d+\])?", flag, message)
        return message

    def error(self, message: str) -> NoReturn:
        """Writes one sentence to stderr and exits with status 2."""
        message = re.sub(r"^argument (\S+): ", self._blamed, message)
        self.exit(2, f"{self.prog}: {self._file}{message} (--help lists flags)\n")

    def parse_args(
        self, args: Any = None, namespace: Any = None, *, file: FileFlags | None = None
    ) -> Any:
        """Parses `args`. The error for an unknown flag names the nearest known flag.

        `file`: flags for which `args` has none. The namespace's `from_file` has their destinations.
        """
        args = list(sys.argv[1:] if args is None else args)
        end = args.index("--") if self.words and "--" in args else len(args)
        parsed, unknown = self.parse_known_args(args[:end], namespace)
        for found in unknown:
            if found.startswith("-") and not (self.words and " " in found):
                self._unknown_flag(found.split("=", 1)[0])
        parsed.plain_words = unknown + args[end + 1 :]
        if len(parsed.plain_words) > len(self.words):
            found = parsed.plain_words[len(self.words)]
            hint = "; a text of several words needs quotes" if "PROMPT" in self.words else ""
            self.error(f"unexpected argument {shown(found)}{hint}")
        parsed.from_file = set() if file is None else self._add_file(parsed, file)
        return parsed

    def _add_file(self, parsed: argparse.Namespace, file: FileFlags) -> set[str]:
        """Sets the flags of a file that are not given otherwise. Returns their destinations."""
        self._file = f"{file.name}: "
        given, added = dict(self._given), {}
        for name, value in file.values.items():
            action = self._option_string_actions.get(f"--{name}")
            if name == "config":
                self.error("config cannot stand in a file of flags; give --config FILE itself")
            if action is None or action.nargs == 0:
                self._unknown_flag(name)
            if value is None or getattr(parsed, action.dest) is not None:
                continue
            self._given = {action.dest: f"--{name}"}
            read, _ = super().parse_known_args(self._written(name, action, value))
            setattr(parsed, action.dest, getattr(read, action.dest))
            added[action.dest] = f"--{name}"
        self._given = given | added
        self._file = ""
        return set(added)

    def _written(self, name: str, action: argparse.Action, value: Any) -> list[str]:
        """A flag of a file as it is typed."""
        repeatable = isinstance(action, argparse._AppendAction)
        if isinstance(value, dict) or (isinstance(value, list) and not repeatable):
            if name != "speculative-config":
                self.error(f"--{name} is {shown(value)}, expected one value")
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        for each in values:
            if not isinstance(each, (str, int, float)):
                self.error(f"--{name} is {shown(each)}, expected a text, a number, yes or no")
        texts = [("no", "yes")[each] if isinstance(each, bool) else str(each) for each in values]
        return [f"--{name}={text}" for text in texts]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Replaces underscores in flags by dashes, then parses like ArgumentParser."""
        args = list(sys.argv[1:] if args is None else args)
        self._given = {}
        dashed = [self._dashed(arg) for arg in args]
        if self.words:
            dashed = [self._switch(*pair) for pair in zip(dashed, [*dashed[1:], ""])]
        return super().parse_known_args(dashed, namespace)

    def _dashed(self, arg: str) -> str:
        name, equals, value = arg.partition("=")
        dashed = name.replace("_", "-") if name.startswith("--") else name
        action = self._option_string_actions.get(dashed)
        if action is None:
            return arg
        self._given[action.dest] = dashed
        return dashed + equals + value

    def _switch(self, arg: str, following: str) -> str:
        """A boolean flag takes the word behind it as its value only if that is yes or no."""
        action = self._option_string_actions.get(arg)
        if action is None or action.type is not parse_bool:
            return arg
        return arg if following.strip().lower() in _TRUE | _FALSE else f"{arg}=yes"

    def _blamed(self, match: re.Match[str]) -> str:
        """Replaces an error's "argument --one/--other: " by the name that was typed."""
        action = self._option_string_actions.get(match[1].split("/")[0])
        flag = None if action is None else self._given.get(action.dest)
        return f"{flag or match[1]}: "

    def _unknown_flag(self, flag: str) -> NoReturn:
        known = list(self._option_string_actions)
        if self._file:  # the names in a file have no dashes
            known = [name.removeprefix("--") for name in known if name.startswith("--")]
        near = difflib.get_close_matches(flag, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unknown flag {shown(flag)}{hint}")


class _HelpAll(argparse.Action):
    """The action of --help-all."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.exit(show_text(parser.format_full_help(), parser.prog))


def add_flags(
    parser: FlagParser,
    config: type[Any],
    title: str,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Adds one flag for each field of the dataclass `config` whose metadata allows it.

    `defaults`: field -> default shown in the help, if the program replaces the field's own default.
    A field whose metadata has a `group` is listed under that title.
    """
    defaults = defaults or {}
    groups = {group.title: group for group in parser._action_groups}
    if title not in groups:
        groups[title] = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        flags = field.metadata.get("flags")
        if flags is None:
            flags = ("--" + field.name.replace("_", "-"),)
        if flags:
            own = field.metadata.get("group") or title
            if own not in groups:
                groups[own] = parser.add_argument_group(own)
            groups[own].add_argument(
                *flags, dest=field.name, **_argument(field, hints[field.name], defaults)
            )
            if field.metadata.get("brief") is not None:
                parser.briefs[field.name] = field.metadata["brief"]


def from_flags(config: type[T], parsed: argparse.Namespace, **overrides: Any) -> T:
    """Makes `config` from parsed flags. A flag that was not given keeps the field's default."""
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    given = {k: v for k, v in vars(parsed).items() if k in names and v is not None}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return config(**{**given, **overrides})


def _argument(
    field: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for one field. The argparse default is always None."""
    kind, repeated = _scalar(hint)
    default = defaults.get(field.name, field.default)
    text = field.metadata.get("help", "")
    if field.name in defaults:
        text = text.partition(" (default: ")[0]
    if not _is_unset(default) and "(default: " not in text:
        text += f" (default: {_shown(default)})"
    arguments: dict[str, Any] = {"help": text.replace("%", "%%"), "default": None}
    if field.metadata.get("metavar"):
        arguments["metavar"] = field.metadata["metavar"]
    if kind is bool:
        return {"nargs": "?", "const": True, "type": parse_bool, "metavar": "yes|no", **arguments}
    if field.metadata.get("choices"):
        arguments["choices"] = field.metadata["choices"]
    elif "metavar" not in arguments:
        arguments["metavar"] = "N" if kind is int else "X" if kind is float else "TEXT"
    if repeated:
        arguments["action"] = "append"
    return {"type": _READERS.get(kind, kind), **arguments}


def _scalar(hint: Any) -> tuple[Callable[[str], Any], bool]:
    """Returns (converter, repeatable?) of a type hint such as `int | None` or `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        repeated = [arg for arg in options if typing.get_origin(arg) is not None]
        return _scalar(repeated[0] if repeated else options[0])
    if typing.get_origin(hint) is Sequence:
        return _scalar(typing.get_args(hint)[0])[0], True
    if hint not in (str, int, float, bool):
        raise TypeError(f"no flag can be made for a field of type {hint}")
    return typing.cast(Callable[[str], Any], hint), False


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # also for more digits than Python accepts
        raise argparse.ArgumentTypeError(f"expected an integer, found {shown(text)}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {shown(text)}") from None


_READERS: dict[Callable[[str], Any], Callable[[str], Any]] = {int: _integer, float: _number}


def _is_unset(default: Any) -> bool:
    return default is None or default is dataclasses.MISSING or default == ()


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default)
