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

    if "weight_scale" in made:
        scales = made["weight_scale"].astype(np.float32)
        return scales.repeat(k // scales.shape[1], axis=1) * q.astype(np.float32)
    half = "half_" if "weight_half_records" in made else ""
    is_4 = "weight_packed" in made
    values = q.astype(np.float32) * factors(made[f"weight_{half}records"], k, half != "", is_4)
    minima = made.get(f"weight_{half}min_records")
    if minima is not None:
        values = values - factors(minima, k, half != "", is_4, signed=False)
    return values


def factors(
    records: npt.NDArray[np.uint8], k: int, halves: bool, is_4: bool, signed: bool = True
) -> npt.NDArray[np.float32]:
    """A factor for each of k, from records as csrc/kernels/gemm/packed/layout.h has them."""
    size = 10 if not is_4 else 8 if halves else 6
    made = np.zeros((len(records), -(-k // 128) * 128), np.float32)
    for row, block in np.ndindex(len(records), records.shape[1] // size):
        record = records[row, block * size : (block + 1) * size]
        if is_4 and halves:
            values = record.view("<f2").astype(np.float32)
        elif halves and record[:2].view("<u2")[0] == 0x7FFF:
            values = record[2:].view("<f2").astype(np.float32)
        else:
            of_groups = record[2:].view(np.int8 if signed and not is_4 else np.uint8)
            values = record[:2].view("<f2").astype(np.float32) * of_groups.astype(np.float32)
        made[row, block * 128 : (block + 1) * 128] = values.repeat(128 // len(values))
    return made[:, :k]


CASES = [(name, BLOCKS[type_id].form) for name, type_id in IDS.items()]
CASES += [(name, Form.K8_MIN) for name in ("Q3_K", "Q4_K", "Q6_K", "IQ4_XS")]
CASES += [("Q4_0", Form.INT8), ("Q4_K", Form.K8_MIN_HALVES), ("Q6_K", Form.K8_HALVES)]
CASES += [(name, Form.K8_MIN_HALVES) for name in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL")]
FLOATS = (Form.MXFP4, Form.NVFP4)  # tests/engine/test_gguf_blocks.py


@pytest.mark.parametrize(("name", "form"), [c for c in CASES if c[1] not in FLOATS])
def test_numbers(name: str, form: Form) -> None:
    """Random bytes: every code and scale, negative and subnormal numbers for a block."""
    type_id, n, k = IDS[name], 24, 512
    block, nbytes = gguf.GGML_QUANT_SIZES[TYPES[name]]
    rng = np.random.default_rng(type_id)
    raw = rng.integers(0, 256, (n, k // block, nbytes), dtype=np.uint8)
    first = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(name, 0)
    two = name in ("Q2_K", "Q4_K", "Q5_K", "Q4_1", "Q5_1")
    for at in (first, first + 2) if two else (first,):
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
        (("Q4_0", "Q4_K"), Form.K8_MIN_HALVES),
        (("Q6_K", "Q8_0"), Form.K8_HALVES),
        (("Q4_1", "Q4_1"), Form.K4_HALVES),
        (("Q4_1", "Q5_1"), Form.K8_MIN_HALVES),
        (("Q4_1", "Q8_0"), Form.K8_MIN_HALVES),
        (("MXFP4", "Q8_0"), None),
    ],
)
def test_one_form_for_the_parts_of_a_matrix(names: tuple[str, ...], form: Form | None) -> None:
    assert form_of([IDS[name] for name in names]) == form


def test_types_that_are_decoded() -> None:
    assert form_of([TYPES["IQ2_S"], TYPES["IQ2_S"]]) is None
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


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_rows_of_no_whole_blocks(name: str) -> None:
    """K of 576 is no multiple of 128; scales and minima beyond K are 0."""
    weight = np.random.default_rng(1).standard_normal((8, 576), np.float32)
    raw = gguf.quants.quantize(weight, TYPES[name])
    form = BLOCKS[IDS[name]].form
    made = split(IDS[name], form, raw)
    assert np.array_equal(numbers(made, 576), gguf.dequantize(raw, TYPES[name]))
    for part in form.records:
        assert not made[part][:, -4:].any()
