"""Models on cards of 8 to 32 GB: what fits without flags, and what a refusal names.

The checkpoints have the shapes of published models and no weights. The plans are those of a card
with sm_86, which need not be here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading import loader
from cpmcu.loading.fitting import USEFUL_TOKENS, Fit, fit
from cpmcu.loading.loader import LoadedModel, load_model
from cpmcu.loading.plan import LoadPlan
from tests.reference.hollow import write_hollow

SM_86 = 86
Plan = Callable[..., LoadedModel]

# Preset -> GB -> the least context and number of sequences without flags; None: refused.
DEFAULTS: dict[str, dict[float, tuple[int, int] | None]] = {
    "llama3.1-8b": {
        7: (7000, 8),
        11: (38000, 8),
        15: (68000, 8),
        22: (120_000, 8),
        30: (131_072, 8),
    },
    "qwen3.5-27b": {7: None, 11: None, 15: None, 22: (22000, 4), 30: (108_000, 8)},
    "qwen3-30b-a3b": {7: None, 11: None, 15: None, 22: (40960, 8), 30: (40960, 8)},
}
CASES = [(name, gb) for name, sizes in DEFAULTS.items() for gb in sizes]


@pytest.fixture(autouse=True)
def no_check_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are not compared with the engine's: a model with experts has 73,000."""
    nothing = LoadPlan([], [], {}, {}, 0)
    monkeypatch.setattr(loader, "plan_load", lambda *arguments: nothing)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Returns a function (preset, GB, fields) that plans the preset in 4 bits with these GB."""
    folder = tmp_path_factory.mktemp("hollow")

    def made(name: str, gigabytes: float, quant: str | None = "gptq", **fields: Any) -> LoadedModel:
        directory = folder / f"{name}-{quant}"
        if not directory.exists():
            write_hollow(directory, name, quant)
        config = EngineConfig(memory_limit=gigabytes, **fields)
        return load_model(str(directory), config=config, plans_for=SM_86)

    return made


@pytest.mark.parametrize(("name", "gigabytes"), CASES)
def test_defaults_of_each_size(plan: Plan, name: str, gigabytes: float) -> None:
    expected = DEFAULTS[name][gigabytes]
    if expected is None:
        with pytest.raises(MemoryError, match=r"MiB too much\. No flag .* format of fewer bits"):
            plan(name, gigabytes)
        return
    engine = plan(name, gigabytes).engine
    assert (engine.max_model_len >= expected[0], engine.max_num_seqs) == (True, expected[1])
    assert engine.num_pages * 64 >= engine.max_model_len  # what sequences share
    rows = engine.memory_plan()
    used = max(row["offset"] + row["bytes"] for row in rows)
    assert 0.97 * gigabytes * 1e9 <= used <= gigabytes * 1e9 or expected[0] == 131_072


@pytest.mark.parametrize(
    ("name", "title"), [("llama3.1-8b", "Llama-3.1-8B"), ("qwen3.5-27b", "Qwen3.5-27B")]
)
def test_the_page_on_gpus_has_these_lengths(plan: Plan, name: str, title: str) -> None:
    """Lengths in the row without flags differ by at most 2 %: a build with CUDA plans more."""
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| {title}.*? \| none \|(.*)\|$", page, re.MULTILINE)
    cells = [cell.split("(")[0].strip() for cell in row.split("|")]
    for gigabytes, cell in zip(DEFAULTS[name], cells, strict=True):
        if cell == "-":
            assert DEFAULTS[name][gigabytes] is None
            continue
        engine = plan(name, gigabytes).engine
        stated = 131072 if cell == "all" else int(cell.replace(",", ""))
        assert engine.max_model_len == pytest.approx(stated, rel=0.02)


# (preset, GB, flags, what the sentence names)
REFUSALS: list[tuple[str, float, dict[str, Any], str]] = [
    (
        "llama3.1-8b",
        7,
        {"max_model_len": 14000, "max_num_seqs": 1},
        r"14000 tokens fits with kv_cache_dtype fp8_e4m3 \(up to 1\d{4} tokens\)\. Without more, "
        r"max_model_len can be \d{4}",
    ),
    (
        "llama3.1-8b",
        7,
        {"max_model_len": 60000, "max_num_seqs": 1},
        r"at most \d{5} tokens, with chunk_length 512, kv_cache_dtype fp8_e4m3 and "
        "lm_head_quant w4",
    ),
    (
        "qwen3.5-27b",
        22,
        {"max_num_seqs": 64, "chunk_length": 2048},
        r"fits with max_num_seqs 1 \(up to \d{5} tokens\)",
    ),
    ("qwen3.5-27b", 19, {}, r"fits with no_speculation \(up to \d{5} tokens\)"),
]


@pytest.mark.parametrize(("name", "gigabytes", "fields", "named"), REFUSALS)
def test_a_refusal_names_what_helps(
    plan: Plan, name: str, gigabytes: float, fields: dict[str, Any], named: str
) -> None:
    chunk = {"chunk_length": 2048} if name.startswith("llama") else {}
    with pytest.raises(MemoryError, match=named):
        plan(name, gigabytes, **{**chunk, **fields})


def test_the_named_flags_help(plan: Plan) -> None:
    """The lengths of the sentences above are those of engines with the flags."""
    fields: dict[str, Any] = {"chunk_length": 2048, "max_num_seqs": 1}
    eight = plan("llama3.1-8b", 7, **fields, kv_cache_dtype="fp8_e4m3", max_model_len=14000)
    assert eight.engine.max_model_len == 14000
    without = SpeculativeConfig(no_speculation=True)
    assert plan("qwen3.5-27b", 19, speculative_config=without).engine.max_model_len > 4096


def test_16_bits_are_told_of_4(plan: Plan) -> None:
    with pytest.raises(MemoryError, match=r"No flag .*: use a checkpoint in 4 bits"):
        plan("llama3.1-8b", 11, quant=None)


def test_a_short_context_is_a_warning(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    loaded = plan("llama3.1-8b", 6.1)
    assert 64 <= loaded.engine.max_model_len < USEFUL_TOKENS
    assert "memory holds only" in caplog.text
    assert "4096 tokens fits with lm_head_quant w4" in caplog.text
    assert plan("llama3.1-8b", 6.1, lm_head_quant="w4").engine.max_model_len >= USEFUL_TOKENS


def test_a_head_in_4_bits_gives_its_memory_to_the_kv_cache(plan: Plan) -> None:
    """The dense rows of the head lie in the KV cache while weights are loaded."""
    dense, rounded = (plan("llama3.1-8b", 7, lm_head_quant=bits).engine for bits in ("none", "w4"))
    head = 128256 * 4096
    saved = (rounded.num_pages - dense.num_pages) * 64 * 131072  # bytes of a token
    assert saved == pytest.approx(head * (2 - 33 / 64), rel=0.05)
    rows = {row["name"]: row for row in rounded.memory_plan()}
    assert rows["pages"]["offset"] == rows["lm_head.dense"]["offset"]


def test_buffers_suit_the_length_that_fits(plan: Plan) -> None:
    """The buffer of attention's partial results is made for the context that fits."""
    engine = plan("qwen3.5-27b", 22).engine
    (partials,) = (row for row in engine.memory_plan() if row["name"] == "attention.partials")
    assert partials["bytes"] < 1 << 30
    long = plan("qwen3.5-27b", 22, max_num_seqs=1, max_model_len=26000).engine
    assert long.max_model_len == 26000


