"""The two-pass memory plan: buffers that live at the same time share no byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.config import EngineConfig
from cpmcu.loading.loader import load_model, runtime_config
from tests.engine.harness import SHIPPED, make_engine
from tests.reference.tiny_checkpoints import write_tiny

ALIGNMENT = 256


def check_plan(rows: list[dict[str, Any]], total: int) -> None:
    """Compares all pairs of buffers."""

    def meet(a: dict[str, Any], b: dict[str, Any]) -> bool:
        forever = a["first"] < 0 or b["first"] < 0
        return forever or (a["first"] <= b["last"] and b["first"] <= a["last"])

    for i, a in enumerate(rows):
        assert a["offset"] >= 0 and a["offset"] % ALIGNMENT == 0
        assert a["offset"] + a["bytes"] <= total
        for b in rows[:i]:
            apart = (
                a["offset"] + a["bytes"] <= b["offset"] or b["offset"] + b["bytes"] <= a["offset"]
            )
            assert apart or not meet(a, b) or not a["bytes"] or not b["bytes"], (a, b)


BUFFERS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(-1, 11), st.integers(0, 4)), max_size=40
)


@settings(deadline=None, max_examples=300)
@given(BUFFERS)
def test_no_two_live_buffers_overlap(buffers: list[tuple[int, int, int]]) -> None:
    from cpmcu import C

    plan = C.MemoryPlan()
    for i, (size, first, length) in enumerate(buffers):
        if first < 0:
            plan.add(f"persistent {i}", "state", size)
        else:
            plan.add_scratch(f"scratch {i}", size, first, first + length)
    total = plan.assign()
    check_plan(plan.rows(), total)
    assert plan.assign() == total  # planning again changes nothing


def test_scratch_of_one_name_is_one_buffer() -> None:
    from cpmcu import C

    plan = C.MemoryPlan()
    first = plan.add_scratch("x", 100, 2, 3)
    assert plan.add_scratch("x", 300, 5, 6) == first
    assert plan.assign() == 512
    (row,) = plan.rows()
    assert (row["bytes"], row["first"], row["last"]) == (300, 2, 6)


def test_scratch_is_shared_over_time() -> None:
    from cpmcu import C

    plan = C.MemoryPlan()
    for phase in range(8):
        plan.add_scratch(f"phase {phase}", 1 << 20, phase, phase)
    assert plan.assign() == 1 << 20


@pytest.mark.parametrize("chunk_length", [1, 64, 2048])
def test_engine_plan_is_sound(chunk_length: int) -> None:
    engine = make_engine(SHIPPED, chunk_length=chunk_length, max_num_seqs=3)
    rows = engine.memory_plan()
    check_plan(rows, max(row["offset"] + row["bytes"] for row in rows))
    weights = sum(row["bytes"] for row in rows if row["group"] == "weights")
    assert weights == sum(2 * _elements(info.shape) for info in engine.expected_tensors())
    assert {row["group"] for row in rows} == {"weights", "state", "kv", "scratch"}


def test_a_model_that_does_not_fit_is_refused_with_sizes(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", max_position_embeddings=1 << 26)
    with pytest.raises(MemoryError, match=r"does not fit: \d+ MiB of weights.* MiB too much"):
        make_engine(tmp_path, max_model_len=1 << 26, memory_limit=0.01)
    engine = make_engine(tmp_path, max_num_seqs=1, memory_limit=0.05, max_model_len=0)
    assert 64 <= engine.max_model_len < 1 << 26  # the default is the length that fits


def test_planned_model_len_allocates_no_memory(tmp_path: Path) -> None:
    from cpmcu import C

    write_tiny(tmp_path, "llama", max_position_embeddings=1 << 26)
    wide = {"max_num_seqs": 1, "memory_limit": 0.05}
    for config in (EngineConfig(max_model_len=100), EngineConfig(**wide)):
        loaded = load_model(str(tmp_path), config=replace(config, device="cpu"))
        settings = loaded.spec, runtime_config(config, "cpu")
        before = loaded.engine.counters["allocations"]
        planned = C.Engine.planned_model_len(*settings)
        assert loaded.engine.counters["allocations"] == before
        # If memory is the limit, other programs may change the free memory meanwhile.
        tolerance = 0 if config.max_model_len else 0.5
        assert planned == pytest.approx(loaded.engine.max_model_len, rel=tolerance)
    assert planned < 1 << 26
    with pytest.raises(MemoryError, match="does not fit"):
        C.Engine.planned_model_len(
            loaded.spec, C.RuntimeConfig(max_model_len=1 << 26, memory_limit=0.01)
        )


def _elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
