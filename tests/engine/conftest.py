"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpmcu.models import qwen2_moe, qwen3_moe
from tests.engine.drafted import Models
from tests.engine.harness import DEVICES
from tests.engine.sparse import sparse_models as make_sparse_models


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    return Models(tmp_path_factory.mktemp("spec"), device)


@pytest.fixture(scope="module")
def sparse_models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Models]:
    with make_sparse_models(tmp_path_factory.mktemp("sparse"), device) as models:
        yield models


@pytest.fixture(scope="module")
def experts_on_cuda() -> Iterator[None]:
    """Lifts the refusal of device cuda. To be deleted together with `refuse_cuda`."""
    with pytest.MonkeyPatch.context() as patch:
        for family in (qwen2_moe, qwen3_moe):
            patch.setattr(family, "refuse_cuda", lambda options: None)
        yield
