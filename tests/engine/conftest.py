"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest

from tests.engine.drafted import Models
from tests.engine.harness import DEVICES


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    return Models(tmp_path_factory.mktemp("spec"), device)
