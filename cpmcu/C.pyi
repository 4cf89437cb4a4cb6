"""The C++ extension: engine, model specification and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

build_info_json: str
PAGE_SIZE: int
MAX_TREE_SIZE: int
MAX_LOGPROBS: int

def device_count() -> int:
    """Number of CUDA devices that the driver shows; 0 without a driver or a CUDA build."""

def device_info(index: int) -> dict[str, Any]:
    """name, compute_capability, total_bytes, free_bytes, sm_count, driver_version."""

def ceilings(device: str, index: int = 0) -> dict[str, float]:
    """Measures read_bytes_per_second and host_to_device_bytes_per_second of "cpu" or "cuda"."""

def registered() -> dict[str, dict[str, str]]:
    """What is registered: kind ("linear", "block") -> name -> source file."""

def load_plugin(path: str) -> None:
    """Loads a shared library that registers linear methods, blocks or drafters (csrc/core/plugin.h).

    ValueError if it cannot be loaded.
    """

class MemoryPlan:
    """Buffers with sizes and lifetimes, and the offsets that they get; see csrc/core/arena.h."""

    def __init__(self) -> None: ...
    def add(self, name: str, group: str, bytes: int) -> int: ...
    def add_scratch(self, name: str, bytes: int, first: int, last: int) -> int: ...
    def assign(self) -> int:
        """Bytes in all."""
    def rows(self) -> list[dict[str, Any]]:
        """{name, offset, bytes, first, last, group} of each buffer; first is -1 for persistent."""

class ModelSpec:
    """A model as plain data; see csrc/core/model_spec.h. Made with keyword arguments."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_inv_freq: list[float]  # [rotary width / 2], float32
    rope_attention_scaling: float  # multiplies cos and sin
    qkv_bias: bool
    qk_norm: bool
    embed_scale: float  # embedding output is multiplied by it
    residual_scale: float  # each block's output is multiplied by it before the residual add
    logit_scale: float  # the head's input is multiplied by it
    tie_word_embeddings: bool
    dtype: str  # "float16" | "bfloat16" | "float32" (CPU only)
    # Of each layer its blocks: kind, and the parameters in which it differs from the fields above.
    # Empty: [("attention", {}), ("mlp", {})] each.
    layers: list[list[tuple[str, dict[str, Any]]]]
    linear_method: str  # "dense" | "w4a16" | "w4_rtn" | "w8_rtn" | …
    linear_overrides: dict[str, str]  # module name -> method, e.g. {"lm_head": "dense"}
    linear_options: dict[str, int]  # e.g. {"group_size": 128}
    def __init__(self, **fields: Any) -> None: ...

class RuntimeConfig:
    device: str  # "cpu" | "cuda"
    device_index: int
    memory_limit: float  # share of the memory that is free at start
    chunk_length: int  # rows of one prefill step
    max_num_seqs: int  # sequence slots
    max_model_len: int  # tokens of one sequence; 0: max_position_embeddings, or what fits
    cuda_graph: bool
    num_threads: int  # CPU back end; 0: all cores
    cublas_paths: list[str]  # where to look for libcublasLt first
    def __init__(self, **fields: Any) -> None: ...

class SamplingConfig:
    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # 0: off
    min_p: float
    seed: int  # 64 bits
    stream: int  # which random stream of that seed (the n-th choice of a request)
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    logprobs: int  # -1: none; n >= 0: of the emitted token and of the n most likely
    stop_ids: list[int]  # with a drafter: the device ends the sequence after one of them
    max_tokens: int  # with a drafter: the device ends the sequence after so many
    def __init__(self, **fields: Any) -> None: ...

class DrafterSpec:
    """A drafter as plain data; see csrc/speculative/drafter.h. Made with keyword arguments."""

    method: str  # "eagle" | "eagle3" | "model" | "ngram" | …
    scope: str  # begins the names of its tensors and buffers: "draft."
    depth: int  # tokens of the longest drafted path
    topk: int  # width of a level; a chain has 1
    tree_size: int  # tokens verified, root included
    options: dict[str, Any]  # of this method alone; its two files say which
    model: ModelSpec | None  # the draft's own layers
    parts: list[DrafterSpec]  # of a drafter that is made of others
    def __init__(self, **fields: Any) -> None: ...

class TensorInfo:
    name: str  # checkpoint (Hugging Face Llama) name
    shape: list[int]
    dtype: str
    required: bool

class FileEntry:
    """One tensor's bytes in a file."""

    name: str
    dtype: str  # "float32" | "float16" | "bfloat16" | "int32" | ...
    shape: list[int]
    offset: int  # bytes from the file's start
    nbytes: int
    def __init__(
        self, name: str, dtype: str, shape: Sequence[int], offset: int, nbytes: int
    ) -> None: ...

