"""From the command line to a loaded model: flags, files, and requests that come too early."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess

import httpx

from tests.e2e.calls import CHAT, HELLO, error_of, run_server
from tests.missing import skip_unless
from tests.python_path import python_path


def test_the_socket_opens_before_the_model_is_loaded(server):
    lines = server.log.splitlines()
    listening = next(i for i, line in enumerate(lines) if "listening on" in line)
    assert listening < next(i for i, line in enumerate(lines) if ": loading tiny-python" in line)
    (ready,) = [line for line in lines if "is ready after" in line]
    assert "draft eagle, " in ready and ready.endswith(" GB")


@skip_unless(shutil.which("curl"), "curl is missing")
def test_the_log_names_a_command_to_try(server):
    (line,) = [line for line in server.log.splitlines() if "to try: " in line]
    command = shlex.split(line.partition("to try: ")[2])
    done = subprocess.run([*command, "--silent"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_the_model_loads_while_the_web_framework_is_imported(tmp_path):
    (tmp_path / "fastapi.py").write_text(
        "import os, signal, threading, time\n"
        "for _ in range(3000):\n"
        "    if all(each.name != 'cpmcu-load' for each in threading.enumerate()):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.01)\n"
    )
    found = run_server("--port", "0", "--device", "cpu", PYTHONPATH=python_path(tmp_path))
    assert found.returncode == 0
    assert " is ready after " in found.stderr


def test_a_missing_package(tmp_path):
    """A missing package is found while the model loads. The process ends with one sentence."""
    error = "raise ImportError('No module named fastapi', name='fastapi')\n"
    (tmp_path / "fastapi.py").write_text(error)
    found = run_server("--port", "0", "--device", "cpu", PYTHONPATH=python_path(tmp_path))
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert (
        "cpmcu.server: the server needs the package 'fastapi': pip install 'cpmcu[server]'\n"
    ) in found.stderr


def test_loading(tmp_path):
    """Until the model is loaded, all endpoints that need it answer 503 with Retry-After."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    async def run() -> None:
        service = Service(EngineConfig(device="cpu"), ServerConfig())
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.get("/health")
            assert reply.status_code == 503
            assert reply.json() == {"status": "loading", "model_loaded": False}
            assert (await client.post("/ping")).status_code == 503
            assert (await client.get("/load")).json() == {"server_load": 0}
            for path, body in ((CHAT, HELLO), ("/tokenize", {"prompt": "x"})):
                reply = await client.post(path, json=body)
                assert error_of(reply, 503)["code"] == "loading"
                assert int(reply.headers["retry-after"]) >= 1
            assert (await client.get("/metrics")).status_code == 200
            await asyncio.to_thread(service.load)
            assert (await client.get("/health")).json()["status"] == "ok"
            assert (await client.get("/ping")).json()["status"] == "ok"
            assert (await client.get("/load")).json() == {"server_load": 0}
            service.stop()
            assert (await client.get("/health")).json()["status"] == "stopping"
            assert error_of(await client.post(CHAT, json=HELLO), 503)["code"] == "stopping"
        service.close()

    asyncio.run(run())


def test_files_that_are_not_there():
    found = run_server("--port", "0", "--api-key", "@no/keys")
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == "cpmcu.server: no/keys: No such file or directory"
    found = run_server("--port", "0", "--chat-template", "no/x")
    assert found.returncode == 1
    assert (
        "the model cannot be loaded: --chat-template no/x: No such file or directory\n"
        in found.stderr
    )


def test_a_model_that_cannot_be_loaded():
    found = run_server("--model", "/nowhere", "--port", "0")
    assert found.returncode == 1
    assert found.stderr.count("the model cannot be loaded") == 1
    assert "Traceback" not in found.stderr


def test_wrong_flags(server):
    for flags, message in (
        (["--prot", "1"], "did you mean --port?"),
        (["--port", "70000"], "port is 70000"),
        (["--cors-origin", "example.org"], "--cors-origin"),
    ):
        found = run_server(*flags)
        assert found.returncode == 2
        assert message in found.stderr
    found = run_server("--port", str(server.port))
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()  # nothing has been loaded
    assert line.startswith("cpmcu.server: cannot listen on 127.0.0.1")
    assert line.endswith("; give another --port, or 0 for a free one")
