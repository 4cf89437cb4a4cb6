"""A speculative step neither allocates memory nor waits for the device."""

from __future__ import annotations

import pytest

from cpmcu.config import SpeculativeConfig
from tests.engine.harness import DEVICES, SHIPPED, generate, make_engine, sampling

EAGLE2 = str(SHIPPED.parent / "tiny-python-eagle2")
PROMPT = [1, 300, 301, 302, 303, 304]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graph", [True, False])
def test_step_neither_allocates_nor_waits(graph: bool, device: str) -> None:
    """The host only polls mapped memory: no allocation, no device synchronisation."""
    engine = make_engine(
        SHIPPED,
        device,
        max_num_seqs=2,
        max_model_len=1024,
        cuda_graph=graph,
        speculative_config=SpeculativeConfig(
            draft_model_path=EAGLE2, spec_num_iter=4, spec_topk_per_iter=4, spec_tree_size=12
        ),
    )
    generate(engine, PROMPT, 20)  # captures the graphs and selects the GEMM algorithms
    slot = engine.add_sequence(sampling(temperature=0.7, seed=1), PROMPT)
    assert engine.reserve(slot, 900)
    engine.prefill([(slot, PROMPT, True)])
    engine.collect()
    before = engine.counters
    for _ in range(50):
        engine.decode([slot])
        if engine.in_flight() >= 2:
            engine.collect()
    while engine.in_flight():
        engine.collect()
    after = engine.counters
    assert after["steps"] == before["steps"] + 50
    for counter in ("allocations", "synchronizations", "graph_captures"):
        assert after[counter] == before[counter], counter
