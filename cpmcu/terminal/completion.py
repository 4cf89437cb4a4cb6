"""`cpmcu completion SHELL`: prints a completion script, made from the flags of every verb."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from cpmcu.flags import FlagParser

SHELLS = ("bash", "zsh", "fish")
_INSTALL = """\
bash: cpmcu completion bash > ~/.local/share/bash-completion/completions/cpmcu
zsh: cpmcu completion zsh > a file _cpmcu in a directory of $fpath
fish: cpmcu completion fish > ~/.config/fish/completions/cpmcu.fish"""
_FILES = re.compile(r"PATH|FILE|DIR")


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag for completion. An argument has no names."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    takes_file: bool = False


def script(arguments: Sequence[str], verbs: Mapping[str, str]) -> str:
    """The script of the shell that `arguments` name. `verbs`: name -> what it does."""
    parsed = make_parser().parse_args(list(arguments))
    flags = {verb: flags_of(parser) for verb, parser in _parsers(verbs).items()}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[parsed.shell](verbs, flags)


def make_parser() -> FlagParser:
    """The parser of `cpmcu completion`."""
    parser = FlagParser(
        prog="cpmcu completion",
        description="Prints a script that completes verbs, flags and values in a shell.",
        epilog=_INSTALL,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def flags_of(parser: argparse.ArgumentParser) -> list[Flag]:
    """The flags and arguments that `--help-all` shows."""
    found = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        takes_value = action.nargs not in (0, "?")
        found.append(
            Flag(
                names=tuple(action.option_strings),
                help=re.split(r" \(default|; ", (action.help or "").replace("%%", "%"))[0],
                takes_value=takes_value,
                choices=tuple(map(str, action.choices or ())),
                takes_file=takes_value and bool(_FILES.search(str(action.metavar or ""))),
            )
        )
    return found


def _parsers(verbs: Mapping[str, str]) -> dict[str, FlagParser]:
    from cpmcu import bench, cli, server
    from cpmcu.convert import __main__ as convert

    programs = {"serve": server, "bench": bench, "convert": convert}
    found = {verb: program.make_parser(verb) for verb, program in programs.items()}
    found |= {verb: cli.make_parser(verb) for verb in cli.VERBS}
    found["completion"] = make_parser()
    return {verb: found[verb] for verb in verbs}


def _bash(verbs: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    lines = [
        "# bash completion of cpmcu",
        "_cpmcu() {",
        "    local cur=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD-1]} words files",
        "    if [ $COMP_CWORD -eq 1 ]; then",
        f'        COMPREPLY=($(compgen -W "{" ".join(verbs)}" -- "$cur"))',
        "        return",
        "    fi",
        "    if [ \"$cur\" = '=' ]; then",
        "        cur=''",
        "    elif [ \"$flag\" = '=' ]; then",
        "        flag=${COMP_WORDS[COMP_CWORD-2]}",
        "    fi",
        "    case ${COMP_WORDS[1]} in",
    ]
    for verb in verbs:
        lines += [f"    {verb})", "        case $flag in", *_bash_values(flags[verb])]
        names = [name for each in flags[verb] for name in each.names]
        words = [word for each in flags[verb] if not each.names for word in each.choices]
        lines += [
            "        *)",
            f'            words="{" ".join([*words, *names])}" files=yes ;;',
            "        esac ;;",
        ]
    lines += [
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        '    if [ -n "$files" ] && [ "${cur#-}" = "$cur" ]; then',
        "        compopt -o filenames",
        '        COMPREPLY+=($(compgen -f -- "$cur"))',
        "    fi",
        "}",
        "complete -F _cpmcu cpmcu",
    ]
    return "\n".join(lines) + "\n"


def _bash_values(flags: Sequence[Flag]) -> Iterator[str]:
    """The cases of flags that take a value."""
    nothing: list[str] = []
    for flag in flags:
        if not flag.names or not flag.takes_value:
            continue
        pattern = "|".join(flag.names)
        if flag.choices:
            yield f'        {pattern}) words="{" ".join(flag.choices)}" ;;'
        elif flag.takes_file:
            yield f"        {pattern}) files=yes ;;"
        else:
            nothing += flag.names
    if nothing:
        yield f"        {'|'.join(nothing)}) ;;"


def _zsh(verbs: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    lines = ["#compdef cpmcu", "_cpmcu() {", "    local -a verbs", "    verbs=("]
    lines += [f"        {shlex.quote(f'{verb}:{does}')}" for verb, does in verbs.items()]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe verb verbs",
        "        return",
        "    fi",
        "    local verb=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $verb in",
    ]
    for verb in verbs:
        lines.append(f"    {verb}) _arguments \\")
        for flag in flags[verb]:
            lines += [f"        {spec} \\" for spec in _zsh_specs(flag)]
        lines.append("        '*:file:_files' ;;")
    lines += [
        "    esac",
        "}",
        'if [ "$funcstack[1]" = _cpmcu ]; then',
        '    _cpmcu "$@"',
        "else",
        "    compdef _cpmcu cpmcu",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _zsh_specs(flag: Flag) -> Iterator[str]:
    value = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.takes_file else " "
    if not flag.names:
        yield shlex.quote(f"1:argument:{value}")
    shown = re.sub(r"([\[\]:\\])", r"\\\1", flag.help)
    for name in flag.names:
        yield shlex.quote(f"*{name}[{shown}]" + (f":value:{value}" if flag.takes_value else ""))


def _fish(verbs: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    lines = ["# fish completion of cpmcu"]
    for verb, does in verbs.items():
        first = "complete -c cpmcu -f -n __fish_use_subcommand"
        lines.append(f"{first} -a {verb} -d {_fish_text(does)}")
    for verb in verbs:
        begin = f"complete -c cpmcu -n '__fish_seen_subcommand_from {verb}'"
        for flag in flags[verb]:
            parts = [begin, *(_fish_name(name) for name in flag.names)]
            if flag.choices:
                parts.append(f"-x -a '{' '.join(flag.choices)}'")
            elif flag.takes_value:
                parts.append("-r -F" if flag.takes_file else "-x")
            lines.append(" ".join([*parts, "-d", _fish_text(flag.help)]))
    return "\n".join(lines) + "\n"


def _fish_name(name: str) -> str:
    return f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"


def _fish_text(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
