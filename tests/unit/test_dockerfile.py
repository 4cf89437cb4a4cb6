"""Checks the Dockerfile without Docker:

the copied files exist, and the commands are those of this package.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path

from cpmcu.server import make_parser

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"ARG", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN"}
INSTRUCTIONS |= {"USER", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """Returns (name, rest) of each instruction, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (l.partition(" ") for l in lines) if name]


def arguments(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def ignored(path: str) -> bool:
    """Does .dockerignore leave out `path`? The last matching line decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        parts = path.split("/")
        names = parts if "**/" in line else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            result = not line.startswith("!")
    return result


def test_instructions_are_known():
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    assert instructions()[0][0] in ("ARG", "FROM")


def test_images_have_versions():
    values = dict(rest.split("=") for rest in arguments("ARG"))
    for image in arguments("FROM"):
        name = re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], image.split()[0])
        assert re.fullmatch(r"[\w./]+:\d[\w.-]+", name)


def test_what_is_copied_exists_and_is_not_ignored():
    copied = [shlex.split(rest)[:-1] for rest in arguments("COPY") if "--from=" not in rest]
    names = [name for words in copied for name in words]
    assert {"csrc", "cpmcu", "pyproject.toml", "setup.py"} <= set(names)
    for name in names:
        assert (ROOT / name).exists()
        assert not ignored(name)
    for name in ("cpmcu/serving/page/index.html", "cpmcu/assets/tiny-python-minicpm/config.json"):
        assert not ignored(name)
    for name in ("cpmcu/C.cpython-311.so", "csrc/x/__pycache__", ".git", "build", "tests"):
        assert ignored(name)


def test_all_that_setup_reads_is_copied():
    """pyproject.toml names the README; the packages are built from csrc and cpmcu."""
    copied = {name for rest in arguments("COPY") for name in shlex.split(rest)[:-1]}
    readme = re.search(r'^readme = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {readme[1], "LICENSE", "csrc", "cpmcu"} <= copied


def test_architectures_are_known():
    (archs,) = (rest.split("=")[1] for rest in arguments("ARG") if rest.startswith("CPMCU_"))
    setup = (ROOT / "setup.py").read_text()
    assert all(f'"{arch}": ' in setup for arch in archs.split(","))


def test_package_lists_are_not_kept():
    for command in arguments("RUN"):
        if "apt-get install" in command:
            assert "--no-install-recommends" in command
            assert "rm -rf /var/lib/apt/lists/*" in command


def test_it_runs_the_server_and_not_as_root():
    (entry,) = (json.loads(rest) for rest in arguments("ENTRYPOINT"))
    assert entry[:3] == ["python", "-m", "cpmcu.server"]
    parsed = make_parser().parse_args(entry[3:])
    assert parsed.host == "0.0.0.0"
    assert arguments("EXPOSE") == [str(parsed.port)]
    assert arguments("USER") == ["cpmcu"]
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    (check,) = arguments("HEALTHCHECK")
    command = json.loads(check.split("CMD ", 1)[1])
    assert f":{parsed.port}/health" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")
