"""Shared by tests of the HTTP API: paths, bodies, a key, and the check of an error."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import Server

FIRST = {"Authorization": "Bearer first"}

CHAT = "/v1/chat/completions"

HELLO = {"messages": [{"role": "user", "content": "x = "}]}


def error_of(reply: httpx.Response, status: int) -> dict[str, str | None]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


@contextlib.contextmanager
def begun(server: Server, body: Mapping[str, object]) -> Iterator[None]:
    """Runs a stream of completions within the block, with the key of `limited`."""
    url = server.url + "/v1/completions"
    body = {**body, "stream": True}
    with httpx.stream("POST", url, json=body, headers=FIRST, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)  # the first of many: its slots are taken, or will be before others are
        yield
        assert reply.status_code == 200
        assert "data: [DONE]" in lines


def run_server(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpmcu.server", *flags]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def node_modules(*packages: str) -> str:
    """Returns the folder of npm's packages; skips the test if node has not all of these."""
    places = [os.environ.get("NODE_PATH", "")]
    if shutil.which("node") and shutil.which("npm"):
        done = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True)
        places.append(done.stdout.strip())
        for place in filter(None, places):
            if all((Path(place) / package).is_dir() for package in packages):
                return place
    names = " ".join(packages)
    pytest.skip(f"node has not the packages {names}: npm install -g {names}, or set NODE_PATH")
