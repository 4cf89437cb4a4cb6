# Generated from csrc/**/bind_*.cpp by `make stubs`; not to be edited.
"""The C++ extension: engine, model specification and kernels."""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing

class ModelSpec:
    """A model as plain data; see csrc/core/model_spec.h. Made with keyword arguments. Sizes are in elements."""

    def __init__(self, **kwargs: typing.Any) -> None: ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    "Tokens."
    rope_inv_freq: list[float]
    "[rotary width / 2], at most head_dim / 2, float32, in radians a token."
    rope_attention_scaling: float
    "Cos and sin are multiplied by it."
    qkv_bias: bool
    "The projections q, k and v have a bias."
    qk_norm: bool
    "RMSNorm of each q and k head."
    embed_scale: float
    "The embedding's output is multiplied by it."
    residual_scale: float
    "Each block's output is multiplied by it before the residual add."
    logit_scale: float
    "The head's input is multiplied by it."
    tie_word_embeddings: bool
    "The head is the embedding table."
    dtype: str
    '"float16" | "bfloat16" | "float32" (CPU only): weights and activations.'
    layers: list[list[tuple[str, dict[str, bool | int | float | str | list[int] | list[float]]]]]
    'Of each layer its blocks: kind, and the parameters in which it differs from the other fields.\nEmpty: [("attention", {}), ("mlp", {})] each.'
    linear_method: str
    '"dense" | "w4a16" | "w4_rtn" | "w8_rtn" | ... (`registered`).'
    linear_overrides: dict[str, str]
    'Module name -> method, e.g. {"lm_head": "dense"}.'
    linear_options: dict[str, int]
    'Of the methods, e.g. {"group_size": 128}.'

class RuntimeConfig:
    """How an engine is run: device, memory, limits. Made with keyword arguments."""

    def __init__(self, **kwargs: typing.Any) -> None: ...
    device: str
    '"cpu" | "cuda".'
    device_index: int
    "Which CUDA device."
    memory_limit: float
    "Share of the memory that is free at start, above 0 and at most 1."
    chunk_length: int
    "Most tokens of one prefill step."
    max_num_seqs: int
    "Sequence slots."
    max_model_len: int
    "Tokens of one sequence; 0: max_position_embeddings, or what fits."
    cuda_graph: bool
    "Decode steps are captured and replayed."
    num_threads: int
    "CPU back end; 0: all cores."
    cublas_paths: list[str]
    "Folders to look for libcublasLt in first."

class SamplingConfig:
    """Sampling parameters of one sequence; see csrc/kernels/sample.h. Made with keyword arguments."""

    def __init__(self, **kwargs: typing.Any) -> None: ...
    temperature: float
    "0: greedy."
    top_p: float
    top_k: int
    "0: off."
    min_p: float
    seed: int
    "64 bits."
    stream: int
    "Which random stream of that seed (the n-th choice of a request)."
    repetition_penalty: float
    "1: off."
    presence_penalty: float
    "0: off."
    frequency_penalty: float
    "0: off."
    logit_bias: list[tuple[int, float]]
    "(token id, what is added to its logit)."
    logprobs: int
    "-1: none; n >= 0: of the emitted token and of the n most likely, at most MAX_LOGPROBS."
    stop_ids: list[int]
    "With a drafter: the device ends the sequence after one of them."
    max_tokens: int
    "With a drafter: the device ends the sequence after so many."

class DrafterSpec:
    """A drafter as plain data; see csrc/speculative/drafter.h. Made with keyword arguments."""

    def __init__(self, **kwargs: typing.Any) -> None: ...
    method: str
    '"eagle" | "eagle3" | "model" | "ngram" | ... (`registered`).'
    scope: str
    'Begins the names of its tensors and buffers: "draft.".'
    depth: int
    "Tokens of the longest drafted path."
    topk: int
    "Width of a level; a chain has 1."
    tree_size: int
    "Tokens verified, root included."
    options: dict[str, bool | int | float | str | list[int] | list[float]]
    "Of this method alone; its two files say which."
    model: ModelSpec | None
    "The draft's own layers."
    parts: list[DrafterSpec]
    "Of a drafter that is made of others."

