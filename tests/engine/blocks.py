"""Block drafters and their targets, and engines whose drafts numpy networks check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import load_model
from tests.engine.drafted import Drive
from tests.engine.harness import random_ids
from tests.reference.block_draft import Lattice, NumpyBlock
from tests.reference.numpy_drafts import NumpyTarget
from tests.reference.tiny_blocks import write_block
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny

VOCAB = 7  # so few tokens that random weights often draft the right one
MASK = 5
HIDDEN, HEAD_DIM = 64, 16
TREE = {"spec_num_iter": 4, "spec_tree_size": 20}
REDUCED = {"draft_vocab_size": 5, "enable_confidence_head": False}


def tensor(*shape: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A draft, and the keys that differ in its target's config."""

    kind: str
    overrides: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    rename: dict[str, str] = field(default_factory=dict)
    family: str = "qwen3"
    target: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


def speculators(**keys: Any) -> dict[str, Any]:
    """The config of speculators: ids of layers whose inputs are read, layers as an object."""
    layers = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 0.01,
        "rope_theta": 20000.0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
    }
    nothing = dict.fromkeys([*layers, "target_layer_ids", "attention_bias"])
    named = {"transformer_layer_config": layers, "aux_hidden_state_layer_ids": [2, 1]}
    return {**nothing, **named, "mask_token_id": MASK, **keys}


def write(directory: Path, case: Case) -> tuple[TinyCheckpoint, TinyCheckpoint]:
    """Writes the target and the draft, and returns both."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 3, **case.target}
    target = write_tiny(directory / "target", case.family, seed=3, dtype=case.dtype, **sizes)
    tensors = {"extra": case.extra, "drop": case.drop, "rename": case.rename, "dtype": case.dtype}
    return target, write_block(directory / "draft", case.kind, target, **tensors, **case.overrides)


class Pair:
    """An engine on the CPU, and the numpy network that says what it drafts."""

    def __init__(
        self, directory: Path, case: Case, speculation: dict[str, Any], **config: Any
    ) -> None:
        self.target, self.draft = write(directory, case)
        of_target = NumpyTarget(self.target.fields(), self.target.weights, np.float64)
        self.network = NumpyBlock(of_target, self.draft.config, self.draft.weights)
        self.depth = self.network.drafted = speculation["spec_num_iter"]
        self.engine = load(self.target, self.draft.directory, speculation, **config)

    def start(self, ids: Sequence[int], chunk: int = 0, **fields: Any) -> Sequenced:
        slot, first = Drive(self.engine).start(list(ids), chunk, max_tokens=400, **fields)
        return Sequenced(slot, [*ids, first])

    def step(self, sequences: Sequence[Sequenced], shape: tuple[int, int] | None = None) -> None:
        """Runs one step of these sequences."""
        engine, slots = self.engine, [each.slot for each in sequences]
        for each in sequences:
            wanted = len(each.text) + engine.tokens_per_step
            assert engine.reserve(each.slot, min(wanted, engine.max_model_len))
        drafts = engine.begin_masked(slots, shape)
        for each, (tokens, parents) in zip(sequences, drafts):
            depth = self.depth if shape is None else shape[0]
            assert tokens[0] == each.text[-1]
            each.drafts.append((len(each.text) - 1, tokens, parents, depth))
        nodes = sum(len(tokens) for tokens, _ in drafts)
        engine.end_masked([-1] * nodes, np.zeros((0, 0), np.uint32))
        for output in engine.collect():
            (each,) = (each for each in sequences if each.slot == output.slot)
            each.text += output.tokens
            each.emitted.append(len(output.tokens))

    def check(self, each: Sequenced, topk: int = 0) -> None:
        """Compares all drafts of a sequence, and ends it."""
        self.engine.release(each.slot)
        for lattice, draft in self.lattices(each, topk):
            lattice.check(*draft)

    def lattices(self, each: Sequenced, topk: int = 0) -> Iterator[tuple[Lattice, Any]]:
        """The numpy lattice of each draft, and its tokens, parents and depth."""
        _, states = self.network.target.states(each.text, self.network.layers)
        for length, *draft in each.drafts:
            before = [state[:length] for state in states]
            yield self.network.lattice(before, each.text[length], topk), draft

    def run(
        self,
        ids: Sequence[int],
        steps: int,
        chunk: int = 0,
        topk: int = 0,
        shapes: Sequence[tuple[int, int] | None] = (None,),
        **fields: Any,
    ) -> Sequenced:
        """Runs and compares one sequence, whose steps have these shapes in turn."""
        each = self.start(ids, chunk, **fields)
        for i in range(steps):
            self.step([each], shapes[i % len(shapes)])
        self.check(each, topk)
        return each


@dataclass
class Sequenced:
    """A sequence, and its drafts: cached tokens before the step, tokens, parents, depth."""

    slot: int
    text: list[int]  # the last token is the root of the next step
    drafts: list[tuple[int, list[int], list[int], int]] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)


def load(
    target: TinyCheckpoint, draft: Path | None, speculation: dict[str, Any], **config: Any
) -> Any:
    named = {"no_speculation": True} if draft is None else {"draft_model_path": str(draft)}
    settings = {
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 1,
        "chunk_length": 128,
        "max_model_len": 512,
        "speculative_config": SpeculativeConfig(**named, **speculation),
        **config,
    }
    return load_model(str(target.directory), config=EngineConfig(**settings)).engine


def text_of(length: int, vocab: int = VOCAB) -> list[int]:
    return [i % vocab for i in random_ids(length, 1000, seed=length)]
