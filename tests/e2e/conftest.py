"""Servers shared by the tests of a worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Server, start, write_scripted
from tests.missing import missing

SCRIPTS = {
    "story": "Es war 🙂 einmal: 你好，世界！ 👩‍👩‍👧 naïve café. Ende",
    "think": "<think>\nSo, 🤔 two\nand two.\n</think>\n\nFour, 四.",
    "muse": "Quite a while…\n</think>\nDone thinking.",
    "call": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "你"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
    "guide": "## Sums\n\n1. *Add* with `+`:\n   - ints\n\n```python\nx = 2 + 2\n```\n\nDone, "
    "**really**.",
    "broken": 'Hm <tool_call>{"name": add}</tool_call> no.',
}
# The template's comment names the model's tags and the enable_thinking variable. A conversation is
# rendered as its concatenated texts.
TEMPLATE = (
    "{# <think> </think> <tool_call> enable_thinking #}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ suffix }}"
)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of the shipped model with its EAGLE head. Every decode step has a draft."""
    # On any machine, a pass beside decoding sequences then has 64 tokens, the fewest.
    passes = ("--chunk-length", "64", "--max-prefill-ms", "0.1")
    with start(*passes, "--spec-auto", "no") as running:
        yield running


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that answers with SCRIPTS and is its own draft: all draft tokens are accepted."""
    directory = write_scripted(tmp_path_factory.mktemp("scripted"), SCRIPTS, TEMPLATE)
    draft = ("--draft-model-path", str(directory), "--spec-num-iter", "4")
    draft += ("--spec-topk-per-iter", "1", "--spec-tree-size", "5")
    with start("--model", str(directory), "--served-model-name", "scripted", *draft) as running:
        yield running


@pytest.fixture(scope="session")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose tags are special tokens."""
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|other|>")
    text = '<think>So, two.</think>Ok<|other|>.<tool_call>{"name": "f"}</tool_call>'
    folder = tmp_path_factory.mktemp("special")
    directory = write_scripted(folder, {"tell": text}, TEMPLATE, tags)
    with start("--model", str(directory), "--served-model-name", "scripted") as running:
        yield running


@pytest.fixture(scope="session")
def limited() -> Iterator[Server]:
    """A server with small limits, API keys and JSON logs."""
    flags = ["--max-queue", "4", "--max-num-seqs", "2", "--max-model-len", "128"]
    flags += ["--max-body-mib", "1", "--max-messages", "5", "--max-text-length", "2000"]
    flags += ["--api-key", "first", "--api-key", "second", "--log-format", "json"]
    flags += ["--cors-origin", "https://example.org", "--ping-interval", "0.01"]
    with start(*flags) as running:
        yield running


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium."""
    webdriver = pytest.importorskip("selenium.webdriver")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    tool = shutil.which("chromedriver")
    if browser is None or tool is None:
        missing("this needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(tool)
    with webdriver.Chrome(options=options, service=service) as running:
        yield running
