"""SIGTERM and Ctrl-C while the server starts, runs and stops."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.e2e.calls import CHAT, run_server
from tests.e2e.harness import Server, start
from tests.python_path import python_path


def stream_until_end(server: Server, tokens: int, begun: threading.Event) -> tuple[str, bool]:
    """Reads a stream to its end. Returns (last finish reason, whether it had a [DONE])."""
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    reason, done = "", False
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            begun.set()
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                reason = choices[0]["finish_reason"] or ""
    return reason, done


@pytest.mark.parametrize(
    ("seconds", "tokens", "reason"), [("200", 150, "length"), ("0.3", 1900, "abort")]
)
def test_stopping(seconds, tokens, reason):
    """Running requests finish or are aborted at the deadline; then the process ends."""
    with start("--shutdown-timeout", seconds) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            begun = threading.Event()
            stream = pool.submit(stream_until_end, server, tokens, begun)
            assert begun.wait(60)
            assert server.stop(signal.SIGTERM if reason == "length" else signal.SIGINT) == 0
            assert stream.result() == (reason, True)
        assert "Traceback" not in server.log


def stop_at_once(server: Server) -> int:
    """Sends SIGTERM and, once the server has noticed, Ctrl-C; returns the exit status."""
    server.process.send_signal(signal.SIGTERM)
    while "stopping" not in server.log:
        assert server.process.poll() is None, server.log
        time.sleep(0.01)
    return server.stop(signal.SIGINT)


def test_a_second_ctrl_c():
    """Running requests are aborted at once, streamed or not."""
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    with start("--shutdown-timeout", "60") as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            begun = threading.Event()
            whole = pool.submit(server.post, "/v1/completions", body)
            stream = pool.submit(stream_until_end, server, 1900, begun)
            while server.metric("vllm:num_requests_running") < 2:
                time.sleep(0.01)
            assert begun.wait(60)
            assert stop_at_once(server) == 0
            assert stream.result() == ("abort", True)
            assert whole.result().json()["choices"][0]["finish_reason"] == "abort"
        assert "Traceback" not in server.log


def test_stopping_before_a_body_has_come():
    """A request whose body is incomplete gets an error in the usual format."""
    with start() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode() + b'{"a": ')
            server.get("/health")  # accepted behind it
            assert stop_at_once(server) == 0
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "stopping"
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_while_the_program_starts(number, tmp_path):
    """A signal and then Ctrl-C during the import of a library."""
    path = tmp_path / "fastapi.py"
    path.write_text(
        "import os, signal, time\n"
        "try:\n"
        f"    exec('os.kill(os.getpid(), {int(number)}); time.sleep(10)')\n"
        "finally:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    found = run_server("--port", "0", "--log-level", "error", PYTHONPATH=python_path(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_in_a_callback(number, tmp_path):
    """A signal during an import, in a callback whose exceptions Python ignores."""
    (tmp_path / "fastapi.py").write_text(
        "import os, time, weakref\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        f"seen = weakref.ref(thing, lambda _: os.kill(os.getpid(), {int(number)}))\n"
        "del thing\n"
        "raise ValueError('the signal was lost')\n"
    )
    found = run_server("--port", "0", "--log-level", "error", PYTHONPATH=python_path(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")


def test_stopping_while_the_model_loads():
    """The process ends at once while the loading thread is running."""
    with start(ready=False) as server:
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 30
        assert "Traceback" not in server.log