class MemoryPlan:
    """Buffers with sizes and lifetimes, and the offsets that they get; see csrc/core/arena.h."""

    def __init__(self) -> None: ...
    def add(self, name: str, group: str, bytes: int) -> int:
        """Adds a persistent buffer; returns its number."""

    def add_scratch(self, name: str, bytes: int, first: int, last: int) -> int:
        """Adds a buffer that lives from phase `first` to phase `last`, both included. One name is one buffer."""

    def assign(self) -> int:
        """Gives each buffer its offset; returns bytes in all."""

    def rows(self) -> list[dict[str, typing.Any]]:
        """{name, group, offset, bytes, first, last} of each buffer; first is -1 if it is persistent."""

class PagePool:
    """Numbers of pages with reference counts, without memory; see csrc/state/page_pool.h."""

    def __init__(self, num_pages: int) -> None: ...
    def num_owners(self, page: int) -> int:
        """RuntimeError for a page that is not there, as in the methods below."""

    def take(self) -> int:
        """A page with one owner. RuntimeError if none is free."""

    def share(self, page: int) -> None:
        """One more owner. RuntimeError for a page without one."""

    def release(self, page: int, num_steps: int) -> None:
        """One owner less. RuntimeError for a page without one.

        `num_steps`: the steps that were launched until now; they may read the page. RuntimeError
        if it is less than before."""

    def retire(self, num_done: int) -> None:
        """So many steps are done: pages that no owner and no other step holds are free."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_retiring(self) -> int:
        """Pages without an owner that steps in flight may still read."""

class TensorInfo:
    """A tensor that a checkpoint has to bring."""

    @property
    def name(self) -> str:
        """As in a Hugging Face checkpoint of Llama."""

    @property
    def shape(self) -> list[int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def required(self) -> bool: ...

class FileEntry:
    """One tensor's bytes in a file."""

    def __init__(
        self, name: str, dtype: str, shape: collections.abc.Sequence[int], offset: int, nbytes: int
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """ "float32" | "float16" | "bfloat16" | "int32" | ..."""

    @property
    def shape(self) -> list[int]: ...
    @property
    def offset(self) -> int:
        """Bytes from the file's start."""

    @property
    def nbytes(self) -> int: ...

class SlotOutput:
    """What a step emitted for one sequence."""

    @property
    def slot(self) -> int: ...
    @property
    def tokens(self) -> list[int]:
        """Emitted by this step, in order."""

    @property
    def finished(self) -> bool:
        """With a drafter: the device ended the sequence."""

    @property
    def logprobs(self) -> list[float]:
        """One a token, if asked for."""

    @property
    def top_ids(self) -> list[list[int]]:
        """Of each token the most likely ones at its place, likeliest first."""

    @property
    def top_logprobs(self) -> list[list[float]]:
        """Log-probabilities of `top_ids`."""

PAGE_SIZE: int
MAX_TREE_SIZE: int
MAX_LOGPROBS: int

def device_count() -> int:
    """Number of CUDA devices that the driver shows; 0 without a driver or a CUDA build."""

def device_info(index: int) -> dict[str, typing.Any]:
    """name, compute_capability, total_bytes, free_bytes, sm_count, driver_version."""

def registered() -> dict[str, dict[str, str]]:
    """What is registered: kind ("linear", "block", "drafter") -> name -> source file."""

def load_plugin(path: str) -> None:
    """Loads a shared library that registers linear methods, blocks or drafters.

    See csrc/core/plugin.h. ValueError if it cannot be loaded."""

class Engine:
    """One model on one device. Not thread-safe: one thread drives it."""

    def __init__(
        self, spec: ModelSpec, config: RuntimeConfig, draft: DrafterSpec | None = None
    ) -> None:
        """Plans and allocates all memory. MemoryError says what does not fit and by how much."""

    @staticmethod
    def planned_model_len(
        spec: ModelSpec, config: RuntimeConfig, draft: DrafterSpec | None = None
    ) -> int:
        """`max_model_len` of an engine made of the same now. Allocates none of its memory.

        MemoryError as of the constructor."""

    def memory_plan(self) -> list[dict[str, typing.Any]]:
        """Rows {name, group, offset, bytes, first, last}, as of MemoryPlan."""

    def expected_tensors(self) -> list[TensorInfo]: ...
    def load_file(
        self,
        path: str,
        entries: collections.abc.Sequence[FileEntry],
        progress: collections.abc.Callable[[int], None] | None = None,
    ) -> None:
        """Streams tensors from `path` into place; `progress` gets bytes done so far in this call.

        ValueError for an unknown name, a shape or dtype that differs, a short file.
        Floating-point dtypes are converted to the model's."""

    def load_tensor(
        self, name: str, array: numpy.ndarray[typing.Any, numpy.dtype[typing.Any]], dtype: str
    ) -> None:
        """The same from host memory; bfloat16 comes as uint16."""

    def finish_loading(self) -> None:
        """ValueError that lists the missing tensors."""

    def add_sequence(
        self,
        sampling: SamplingConfig,
        prompt: collections.abc.Sequence[int],
        generated: collections.abc.Sequence[int] = [],
    ) -> int:
        """Takes a free slot for a sequence (resets its state). RuntimeError if none is free.

        `prompt` and what was `generated` before (when a sequence is resumed) are for penalties
        only; the tokens themselves come with `prefill`."""

    def release(self, slot: int) -> None:
        """Gives the slot and its pages back. Steps in flight for it are dropped from results."""

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Takes pages so that the slot can hold `num_tokens`; False if there are too few.

        Waits for the steps in flight if they are the last that read the pages it needs."""

    def prefill(
        self,
        items: collections.abc.Sequence[tuple[int, collections.abc.Sequence[int], bool]],
        mask_rows: collections.abc.Sequence[int] = [],
        masks: typing.Annotated[numpy.typing.ArrayLike, numpy.uint32] | None = None,
    ) -> None:
        """One step over prompt chunks: (slot, token ids, last chunk of its prompt?).

        At most chunk_length tokens in all. A last chunk samples the first token; with `masks`
        [M, ceil(V / 32)] the i-th of those that do so only one that mask mask_rows[i] allows
        (-1: any)."""

    def prefill_logprobs(
        self,
        slot: int,
        ids: collections.abc.Sequence[int],
        targets: collections.abc.Sequence[int],
        num_top: int,
    ) -> list[tuple[float, list[int], list[float]]]:
        """A prefill step of one chunk that is not the last of its prompt, and waits for it.

        For each token: the log-probability of its target (the token that follows it), and ids
        and log-probabilities of the likeliest tokens there. To be collected like any step."""

    def prefill_logits(
        self, slot: int, ids: collections.abc.Sequence[int]
    ) -> numpy.typing.NDArray[numpy.float32]:
        """A prefill step of one chunk that draws nothing; the logits [n, V] of its tokens.

        Waits for the device. To be collected like any step."""

    def decode(
        self, slots: collections.abc.Sequence[int], shape: tuple[int, int] | None = None
    ) -> None:
        """Enqueues one decode step for these slots; does not wait.

        `shape`: depth and nodes of a speculative step's trees, at most (and by default) those of
        the DrafterSpec; (0, 1) drafts nothing. It changes no token. ValueError for others."""

    def begin_masked(
        self, slots: collections.abc.Sequence[int], shape: tuple[int, int] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Enqueues a decode step up to its logits. Waits for the draft alone.

        Returns tokens and parents of the N nodes of each slot's tree; node 0 is the root, an
        unused node has token -1. Without a drafter there is the root alone. Another step or a
        release before `end_masked` abandons the step."""

    def end_masked(
        self,
        mask_rows: collections.abc.Sequence[int],
        masks: typing.Annotated[numpy.typing.ArrayLike, numpy.uint32],
    ) -> None:
        """The rest of the step: draws, and accepts what agrees with the draft; does not wait.

        mask_rows [slots * N]: which of masks [M, ceil(V / 32)] a node is held to; -1: none.
        RuntimeError if no masked step has begun."""

    def in_flight(self) -> int:
        """Steps enqueued and not yet collected."""

    def collect(self) -> list[SlotOutput]:
        """Waits for the oldest step in flight and returns what it emitted.

        Prefill steps of chunks that are not last return []. Device errors surface here as
        RuntimeError."""

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence can hold."""

    @property
    def num_pages(self) -> int:
        """KV pages of PAGE_SIZE tokens, shared by all slots."""

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner; steps in flight may still read some."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def chunk_length(self) -> int: ...
    @property
    def tokens_per_step(self) -> int:
        """Most tokens that a decode step emits for a sequence."""

    @property
    def launch_ahead(self) -> int:
        """Decode steps worth having in flight: 2 on CUDA, 1 on the CPU."""

    @property
    def counters(self) -> dict[str, int]:
        """steps, waits, graph_captures, graph_replays; of the process: allocations, synchronizations."""

def ceilings(device: str, index: int = 0) -> dict[str, float]:
    """Measures read_bytes_per_second and host_to_device_bytes_per_second of "cpu" or "cuda"."""

build_info_json: str
ops: typing.Any
"Kernels for tests: see csrc/kernels/bind_ops.cpp."
