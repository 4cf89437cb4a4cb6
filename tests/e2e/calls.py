"""Shared by tests of the HTTP API: paths, bodies, a key, and the check of an error."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx

FIRST = {"Authorization": "Bearer first"}

CHAT = "/v1/chat/completions"

HELLO = {"messages": [{"role": "user", "content": "x = "}]}


def error_of(reply: httpx.Response, status: int) -> dict[str, str | None]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


def run_server(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpmcu.server", *flags]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
