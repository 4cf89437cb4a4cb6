"""sparse_config of a checkpoint, the options that change it, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cpmcu.config import EngineConfig
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.registry import find_model
from cpmcu.models.sparse import check_sparse_options
from cpmcu.sparse_options import SparseOptions
from tests.reference.tiny_checkpoints import tiny_config

PUBLISHED = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 64,
    "window_size": 2048,
    "topk": 64,
    "use_nope": False,
    "dense_len": 8192,
}
RULE = {"init_blocks": 1, "window_size": 2048, "topk": 64, "dense_len": 8192}


def build(
    stated: object = PUBLISHED, device: str = "cpu", family: str = "minicpm", **options: Any
) -> SpecFields:
    config = tiny_config(family, head_dim=64, sparse_config=stated)
    sparse = SparseOptions(**options)
    fields = find_model(config).build(config, BuildOptions(device=device, sparse=sparse))
    check_sparse_options(sparse, fields)
    return fields


def layers(rule: dict[str, int]) -> Any:
    return ((("sparse_attention", rule), ("mlp", {})),) * 2


def test_the_checkpoint_says_whether_attention_is_sparse() -> None:
    assert build().layers == layers(RULE)
    assert build({"topk": 5}).layers == layers(RULE | {"topk": 5})
    assert build(None).layers == build({}).layers == ()


def test_apply_sparse() -> None:
    assert build(apply_sparse=False).layers == ()
    assert build(apply_sparse=True).layers == layers(RULE)
    # A MiniCPM4 checkpoint without sparse_config, as published.
    assert build(None, apply_sparse=True).layers == layers(RULE)


def test_options_replace_numbers() -> None:
    changed = build(
        sink_window_size=128, block_window_size=512, sparse_topk_k=32, sparse_switch=100
    )
    rule = {"init_blocks": 2, "window_size": 512, "topk": 32, "dense_len": 100}
    assert changed.layers == layers(rule)
    assert build(sink_window_size=0, sparse_switch=0).layers == layers(
        RULE | {"init_blocks": 0, "dense_len": 0}
    )


def test_without_options_all_attention_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    """All attention is dense without options, as in a draft."""
    config = tiny_config("minicpm", sparse_config=PUBLISHED)
    with caplog.at_level(logging.INFO):
        assert find_model(config).build(config, BuildOptions()).layers == ()
    assert "sparse_config is ignored: dense attention is exact" in caplog.text


def test_options_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    build(None, sparse_topk_k=5, sparse_switch=1)
    assert "sparse_topk_k, sparse_switch has no effect: attention is dense" in caplog.text


@pytest.mark.parametrize(
    ("stated", "options", "message"),
    [
        ([], {}, "sparse_config is \\[\\], expected a mapping"),
        ({"kernel_size": 64}, {}, "sparse_config: kernel_size is 64, expected 32, the only one"),
        ({"kernel_stride": 8}, {}, "kernel_stride is 8, expected 16"),
        ({"block_size": 128}, {}, "block_size is 128, expected 64"),
        ({"use_nope": True}, {}, "use_nope is True, expected False"),
        ({"topk": 0}, {}, "topk is 0, expected an integer from 1"),
        ({"topk": 1.5}, {}, "topk is 1.5, expected an integer"),
        ({"dense_len": True}, {}, "dense_len is True, expected an integer"),
        ({"dense_len": 2**31}, {}, "dense_len is 2147483648, expected an integer"),
        ({"window_size": 64}, {}, "window_size is 64, expected an integer from 128"),
        ({"window_size": 200}, {}, "window_size is 200, expected a multiple of 64"),
        ({"init_blocks": -1}, {}, "init_blocks is -1"),
        (
            {},
            {"sink_window_size": 192, "sparse_topk_k": 2},
            "sparse_topk_k is 2, but the first",
        ),
    ],
)
def test_refused(stated: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(stated, **{"apply_sparse": True, **options})


def test_other_families_have_no_sparse_attention() -> None:
    with pytest.raises(ValueError, match="not of the MiniCPM family, expected no"):
        build(None, family="llama", apply_sparse=True)


def test_unknown_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build({"topk": 8, "colour": 1})
    assert "sparse_config: colour is not read" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_window_size": 1}, "sink_window_size is 1, but must be a number of tokens, a mult"),
        ({"sink_window_size": -64}, "from 0 to"),
        ({"block_window_size": 64}, "a multiple of 64, from 128 to"),
        ({"block_window_size": "big"}, "block_window_size is 'big'"),
        ({"sparse_topk_k": 0}, "sparse_topk_k is 0, but must be from 1 to"),
        ({"sparse_switch": -1}, "sparse_switch is -1, but must be from 0 to"),
        ({"sparse_switch": 1 << 31}, "from 0 to 2147483647"),
        ({"apply_sparse": "maybe"}, "apply_sparse is 'maybe'"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
