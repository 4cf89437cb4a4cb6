"""Fixtures and hooks of all tests. Without a GPU, GPU tests are skipped.

With CPMCU_REQUIRE_ALL=1, a missing package or program fails the tests that need it.
"""

from __future__ import annotations

import hypothesis
import pytest

from tests.missing import REQUIRE_ALL, require

# The time of an example depends on the machine and its load.
hypothesis.settings.register_profile("cpmcu", deadline=None)
hypothesis.settings.load_profile("cpmcu")

if REQUIRE_ALL:
    pytest.importorskip = require


def _no_gpu() -> str | None:
    """The reason why tests marked `gpu` cannot run; None if they can."""
    try:
        from cpmcu import C
    except ImportError as error:
        return str(error)
    return None if C.device_count() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
