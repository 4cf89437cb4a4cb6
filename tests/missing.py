"""Skips for packages and programs that a machine lacks. With CPMCU_REQUIRE_ALL=1 they are failures.

`pytest.importorskip` fails, too: tests/conftest.py replaces it.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest

REQUIRE_ALL = os.environ.get("CPMCU_REQUIRE_ALL") == "1"


def missing(what: str) -> NoReturn:
    """Skips the running test, or the module that is imported. `what`: names what is missing."""
    if REQUIRE_ALL:
        pytest.fail(f"CPMCU_REQUIRE_ALL=1, but {what}", pytrace=False)
    pytest.skip(what, allow_module_level=True)


_importorskip = pytest.importorskip


def require(modname: str, *arguments: Any, **options: Any) -> Any:
    """pytest.importorskip, but a missing module is a failure."""
    try:
        return _importorskip(modname, *arguments, **options)
    except pytest.skip.Exception as error:
        missing(str(error))


def skip_unless(found: object, what: str) -> pytest.MarkDecorator:
    """A mark that skips a test if a package or program was not found."""
    return pytest.mark.skipif(not found and not REQUIRE_ALL, reason=what)
