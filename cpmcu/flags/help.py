"""The text of `--help`: the most used flags by group, one line each."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping

Briefs = dict[str, str]  # destination of a flag -> its line of help; "": hidden

_INDENT = "  "
_LEFT = 30  # maximum width of the column of flags
_CHOICES = 14  # longer lists of choices are not shown in that column


def short_help(
    parser: argparse.ArgumentParser, usage: str, briefs: Briefs, words: Mapping[str, str]
) -> str:
    """Usage, description, and the flags of each group.

    If no flag of a group has a brief, the group gets the full help texts.
    """
    width = max(30, shutil.get_terminal_size().columns)
    lines = [*textwrap.wrap(f"usage: {usage}", width, subsequent_indent=_INDENT), ""]
    lines += [*textwrap.wrap(parser.description or "", width), ""]
    groups = [(group.title or "", _rows(group, briefs)) for group in parser._action_groups]
    if words:
        groups.insert(0, ("arguments", (list(words.items()), [])))
    rows = [row for _, (found, _) in groups for row in found]
    left = max(len(flag) for flag, _ in rows if len(flag) <= _LEFT) + 2 * len(_INDENT)
    for title, (found, others) in groups:
        if not found:
            continue
        lines.append(f"{title}:")
        for flag, text in found:
            lines += _row(flag, text, left, width)
        if others:
            lines += textwrap.wrap(
                "also " + ", ".join(others),
                width,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT * 2,
                break_on_hyphens=False,
            )
        lines.append("")
    for line in (parser.epilog or "").splitlines():
        lines += textwrap.wrap(line, width, break_on_hyphens=False)
    return "\n".join(lines).rstrip() + "\n"


def _rows(
    group: argparse._ArgumentGroup, briefs: Briefs
) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns (flag, brief) rows of a group, and the flags without a brief."""
    shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
    if not any(action.dest in briefs for action in shown):
        return [(flag_text(action), (action.help or "").replace("%%", "%")) for action in shown], []
    brief = [action for action in shown if briefs.get(action.dest)]
    others = [action.option_strings[0] for action in shown if action.dest not in briefs]
    return [(flag_text(action), briefs[action.dest]) for action in brief], others


def flag_text(action: argparse.Action) -> str:
    """A flag with its choices or metavar, for example `--device auto|cpu|cuda`.

    A switch has all its names, another flag its short name and its first name.
    """
    if not action.option_strings:
        return str(action.metavar or "|".join(map(str, action.choices or [action.dest])))
    short = [name for name in action.option_strings if not name.startswith("--")]
    names = action.option_strings if action.nargs == 0 else [*short, action.option_strings[0]]
    name = ", ".join(names)
    if action.nargs in (0, "?"):  # a switch needs no value
        return name
    choices = "|".join(map(str, action.choices or ()))
    value = choices if 0 < len(choices) <= _CHOICES else action.metavar or "NAME"
    return f"{name} {value}"


def _row(flag: str, text: str, left: int, width: int) -> list[str]:
    """Lines of a flag and its text. If the flag is too long, the text begins on the next line."""
    margin = left if width >= 2 * left else len(_INDENT) * 2
    begin = (_INDENT + flag).ljust(margin)
    lines = textwrap.wrap(text, width - margin) or [""]
    if len(begin) > margin:
        return [begin, *(" " * margin + line for line in lines)]
    return [begin + lines[0], *(" " * margin + line for line in lines[1:])]
