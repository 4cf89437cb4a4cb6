"""The examples run. If an example needs another model, it is checked without that model."""

from __future__ import annotations

import asyncio
import json
import os
import py_compile
import re
import runpy
import shlex
import subprocess
import sys
import types

import pytest

from cpmcu.cli import make_parser as cli_parser
from cpmcu.server import make_parser as server_parser
from tests.e2e.harness import ROOT, start
from tests.python_path import python_path

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, status: int = 0, **environment: str) -> str:
    """Runs an example and returns its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def address(server):
    return {"OPENAI_BASE_URL": f"{server.url}/v1"}


QUESTIONS = ["> What is a token?", "> And how long is one?"]


def test_chat_without_a_server():
    lines = run("chat").splitlines()
    assert [line for line in lines if line.startswith("> ")] == QUESTIONS


def test_chat(address):
    lines = run("openai_chat", **address).splitlines()
    assert [line for line in lines if line.startswith("> ")] == QUESTIONS
    assert len([line for line in lines if line.startswith("--- ")]) == 2


def test_demo():
    (speeds,) = [line for line in run("demo").splitlines() if line.startswith("with a draft ")]
    assert speeds.endswith("; the same text")


def test_stream(address):
    *text, numbers = run("openai_stream", **address).splitlines()
    assert "".join(text)
    assert numbers.startswith("--- ")
    assert float(numbers.split("mean accept length ")[1]) > 1


def test_structured_output(address):
    pytest.importorskip("llguidance")
    text = run("openai_structured_output", **address)
    assert text.startswith("name='")
    assert "speed='" in text


def test_tools(address):
    pytest.importorskip("llguidance")
    first = run("openai_tools", **address).splitlines()[0]
    call, result = first.split(" = ")
    assert eval(call, {"add": lambda given: given["a"] + given["b"]}) == int(result)


def test_long_prompt(address, tmp_path):
    prompt = tmp_path / "prompt.txt"
    run("long_prompt_gen", "-o", str(prompt), "-l", "3000", "-q", "What does it do?", "--seed", "1")
    text = prompt.read_text("utf-8")
    assert len(text) == 3000
    assert text.endswith("\n\nWhat does it do?")
    lines = run("openai_long_prompt", str(prompt), **address).splitlines()
    read = [line.split() for line in lines if " tokens after " in line]
    assert len(read) > 3  # the server reads in chunks of 64
    assert read[-1][0] == read[-1][2]
    assert "length is 3, but" in run("long_prompt_gen", "-l", "3", status=1)
    nowhere = str(tmp_path / "no" / "x")
    said = run("long_prompt_gen", "-o", nowhere, "-l", "3000", status=1)
    assert said == f"long_prompt_gen.py: {nowhere} cannot be written: No such file or directory\n"


def test_a_long_prompt_repeats_sources_if_it_must():
    module = runpy.run_path(str(EXAMPLES / "long_prompt_gen.py"))
    assert len(module["long_prompt"](9_000_000, "Why?", 1)) == 9_000_000


@pytest.mark.parametrize("quant", ["yes", "no"])
@pytest.mark.parametrize("eagle", ["yes", "no"])
@pytest.mark.parametrize("what", ["generate", "serve"])
def test_minicpm4_flags_are_cpmcus(monkeypatch, what, quant, eagle):
    """Each switch becomes valid flags; further arguments are passed on."""
    seen: list[list[str]] = []
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: seen.append([*sys.argv]))
    switches = ["--apply_quant", quant, f"--apply-eagle={eagle}", "--apply-eagle-quant", quant]
    monkeypatch.setattr(sys, "argv", ["minicpm4.py", what, *switches, "--apply-sparse", "no"])
    runpy.run_path(str(EXAMPLES / "minicpm4.py"), run_name="__main__")
    (program, *flags) = seen[0]
    assert program == {"generate": "cpmcu.cli", "serve": "cpmcu.server"}[what]
    parsed = (cli_parser() if what == "generate" else server_parser()).parse_args(flags)
    assert parsed.model == "openbmb/MiniCPM4-8B" + "-marlin-cpmcu" * (quant == "yes")
    assert (parsed.draft_model_path is not None) == (eagle == "yes")
    assert (parsed.draft_model_path or "").endswith("-QAT-cpmcu") == (quant == eagle == "yes")
    assert (parsed.minicpm4_yarn, parsed.apply_sparse) == (True, False)


class _Bound:
    """Stands for Ray's deployments: records their arguments."""

    def __init__(self, target=None, **options) -> None:
        self.target, self.options = target, options

    def __call__(self, target):
        return _Bound(target, **self.options)

    def bind(self, *arguments):
        return self.target, self.options, arguments


