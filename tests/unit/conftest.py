"""Fixtures shared by several files of unit tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny

# Files that train, compile plugins or run programs. `make test-unit` skips them.
SLOW = (
    "test_bench",
    "test_extension_points",
    "test_packages",
    "test_quantize_recipe",
    "test_synthetic_acceptance",
    "test_terminal",
    "test_train_head",
    "test_train_mtp",
    "test_train_recipe",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def target(tmp_path: Path) -> TinyCheckpoint:
    return write_tiny(tmp_path / "target", "minicpm", num_hidden_layers=3)


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Sends Ctrl-C to this process, which may ignore it, as in a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    yield lambda: signal.pthread_kill(main_thread, signal.SIGINT)
    signal.signal(signal.SIGINT, before)
