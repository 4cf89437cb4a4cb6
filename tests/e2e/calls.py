"""Common code of tests of the HTTP API: paths, bodies, a key, and the check of an error."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from tests.e2e.harness import Server
from tests.missing import REQUIRE_ALL, missing

FIRST = {"Authorization": "Bearer first"}

CHAT = "/v1/chat/completions"

HELLO = {"messages": [{"role": "user", "content": "x = "}]}


def error_of(reply: httpx.Response, status: int) -> dict[str, str | None]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    sizes = {"n_prompt_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    assert set(error) == {"message", "type", "param", "code"} | sizes
    assert "Traceback" not in error["message"]
    return error


@contextlib.contextmanager
def begun(server: Server, body: Mapping[str, object]) -> Iterator[None]:
    """Runs a stream of completions within the block, with the key of `limited`."""
    url = server.url + "/v1/completions"
    body = {**body, "stream": True}
    with httpx.stream("POST", url, json=body, headers=FIRST, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)  # now its slots are taken, or will be before those of later requests
        yield
        assert reply.status_code == 200
        assert "data: [DONE]" in lines


def run_server(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpmcu.server", *flags]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


# Packages of npm that tests install if node has not got them.
INSTALLED = {
    "ai": "6.0.326",
    "@ai-sdk/anthropic": "3.0.140",
    "@ai-sdk/openai": "3.0.141",
    "openai": "6.49.0",
    "zod": "4.6.7",
}
if REQUIRE_ALL:
    INSTALLED["@openai/codex"] = "0.171.0"  # 424 MB
_FOLDER = Path(__file__).parents[2] / "build" / "node"


def node_modules(*packages: str) -> str:
    """Returns a folder of npm's packages; skips the test if one of `packages` is missing.

    INSTALLED is installed into build/node once. Without a package index the test is skipped.
    """
    names = " ".join(packages)
    if not shutil.which("node") or not shutil.which("npm"):
        missing(f"this needs node and npm, and of npm {names}")
    done = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True)
    for place in (os.environ.get("NODE_PATH", ""), done.stdout.strip()):
        if place and all((Path(place) / package).is_dir() for package in packages):
            return place
    if not set(packages) <= set(INSTALLED):
        missing(f"node has not the packages {names}: npm install -g {names}, or set NODE_PATH")
    if error := _install():
        missing(f"npm cannot install {names}: {error}")
    return str(_FOLDER / "node_modules")


def _install() -> str:
    """Installs INSTALLED. Returns the reason of a failure, else "". A failure is not retried for
    ten minutes."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}@{version}" for name, version in INSTALLED.items()]
    command = ["npm", "install", "--prefix", str(_FOLDER), "--no-audit", "--no-fund", *wanted]
    command += ["--no-save", "--ignore-scripts", f"--fetch-retries={3 if REQUIRE_ALL else 0}"]
    command += ["--fetch-timeout=20000"]
    result = _FOLDER / "installed"  # what is installed, or why it is not
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests of other workers wait
        known = result.read_text() if result.exists() else ""
        if known == " ".join(wanted):
            return ""
        if known.startswith("error: ") and time.time() - result.stat().st_mtime < 600:
            return known
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
            result.write_text(" ".join(wanted))
        except subprocess.TimeoutExpired:
            result.write_text("error: it takes more than 240 s")
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or ["no message"]
            result.write_text(f"error: {lines[0]}")
        text = result.read_text()
        return text if text.startswith("error: ") else ""
