"""Pairs with synthetic acceptance emit their text and reach their acceptance on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import bench
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import LoadedModel, load_model
from scripts.synthetic.acceptance import draft_tensors, lay_out
from scripts.synthetic.layouts import eagle3_tensors, eagle_tensors, special_ids
from scripts.synthetic.presets import PRESETS
from scripts.synthetic.sources import CHUNK, NumpySource
from scripts.synthetic.writer import DEFAULT_TOKENIZER, copy_tokenizer
from tests.engine.harness import sampling
from tests.unit.test_synthetic_checkpoint import read_tensors, write

DEPTH, STEPS, PROMPT = 4, 300, [5, 900, 17]
ROOM = len(PROMPT) + 1 + STEPS * (DEPTH + 1)
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FLAGS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


def write_pair(folder: Path, preset: str, acceptance: float, *more: str) -> tuple[Path, Path]:
    target, draft = folder / "target", folder / "draft"
    flags = ["--acceptance", str(acceptance), "--draft-out", str(draft), "--dtype", "float32"]
    write(preset, target, *flags, *FLAGS, *more)
    return target, draft


def load(target: Path, draft: Path | None, **speculation: Any) -> LoadedModel:
    path = None if draft is None else str(draft)
    config = EngineConfig(
        model=str(target),
        device="cpu",
        max_num_seqs=1,
        max_model_len=ROOM,
        speculative_config=SpeculativeConfig(draft_model_path=path, **speculation),
    )
    return load_model(str(target), config=config)


def expected_length(acceptance: float) -> tuple[float, float]:
    """Mean and standard deviation of the tokens per speculative step."""
    lengths = np.arange(1, DEPTH + 2)
    at_least = acceptance ** np.arange(DEPTH + 1)
    share = at_least - np.append(at_least[1:], 0)
    mean = float(lengths @ share)
    return mean, float(np.sqrt((lengths - mean) ** 2 @ share))


@pytest.fixture(scope="module", params=["0.5", "0.8", "1.0", "0.75 gptq", "0.75 fp8"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[float, Path, Path]:
    number, *forms = request.param.split()
    quant = [word for form in forms for word in ("--quant", form, "--draft-quant", form)]
    acceptance = float(number)
    preset = "tiny-llama" if acceptance == 0.5 else "tiny-minicpm"  # both layouts of a draft
    return acceptance, *write_pair(tmp_path_factory.mktemp("pair"), preset, acceptance, *quant)


@pytest.mark.parametrize("topk, tree_size", [(1, 5), (8, 32)])
def test_text_and_acceptance_follow_the_plan(
    pair: tuple[float, Path, Path], topk: int, tree_size: int
) -> None:
    acceptance, target, draft = pair
    shape = {"spec_num_iter": DEPTH, "spec_topk_per_iter": topk, "spec_tree_size": tree_size}
    loaded = load(target, draft, **shape)
    quantised = (target / "config.json").read_text().count("quantization_config")
    assert loaded.draft is not None
    for spec in (loaded.spec, loaded.draft.model):
        assert spec.linear_method == ("packed" if quantised else "dense")
    engine = loaded.engine
    slot = engine.add_sequence(sampling(max_tokens=ROOM), PROMPT)
    assert engine.reserve(slot, ROOM)
    engine.prefill([(slot, PROMPT, True)])
    tokens, lengths = engine.collect()[0].tokens, []
    for _ in range(STEPS):
        engine.decode([slot])
        emitted = engine.collect()[0].tokens
        tokens += emitted
        lengths.append(len(emitted))

    config = json.loads((target / "config.json").read_text())
    laid = lay_out(config, 0, acceptance, SMALL["vocab_size"] // 2)
    previous = [PROMPT[-1], *tokens[:-1]]
    assert tokens == laid.next_token[previous].tolist()
    mean, deviation = expected_length(acceptance)
    assert abs(np.mean(lengths) - mean) <= 3 * deviation / np.sqrt(STEPS)
    if topk == 1:  # each step accepts the planned number of tokens
        at = 0
        for length in lengths:
            agreed = laid.accepted[tokens[at : at + DEPTH]].tolist()
            assert length == 1 + (agreed + [False]).index(False)
            at += length


def test_the_token_cycle_visits_each_drafted_token_once() -> None:
    config = {**PRESETS["tiny-minicpm"].config, **SMALL}
    laid = lay_out(config, 0, 0.75, 512)
    token, seen = int(laid.drafted[0]), []
    while token not in seen:
        seen.append(token)
        token = int(laid.next_token[token])
    assert sorted(seen) == laid.drafted.tolist() and token == seen[0]
    assert not special_ids(config) & set(seen)
    assert laid.accepted[laid.drafted].sum() == 384
    outside = np.setdiff1d(np.arange(SMALL["vocab_size"]), laid.drafted)
    assert np.isin(laid.next_token[outside], laid.drafted).all()
    assert sorted(laid.head_rows) == list(range(SMALL["vocab_size"]))


def test_flags_of_a_pair_are_checked(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with pytest.raises(SystemExit, match="go together"):
        write("tiny-llama", out, "--acceptance", "0.5")
    both = ["--draft-out", str(tmp_path / "draft"), "--acceptance"]
    with pytest.raises(SystemExit, match="probability"):
        write("tiny-llama", out, *both, "1.5")
    with pytest.raises(SystemExit, match="is a draft"):
        write("tiny-minicpm-eagle", out, *both, "0.5")
    with pytest.raises(SystemExit, match="2 to 4092"):
        write("tiny-llama", out, *both, "0.5", "--draft-vocab-size", "5000")
    assert not out.exists()


def test_eagle_head_with_its_own_vocabulary(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, "tiny-minicpm", 0.5)
    loaded = load(target, draft, spec_num_iter=2, spec_topk_per_iter=4, spec_tree_size=8)
    assert loaded.draft is not None and loaded.draft.method == "eagle"
    options = loaded.draft.options
    assert options["own_head"] and options["input_norms"] and options["attention_norm"]
    ids = np.asarray(options["vocab_ids"])
    assert ids.size == 1024 and (np.diff(ids) > 0).all() and ids.max() < SMALL["vocab_size"]

    with pytest.raises(ValueError, match="FR-Spec"):
        load(target, draft, frspec_vocab_size=256)

    tensors = draft / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes().replace(b"[1024,128]", b"[ 512,256]"))
    with pytest.raises(ValueError, match=r"lm_head.weight has 512 rows, expected 1024, as d2t"):
        load(target, draft)


def test_bench_reports_speculative_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_pair(tmp_path, "tiny-minicpm", 1.0)
    copy_tokenizer(DEFAULT_TOKENIZER, target)
    flags = ["--model", str(target), "--device", "cpu", "--contexts", "32", "--decode", "2"]
    flags += ["--draft-model-path", str(draft), "--spec-num-iter", "4", "--max-num-seqs", "1"]
    capsys.readouterr()  # discards the writer's output
    assert bench.main([*flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    speculation = result["speculation"]
    assert speculation["depth"] == 4 and speculation["options"]["spec_num_iter"] == 4
    (plain,), (row,) = result["rows"], speculation["rows"]
    assert row["context"] == plain["context"] == 32
    assert row["cycle_ratio"] == pytest.approx(row["cycle_ms"] / plain["step_ms"])
    assert row["mean_accept_length"] == pytest.approx(5, abs=0.5)  # the last step is cut short
    assert list(row["tokens_per_s_at_accept_length"]) == ["1", "2", "3", "4", "5", "6"]
    assert "| T, ms |" in bench.table(result)
    assert speculation["chosen"] == [] and "chosen" not in bench.table(result)

    assert bench.main([*flags, "--spec-auto", "yes", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["speculation"]["chosen"]
    assert row["context"] == 32 and row["tokens_per_s"] > 0
    assert row["mean_accept_length"] == 0 or 1 <= row["mean_accept_length"] <= 5
    assert "shapes chosen in each step" in bench.table(result)

    assert bench.main([*flags, "--no-speculation", "--json"]) == 0
    assert "speculation" not in json.loads(capsys.readouterr().out)


def test_draft_presets(tmp_path: Path) -> None:
    out = write("tiny-minicpm-eagle", tmp_path / "draft")
    shapes = {name: t[1] for name, t in read_tensors(out / "model.safetensors").items()}
    assert shapes["fc.weight"] == [256, 512]
    norms = {"input_norm1", "input_norm2", "layers.0.input_layernorm"}
    assert {f"{name}.weight" for name in norms} <= set(shapes)
    counts = np.load(out / "token_counts.npy")
    assert counts.dtype == np.int64 and counts.shape == (4096,) and counts.min() > 0
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "token_counts.npy",
    }
    target = write("tiny-minicpm", tmp_path / "target")
    loaded = load(target, out, frspec_vocab_size=512)
    assert loaded.draft is not None and len(loaded.draft.options["vocab_ids"]) == 512
    assert not loaded.draft.options["own_head"]

    eagle = {s.name: s for s in eagle_tensors(PRESETS["llama3.1-8b"].config)}
    assert "input_norm1.weight" not in eagle and "layers.0.self_attn.q_proj.weight" in eagle
    config = PRESETS["llama3.1-8b-eagle3"].config
    eagle3 = {spec.name: spec.shape for spec in eagle3_tensors(config)}
    assert eagle3["fc.weight"] == (4096, 3 * 4096)
    assert eagle3["midlayer.self_attn.q_proj.weight"] == (4096, 2 * 4096)
    assert eagle3["lm_head.weight"] == (32000, 4096)
    assert eagle3["d2t"] == (32000,) and eagle3["t2d"] == (128256,)


class ReusingSource(NumpySource):
    """All chunks have the same memory, as on a GPU."""

    def __init__(self) -> None:
        self._memory = np.empty(4 * CHUNK, np.uint8)

    def vectors(self, *args: Any) -> Iterator[np.ndarray]:
        for chunk in super().vectors(*args):
            staged = self._memory[: chunk.nbytes].view(chunk.dtype)
            staged[:] = chunk
            yield staged


def test_second_choices_from_a_source_that_reuses_memory() -> None:
    config = {**PRESETS["llama3.1-8b-eagle"].config, **SMALL}
    pair = lay_out(config, 3, 0.6, 512, second=0.5)
    (head,) = (s for s in draft_tensors(config, 3, pair) if s.name == "lm_head.weight")
    filled = [
        np.concatenate([c.copy() for c in head.fill(source, 3, head.count, "float32")])
        for source in (NumpySource(), ReusingSource())
    ]
    assert np.array_equal(*filled)
