"""Block drafters with synthetic acceptance reach it on the CPU, in chains and in trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import load_model
from cpmcu.quant.packing import unpack_gptq
from scripts.synthetic.acceptance import lay_out
from scripts.synthetic.entries import Entries, entries_matrix
from scripts.synthetic.sources import NumpySource
from scripts.synthetic.tensors import TensorSpec
from tests.engine.harness import sampling
from tests.unit.test_synthetic_acceptance import expected_length
from tests.unit.test_synthetic_blocks import flags_of
from tests.unit.test_synthetic_checkpoint import write

DEPTH, PROMPT = 4, [5, 900, 17]
SMALL = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DRAFT = HEADS | {"num_hidden_layers": 2}
CHAIN = {"spec_topk_per_iter": 1}
TREE = {"spec_tree_size": 32}
OF_KIND: dict[str, dict[str, Any]] = {
    "dspark": {"block_size": DEPTH},
    "dflash2": {"block_size": DEPTH + 1, "layer_types": ["sliding_attention"] * 2},
}


def write_pair(
    folder: Path, kind: str, acceptance: float, *more: str, preset: str = "tiny-llama"
) -> tuple[Path, Path]:
    target, draft = folder / "target", folder / "draft"
    flags = ["--acceptance", str(acceptance), "--draft-out", str(draft), "--draft-kind", kind]
    flags += flags_of(SMALL | HEADS | {"head_dim": 128})
    flags += flags_of(DRAFT | OF_KIND[kind], "--draft-set")
    write(preset, target, *flags, *more)
    return target, draft


def accept_lengths(
    target: Path, draft: Path, steps: int, prompt: list[int] = PROMPT, **speculation: Any
) -> tuple[list[int], list[int]]:
    """The text, and the number of tokens of each step."""
    room = len(prompt) + 1 + steps * (DEPTH + 1)
    config = EngineConfig(
        model=str(target),
        device="cpu",
        num_threads=1,
        max_num_seqs=1,
        max_model_len=room,
        speculative_config=SpeculativeConfig(draft_model_path=str(draft), **speculation),
    )
    engine = load_model(str(target), config=config).engine
    slot = engine.add_sequence(sampling(max_tokens=room), prompt)
    assert engine.reserve(slot, room)
    for begin in range(0, len(prompt), engine.chunk_length):
        part = prompt[begin : begin + engine.chunk_length]
        engine.prefill([(slot, part, begin + len(part) == len(prompt))])
        tokens = engine.collect()[0].tokens
    lengths = []
    for _ in range(steps):
        engine.decode([slot])
        emitted = engine.collect()[0].tokens
        tokens += emitted
        lengths.append(len(emitted))
    return tokens, lengths


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", OF_KIND)
@pytest.mark.parametrize("quant", [None, "gptq"])
def test_text_and_acceptance_follow_the_plan(
    kind: str, shape: dict[str, int], quant: str | None, tmp_path: Path
) -> None:
    acceptance, steps = 0.75, 100
    form = ["--quant", quant, "--draft-quant", quant] if quant else []
    target, draft = write_pair(tmp_path, kind, acceptance, *form)
    tokens, lengths = accept_lengths(target, draft, steps, **shape)
    config = json.loads((target / "config.json").read_text())
    mask = {"mask_token_id": SMALL["vocab_size"] - 1}
    laid = lay_out(config | mask, 0, acceptance, SMALL["vocab_size"] // 2)
    assert tokens == laid.next_token[[PROMPT[-1], *tokens[:-1]]].tolist()
    mean, deviation = expected_length(acceptance)
    assert abs(np.mean(lengths) - mean) <= 3 * deviation / np.sqrt(steps)
    at, planned = 0, []
    while len(planned) < steps:
        agreed = laid.accepted[tokens[at : at + DEPTH]].tolist()
        planned.append(1 + (agreed + [False]).index(False))
        at += lengths[len(planned) - 1]
    assert lengths == planned


@pytest.mark.parametrize(
    "kind, preset, flags",
    [
        ("dspark", "tiny-minicpm", []),
        ("dspark", "tiny-qwen3-moe", ["--quant", "fp8", "--draft-quant", "fp8"]),
        ("dflash2", "tiny-qwen3.5", ["--draft-set", "sliding_window=64"]),
    ],
)
def test_other_targets_and_long_prompts(
    kind: str, preset: str, flags: list[str], tmp_path: Path
) -> None:
    """With P = 1 each step accepts a whole block, whatever the context holds."""
    prompt = np.random.default_rng(1).integers(5, 2000, 300).tolist()
    target, draft = write_pair(tmp_path, kind, 1.0, *flags, preset=preset)
    _, lengths = accept_lengths(target, draft, 12, prompt, **CHAIN)
    assert lengths == [DEPTH + 1] * 12


@pytest.mark.parametrize("kind", OF_KIND)
def test_right_second_choices_are_in_larger_trees(kind: str, tmp_path: Path) -> None:
    acceptance, steps = 0.6, 80
    target, draft = write_pair(tmp_path, kind, acceptance, "--second", "1")
    means = [
        float(np.mean(accept_lengths(target, draft, steps, **shape)[1]))
        for shape in (CHAIN, {"spec_tree_size": 8}, TREE)
    ]
    mean, deviation = expected_length(acceptance)
    assert abs(means[0] - mean) <= 3 * deviation / np.sqrt(steps)
    assert means[0] + 0.5 < means[1] < means[2]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--draft-kind", "dspark"], "--acceptance and --draft-out go together"),
        (["--draft-set", "block_size=4"], "--draft-set needs --draft-kind"),
        (
            ["--draft-set", "mask_token_id=9000"],
            "mask_token_id is 9000, expected an id below the target's 4096",
        ),
        (["--draft-set", "hidden_size=128"], "the draft's hidden_size must be the target's"),
        (["--draft-set", "target_layer_ids=[]"], "target_layer_ids is .*, but must be a list"),
    ],
)
def test_flags_are_checked(flags: list[str], message: str, tmp_path: Path) -> None:
    both = ["--acceptance", "0.5", "--draft-out", str(tmp_path / "draft")]
    if flags[0] == "--draft-kind":
        both = both[:2]
    elif "needs" not in message:
        both += ["--draft-kind", "dspark"]
    with pytest.raises(SystemExit, match=message):
        write("tiny-llama", tmp_path / "target", *both, *flags)
    assert not (tmp_path / "target").exists()


def test_draft_kind_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--draft-kind is for the draft in --draft-out"):
        write("tiny-llama", tmp_path / "target", "--draft-kind", "dspark")


def test_chosen_elements_in_4_bits_are_those_of_the_dense_matrix() -> None:
    """Elements of one row and group have a common scale, the largest magnitude over 7."""
    rows, columns = np.array([0, 0, 3]), np.array([1, 2, 130])
    entries = Entries(rows, columns, np.array([7.0, -3.0, 0.5], np.float32))
    (dense,) = entries_matrix("m", 8, 256, entries, in_4_bits=False)
    packed = {spec.name: spec for spec in entries_matrix("m", 8, 256, entries, in_4_bits=True)}

    def values(spec: TensorSpec, dtype: str) -> np.ndarray:
        return np.concatenate(list(spec.fill(NumpySource(), 1, spec.count, dtype)))

    codes = values(packed["m.qweight"], "int32").reshape(32, 8)
    scales = values(packed["m.scales"], "float16").astype(np.float32).reshape(2, 8)
    weight = ((unpack_gptq(codes) - 8.0) * scales.repeat(128, 0)).T
    expected = values(dense, "float32").reshape(8, 256)
    assert weight[rows, columns] == pytest.approx(entries.values, rel=1e-3)
    assert np.abs(weight - expected).max() < 0.01
    assert not weight[0, 3:128].any() and weight[0, 128:].any() and expected.all()
