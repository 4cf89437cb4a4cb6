"""Engine configuration: frozen dataclasses that LLM, the CLI and the server share.

The metadata of a field holds its help text and its flag, if that differs from the field's name.
To add a flag, add a field (see `cpmcu/flags/__init__.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from cpmcu.checks import check_filled, number, shown, truth
from cpmcu.drafters.options import (
    DrafterOptions,
    additions,
    all_options,
    drafter_of,
    options_of,
)
from cpmcu.options import check_option, one_of, whole
from cpmcu.options import option as option
from cpmcu.sparse_options import SparseOptions
from cpmcu.speculation_keys import read_keys
from cpmcu.verification import TARGET_MATCH, check_verification, strategy_option, window_option

DTYPES = ("auto", "float16", "bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")
SPEC_METRICS = ("none", "summary", "detailed")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
HEAD_QUANTS = ("none", "w8", "w4")

PREFIX_CACHE = "prefix cache"  # title of a group of flags

MOST_RANKS = 8  # equal to kMaxRanks in csrc/core/exchange.h
MOST_GB = 1e6  # equal to kMaxGigabytes in csrc/engine/engine_setup.cpp
# Defaults of max_num_seqs and chunk_length; less if memory is short.
USUAL_SEQS, USUAL_CHUNK = 8, 2048
MOST_SEQS = 256  # equal to kMaxSeqs in csrc/engine/runtime_config.h

Options = typing.TypeVar("Options", bound=DrafterOptions)

_MODEL_HELP = (
    "local directory, GGUF file, Hugging Face repository id, or a shipped model: "
    "tiny-python-minicpm (default; small, completes Python code) or tiny-python-minicpm-w4 "
    "(the same in 4 bits)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)
class SpeculativeConfig:
    """The drafter, and its options.

    `options`: name -> value of each drafter's option that is given (`cpmcu/drafters/options`). The
    constructor also takes each of these options as an argument.

    If no draft is named, a shipped model uses its shipped draft (of `method`). A model with an MTP
    head uses that head. Other models do not speculate. Raises ValueError for a value out of range
    and for values that do not go together, TypeError for an unknown name.
    """

    draft_model_path: str | None = option(
        None,
        "draft head or draft model: local directory or Hugging Face id",
        metavar="PATH|REPO",
        brief="draft head or model, named like --model-path",
        keys={"model": None},
    )
    method: str = option(
        "auto",
        "drafter: auto detects it from the files; ngram looks up the prompt and output",
        flags=("--spec-method",),
        metavar="NAME",
        brief="ngram: drafts from the text, without files",
    )
    no_speculation: bool = option(
        False,
        "switch speculation off; overrides all other flags of speculation",
        brief="switch speculation off; changes no text",
    )
    spec_auto: bool | None = option(
        None,
        "choose in each step the size of the drafted tree, or no draft, from acceptance and step "
        "times so far; changes no text (default: yes if no shape is given)",
    )
    verify_strategy: str = strategy_option()
    verify_window: int | None = window_option()
    per_request_spec_decode_metrics: str = option(
        "summary", "acceptance in each result; detailed: also per step", choices=SPEC_METRICS
    )
    options: Mapping[str, Any] = dataclasses.field(hash=False, metadata={"flags": ()})

    def __init__(self, *, options: Mapping[str, Any] | None = None, **values: Any) -> None:
        known, given = all_options(), dict(options or {})
        for field in _core_fields():
            value = values.pop(field.name, field.default)
            object.__setattr__(self, field.name, value)
        given |= values
        if unknown := sorted(given.keys() - known.keys()):
            raise TypeError(f"SpeculativeConfig has no option {unknown[0]!r}")
        given = {
            name: value
            for name, value in given.items()
            if value is not None and value is not known[name].field.default
        }
        for name, value in given.items():
            check_option(known[name].field, known[name].hint, value)
        object.__setattr__(self, "options", given)
        self._check()

    def _check(self) -> None:
        check_filled(
            "draft_model_path", self.draft_model_path, "a directory, file or Hugging Face id"
        )
        one_of(
            "per_request_spec_decode_metrics", self.per_request_spec_decode_metrics, SPEC_METRICS
        )
        check_verification(self.verify_strategy, self.verify_window)
        truth("no_speculation", self.no_speculation)
        if self.spec_auto is not None:
            truth("spec_auto", self.spec_auto)
        for drafter, needed in self.drafters_by_option().items():
            if needed and self.method not in ("auto", drafter):
                name = next(name for name, its in self.naming() if its == drafter)
                raise ValueError(
                    f"{name} is set, but method is {self.method!r}, expected {drafter!r}"
                )
        known, kind = all_options(), options_of(self.method)
        owners = {known[name].owner for name in self.options} - set(kind.__mro__)
        kinds = [kind, *sorted(owners - set(additions()), key=lambda owner: owner.__name__)]
        if self.method == "auto" and self.draft_model_path is not None:
            kinds = []  # the files say which kind it is; its plan checks its options
        for each in kinds:
            self.of(each)
        for addition in additions():
            self.of(addition).check(self.method, kind)

    def of(self, kind: type[Options]) -> Options:
        """The options of one drafter."""
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in self.options.items() if name in names})

    def but(self, **values: Any) -> SpeculativeConfig:
        """This configuration with other values of some fields or options."""
        core = {field.name: getattr(self, field.name) for field in _core_fields()}
        return SpeculativeConfig(**{**core, **self.options, **values})

    def drafters_by_option(self) -> dict[str, bool]:
        """Drafters that given options require (True) or refuse (False)."""
        return {drafter: bool(self.options[name]) for name, drafter in self.naming()}

    def naming(self) -> list[tuple[str, str]]:
        """Returns (option, drafter) for each option given that requires or refuses a drafter."""
        known = all_options()
        return [
            (name, drafter_of(known[name].owner))
            for name in self.options
            if known[name].field.metadata["names_drafter"]
        ]

    @property
    def strategy(self) -> str:
        """The verify strategy of the engine."""
        return TARGET_MATCH if self.no_speculation else self.verify_strategy

    @property
    def chooses_shapes(self) -> bool:
        """Does each step choose the shape of its tree?"""
        if self.spec_auto is not None:
            return self.spec_auto
        known = all_options()
        return not any(known[name].field.metadata["fixes_shape"] for name in self.options)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Reads a mapping with vLLM's keys or field names. Raises ValueError for other keys."""
        return cls(**read_keys(values, speculation_fields()))

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
        fields = read_keys(values, speculation_fields())
        twice = sorted(fields.keys() & flags.keys())
        if twice:
            raise ValueError(f"speculative_config also sets {', '.join(twice)}: give it once")
        return cls(**fields, **flags)