def test_planning_allocates_nothing(plan: Plan) -> None:
    engine = plan("llama3.1-8b", 7).engine
    before = engine.counters["allocations"]
    engine = plan("llama3.1-8b", 900_000).engine  # more than the machine has
    assert engine.counters["allocations"] - before < 10
    assert engine.max_model_len == 131072


# ---- the choice, with made-up sizes


def made_up_fit(room: int, **fields: Any) -> tuple[Fit, list[tuple[int, int]]]:
    """Fits an engine whose sequences take 100, and whose chunk takes a unit a token."""
    tried = []

    def planned(config: EngineConfig, sized_for: int) -> int:
        assert config.max_num_seqs and config.chunk_length
        tried.append((config.max_num_seqs, config.chunk_length))
        most = sized_for or 10000
        rest = room - 100 * config.max_num_seqs - config.chunk_length - most // 10
        if rest < 64:
            raise MemoryError(f"{64 - rest} too much")
        return min(most, rest)

    return fit(EngineConfig(**fields), 10000, planned, "gptq"), tried


def test_usual_numbers_if_they_fit() -> None:
    found, tried = made_up_fit(20000)
    assert (found.config.max_num_seqs, found.config.chunk_length) == (8, 2048)
    assert (found.max_model_len, found.sized_for, len(tried)) == (10000, 0, 1)


def test_fewer_sequences_before_shorter_chunks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found, _ = made_up_fit(6900)
    assert (found.config.max_num_seqs, found.config.chunk_length) == (2, 2048)
    assert found.max_model_len >= USEFUL_TOKENS and "max_num_seqs is 2" in caplog.text
    found, _ = made_up_fit(5500)
    assert (found.config.max_num_seqs, found.config.chunk_length) == (1, 512)
    assert "chunk_length is 512" in caplog.text


def test_given_numbers_stay() -> None:
    found, tried = made_up_fit(6900, max_num_seqs=8, chunk_length=2000)
    assert set(tried) >= {(8, 2000)} and found.config.max_num_seqs == 8
    assert found.config.chunk_length == 2000 and found.max_model_len < USEFUL_TOKENS


def test_the_length_fills_the_memory() -> None:
    found, _ = made_up_fit(8000)  # 8000 - 800 - 2048 = 5152 = length + length / 10
    assert found.max_model_len == pytest.approx(5152 / 1.1, rel=0.03)
    assert found.sized_for >= found.max_model_len


# ---- the limit


def test_a_limit_above_the_free_memory_is_refused(tmp_path: Path) -> None:
    from tests.reference.tiny_checkpoints import write_tiny

    write_tiny(tmp_path)
    config = EngineConfig(memory_limit=500_000, device="cpu")
    with pytest.raises(MemoryError, match=r"memory_limit is 500000 GB, but \d+ MiB are free"):
        load_model(str(tmp_path), config=config)
