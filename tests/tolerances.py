"""The one table of thresholds of numeric tests, and the metrics that they are for.

An engine result is compared with a float32 or float64 reference. `calc_diff` is blind to scale
and catches wrong formulas, `max_abs` catches single wrong numbers; NaN and infinities must agree
before either is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Upper limits.

    `diff`: result of calc_diff. `max_abs`: the largest absolute error, divided by the largest
    absolute reference value.
    """

    diff: float
    max_abs: float


# Logits of tiny models (a few layers, random weights) against float32.
LOGITS = {
    "float32": Tolerance(diff=1e-11, max_abs=5e-6),
    "float16": Tolerance(diff=2e-5, max_abs=1e-2),
    "bfloat16": Tolerance(diff=1e-3, max_abs=8e-2),
}

# Logits of tiny models with gated delta nets. The norms of q, k and of the output divide by small
# numbers: the chunked and the recurrent form of transformers differ by 6e-6 of the largest logit.
LOGITS_HYBRID = {
    "float32": Tolerance(diff=1e-10, max_abs=1e-4),
    "float16": Tolerance(diff=2e-5, max_abs=2e-2),
    "bfloat16": Tolerance(diff=1e-3, max_abs=2e-1),
}

# Logits of the CUDA back end against the CPU's in the same dtype: both round, at other places.
LOGITS_CUDA = {
    "float16": Tolerance(diff=2e-5, max_abs=1e-2),
    "bfloat16": Tolerance(diff=1e-3, max_abs=8e-2),
}

# The distance of a number in [1, 2) to the next one: the largest share that it can be of a number.
ULP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Single kernels against float64. A result is rounded once, after float32 sums; attention on CUDA
# also rounds its probabilities.
KERNELS = {
    "exact_inputs": {
        "float32": Tolerance(diff=1e-12, max_abs=2e-6),
        "float16": Tolerance(diff=2e-7, max_abs=6e-4),
        "bfloat16": Tolerance(diff=1e-5, max_abs=5e-3),
    },
    "gemm": {
        "float32": Tolerance(diff=1e-11, max_abs=1e-5),
        "float16": Tolerance(diff=2e-7, max_abs=1e-3),
        "bfloat16": Tolerance(diff=1e-5, max_abs=8e-3),
    },
    # A normed x is rounded before it is multiplied.
    "normed_gemm": {
        "float32": Tolerance(diff=1e-11, max_abs=1e-5),
        "float16": Tolerance(diff=1e-6, max_abs=2e-3),
        "bfloat16": Tolerance(diff=4e-5, max_abs=1.6e-2),
    },
    "attention": {
        "float32": Tolerance(diff=1e-11, max_abs=1e-5),
        "float16": Tolerance(diff=1e-6, max_abs=2e-3),
        "bfloat16": Tolerance(diff=4e-5, max_abs=1.6e-2),
    },
}


def calc_diff(result: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """1 - 2<a,b> / (<a,a> + <b,b>): 0 if equal, 1 if orthogonal. NaN/Inf must agree."""
    a, b = _finite_pair(result, reference)
    scale = float((a * a + b * b).sum())
    return 0.0 if scale == 0 else 1.0 - 2.0 * float((a * b).sum()) / scale


def assert_close(result: npt.ArrayLike, reference: npt.ArrayLike, tolerance: Tolerance) -> None:
    """Fails with both metrics in the message."""
    diff = calc_diff(result, reference)
    a, b = _finite_pair(result, reference)
    largest = float(np.abs(b).max(initial=0.0)) or 1.0
    max_abs = float(np.abs(a - b).max(initial=0.0)) / largest
    assert diff <= tolerance.diff and max_abs <= tolerance.max_abs, (
        f"calc_diff {diff:.3g} (at most {tolerance.diff:.3g}), max_abs {max_abs:.3g} of the "
        f"largest value (at most {tolerance.max_abs:.3g})"
    )


def assert_as_close(
    result: npt.ArrayLike, other: npt.ArrayLike, reference: npt.ArrayLike, times: float = 4
) -> None:
    """The errors of `result` are at most `times` those of `other`, a known good result.

    For results that both round, where deep norms or routers make the errors larger than a fixed
    bound would allow for other models.
    """
    a, b = _finite_pair(other, reference)
    largest = float(np.abs(b).max(initial=0.0)) or 1.0
    own = Tolerance(calc_diff(other, reference), float(np.abs(a - b).max(initial=0.0)) / largest)
    assert_close(result, reference, Tolerance(times**2 * own.diff, times * own.max_abs))


def _finite_pair(
    result: npt.ArrayLike, reference: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    a, b = np.asarray(result, np.float64), np.asarray(reference, np.float64)
    assert a.shape == b.shape, f"shape {a.shape}, reference {b.shape}"
    finite = np.isfinite(b)
    assert np.array_equal(np.isfinite(a), finite), "NaN or Inf at other places"
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), "NaN and Inf differ"
    return a[finite], b[finite]
