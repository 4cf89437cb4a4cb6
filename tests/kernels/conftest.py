"""Under a sanitizer, each case of a CPU kernel runs with one of its dtypes.

Memory errors depend on shapes much more than on dtypes. The dtypes take turns, so that a kernel
with as many cases runs with all of them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.kernels.util import SMALL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not SMALL:
        return
    tests: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or not item.path.is_relative_to(Path(__file__).parent):
            continue
        if call.params.get("device") == "cpu" and "dtype" in call.params:
            test, _, case = item.nodeid.partition("[")
            tests[test][case.replace(f"cpu-{call.params['dtype']}", "cpu")].append(item)
    dropped = {
        item
        for cases in tests.values()
        for turn, same in enumerate(cases.values())
        for item in same
        if item is not same[turn % len(same)]
    }
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
