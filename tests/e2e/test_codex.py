"""Codex itself, with a model that calls its shell (`npm install -g @openai/codex`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.calls import node_modules
from tests.e2e.harness import cue, start, write_scripted

COMMAND = f"echo '{cue('end')}'"
SCRIPTS = {
    "go": "<think>I need a shell.</think>I look.\n<tool_call>\n"
    f'{{"name": "exec_command", "arguments": {{"cmd": "{COMMAND}"}}}}\n</tool_call>',
    "end": "It says hello; all is well.",
}
# Messages are trimmed, so that the output of the command ends the prompt of the second turn.
TEMPLATE = (
    "{# <think> </think> <tool_call> #}"
    "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
)
CONFIG = """
model = "scripted"
model_provider = "cpmcu"
show_raw_agent_reasoning = true

[model_providers.cpmcu]
name = "cpmcu"
base_url = "{url}/v1"
wire_api = "responses"

[model_providers.cpmcu.auth]
command = "/bin/echo"
args = ["first"]
"""


@pytest.fixture
def program():
    modules = Path(node_modules("@openai/codex"))
    return modules / "@openai" / "codex" / "bin" / "codex.js"


def test_codex(program, tmp_path):
    """Codex reads the models, sends a task, runs the command of the call, and prints the answer."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    model = write_scripted(tmp_path / "model", SCRIPTS, TEMPLATE, max_position_embeddings=32768)
    flags = ("--served-model-name", "scripted", "--api-key", "first", "--max-model-len", "32768")
    with start("--model", str(model), *flags) as server:
        (home / "config.toml").write_text(CONFIG.format(url=server.url))
        command = ["node", str(program), "exec", "--skip-git-repo-check", cue("go")]
        done = subprocess.run(
            [*command, "--dangerously-bypass-approvals-and-sandbox"],
            env={**os.environ, "CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=work,
        )
        log = server.log
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SCRIPTS["end"]
    for told in ("I need a shell.", "I look.", COMMAND, "succeeded"):
        assert told in done.stderr
    assert "failed to refresh" not in done.stderr and "metadata" not in done.stderr
    assert log.count("POST /v1/responses 200") == 2
    assert "tools of type 'web_search' are skipped" in log
