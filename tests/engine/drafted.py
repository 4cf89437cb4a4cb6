"""Targets, drafts, tree shapes, samplings and prompts for speculation tests, and a driver."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.harness import SMALL, random_ids
from tests.reference.tiny_checkpoints import (
    TinyCheckpoint,
    random_weights,
    tiny_config,
    write_tiny,
)
from tests.reference.tiny_drafts import KINDS, write_draft
from tests.reference.tiny_fp8 import write_fp8
from tests.reference.tiny_hybrid import CUDA_SIZES, HYBRIDS
from tests.reference.tiny_mixed import write_mixed
from tests.reference.tiny_w4 import quantise, write_w4

# Layouts of write_quantised by the form of tiny_mixed -> quantization_config.
QUANT_CONFIGS: dict[str, dict[str, Any]] = {
    "nvfp4mo": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    "mxfp4mo": {"quant_method": "modelopt", "quant_algo": "MXFP4"},
    "mxfp8": {"quant_method": "mxfp8"},
    "gptq4_g32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "gptq8z_g64": {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": False},
}

VOCAB = 160
CONTEXT = 512

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 12345},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "seed": 7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": [(5, 2.0), (9, -3.0)],
    },
    "penalised": {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
}

TREES: dict[str, dict[str, int]] = {
    "chain": {"spec_num_iter": 4, "spec_topk_per_iter": 1, "spec_tree_size": 5},
    "root": {"spec_num_iter": 1, "spec_topk_per_iter": 1, "spec_tree_size": 1},
    "narrow": {"spec_num_iter": 3, "spec_topk_per_iter": 4, "spec_tree_size": 12},
    "wide": {"spec_num_iter": 4, "spec_topk_per_iter": 8, "spec_tree_size": 33},
    "full": {"spec_num_iter": 5, "spec_topk_per_iter": 10, "spec_tree_size": 64},
}

TREE_NAMES = ["chain", "narrow"] if SMALL else list(TREES)

# 4-bit drafts of 4-bit targets: kind -> dense draft, draft layout, target layout.
W4_DRAFTS = {
    "eagle_w4": ("eagle_bias", "gptq", "gptq"),
    "minicpm_eagle_w4": ("minicpm_eagle", "marlin", "marlin"),
    "eagle3_w4": ("eagle3", "compressed", "awq"),
}

FILL = "_filled"  # suffix of a kind whose drafts the context fills

DRAFTS = [*KINDS, "ngram", *W4_DRAFTS, "minicpm_eagle_filled", "model_filled", "dspark_filled"]

SOME_DRAFTS = DRAFTS

if SMALL:
    DRAFTS = ["minicpm_eagle", "eagle3", "model_filled", "ngram", "eagle_w4"]
    SOME_DRAFTS = DRAFTS[:-1]  # 4-bit drafts are slow under a sanitizer


class Models:
    """Targets, drafts and their engines, on one device.

    `changes`: to the targets' config.json. `query_scale`: multiplies the targets' queries.
    `num_ranks`: tensor_parallel_size of their engines.
    """

    def __init__(
        self,
        root: Path,
        device: str,
        query_scale: float = 1.0,
        num_ranks: int = 1,
        **changes: Any,
    ) -> None:
        self.query_scale = query_scale
        self.num_ranks = num_ranks
        self.changes = {"max_position_embeddings": CONTEXT, **changes}
        self.root, self.device = root, device
        self.dtype = "bfloat16" if device == "cuda" else "float32"
        self.expected: dict[Any, list[int]] = {}
        self._targets: dict[str, TinyCheckpoint] = {}
        self._plain: dict[str, Any] = {}

    def target(self, family: str) -> TinyCheckpoint:
        """A suffix "_layout" of `family` names a layout of quantised weights."""
        if family not in self._targets:
            if family in HYBRIDS:
                return self.hybrid(family, family)
            name, _, layout = family.partition("_")
            fields = {
                "vocab_size": VOCAB,
                "num_hidden_layers": 3,
                **self.changes,
                **({"hidden_size": 128, "head_dim": 64} if layout else {"head_dim": 64}),
            }
            weights = random_weights(tiny_config(name, self.dtype, **fields))
            for key in weights:
                if key.endswith("q_proj.weight"):
                    weights[key] *= np.float32(self.query_scale)
            made = write_tiny(self.root / family, name, dtype=self.dtype, weights=weights, **fields)
            if layout:
                write_quantised(made.directory, made, layout)
            self._targets[family] = made
        return self._targets[family]

    def hybrid(self, name: str, family: str, **overrides: Any) -> TinyCheckpoint:
        """Adds a target `name`: a model of gated delta nets, by default with an MTP head.

        Skips the test if the device cannot run it.
        """
        sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
        sizes |= CUDA_SIZES if self.device == "cuda" else {}
        sizes |= {"mtp_num_hidden_layers": 1, **overrides}
        made = write_tiny(self.root / name, family, dtype=self.dtype, **sizes)
        self._targets[name] = made
        return made

    def put(self, name: str, made: TinyCheckpoint) -> None:
        """Adds a target `name`."""
        self._targets[name] = made

    def draft(self, kind: str, family: str) -> Path:
        kind = kind.removesuffix(FILL)
        directory = self.root / f"{family}-{kind}"
        if directory.is_dir():
            return directory
        dense, layout, _ = W4_DRAFTS.get(kind, (kind, "", ""))
        made = write_draft(directory, dense, self.target(family), dtype=self.dtype)
        layout = layout or family.partition("_")[2]
        if layout:
            write_quantised(directory, made, layout)
        return directory

    def engine(self, family: str, speculation: dict[str, Any] | None, **config: Any) -> Any:
        from cpmcu.config import EngineConfig, SpeculativeConfig
        from cpmcu.loading.loader import load_model

        target = self.target(family).directory
        speculation = {"no_speculation": True} if speculation is None else speculation
        config = {"max_num_seqs": 1, "chunk_length": 128, "num_threads": 1, **config}
        config.setdefault("tensor_parallel_size", self.num_ranks)
        return load_model(
            str(target),
            config=EngineConfig(
                device=self.device,
                memory_limit=0.2,
                speculative_config=SpeculativeConfig(**speculation),
                **config,
            ),
        ).engine

    def drafted(self, kind: str, family: str, tree: dict[str, Any], **config: Any) -> Any:
        if (
            kind in ("dflash2", "lilicorr") and tree["spec_topk_per_iter"] > 1
        ):  # the draft's file says how many
            tree = {key: value for key, value in tree.items() if key != "spec_topk_per_iter"}
        if kind == "ngram":
            tree = {"spec_num_iter": tree["spec_num_iter"]}
            return self.engine(family, {"method": "ngram", **tree}, **config)
        if kind.endswith(FILL):
            steps = max(1, tree["spec_num_iter"] - 1)
            tree = {**tree, "fill": "ngram", "num_model_steps": steps}
        if kind.removesuffix(FILL) == "mtp":
            return self.engine(family, {"method": "mtp", **tree}, **config)
        draft = str(self.draft(kind, family))
        return self.engine(family, {"draft_model_path": draft, **tree}, **config)

    def plain(self, family: str, ids: list[int], count: int, **fields: Any) -> list[int]:
        """Returns the tokens that the target emits without a drafter."""
        key = (family, tuple(ids), repr(fields))
        known = self.expected.get(key, [])
        if len(known) < count:
            if family not in self._plain:
                self._plain[family] = self.engine(family, None)
            known = self.expected[key] = Drive(self._plain[family]).one(ids, count, **fields)
        return known[:count]


def write_quantised(directory: Path, made: TinyCheckpoint, layout: str) -> None:
    """`layout`: "fp8", a form of tiny_mixed with a config here, or one of 4-bit weights."""
    if layout == "fp8":
        write_fp8(directory, made.config, made.weights, "qwen")
    elif layout in QUANT_CONFIGS:
        write_mixed(directory, made.config, made.weights, {"": layout}, QUANT_CONFIGS[layout])
    else:
        write_w4(directory, made.config, quantise(made.weights), layout)


class Drive:
    """Runs sequences to completion on an engine, as the runner does."""

    def __init__(
        self,
        engine: Any,
        ahead: int = 1,
        shapes: Callable[[], tuple[int, int] | None] = lambda: None,
        skips: Callable[[], bool] = lambda: False,  # does the draft skip a prompt's chunk?
    ) -> None:
        self.engine, self.ahead, self.shapes, self.skips = engine, ahead, shapes, skips
        self.emitted: list[int] = []  # tokens of each decode step of the last sequence

    def start(self, ids: list[int], chunk: int = 0, **fields: Any) -> tuple[int, int]:
        from cpmcu import C

        engine = self.engine
        slot = engine.add_sequence(C.SamplingConfig(**fields), ids)
        assert engine.reserve(slot, len(ids))
        chunk = chunk or engine.chunk_length
        outputs = []
        for begin in range(0, len(ids), chunk):
            part = (slot, ids[begin : begin + chunk], begin + chunk >= len(ids))
            engine.prefill([part], skip_draft=self.skips())
            outputs = engine.collect()
        return slot, outputs[0].tokens[0]

    def one(self, ids: list[int], count: int, chunk: int = 0, **fields: Any) -> list[int]:
        """`count` tokens, or fewer if the device ends the sequence at a stop id."""
        engine = self.engine
        fields = {"max_tokens": count, **fields}
        slot, first = self.start(ids, chunk, **fields)
        tokens, finished, in_flight, self.emitted = [first], count == 1, 0, []
        while not finished and len(tokens) < count:
            while in_flight < self.ahead:
                wanted = len(ids) + len(tokens) + (in_flight + 1) * engine.tokens_per_step
                if in_flight and len(tokens) + in_flight >= count:
                    break
                assert engine.reserve(slot, min(wanted, engine.max_model_len))
                engine.decode([slot], self.shapes())
                in_flight += 1
            (output,) = engine.collect()
            in_flight -= 1
            tokens += output.tokens
            self.emitted.append(len(output.tokens))
            finished = output.finished
        engine.release(slot)
        while engine.in_flight():
            assert engine.collect() == []
        return tokens


# (kind of draft, tree): one of each kind of drafter, for targets whose weights are the subject.
FOUR_DRAFTS = [("eagle", "wide"), ("eagle3", "chain"), ("model", "narrow"), ("ngram", "chain")]


def check_draft(models: Models, kind: str, family: str, tree: dict[str, Any]) -> None:
    """Four prompts, each with another kind of sampling, have the tokens of plain decoding."""
    drive = Drive(models.drafted(kind, family, tree))
    for ids, fields in zip(PROMPTS[2:6], SAMPLINGS.values(), strict=True):
        assert drive.one(ids, 40, **fields) == models.plain(family, ids, 40, **fields)


def family_of(kind: str) -> str:
    family = "minicpm" if kind.startswith("minicpm") else "llama"
    return f"{family}_{W4_DRAFTS[kind][2]}" if kind in W4_DRAFTS else family


PROMPTS = [random_ids(length, VOCAB, seed=length) for length in (1, 2, 63, 64, 65, 130, 200)]

SEVERAL = PROMPTS[::3] if SMALL else PROMPTS

COUNT = 20 if SMALL else 66  # tokens; most prompts then cross a page boundary


@contextlib.contextmanager
def memory_full_of(byte: int) -> Iterator[None]:
    """Makes malloc fill new memory with `byte`."""
    perturb, libc = -6, ctypes.CDLL(None)
    libc.mallopt(perturb, byte ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(perturb, 0)