def _core_fields() -> list[dataclasses.Field[Any]]:
    """The fields of SpeculativeConfig that belong to no drafter."""
    return [field for field in dataclasses.fields(SpeculativeConfig) if field.name != "options"]


def speculation_fields() -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Returns (field, type) of SpeculativeConfig's arguments by name, options of drafters too."""
    hints = typing.get_type_hints(SpeculativeConfig)
    found = {field.name: (field, hints[field.name]) for field in _core_fields()}
    return found | {name: (own.field, own.hint) for name, own in all_options().items()}


def speculation_flags() -> type[Any]:
    """A dataclass with these fields, from which flags are made."""
    fields = [
        (name, hint, dataclasses.field(default=field.default, metadata=dict(field.metadata)))
        for name, (field, hint) in speculation_fields().items()
    ]
    return dataclasses.make_dataclass("SpeculationFlags", fields, kw_only=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SparseOptions):
    """Options for loading and running a model. Raises ValueError for a value out of range."""

    model: str | None = option(
        None,
        _MODEL_HELP,
        flags=("--model-path", "--model", "-m"),
        metavar="PATH|REPO",
        brief="directory, GGUF file or Hugging Face id",
    )
    revision: str | None = option(None, "branch, tag or commit of the Hugging Face repository")
    device: str = option(
        "auto",
        "device to run on; auto: a GPU if there is one, else the CPU",
        choices=DEVICES,
        brief="device (default: a GPU if there is one)",
    )
    device_index: int = option(0, "index of the CUDA device, from 0")
    tensor_parallel_size: int = option(
        1,
        "GPUs of this machine that share the model, from device_index on: each holds a part of "
        "every layer; on the CPU, threads",
        brief="GPUs that share the model",
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; auto: the type of the checkpoint",
        choices=DTYPES,
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
        "memory of a device that the engine may use: a share of what is free at start, up to 1, or "
        "GB, above 1",
        brief="share of free memory, or GB (default: 0.9)",
    )
    chunk_length: int | None = option(
        None,
        "most prompt tokens of one prefill pass, which several prompts may share (default: "
        f"{USUAL_CHUNK}, or fewer if memory is short)",
        flags=("--chunk-length", "--max-num-batched-tokens"),
    )
    max_prefill_ms: float = option(
        40.0,
        "most milliseconds of a prefill pass while other sequences decode: their outputs pause so "
        "long. Less makes streams smoother and prompts slower. Judged from recent passes; a pass "
        "has at least 64 tokens. Beside short decode steps, passes are shorter than that anyway",
    )
    max_model_len: int = option(
        0,
        "most tokens of one sequence, prompt and output; 0: the model's own limit",
        brief="most tokens of prompt and output together",
    )
    max_num_seqs: int | None = option(
        None,
        f"most sequences that run concurrently, up to {MOST_SEQS} (default: {USUAL_SEQS}, or fewer "
        "if memory is short)",
    )
    swap_space: float | None = option(
        None,
        "host memory for sequences that wait for pages, in GB; without it they are computed again "
        "(default: 4, or a quarter of what is free if that is less; 0 on a CPU)",
        metavar="GB",
    )
    cuda_graph: bool = option(True, "replay decode steps as CUDA graphs")
    num_threads: int = option(0, "threads of the CPU back end; 0: OMP_NUM_THREADS, or one per core")
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
        """The options that `speculative_config` gives, parsed."""
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
        one_of("device", self.device, DEVICES)
        one_of("dtype", self.dtype, DTYPES)
        one_of("lm_head_quant", self.lm_head_quant, HEAD_QUANTS)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not 0.0 < number("memory_limit", self.memory_limit) <= MOST_GB:
            raise ValueError(
                f"memory_limit is {self.memory_limit!r}, but must be a share in (0, 1] of the free "
                "memory, or GB above 1"
            )
        if self.chunk_length is not None:
            whole("chunk_length", self.chunk_length, 1)
        if not 0.0 < number("max_prefill_ms", self.max_prefill_ms) < math.inf:
            raise ValueError(
                f"max_prefill_ms is {self.max_prefill_ms}, but must be a number of milliseconds "
                "above 0"
            )
        if self.max_num_seqs is not None:
            whole("max_num_seqs", self.max_num_seqs, 1, MOST_SEQS)
        whole("max_model_len", self.max_model_len, 0)
        whole("num_threads", self.num_threads, 0)
        whole("device_index", self.device_index, 0)
        whole("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        if self.tensor_parallel_size.bit_count() != 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but must be a power of two"
            )
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


def _size(name: str, value: float) -> None:
    if not 0.0 <= number(name, value) < math.inf:
        raise ValueError(f"{name} is {value}, but must be a size in GB, at least 0")