def _stand_in_for_ray(monkeypatch) -> None:
    config = types.ModuleType("ray.serve.config")
    config.RequestRouterConfig = dict
    serve = types.ModuleType("ray.serve")
    serve.deployment, serve.ingress = _Bound, lambda app: lambda target: target
    ray = types.ModuleType("ray")
    ray.serve = serve
    for module in (ray, serve, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_ray_serve_for_agents(monkeypatch):
    """A stand-in for Ray records the options, and a request goes through a replica."""
    _stand_in_for_ray(monkeypatch)
    example = runpy.run_path(str(EXAMPLES / "ray_serve_agents.py"))
    _, options, ((replica, made, (engine,)),) = example["build"]({"device": "cpu", "replicas": "3"})
    assert (options["name"], made["num_replicas"], engine.device) == ("ingress", 3, "cpu")
    router = made["request_router_config"]
    assert router["request_router_class"].endswith("llm.request_router.PrefixCacheAffinityRouter")
    one, two = (
        example["prompt_of"](
            json.dumps({"messages": [{"content": "Hello"}, word], "n": n}).encode()
        )
        for n, word in enumerate("ab")
    )
    assert one[:-3] == two[:-3] and one != two
    assert example["prompt_of"](b"{") == example["prompt_of"](b"[]") == ""
    ended = []

    async def app(scope, receive, send):
        body = (await receive())["body"]
        headers = [(b"x-path", scope["path"].encode())]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})
        ended.append((await receive())["type"])

    async def ask() -> list:
        served = replica.__new__(replica)
        served._app = app
        asked = example["Asked"]("POST", "/v1/x", b"", [], b"question", "")
        answer = served.answer(asked)
        parts = [await answer.__anext__(), await answer.__anext__()]
        await answer.aclose()  # the client leaves
        await asyncio.sleep(0)
        return parts

    assert asyncio.run(ask()) == [(201, [(b"x-path", b"/v1/x")]), b"question"]
    assert ended == ["http.disconnect"]


@pytest.mark.parametrize("name", ["ray_serve_app", "ray_serve_agents"])
def test_ray_serve_without_ray(name):
    """Python itself writes a traceback for an ImportError of a module."""
    said = run(name, status=1)
    assert said.startswith("this example needs Ray and the server (No module named 'ray'")
    assert "): pip install 'ray[serve" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["ray_serve_app", "ray_serve_agents"])
def test_ray_serve_is_not_run_by_python(monkeypatch, name):
    _stand_in_for_ray(monkeypatch)
    with pytest.raises(SystemExit, match=f"serve run examples.{name}:build"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_all_compile(tmp_path):
    """All examples compile, including those with Ray, which the tests do not install."""
    for path in EXAMPLES.glob("*.py"):
        py_compile.compile(str(path), str(tmp_path / f"{path.stem}.pyc"), doraise=True)


@pytest.mark.parametrize("name", ["generate", "stream"])
def test_without_a_server(name):
    assert "--- " in run(name, CUDA_VISIBLE_DEVICES="")


OF_A_CLIENT = (
    "openai_chat",
    "openai_stream",
    "openai_structured_output",
    "openai_tools",
    "openai_long_prompt",
)


@pytest.mark.parametrize("name", ["chat", "demo", "generate", "stream", "minicpm4", *OF_A_CLIENT])
def test_a_missing_package_is_one_sentence(name, tmp_path):
    package = "openai" if name in OF_A_CLIENT else "cpmcu"
    text = f"raise ModuleNotFoundError('no module', name={package!r})"
    (tmp_path / f"{package}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = run(name, status=1, PYTHONPATH=path, CPMCU_DEBUG="")
    assert said.count("\n") == 1
    assert said.startswith(f"{name}.py") and "pip install" in said and package in said
    if name != "minicpm4":
        assert "Traceback" in run(name, status=1, PYTHONPATH=path, CPMCU_DEBUG="1")


@pytest.mark.parametrize("name", OF_A_CLIENT)
def test_a_missing_server_is_one_sentence(name, tmp_path):
    (tmp_path / "prompt").write_text("x")
    arguments = [str(tmp_path / "prompt")] if name == "openai_long_prompt" else []
    nowhere = "http://127.0.0.1:9/v1"
    said = run(name, *arguments, status=1, OPENAI_BASE_URL=nowhere, CPMCU_DEBUG="")
    assert said == (
        f"{name}.py: no server answers at {nowhere}/models: start one with `cpmcu serve`, or set "
        "OPENAI_BASE_URL\n"
    )


def test_other_errors_are_one_sentence(limited, tmp_path):
    wrong = {"OPENAI_BASE_URL": f"{limited.url}/v1", "OPENAI_API_KEY": "x", "CPMCU_DEBUG": ""}
    said = run("openai_chat", status=1, **wrong)
    assert "openai_chat.py: the server answers: A valid API key is needed" in said
    assert "OPENAI_API_KEY" in said and said.count("\n") == 1
    assert "usage: openai_long_prompt.py FILE" in run("openai_long_prompt", status=1)
    said = run("chat", str(tmp_path / "none"), status=1, CPMCU_DEBUG="")
    assert said.startswith("chat.py: ") and "none" in said and said.count("\n") == 1


DOCUMENTS = ["README", "docs/server", "docs/messages", "docs/responses"]


@pytest.fixture(scope="module")
def renamed():
    """A server whose model has another name, as if a chat model were installed."""
    with start("--served-model-name", "another") as running:
        yield running


@pytest.mark.parametrize("name", DOCUMENTS)
def test_clients_in_documents(renamed, name):
    """The programs and curl commands run as printed, whatever model is served."""
    text = (ROOT / f"{name}.md").read_text("utf-8").replace("http://localhost:8000", renamed.url)
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    programs = [program for program in programs if "http://" in program]
    assert programs
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    for command in re.findall(r"^curl .*", text, re.MULTILINE):
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout and '"error":{' not in done.stdout
