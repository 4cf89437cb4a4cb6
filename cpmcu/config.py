"""Engine configuration: frozen dataclasses that LLM, the CLI and the server share.

The metadata of a field holds its help text and its flag, if that differs from the field's name.
To add a flag, add a field (see `cpmcu/flags.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from cpmcu.checks import check_filled, integer, number, shown, truth
from cpmcu.options import option as option
from cpmcu.sparse_options import SparseOptions
from cpmcu.speculation_keys import read_keys
from cpmcu.verification import TARGET_MATCH, check_verification, strategy_option, window_option

DTYPES = ("auto", "float16", "bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")
SPEC_METRICS = ("none", "summary", "detailed")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
HEAD_QUANTS = ("none", "w8", "w4")
DRAFT_HEAD_QUANTS = ("auto", *HEAD_QUANTS)
FILLS = ("ngram",)

PREFIX_CACHE = "prefix cache"  # a group of flags

INT_MAX = (1 << 31) - 1
MOST_SEQS = 256  # kMaxSeqs in csrc/engine/runtime_config.h

# As in csrc/kernels/tree/tree.h.
MAX_TREE_SIZE = 64
MAX_DRAFT_DEPTH = 16
MAX_NGRAM = 32
MAX_DRAFT_TOPK = 32

_MODEL_HELP = (
    "local directory, Hugging Face repository id, or a shipped model: tiny-python-minicpm "
    "(default; small, completes Python code) or tiny-python-minicpm-w4 (the same in 4 bits)"
)


def num_candidates(topk: int, depth: int) -> int:
    """Number of candidates that a draft scores: topk children of topk nodes in each level."""
    return topk + (depth - 1) * topk * topk


@dataclasses.dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of a drafted tree."""

    depth: int  # drafted levels
    topk: int  # nodes expanded per level, and children per node
    tree_size: int  # verified nodes, the root included


