"""Blocks of GGUF types taken apart: the numbers of the gguf package, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.loading.gguf.blocks import BLOCKS, Form, form_of, metas, split, split_rows

gguf = pytest.importorskip("gguf")
TYPES = gguf.GGMLQuantizationType
IDS = {block.name: type_id for type_id, block in BLOCKS.items()}


def numbers(made: dict[str, npt.NDArray[Any]], k: int) -> npt.NDArray[np.float32]:
    """The numbers of integer forms, in float32 as the engine computes them."""
    if "weight" in made:
        q = made["weight"]
    elif made["weight_packed"].dtype == np.int32:
        bytes_ = made["weight_packed"].view(np.uint8)
        q = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(bytes_), -1).astype(np.int8) - 8
    else:
        bytes_ = made["weight_packed"]
        q = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(bytes_), -1)

    def wide(name: str) -> npt.NDArray[np.float32]:
        values = made[name].astype(np.float32)
        return values.repeat(k // values.shape[1], axis=1)

    scales = wide("weight_scale")
    if "weight_group_scale" in made:
        scales = scales * wide("weight_group_scale")
    values = scales * q.astype(np.float32)
    if "weight_min" in made:
        values = values - wide("weight_min") * wide("weight_group_min")
    return values


CASES = [(name, BLOCKS[type_id].form) for name, type_id in IDS.items()]
CASES += [(name, Form.K8_MIN) for name in ("Q3_K", "Q4_K", "Q6_K", "IQ4_XS")]
CASES += [("Q4_0", Form.INT8)]
FLOATS = (Form.MXFP4, Form.NVFP4)  # tests/engine/test_gguf_blocks.py


@pytest.mark.parametrize(("name", "form"), [c for c in CASES if c[1] not in FLOATS])
def test_numbers(name: str, form: Form) -> None:
    """Random bytes: every code and scale, negative and subnormal numbers for a block."""
    type_id, n, k = IDS[name], 24, 512
    block, nbytes = gguf.GGML_QUANT_SIZES[TYPES[name]]
    rng = np.random.default_rng(type_id)
    raw = rng.integers(0, 256, (n, k // block, nbytes), dtype=np.uint8)
    first = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(name, 0)
    for at in (first, first + 2) if name in ("Q2_K", "Q4_K", "Q5_K") else (first,):
        halves = rng.normal(0, 1e-3, (n, k // block, 1)).astype("<f2")
        halves[0] = np.float16(3e-7)
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    raw = raw.reshape(n, -1)
    made = split(type_id, form, raw)
    expected = gguf.dequantize(raw, TYPES[name])
    assert np.array_equal(numbers(made, k), expected)
    for meta in metas("m", form, n, k):
        array = made[meta.name.removeprefix("m.")]
        assert (array.shape, array.dtype.name) == (meta.shape, meta.dtype)
    assert len(made) == len(metas("m", form, n, k))


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (("Q4_K", "Q4_K"), Form.K4),
        (("Q4_K", "Q6_K"), Form.K8_MIN),
        (("Q6_K", "IQ4_XS"), Form.K8),
        (("Q4_0", "Q8_0", "Q5_0"), Form.INT8),
        (("Q4_0", "Q4_K"), None),
        (("MXFP4", "Q8_0"), None),
    ],
)
def test_one_form_for_the_parts_of_a_matrix(names: tuple[str, ...], form: Form | None) -> None:
    assert form_of([IDS[name] for name in names]) == form


def test_types_that_are_decoded() -> None:
    assert form_of([TYPES["Q4_1"], TYPES["Q4_1"]]) is None
    assert form_of([IDS["Q4_K"], TYPES["F16"]]) is None


def test_rows_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpmcu.loading.gguf.blocks._THREAD_BYTES", 1000)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    raw = np.random.default_rng(0).integers(0, 256, (17, 2 * 144), dtype=np.uint8)
    alone = split(IDS["Q4_K"], Form.K4, raw)
    several = split_rows(IDS["Q4_K"], Form.K4, raw)
    assert list(several) == list(alone)
    for name, values in alone.items():
        np.testing.assert_array_equal(several[name], values)
