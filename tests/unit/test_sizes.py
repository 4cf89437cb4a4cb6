"""A C++ file has at most 500 lines and a function at most 120, unless the file's header says why.

The header is the comment at the start of a file. `Length of NAME: REASON` in it permits a longer
function of that name, `Length of this file: REASON` a longer file. An unused permission is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 120

# Comments, directives, and constants that may contain a brace or a bracket.
NO_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*|R"(\w*)\(.*?\)\1"'
    r"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'",
    re.DOTALL | re.MULTILINE,
)
# Text before a declaration that does not belong to it.
LABEL = re.compile(r"\s*(?:(?:public|private|protected):|[A-Z][A-Z0-9_]*\([^()]*\)\s*\n)")
ATTRIBUTE = re.compile(r"alignas\([^()]*\)|\[\[[^\[\]]*\]\]")
SCOPE = re.compile(r"(?:^|[\s>])(?:namespace|class|struct|union|enum|extern)\b[^()]*$")
# A name with parameters.
NAME = re.compile(r"((?:\w+::)*(?:operator\s*(?:\(\)|[^\s\w(]+|[\w ]+)|~?\w+))\s*\(")
NOT_NAMES = {
    "__launch_bounds__",
    "__cluster_dims__",
    "__attribute__",
    "decltype",
    "requires",
    "noexcept",
    "explicit",
}
PERMISSION = re.compile(r"Length of ([\w:~]+|this file): \S")


@dataclass(frozen=True)
class Function:
    name: str
    num_lines: int


def without_comments(text: str) -> str:
    """The text without comments. Line numbers stay the same."""
    return NO_CODE.sub(lambda match: "\n" * match[0].count("\n"), text)


def functions_of(text: str) -> Iterator[Function]:
    """The functions defined in a namespace or a class. A lambda counts as part of its function."""
    code = without_comments(text)
    start = 0  # where the declaration that is read begins
    brackets = braces = 0  # numbers of open ones: in a declaration; in a body or initializer
    name: str | None = None
    for match in re.finditer(r"[(){};]", code):
        sign, at = match[0], match.start()
        if sign in "()":
            brackets += {"(": 1, ")": -1}[sign] if braces == 0 else 0
        elif brackets > 0:
            continue  # a default argument, or the lambda of a macro
        elif braces == 0 and sign == "{":
            while label := LABEL.match(code, start, at):
                start = label.end()
            head = code[start:at]
            if SCOPE.search(ATTRIBUTE.sub("", head)):
                start = at + 1
                continue
            if name is None and not head.rstrip().endswith("="):
                names = [n for n in NAME.findall(head) if n not in NOT_NAMES]
                name = names[0] if names else None
            braces = 1
        elif braces == 0:
            start, name = at + 1, None
        elif sign != ";":
            braces += {"{": 1, "}": -1}[sign]
            # After a member's initializer comes another initializer or the body of the constructor.
            if braces == 0 and not re.match(r"\s*[,{]", code[at + 1 :]):
                if name is not None:
                    begin = start + len(code[start:at]) - len(code[start:at].lstrip())
                    yield Function(name, code.count("\n", begin, at) + 1)
                start, name = at + 1, None


def permissions_of(text: str) -> set[str]:
    """The functions, or `this file`, that the file's header permits to be long."""
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        header.append(line.removeprefix("//").strip())
    return set(PERMISSION.findall(" ".join(header)))


def faults_of(text: str) -> list[str]:
    num_lines = text.count("\n")
    long = {f.name: f.num_lines for f in functions_of(text) if f.num_lines > MAX_FUNCTION_LINES}
    if num_lines > MAX_FILE_LINES:
        long["this file"] = num_lines
    permitted = permissions_of(text)
    faults = [
        f"{name} has {lines} lines and no reason"
        for name, lines in long.items()
        if name not in permitted
    ]
    return faults + [f"Length of {name}: nothing needs it" for name in permitted - long.keys()]


def test_no_file_and_no_function_is_long_without_a_reason() -> None:
    faults = {
        str(source.relative_to(CSRC)): faults
        for source in sorted(CSRC.rglob("*"))
        if source.suffix in (".h", ".cpp", ".cu", ".cuh")
        if (faults := faults_of(source.read_text()))
    }
    assert not faults


BODY = "".join(f"  f({i});\n" for i in range(MAX_FUNCTION_LINES))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", "namespace a {\nvoid run(int n = 0) {\n" + BODY + "}\n}\n"),
        (
            "run",
            "struct alignas(8) A : B {\n  int x = 0;\n  void run() const {\n" + BODY + "  }\n};\n",
        ),
        (
            "A::run",
            "int A::run(const B& b) {\n  const auto g = [&] { return '}'; };\n" + BODY + "}\n",
        ),
        ("A", "class A {\n public:\n  A(int n) : n_{n}, m_{0} {\n" + BODY + "  }\n};\n"),
        (
            "run_kernel",
            "template <int kN>\n__global__ void __launch_bounds__(32 * kN)\nrun_kernel(int n) {\n"
            + BODY
            + "}\n",
        ),
    ],
)
def test_a_long_function_is_found_and_may_have_a_reason(name: str, text: str) -> None:
    short = text.replace(BODY, "  f();\n")
    assert [f.name for f in functions_of(text)] == [name]
    assert len(faults_of(text)) == 1 and faults_of(text)[0].startswith(f"{name} has 12")
    permission = f"// Runs.\n//\n// Length of {name}: it runs.\n"
    assert not faults_of(permission + text)
    assert faults_of(permission + short) == [f"Length of {name}: nothing needs it"]
    assert not faults_of(short)


def test_a_long_file_is_found_and_may_have_a_reason() -> None:
    text = "int x;\n" * (MAX_FILE_LINES + 1)
    assert faults_of(text) == ["this file has 501 lines and no reason"]
    assert not faults_of("// Length of this file: a table.\n" + text)
