"""`import cpmcu` is fast and imports no heavy module."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "transformers", "huggingface_hub", "rich", "tokenizers", "numpy", "jinja2"}
HEAVY |= {"fastapi", "uvicorn", "prompt_toolkit"}
PROGRAM = """
import sys, time
start = time.process_time()
import {module}
seconds = time.process_time() - start
print(seconds, *({heavy} & set(sys.modules)))
"""


def measure(module: str, runs: int) -> tuple[float, set[str]]:
    """Returns (CPU seconds of the fastest import in a new process, heavy modules it loaded)."""
    best, heavy = float("inf"), set()
    for _ in range(runs):
        program = PROGRAM.format(module=module, heavy=HEAVY)
        command = [sys.executable, "-c", program]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        best, heavy = min(best, float(words[0])), heavy | set(words[1:])
    return best, heavy


def test_import_cpmcu():
    seconds, heavy = measure("cpmcu", runs=5)
    assert seconds < 0.3
    assert not heavy


def test_importing_the_programs_loads_nothing_heavy():
    assert measure("cpmcu.__main__", runs=1)[1] == set()
    assert measure("cpmcu.cli", runs=1)[1] == set()
    assert measure("cpmcu.server", runs=1)[1] == set()
    assert measure("cpmcu.bench", runs=1)[1] == set()
    assert measure("cpmcu.llm", runs=1)[1] == set()


def test_public_names():
    import cpmcu

    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(cpmcu))
    assert cpmcu.SamplingParams.__module__ == "cpmcu.sampling"
    assert cpmcu.LLM.__module__ == "cpmcu.llm"
