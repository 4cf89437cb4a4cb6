"""Conversations that a chat model writes for the training of its draft."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cpmcu import LLM
from tests.unit.recipe import import_recipe


def test_windows_hold_every_token_but_the_last_part() -> None:
    with import_recipe() as recipe:
        rows = recipe.chat_text.windows([[1, 2, 3], [4], [5, 6, 7, 8]], 3)
        assert rows.tolist() == [[1, 2, 3], [4, 5, 6]] and rows.dtype == np.int32


def test_the_shipped_model_writes_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "chats"
    with LLM() as llm:
        target, template, tokenizer = llm.directory, llm.chat_template, llm.tokenizer
    flags = "--conversations 12 --held-out 2 --second-turn 0.5 --answer-tokens 24 --length 16"
    arguments = ["chat_text.py", "--target", str(target), "--out", str(out), *flags.split()]
    monkeypatch.setattr(sys, "argv", [*arguments, "--message-tokens", "200"])
    with import_recipe() as recipe:
        recipe.chat_text.main()
    rows = np.load(out / "tokens.npy")
    assert rows.shape[0] > 1 and rows.shape[1] == 16
    texts = [path.read_text(encoding="utf-8") for path in (out / "held_out").iterdir()]
    assert len(texts) == 2
    assert template is not None
    head = template.render([{"role": "user", "content": "?"}]).split("?")[0]
    assert all(text.startswith(head) for text in texts)
    whole = tokenizer.decode(rows.reshape(-1).tolist(), skip_special_tokens=False)
    assert head in whole and texts[0] not in whole