HEAD_SHAPE = TreeShape(depth=2, topk=10, tree_size=12)
CHOSEN_SHAPE = TreeShape(depth=4, topk=8, tree_size=32)  # largest shape if each step chooses
SHIPPED_SHAPE = TreeShape(depth=4, topk=8, tree_size=24)
CHAIN_DEPTH = 4
HIERARCHY_DEPTH = 7  # of a chain that a draft with a head of its own drafts
FILL_DEPTH = 9  # of the longest path if the context fills drafts
MODEL_STEPS = 4  # of these, tokens that the drafter drafts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The drafter and the shape of its trees.

    If no draft is named, a shipped model uses its shipped draft (of `method`), and a model with an
    MTP head uses that head. Other models do not speculate. Raises ValueError for a value out of
    range and for an impossible tree shape.
    """

    draft_model_path: str | None = option(
        None,
        "draft head or draft model: local directory or Hugging Face id",
        metavar="PATH|REPO",
        brief="draft head or model, named like --model-path",
    )
    method: str = option(
        "auto",
        "drafter: auto detects it from the files; ngram looks up the prompt and output",
        flags=("--spec-method",),
        metavar="NAME",
        brief="ngram: drafts from the text, without files",
    )
    head_model_path: str | None = option(
        None,
        "with --spec-method hierarchical: EAGLE head of the draft model, which drafts for it",
        metavar="PATH|REPO",
        brief="",
    )
    no_speculation: bool = option(
        False,
        "switch speculation off; overrides all other flags of speculation",
        brief="switch speculation off; changes no text",
    )
    use_eagle3: bool | None = option(
        None, "require an EAGLE-3 head (default: detected from the draft's files)"
    )
    spec_num_iter: int | None = option(
        None,
        "tokens of the longest drafted path (default: 4; named draft with a fixed tree: 2)",
    )
    spec_topk_per_iter: int | None = option(
        None,
        "drafted children of a node, and nodes expanded per level (default: 8; named draft with a "
        "fixed tree: 10)",
    )
    spec_tree_size: int | None = option(
        None,
        f"tokens verified in a step, at most {MAX_TREE_SIZE}, the last emitted token included "
        "(default: 32; shipped draft: 24; named draft with a fixed tree: 12)",
    )
    spec_auto: bool | None = option(
        None,
        "choose in each step the size of the drafted tree, or no draft, from acceptance and step "
        "times so far; changes no text (default: yes if no shape is given)",
    )
    spec_window_size: int | None = option(
        None,
        "most recent KV entries that a draft head's attention sees (each tree node has one entry); "
        "0: all (default: 1024; draft model: 0; an MTP head sees all)",
    )
    frspec_path: str | None = option(
        None,
        "FR-Spec: list of the frequent tokens that the draft chooses from: freq_N.pt, .npy, or a "
        "directory or Hugging Face id with such files",
        metavar="PATH|REPO",
    )
    frspec_vocab_size: int = option(
        0,
        "number of frequent tokens; 0: all of --frspec-path, or the whole vocabulary without it",
        brief="",
    )
    draft_head_quant: str = option(
        "auto",
        "quantise the draft's lm_head at load time; changes no text; auto: w4 if the draft (or the "
        "target of an MTP head) is quantised and the target's lm_head is not, else none",
        choices=DRAFT_HEAD_QUANTS,
    )
    fill: str | None = option(
        None,
        "ngram: a path from the prompt and output joins each draft, weighted by how often such "
        "paths were right; changes no text",
        flags=("--spec-fill",),
        choices=FILLS,
    )
    num_model_steps: int | None = option(
        None,
        f"with --spec-fill: tokens of a path that the drafter drafts (default: {MODEL_STEPS}); "
        "with --spec-method hierarchical alone: most passes of the draft model in a step",
        flags=("--spec-model-steps",),
        brief="",
    )
    enable_multi_layers_mtp: bool | None = option(
        None,
        "several MTP modules: each drafts one token; no: the first one drafts all (default: yes)",
        brief="",
    )
    verify_strategy: str = strategy_option()
    verify_window: int | None = window_option()
    prompt_lookup_min: int | None = option(None, "n-gram: shortest match (default: 1)", brief="")
    prompt_lookup_max: int | None = option(
        None, "n-gram: longest match (default: 4; with --spec-fill: 16)"
    )
    per_request_spec_decode_metrics: str = option(
        "summary", "acceptance in each result; detailed: also per step", choices=SPEC_METRICS
    )

    def __post_init__(self) -> None:
        for name in ("draft_model_path", "head_model_path", "frspec_path"):
            check_filled(name, getattr(self, name), "a directory, file or Hugging Face id")
        counts = ("spec_num_iter", "spec_topk_per_iter", "spec_tree_size")
        for name in (*counts, "num_model_steps", "prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.spec_window_size is not None:
            _whole("spec_window_size", self.spec_window_size, 0)
        _whole("frspec_vocab_size", self.frspec_vocab_size, 0)
        _one_of("draft_head_quant", self.draft_head_quant, DRAFT_HEAD_QUANTS)
        _one_of(
            "per_request_spec_decode_metrics", self.per_request_spec_decode_metrics, SPEC_METRICS
        )
        if self.use_eagle3 and self.method not in ("auto", "eagle3"):
            raise ValueError(f"use_eagle3 is set, but method is {self.method!r}, expected 'eagle3'")
        if self.ngram_range[1] > MAX_NGRAM:
            raise ValueError(
                f"prompt_lookup_max is {self.ngram_range[1]}, but must be at most {MAX_NGRAM}"
            )
        if self.ngram_range[0] > self.ngram_range[1]:
            raise ValueError(
                f"prompt_lookup_min is {self.ngram_range[0]}, but must be at most "
                f"prompt_lookup_max, which is {self.ngram_range[1]}"
            )
        check_verification(self.verify_strategy, self.verify_window)
        if self.head_model_path is not None and self.method != "hierarchical":
            raise ValueError(
                f"head_model_path is given with method {self.method!r}, expected 'hierarchical'"
            )
        self._check_fill()
        self.shape(chain=self.method in ("ngram", "hierarchical"))  # raises if impossible

    def _check_fill(self) -> None:
        steps, longest = self.num_model_steps, self.spec_num_iter
        if self.fill is not None:
            _one_of("fill", self.fill, FILLS)
            if self.method == self.fill:
                raise ValueError(
                    f"fill and method are both {self.fill!r}, expected the method of another draft"
                )
        elif self.method != "hierarchical" and steps is not None and steps != longest:
            found = "not given: give fill, too" if longest is None else longest
            raise ValueError(
                f"num_model_steps is {steps} without a fill, but must equal spec_num_iter, which "
                f"is {found}"
            )
        if steps is not None and longest is not None and steps > longest:
            raise ValueError(
                f"num_model_steps is {steps}, but must be at most spec_num_iter, which is {longest}"
            )

    @property
    def ngram_range(self) -> tuple[int, int]:
        """Shortest and longest match of n-gram look-up, in tokens."""
        most = 4 if self.fill is None else 16
        longest = self.prompt_lookup_max or max(most, self.prompt_lookup_min or 0)
        return self.prompt_lookup_min or 1, longest

    @property
    def strategy(self) -> str:
        """The verify strategy of the engine."""
        return TARGET_MATCH if self.no_speculation else self.verify_strategy

    @property
    def chooses_shapes(self) -> bool:
        """Does each step choose the shape of its tree?"""
        given = (self.spec_num_iter, self.spec_topk_per_iter, self.spec_tree_size)
        return given == (None, None, None) if self.spec_auto is None else self.spec_auto

    def shape(self, *, chain: bool = False, defaults: TreeShape = HEAD_SHAPE) -> TreeShape:
        """The tree shape of the given fields, with `defaults` for the others.

        `chain`: the draft has no branches, so only its length can be chosen. Raises ValueError for
        an impossible shape.
        """
        if chain:
            return self._chain()
        depth = self.spec_num_iter or defaults.depth
        if self.fill is not None and self.spec_num_iter is None:
            width = self.spec_topk_per_iter or defaults.topk
            depth = max(depth, min(FILL_DEPTH, 1 + MAX_TREE_SIZE // width))
        if depth > MAX_DRAFT_DEPTH:
            raise ValueError(f"spec_num_iter is {depth}, but must be at most {MAX_DRAFT_DEPTH}")
        most = min(MAX_DRAFT_TOPK, MAX_TREE_SIZE // max(1, depth - 1))
        topk = self.spec_topk_per_iter or min(defaults.topk, most)
        if topk > MAX_DRAFT_TOPK:
            raise ValueError(f"spec_topk_per_iter is {topk}, but must be at most {MAX_DRAFT_TOPK}")
        if topk > most:
            raise ValueError(
                f"spec_topk_per_iter {topk} x (spec_num_iter {depth} - 1) is {topk * (depth - 1)}, "
                f"but must be at most {MAX_TREE_SIZE}"
            )
        candidates = num_candidates(topk, depth)
        size = self.spec_tree_size or min(defaults.tree_size, candidates + 1)
        if size > MAX_TREE_SIZE:
            raise ValueError(f"spec_tree_size is {size}, but must be at most {MAX_TREE_SIZE}")
        if size - 1 > candidates:
            raise ValueError(
                f"spec_tree_size is {size}, but spec_num_iter {depth} and spec_topk_per_iter "
                f"{topk} draft only {candidates} tokens: at most {candidates + 1}"
            )
        return TreeShape(depth, topk, size)

    def _chain(self) -> TreeShape:
        alone = HIERARCHY_DEPTH if self.method == "hierarchical" else CHAIN_DEPTH
        depth = self.spec_num_iter or (alone if self.fill is None else FILL_DEPTH)
        if depth > MAX_DRAFT_DEPTH:
            raise ValueError(f"spec_num_iter is {depth}, but must be at most {MAX_DRAFT_DEPTH}")
        for name, value in (("spec_topk_per_iter", 1), ("spec_tree_size", depth + 1)):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but a chain of {depth} tokens has {value}: "
                    "give only spec_num_iter"
                )
        return TreeShape(depth, 1, depth + 1)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Reads a mapping with vLLM's keys or field names. Raises ValueError for other keys."""
        return cls(**read_keys(values, typing.get_type_hints(cls)))

    @classmethod
    def from_json(cls, text: str, **flags: Any) -> SpeculativeConfig:
        """Reads a JSON object like `from_mapping`; `flags`: fields given on the command line.

        Raises ValueError for text that is not a JSON object, unknown keys, and a field given twice.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"speculative_config is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"speculative_config is {text}, expected a JSON object")
        fields = read_keys(values, typing.get_type_hints(cls))
        twice = sorted(fields.keys() & flags.keys())
        if twice:
            raise ValueError(f"speculative_config also sets {', '.join(twice)}: give it once")
        return cls(**fields, **flags)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SparseOptions):
    """Options for loading and running a model. Raises ValueError for a value out of range."""

    model: str | None = option(
        None,
        _MODEL_HELP,
        flags=("--model-path", "--model"),
        metavar="PATH|REPO",
        brief="directory, Hugging Face id or shipped model",
    )
    revision: str | None = option(None, "branch, tag or commit of the Hugging Face repository")
    device: str = option(
        "auto",
        "device to run on; auto: a GPU if there is one, else the CPU",
        choices=DEVICES,
        brief="device (default: a GPU if there is one)",
    )
    device_index: int = option(0, "index of the CUDA device, from 0")
    dtype: str = option(
        "auto",
        "type of weights and activations; auto: the type of the checkpoint",
        choices=DTYPES,
        brief="float16, bfloat16 or float32 (default: as saved)",
    )
    lm_head_quant: str = option(
        "none",
        "LOSSY: quantise the model's lm_head to 8 or 4 bits at load time, for speed; changes the "
        "text",
        choices=HEAD_QUANTS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "LOSSY: fp8_e4m3 keeps keys and values in 8 bits, for speed and twice the context; changes "
        "the text; auto: in dtype. Drafts keep theirs in dtype",
        choices=KV_CACHE_DTYPES,
    )
    memory_limit: float = option(
        0.9,
        "share of the memory free at start that the engine may use, in (0, 1]",
        brief="share of the free memory to use (default: 0.9)",
    )
    chunk_length: int = option(
        2048,
        "most prompt tokens of one prefill pass, which several prompts may share",
        flags=("--chunk-length", "--max-num-batched-tokens"),
    )
    max_prefill_ms: float = option(
        40.0,
        "most milliseconds of a prefill pass while other sequences decode: their outputs pause so "
        "long. Less makes streams smoother and prompts slower. Judged from recent passes; a pass "
        "has at least 64 tokens",
    )
    max_model_len: int = option(
        0,
        "most tokens of one sequence, prompt and output; 0: the model's own limit",
        brief="most tokens of prompt and output together",
    )
    max_num_seqs: int = option(8, f"most sequences that run concurrently, up to {MOST_SEQS}")
    swap_space: float | None = option(
        None,
        "host memory for sequences that wait for pages, in GB; without it they are computed again "
        "(default: 4, or a quarter of what is free if that is less; 0 on a CPU)",
        metavar="GB",
    )
    cuda_graph: bool = option(True, "replay decode steps as CUDA graphs")
    num_threads: int = option(0, "threads of the CPU back end; 0: one per core")
    prefix_cache: bool = option(
        True,
        "keep the keys and values of prompts for later prompts that begin alike; changes no text",
        flags=("--prefix-cache", "--enable-prefix-caching"),
        brief="no: compute each prompt from its first token",
        group=PREFIX_CACHE,
    )
    prefix_cache_decoded: bool = option(
        False,
        "keep those of generated tokens, too; a later prompt with them may then differ in its "
        "last bits from what an engine without a cache computes",
        group=PREFIX_CACHE,
    )
    prefix_cache_host_gb: float | None = option(
        None,
        "host memory for pages that leave the GPU, in GB (default: 8, or a quarter of what is "
        "free if that is less; 0 on a CPU)",
        group=PREFIX_CACHE,
    )
    prefix_cache_dir: str | None = option(
        None,
        "folder that keeps pages across restarts; its files hold the tokens of prompts",
        metavar="PATH",
        brief="folder that keeps prompts across restarts",
        group=PREFIX_CACHE,
    )
    prefix_cache_disk_gb: float = option(
        64.0, "most that the folder may hold, in GB", group=PREFIX_CACHE
    )
    minicpm4_yarn: bool = option(
        False, "replace the checkpoint's RoPE scaling with MiniCPM4's factors for long contexts"
    )
    speculative_config: str | SpeculativeConfig | None = option(  # noqa: RUF009
        None,
        "speculation as JSON with keys of vLLM and FastDeploy: "
        '{"method": "eagle|eagle3|mtp|ngram|draft_model|hierarchical", "model": PATH, '
        '"num_speculative_tokens": N, "prompt_lookup_max": N, "prompt_lookup_min": N}',
        metavar="JSON",
    )

    @property
    def speculation(self) -> SpeculativeConfig:
        """`speculative_config` after parsing."""
        assert isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, str):
            read = SpeculativeConfig.from_json(self.speculative_config)
            object.__setattr__(self, "speculative_config", read)
        elif self.speculative_config is None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig())
        elif not isinstance(self.speculative_config, SpeculativeConfig):
            raise ValueError(
                f"speculative_config is {shown(self.speculative_config)}, but must be a "
                "SpeculativeConfig, or its fields as JSON or (for LLM) a dictionary"
            )
        check_filled("model", self.model, "a directory, a Hugging Face id or a shipped model")
        check_filled("revision", self.revision, "a branch, tag or commit")
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("lm_head_quant", self.lm_head_quant, HEAD_QUANTS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not 0.0 < number("memory_limit", self.memory_limit) <= 1.0:
            raise ValueError(
                f"memory_limit is {self.memory_limit!r}, but must be a share in (0, 1] of the free "
                "memory"
            )
        _whole("chunk_length", self.chunk_length, 1)
        if not 0.0 < number("max_prefill_ms", self.max_prefill_ms) < math.inf:
            raise ValueError(
                f"max_prefill_ms is {self.max_prefill_ms}, but must be a number of milliseconds "
                "above 0"
            )
        _whole("max_num_seqs", self.max_num_seqs, 1, MOST_SEQS)
        _whole("max_model_len", self.max_model_len, 0)
        _whole("num_threads", self.num_threads, 0)
        _whole("device_index", self.device_index, 0)
        if self.swap_space is not None:
            _size("swap_space", self.swap_space)
        truth("cuda_graph", self.cuda_graph)
        truth("prefix_cache", self.prefix_cache)
        truth("prefix_cache_decoded", self.prefix_cache_decoded)
        check_filled("prefix_cache_dir", self.prefix_cache_dir, "a folder")
        if self.prefix_cache_host_gb is not None:
            _size("prefix_cache_host_gb", self.prefix_cache_host_gb)
        _size("prefix_cache_disk_gb", self.prefix_cache_disk_gb)
        truth("minicpm4_yarn", self.minicpm4_yarn)
        SparseOptions.__post_init__(self)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}")


def _size(name: str, value: float) -> None:
    if not 0.0 <= number(name, value) < math.inf:
        raise ValueError(f"{name} is {value}, but must be a size in GB, at least 0")


def _whole(name: str, value: int, minimum: int, maximum: int = INT_MAX) -> None:
    """Raises ValueError unless `value` is an integer from `minimum` to `maximum`."""
    if integer(name, value) < minimum:
        raise ValueError(f"{name} is {value}, but must be at least {minimum}")
    if value > maximum:
        raise ValueError(f"{name} is {value}, but must be at most {maximum}")
