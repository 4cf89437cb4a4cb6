"""The numpy oracle compared with transformers; tests without torch use the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.hf_model import fold_minicpm, hf_logits
from tests.reference.numpy_model import NumpyModel
from tests.reference.tiny_checkpoints import FAMILIES, write_tiny
from tests.tolerances import LOGITS, assert_close

IDS = [7, 3, 202, 0, 55, 55, 140, 9, 31, 77, 12]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_matches_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the reference needs transformers")
    tiny = write_tiny(tmp_path, family, tie_word_embeddings=tied)
    config, weights = tiny.config, tiny.weights
    if family == "minicpm":
        config, weights = fold_minicpm(config, weights)
    result = NumpyModel(tiny.fields(), tiny.weights).logits(IDS)
    assert_close(result, hf_logits(config, weights, IDS), LOGITS["float32"])
