"""How a model is quantised: checked before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("rtn", "gptq")
FORMATS = ("gptq", "nvfp4", "mxfp4")
BITS = (4, 8)
# As in cpmcu/quant/int4.py, which imports numpy.
GROUP_SIZE, CHANNEL_WISE = 128, -1
GROUP_SIZES = (32, 64, GROUP_SIZE)
DAMPING = 0.01
CALIBRATION_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How to quantise. Raises ValueError for values that do not go together."""

    method: str = "rtn"
    # "gptq": integers with one scale a group; "nvfp4", "mxfp4": floats of 4 bits.
    format: str = "gptq"
    bits: int = 4
    group_size: int = GROUP_SIZE  # inputs that share a scale; -1: all inputs of an output
    calibration: Path | None = None  # text file, required by gptq
    # Maximum number of tokens of the text that are read.
    calibration_tokens: int = CALIBRATION_TOKENS
    device: str = "cpu"  # device that rounds: cpu or cuda

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected {' or '.join(METHODS)}")
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}, expected one of {', '.join(FORMATS)}")
        if self.format != "gptq" and (self.method, self.bits, self.group_size) != ("rtn", 4, 128):
            raise ValueError(
                f"format is {self.format!r}, which has its own bits and groups and is rounded to "
                "nearest, expected no other method, bits or group_size beside it"
            )
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}, expected {' or '.join(map(str, BITS))}")
        if self.group_size not in (*GROUP_SIZES, CHANNEL_WISE):
            raise ValueError(
                f"group_size is {self.group_size}, expected {', '.join(map(str, GROUP_SIZES))}, or "
                f"{CHANNEL_WISE} for whole rows: the engine has no kernels for other groups"
            )
        if self.method == "gptq" and self.calibration is None:
            raise ValueError("method is 'gptq', expected a calibration text (--calibration FILE)")
        if self.calibration_tokens < 1:
            raise ValueError(
                f"calibration_tokens is {self.calibration_tokens}, expected at least 1"
            )

    def group(self, num_inputs: int) -> int:
        """Inputs of a layer that share a scale."""
        return num_inputs if self.group_size == CHANNEL_WISE else self.group_size

    def to_hf(self) -> dict[str, Any]:
        """quantization_config of GPTQ."""
        by_gptq = {"damp_percent": DAMPING, "true_sequential": True}
        return {
            "bits": self.bits,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "group_size": self.group_size,
            "lm_head": False,
            "quant_method": "gptq",
            "static_groups": True,
            "sym": True,
            **(by_gptq if self.method == "gptq" else {}),
        }

    def floats_to_hf(self, kept: Sequence[str]) -> dict[str, Any]:
        """quantization_config of nvfp4 and mxfp4. `kept`: linear layers of 16 bits."""
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            **_FLOAT_WEIGHTS[self.format],
        }
        return {
            "quant_method": "compressed-tensors",
            "format": f"{self.format}-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                    "format": f"{self.format}-pack-quantized",
                }
            },
            "ignore": list(kept),
            "kv_cache_scheme": None,
        }


_FLOAT_WEIGHTS: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
