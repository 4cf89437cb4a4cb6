"""The MTP head of the engine drafts what the numpy head drafts, and trees reach its acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import bench
from cpmcu.benchmarks.decoding import step_bytes
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import LoadedModel, load_model
from scripts.synthetic.acceptance import lay_out
from tests.engine.drafted import Drive
from tests.engine.harness import SMALL, random_ids
from tests.reference.engines import extension_or_skip
from tests.reference.hf_model import hf_states
from tests.reference.numpy_drafts import NumpyMtp, NumpyTarget
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.unit.test_synthetic_checkpoint import write

extension_or_skip()

GPTQ = ("--quant", "gptq")
VOCAB, DEPTH = 7, 3  # so few tokens that random weights often draft the right one


def load(directory: Path, **speculation: Any) -> LoadedModel:
    config = EngineConfig(
        device="cpu",
        num_threads=1,
        max_num_seqs=1,
        chunk_length=32,
        max_model_len=1024,
        speculative_config=SpeculativeConfig.from_mapping(speculation),
    )
    return load_model(str(directory), config=config)


def expected_lengths(tiny: TinyCheckpoint, ids: list[int], tokens: list[int]) -> list[int]:
    """Emitted tokens of each step of a greedy chain, by the numpy head and transformers' states."""
    text = ids + tokens
    _, hidden = hf_states(tiny.config, tiny.weights, text)
    of_target = {name: w for name, w in tiny.weights.items() if not name.startswith("mtp.")}
    head = NumpyMtp(
        NumpyTarget(tiny.fields(), of_target),
        {name: w for name, w in tiny.weights.items() if name.startswith("mtp.")},
        tiny.config["head_dim"],
    )
    lengths, root, read = [], len(ids), 0  # the root is the last emitted token
    while root < len(text) - 1:
        logits, recycled = head.extend(hidden[read:root], text[read + 1 : root + 1])
        read = root
        drafted = head.chain(recycled[-1], logits[-1], DEPTH)
        right = 0
        while right < DEPTH and text[root + 1 + right : root + 2 + right] == [drafted[right]]:
            right += 1
        lengths.append(min(right + 1, len(text) - 1 - root))
        root += lengths[-1]
    return lengths


@pytest.mark.parametrize(("family", "tied"), [("qwen3_5", False), ("qwen3_next", True)])
def test_a_chain_is_that_of_the_numpy_head(family: str, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the target's states are those of transformers")
    keys = {"vocab_size": VOCAB, "mtp_num_hidden_layers": 1, "tie_word_embeddings": tied}
    tiny = write_tiny(tmp_path, family, seed=2, **keys)
    drive = Drive(load(tmp_path, method="mtp", num_speculative_tokens=DEPTH).engine)
    seen: set[int] = set()
    for length in (1, 2, 31, 40, 70):
        ids = [i % VOCAB for i in random_ids(length, 100, seed=length)]
        tokens = drive.one(ids, 90)
        assert drive.emitted == expected_lengths(tiny, ids, tokens)
        seen |= set(drive.emitted[:-1])
    assert len(seen) >= (2 if tied else 3), seen


@pytest.mark.parametrize(
    ("preset", "topk", "quant"),
    [("tiny-qwen3.5", 4, ()), ("tiny-qwen3.5-moe", 1, ())]
    + ([] if SMALL else [("tiny-qwen3.5", 1, GPTQ), ("tiny-qwen3.5-moe", 4, GPTQ)]),
)
def test_synthetic_acceptance(
    preset: str, topk: int, quant: tuple[str, ...], tmp_path: Path
) -> None:
    """Each step accepts the planned number of tokens, in trees, too, since wrong ones are sure."""
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128}
    flags = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    flags += ["--acceptance", "0.7", "--draft-vocab-size", "512", *quant]
    if not quant:
        flags += ["--dtype", "float32"]
    if preset == "tiny-qwen3.5-moe" and topk == 4:
        flags += ["--set", "common_experts=2"]
    target = write(preset, tmp_path / "target", *flags)
    shape = {"spec_num_iter": 4, "spec_topk_per_iter": topk, "spec_tree_size": topk * 2 + 3}
    loaded = load(target, method="mtp", **shape)
    assert loaded.draft is not None and loaded.draft.method == "mtp"
    assert loaded.spec.linear_method == ("packed" if quant else "dense")
    assert loaded.draft.model is not None and loaded.draft.model.linear_method == "dense"
    drive = Drive(loaded.engine)
    ids = [5, 900, 17]
    tokens = drive.one(ids, 300)

    config = json.loads((target / "config.json").read_text())
    pair = lay_out(config, 0, 0.7, 512)
    assert tokens == pair.next_token[[ids[-1], *tokens[:-1]]].tolist()
    if topk == 1:
        at = 0
        for length in drive.emitted[:-1]:
            agreed = pair.accepted[tokens[at : at + 4]].tolist()
            assert length == 1 + [*agreed, False].index(False)
            at += length
    mean = float(np.mean(drive.emitted[:-1]))
    assert abs(mean - sum(0.7**i for i in range(5))) < 0.35


def test_frspec_with_synthetic_acceptance(tmp_path: Path) -> None:
    """All tokens of the text are among the most frequent ones, so acceptance stays the same."""
    flags = ["--acceptance", "1", "--dtype", "float32", "--set", "vocab_size=1024"]
    target = write("tiny-qwen3.5", tmp_path / "target", *flags, "--draft-vocab-size", "256")
    loaded = load(target, method="mtp", num_speculative_tokens=2, frspec_vocab_size=256)
    assert loaded.draft is not None and len(loaded.draft.options["vocab_ids"]) == 256
    drive = Drive(loaded.engine)
    drive.one([5], 61)
    assert np.mean(drive.emitted) > 2.7  # the eos ids take the places of two tokens


def test_bench_measures_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bench needs no flag, because the head drafts by default."""
    target = write("tiny-qwen3.5", tmp_path / "target", "--acceptance", "1", "--dtype", "float32")
    capsys.readouterr()  # discards the writer's output
    flags = ["--model", str(target), "--device", "cpu", "--contexts", "32", "--decode", "2"]
    assert bench.main([*flags, "--max-num-seqs", "1", "--json"]) == 0
    speculation = json.loads(capsys.readouterr().out)["speculation"]
    (row,) = speculation["rows"]
    assert row["mean_accept_length"] == pytest.approx(5, abs=0.5)  # the last step is cut short


def test_the_floor_of_a_step_counts_states_twice(tmp_path: Path) -> None:
    """Keys and values are those of the attention layers alone."""
    found = []
    for kind in ("linear_attention", "full_attention"):
        kinds = ["full_attention", kind]
        keys = {"layer_types": kinds, "num_hidden_layers": 2, "dtype": "bfloat16"}
        write_tiny(tmp_path / kind, "qwen3_5", vocab_size=64, **keys)
        loaded = load(tmp_path / kind, no_speculation=True)
        rows = loaded.engine.memory_plan()
        of_weights = sum(row["bytes"] for row in rows if row["group"] == "weights")
        of_weights -= 64 * 64 * 2  # the embedding table
        found.append(step_bytes(loaded.engine, loaded.spec, 100) - of_weights)
    of_a_layer = 100 * 2 * 2 * 16 * 2  # keys and values of 2 heads
    assert found == [of_a_layer + 2 * 4 * 6 * 16 * 24, 2 * of_a_layer]
