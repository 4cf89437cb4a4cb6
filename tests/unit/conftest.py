"""Fixtures that several files of unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny


@pytest.fixture
def target(tmp_path: Path) -> TinyCheckpoint:
    return write_tiny(tmp_path / "target", "minicpm", num_hidden_layers=3)
