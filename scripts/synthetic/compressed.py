"""Random projections in FP8 with blocks, NVFP4 and int8, as published files have them.

Codes are random bits. The scales give the weights the standard deviation of the dense matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from scripts.synthetic.sources import Bits
from scripts.synthetic.tensors import Config, Fill, TensorSpec, normal, random_bits, stored

BLOCK = 128  # rows and columns that share a scale in FP8
GROUP = 16  # inputs that share a scale in NVFP4
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

FP8: Config = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
FP8_CODES = Bits(0xBFBFBFBF)  # numbers below 2 in magnitude; no NaN


def _compressed(form: str, **weights: object) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False, **weights},
                "input_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


NVFP4 = _compressed(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=GROUP
)
NVFP4_CODES = Bits(0xFFFFFFFF)
NVFP4_SCALES = Bits(0x07070707, 0x70707070)  # 128 to 240
INT8 = _compressed("pack-quantized", num_bits=8, type="int", strategy="channel")
INT8_CODES = Bits(0x7F7F7F7F, 0x01010101, terms=2)  # mean 128


def e4m3(codes: np.ndarray) -> np.ndarray:
    """The numbers of e4m3 codes that are not NaN."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent, (8 + mantissa) * 2.0**exponent, 2.0 * mantissa) * 2.0**-10
    return np.where(codes & 128, -magnitude, magnitude)


def rms(values: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


BYTES = np.arange(256)
FP8_STD = rms(e4m3(BYTES & 0xBF))
NVFP4_STD = rms(E2M1) * rms(e4m3(0x70 + np.arange(8)))
INT8_STD = rms(np.add.outer(np.arange(128), np.arange(128)) - 127)


def near(scale: float) -> Fill:
    """Scales near this one."""
    return normal(0.05 * scale, mean=scale)


def fp8_tensors(module: str, rows: int, columns: int, std: float) -> Iterator[TensorSpec]:
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    codes = random_bits(FP8_CODES)
    yield TensorSpec(f"{module}.weight", (rows, columns), codes, "float8_e4m3fn")
    yield TensorSpec(f"{module}.weight_scale_inv", blocks, near(std / FP8_STD), "bfloat16")


def nvfp4_tensors(module: str, rows: int, columns: int, std: float) -> Iterator[TensorSpec]:
    _check_columns(module, columns, GROUP)
    codes, scales = random_bits(NVFP4_CODES), random_bits(NVFP4_SCALES)
    divisor = stored(np.array([NVFP4_STD / std], np.float32))
    yield TensorSpec(f"{module}.weight_packed", (rows, columns // 2), codes, "uint8")
    yield TensorSpec(f"{module}.weight_scale", (rows, columns // GROUP), scales, "float8_e4m3fn")
    yield TensorSpec(f"{module}.weight_global_scale", (1,), divisor, "float32")


def int8_tensors(module: str, rows: int, columns: int, std: float) -> Iterator[TensorSpec]:
    _check_columns(module, columns, 4)
    codes, shape = random_bits(INT8_CODES), stored(np.array([rows, columns], np.int64))
    yield TensorSpec(f"{module}.weight_packed", (rows, columns // 4), codes, "int32")
    yield TensorSpec(f"{module}.weight_scale", (rows, 1), near(std / INT8_STD), "bfloat16")
    yield TensorSpec(f"{module}.weight_shape", (2,), shape, "int64")


def _check_columns(module: str, columns: int, multiple: int) -> None:
    if columns % multiple:
        raise SystemExit(f"{module} has {columns} inputs, expected a multiple of {multiple}")
