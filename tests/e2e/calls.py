"""Shared by tests of the HTTP API: paths, bodies, a key, and the check of an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

FIRST = {"Authorization": "Bearer first"}

CHAT = "/v1/chat/completions"

HELLO = {"messages": [{"role": "user", "content": "x = "}]}


def error_of(reply: httpx.Response, status: int) -> dict[str, str | None]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


def node_modules(*packages: str) -> str:
    """Returns the folder of npm's packages. Skips the test if one of them is not installed."""
    places = [os.environ.get("NODE_PATH", "")]
    if shutil.which("npm"):
        done = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True)
        places.append(done.stdout.strip())
    for place in filter(None, places):
        if shutil.which("node") and all((Path(place) / name).is_dir() for name in packages):
            return place
    names = " ".join(packages)
    pytest.skip(f"node lacks a package: npm install -g {names}, or set NODE_PATH")


def run_server(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpmcu.server", *flags]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