class SlotOutput:
    slot: int
    tokens: list[int]  # emitted by this step, in order
    finished: bool  # with a drafter: the device ended the sequence
    logprobs: list[float]  # one a token, if asked for
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

class Engine:
    """One model on one device. Not thread-safe: one thread drives it."""

    max_model_len: int  # tokens that one sequence can hold
    num_pages: int  # KV pages of PAGE_SIZE tokens, shared by all slots
    num_free_pages: int
    max_num_seqs: int
    chunk_length: int
    tokens_per_step: int  # most tokens that a decode step emits for a sequence
    launch_ahead: int  # decode steps worth having in flight: 2 on CUDA, 1 on the CPU
    # steps, waits, graph_captures, graph_replays; of the process: allocations, synchronizations
    counters: dict[str, int]
    def __init__(
        self, spec: ModelSpec, config: RuntimeConfig, draft: DrafterSpec | None = None
    ) -> None:
        """Plans and allocates all memory. MemoryError says what does not fit and by how much."""
    def memory_plan(self) -> list[dict[str, Any]]:
        """Rows {name, offset, bytes, first, last, group}."""
    def expected_tensors(self) -> list[TensorInfo]: ...
    def load_file(
        self,
        path: str,
        entries: Sequence[FileEntry],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Streams tensors from `path` into place; `progress` gets bytes done so far in this call.

        ValueError for an unknown name, a shape or dtype that differs, a short file.
        Floating-point dtypes are converted to the model's.
        """
    def load_tensor(self, name: str, array: npt.NDArray[Any], dtype: str) -> None:
        """The same from host memory; bfloat16 comes as uint16."""
    def finish_loading(self) -> None:
        """ValueError that lists the missing tensors."""
    def add_sequence(
        self, sampling: SamplingConfig, prompt: Sequence[int], generated: Sequence[int] = ()
    ) -> int:
        """Takes a free slot for a sequence (resets its state). RuntimeError if none is free.

        `prompt` and what was `generated` before (when a sequence is resumed) are for penalties
        only; the tokens themselves come with `prefill`.
        """
    def release(self, slot: int) -> None:
        """Gives the slot and its pages back. Steps in flight for it are dropped from results."""
    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Takes pages so that the slot can hold `num_tokens`; False if there are too few."""
    def prefill(
        self,
        items: Sequence[tuple[int, Sequence[int], bool]],
        mask_rows: Sequence[int] = ...,
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """One step over prompt chunks: (slot, token ids, last chunk of its prompt?).

        At most chunk_length rows in all. A last chunk samples the first token; with `masks`
        [M, ceil(V / 32)] the i-th of those that do so only one that mask mask_rows[i] allows
        (-1: any).
        """
    def prefill_logprobs(
        self, slot: int, ids: Sequence[int], targets: Sequence[int], num_top: int
    ) -> list[tuple[float, list[int], list[float]]]:
        """A prefill step of one chunk that is not the last of its prompt, and waits for it.

        For each token: the log-probability of its target (the token that follows it), and ids and
        log-probabilities of the likeliest tokens there. To be collected like any step.
        """
    def decode(self, slots: Sequence[int], shape: tuple[int, int] | None = None) -> None:
        """Enqueues one decode step for these slots; does not wait.

        `shape`: depth and nodes of a speculative cycle's trees, at most (and by default) those of
        the DrafterSpec; (0, 1) drafts nothing. It changes no token. ValueError for others.
        """
    def begin_masked(
        self, slots: Sequence[int], shape: tuple[int, int] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Enqueues a decode step up to its logits. Waits for the draft alone.

        Returns tokens and parents of the N nodes of each slot's tree; node 0 is the root, an
        unused node has token -1. Without a drafter there is the root alone. Another step or a
        release before `end_masked` abandons the step.
        """
    def end_masked(self, mask_rows: Sequence[int], masks: npt.NDArray[np.uint32]) -> None:
        """The rest of the step: draws, and accepts what agrees with the draft; does not wait.

        mask_rows [slots * N]: which of masks [M, ceil(V / 32)] a node is held to; -1: none.
        """
    def in_flight(self) -> int:
        """Steps enqueued and not yet collected."""
    def collect(self) -> list[SlotOutput]:
        """Waits for the oldest step in flight and returns what it emitted (prefill steps of
        chunks that are not last return []). Device errors surface here as RuntimeError."""
    def prefill_logits(self, slot: int, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """A prefill step of one chunk that draws nothing; returns the logits [n, V] of its tokens.
        Waits for the device. `collect` it like any step."""

ops: Any  # kernels for tests: see csrc/kernels/bind_ops.cpp
