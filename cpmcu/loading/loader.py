"""Loads a model into an engine.

The order of the steps:

1. Resolve the directory; read config.json and the headers of the weights.
2. Determine the quantisation scheme, the specification and the draft.
3. Create the engine, which plans and allocates its memory.
4. Plan the load, which checks every tensor.
5. Read the weights.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpmcu.checks import shown
from cpmcu.config import USUAL_CHUNK, USUAL_SEQS
from cpmcu.drafters.registry import TargetModel
from cpmcu.errors import about, one_sentence
from cpmcu.loading import exiting
from cpmcu.loading.cublas import cublas_paths
from cpmcu.loading.draft import PREFIX, open_draft
from cpmcu.loading.fitting import fit
from cpmcu.loading.hub import resolve_model
from cpmcu.loading.model_files import ModelFiles, is_gguf, model_files, model_name
from cpmcu.loading.plan import LoadPlan, Placement, by_engine_names, plan_load
from cpmcu.loading.progress import LoadProgress, LogProgress, log_conversion, log_unused
from cpmcu.loading.tensors import FLOAT_DTYPES, Checkpoint, TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.reader import language_config
from cpmcu.models.registry import ModelFamily, find_model
from cpmcu.models.sparse import check_sparse_options
from cpmcu.quant.registry import QuantPlan, plan_quant, with_modelopt
from cpmcu.sampling import SamplingParams
from cpmcu.shipped import sampling_defaults
from cpmcu.tokenizer import eos_ids
from cpmcu.verification import VERIFY_WINDOW

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with its weights, and the configuration files of the model."""

    engine: C.Engine
    directory: Path
    hf_config: dict[str, Any]  # contents of config.json
    generation_config: dict[str, Any]  # contents of generation_config.json; empty if there is none
    spec: C.ModelSpec
    draft: C.DrafterSpec | None = None
    # Tree shapes from which each step chooses; empty: the shape is fixed.
    shapes: tuple[tuple[int, int], ...] = ()
    draft_directory: Path | None = None  # folder of a draft whose weights are in files of its own


# Beginnings of the names of a language model's head; the second in files with a vision tower.
HEADS = ("lm_head.", "language_model.lm_head.")


@one_sentence()
def load_model(
    model: str,
    *,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    before_tensors: Callable[[Path], None] = lambda directory: None,
    reads_weights: bool = True,
    plans_for: int | None = None,
) -> LoadedModel:
    """Loads a local directory or a Hugging Face repo.

    `before_tensors` is called with the directory after all checks and before weights are read.
    Without `reads_weights`, the engine has its memory plan and no weights. `plans_for`: the plan is
    that of a device of this compute capability (89 for 8.9; 0: the CPU), and nothing is allocated.

    Raises FileNotFoundError for a missing model or file, and ValueError for a damaged or
    unsupported config or checkpoint. Raises MemoryError if the model does not fit into memory, and
    RuntimeError if device "cuda" is not available.
    """
    directory = resolve_model(model, config.revision)
    if plans_for is None:
        device = choose_device(config.device)
    else:
        reads_weights, device = False, "cuda" if plans_for else "cpu"
    files = model_files(directory)
    if device == "cpu":
        files = files.on_cpu()
    hf_config = read_config(directory, files)
    generation_file = directory / "generation_config.json"
    generation_config = sampling_defaults(directory) | files.json(generation_file.name)
    with about(directory):
        family = find_model(hf_config)
    checkpoint = files.checkpoint()
    metas = {name: stored.meta for name, stored in checkpoint.tensors.items()}
    if hf_config.get("tie_word_embeddings") and has_own_head(checkpoint):
        logger.warning(
            "tie_word_embeddings is true, but lm_head.weight is not the embedding table: not tied"
        )
        hf_config = {**hf_config, "tie_word_embeddings": False}
    options = BuildOptions(
        device=device,
        max_model_len=config.max_model_len,
        has_lm_head=any(name.startswith(HEADS) for name in metas),
        minicpm4_yarn=config.minicpm4_yarn,
        sparse=config,
    )
    with about(directory):
        fields = family.build(hf_config, options)
        # A vision tower or a draft head in the same files is not the target's.
        metas = {name: meta for name, meta in metas.items() if family.names(name, fields)}
        quant = plan_target_quant(hf_config, metas, family, fields)
        check_sparse_options(config, fields)
        check_kv_cache_dtype(config.kv_cache_dtype, fields)
        with_head(quant, config.lm_head_quant)
    if config.max_model_len > fields.max_position_embeddings:
        logger.warning(
            "max_model_len is %d but config.json has max_position_embeddings %d: text beyond it "
            "may be poor",
            config.max_model_len,
            fields.max_position_embeddings,
        )
    dtype, reason = choose_dtype(config.dtype, hf_config, metas, device)
    with about(directory):
        stated = {generation_file.name: generation_config, "config.json": hf_config}
        eos = eos_ids(stated, fields.vocab_size)
    with about(generation_file):
        SamplingParams().resolve(generation_config)  # checks the defaults of requests
    target = TargetModel(
        hf_config,
        fields,
        device,
        config.max_model_len,
        eos,
        quantised=quant.linear_method != "dense",
        quantised_head=_stored_head(quant) != "dense",
        checkpoint=checkpoint,
    )
    draft = open_draft(config.speculation, directory, target)

    from cpmcu import _extension  # not at the top: the checks above need no extension

    extension = _extension.load()

    def settings(config: EngineConfig, sized_for: int) -> tuple[Any, ...]:
        check_kv_cache_dtype(config.kv_cache_dtype, fields)
        spec = extension.ModelSpec(
            **fields.to_kwargs(),
            dtype=dtype,
            fp8_kv_cache=config.kv_cache_dtype != "auto",
            linear_method=quant.linear_method,
            linear_options=quant.linear_options.to_dict(),
            module_options={name: own.to_dict() for name, own in quant.module_options.items()},
            linear_overrides=with_head(quant, config.lm_head_quant),
        )
        drafts = draft and not config.speculation.no_speculation
        drafter = (draft.spec(extension, dtype),) if draft and drafts else ()
        return spec, runtime_config(config, device, plans_for, sized_for), *drafter

    def planned(config: EngineConfig, sized_for: int) -> int:
        return int(extension.Engine.planned_model_len(*settings(config, sized_for)))

    with exiting.waited_for():
        with about(directory):
            fitted = fit(config, fields.max_position_embeddings, planned, quant.linear_method)
        held = fitted.max_model_len
        if not config.max_model_len and held < fields.max_position_embeddings:
            # RoPE may depend on the length of a sequence.
            fields = family.build(hf_config, replace(options, max_model_len=held))
            target = replace(target, fields=fields, max_model_len=held)
            draft = draft and open_draft(config.speculation, directory, target)
        with about(directory):
            spec, _, *drafter = arguments = settings(fitted.config, fitted.sized_for)
            engine = extension.Engine(*arguments)
        expected, required = _expected(engine, lambda name: not name.startswith(PREFIX))
        with about(directory):
            plan = plan_load(checkpoint, fields, family.names, quant, expected, required)
        in_target = draft and draft.files and draft.files.checkpoint is checkpoint
        own = draft.with_files if draft and in_target else []
        log_unused(
            {
                name: why
                for name, why in plan.unused.items()
                if not any(part.reads(name) for part in own)
            }
        )
        if not checkpoint.always_converts:
            log_conversion(plan.conversions_to(dtype), dtype, reason)
        loads = [(checkpoint, plan, model_name(directory))]
        for part in draft.with_files if draft else ():
            draft_plan = part.plan_load(*_expected(engine, part.owns))
            if draft_plan is not None and part.plan.files is not None:
                log_unused(draft_plan.unused)
                log_conversion(draft_plan.conversions_to(dtype), dtype, "as the target")
                loads.append((part.plan.files.checkpoint, draft_plan, part.title))
        before_tensors(directory)
        if reads_weights:
            for each, its_plan, title in loads:
                load_tensors(engine, each, its_plan, title, progress or LogProgress())
            engine.finish_loading()
    shapes: tuple[tuple[int, int], ...] = ()
    if draft and config.speculation.chooses_shapes:
        shapes = tuple(engine.draft_shapes)
    of_draft = draft.files if draft else None
    return LoadedModel(
        engine,
        directory,
        hf_config,
        generation_config,
        spec,
        drafter[0] if drafter else None,
        shapes,
        of_draft.directory if of_draft and of_draft.checkpoint is not checkpoint else None,
    )


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Does lm_head.weight differ from the embedding table, in 64 rows at even distances?"""
    names = list(checkpoint.tensors)
    heads = [name for name in names if name.endswith("lm_head.weight")]
    tables = [name for name in names if name.endswith("embed_tokens.weight")]
    if len(heads) != 1 or len(tables) != 1:
        return False
    metas = [checkpoint.tensors[name].meta for name in (heads[0], tables[0])]
    if (metas[0].dtype, metas[0].shape) != (metas[1].dtype, metas[1].shape):
        return False
    head, table = checkpoint.read(heads[0]), checkpoint.read(tables[0])
    step = max(1, len(head) // 64)
    return bool((head[::step] != table[::step]).any())


def plan_target_quant(
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, TensorMeta],
    family: ModelFamily,
    fields: SpecFields,
) -> QuantPlan:
    """The plan of the target's tensors, with the engine's names of modules."""
    quant = plan_quant(hf_config, tensors)
    return replace(
        quant,
        linear_overrides=by_engine_names(quant.linear_overrides, family.names, fields),
        module_options=by_engine_names(quant.module_options, family.names, fields),
    )


def with_head(quant: QuantPlan, bits: str) -> dict[str, str]:
    """The plan's overrides, with lm_head quantised at load time if `bits` is w8 or w4.

    Raises ValueError if the checkpoint stores lm_head quantised.
    """
    overrides = dict(quant.linear_overrides)
    if bits == "none":
        return overrides
    if _stored_head(quant) != "dense":
        raise ValueError(
            f"lm_head_quant is {bits!r}, but the checkpoint stores lm_head as {quant.scheme}, "
            "expected 'none'"
        )
    return overrides | {"lm_head": f"{bits}_rtn"}


def check_kv_cache_dtype(dtype: str, fields: SpecFields) -> None:
    """Raises ValueError if the model's attention cannot read a KV cache of this dtype."""
    if dtype != "auto" and fields.head_dim % 16:
        raise ValueError(
            f"kv_cache_dtype is {dtype!r}, but head_dim is {fields.head_dim}, expected 'auto' or a "
            "head_dim that is a multiple of 16"
        )


def _stored_head(quant: QuantPlan) -> str:
    """The linear method of lm_head in the checkpoint."""
    return quant.linear_overrides.get("lm_head", quant.linear_method)


def _expected(
    engine: C.Engine, wanted: Callable[[str], bool]
) -> tuple[dict[str, TensorMeta], list[str]]:
    """Returns (tensors that the engine accepts, names that it requires), of the `wanted` names."""
    infos = [info for info in engine.expected_tensors() if wanted(info.name)]
    metas = {info.name: TensorMeta(info.name, info.dtype, tuple(info.shape)) for info in infos}
    return metas, [info.name for info in infos if info.required]


def read_config(directory: Path, files: ModelFiles | None = None) -> dict[str, Any]:
    """config.json of a model, with its `text_config` at the top level.

    Raises FileNotFoundError or ValueError.
    """
    files = files or model_files(directory)
    if not is_gguf(directory) and not (directory / "config.json").is_file():
        _refuse_adapter(files)
        raise FileNotFoundError(
            f"{directory}: has no config.json, expected a model directory in Hugging Face format "
            "or a GGUF file"
        )
    config = language_config(files.json("config.json"))
    return with_modelopt(config, files.json("hf_quant_config.json"))


def _refuse_adapter(files: ModelFiles) -> None:
    """Raises ValueError for a directory with a LoRA adapter alone."""
    adapter = files.json("adapter_config.json")
    if adapter:
        raise ValueError(
            f"{files.path}: is an adapter ({shown(adapter.get('peft_type', 'LORA'))}) of "
            f"{shown(adapter.get('base_model_name_or_path'))}, expected a whole model; merge the "
            "adapter into it with peft (merge_and_unload, save_pretrained)"
        )


def choose_device(device: str) -> str:
    """ "cpu" or "cuda". "auto": CUDA if there is a device. RuntimeError for "cuda" without one."""
    if device == "cpu":
        return device
    from cpmcu import _extension  # not needed for "cpu"

    num_devices = _extension.load().device_count()
    if device == "auto":
        return "cuda" if num_devices else "cpu"
    if not num_devices:
        raise RuntimeError(
            "device is 'cuda' but no CUDA device was found, expected one with a driver and a "
            "build with CUDA; `python -m cpmcu.cli --env` lists devices"
        )
    return device


def choose_dtype(
    asked: str | None,
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, TensorMeta],
    device: str,
) -> tuple[str, str]:
    """Returns (dtype of weights and activations, reason for this dtype).

    If `asked` is None or "auto", the dtype is that of config.json, else that of most weights. On
    CUDA, which has no float32 kernels, float32 becomes bfloat16. Raises ValueError if float32 is
    requested on CUDA.
    """
    if asked not in (None, "auto"):
        if asked not in FLOAT_DTYPES:
            raise ValueError(f"dtype is {asked!r}, expected one of {', '.join(FLOAT_DTYPES)}")
        if asked == "float32" and device == "cuda":
            raise ValueError(
                "dtype is 'float32', expected 'bfloat16' or 'float16' on CUDA (float32 is for the "
                "CPU)"
            )
        return str(asked), "as configured"
    stated, reason = hf_config.get("dtype") or hf_config.get("torch_dtype"), "as in config.json"
    if stated is None:
        reason = "most weights have it"
        counts: Counter[str] = Counter()
        for meta in tensors.values():
            if meta.dtype in FLOAT_DTYPES:
                counts[meta.dtype] += meta.num_elements
        stated = counts.most_common(1)[0][0] if counts else "bfloat16"
    stated = str(stated).removeprefix("torch.")
    if stated not in FLOAT_DTYPES:
        raise ValueError(
            f"config.json: dtype is {shown(stated)}, expected one of {', '.join(FLOAT_DTYPES)}"
        )
    if stated == "float32" and device == "cuda":
        return "bfloat16", "float32 runs on the CPU only"
    return stated, reason


def runtime_config(
    config: EngineConfig, device: str, plans_for: int | None = None, sized_for: int = 0
) -> C.RuntimeConfig:
    """The engine's part of the configuration.

    `plans_for`: as in `load_model`; `sized_for`: as in `Fit`.
    """
    from cpmcu import _extension

    window = config.speculation.verify_window
    runtime: C.RuntimeConfig = _extension.load().RuntimeConfig(
        device=device if plans_for is None else "cpu",
        plans_for=plans_for,
        device_index=config.device_index,
        num_ranks=config.tensor_parallel_size,
        memory_limit=config.memory_limit,
        chunk_length=config.chunk_length or USUAL_CHUNK,
        max_num_seqs=config.max_num_seqs or USUAL_SEQS,
        max_model_len=config.max_model_len,
        sized_for=sized_for,
        cuda_graph=config.cuda_graph,
        num_threads=config.num_threads,
        cublas_paths=cublas_paths(),
        verify_strategy=config.speculation.strategy,
        verify_window=VERIFY_WINDOW if window is None else window,
    )
    return runtime


def load_tensors(
    engine: C.Engine, checkpoint: Checkpoint, plan: LoadPlan, what: str, progress: LoadProgress
) -> None:
    """Loads every tensor of the plan into the engine. Files are streamed one after another."""
    done_bytes = 0

    def update(so_far: int) -> None:
        exiting.check()
        progress.update(so_far)

    try:
        progress.start(plan.total_bytes, what)
        for path, placements in _by_file(plan).items():

            def report(file_bytes: int, before: int = done_bytes) -> None:
                update(before + file_bytes)

            with about(path):
                engine.load_file(str(path), _entries(placements), report)
            done_bytes += sum(placement.target.nbytes for placement in placements)
            update(done_bytes)
        for placement in plan.placements:
            if placement.offset is None:
                array = checkpoint.read(placement.source)
                rows = placement.target.shape[0] if placement.target.shape else 0
                if placement.transposed:
                    array = np.ascontiguousarray(array[placement.first_row // rows].T)
                elif array.shape != placement.target.shape:
                    array = array.reshape(-1, *placement.target.shape[1:])
                    array = array[placement.first_row : placement.first_row + rows]
                with about(placement.path):
                    engine.load_tensor(placement.target.name, array, placement.target.dtype)
                done_bytes += placement.target.nbytes
                update(done_bytes)
        for repack in plan.repacks:
            outputs = repack.run({name: checkpoint.read(name) for name in repack.inputs})
            with about(checkpoint.tensors[repack.inputs[0]].path):
                for meta in repack.outputs:
                    engine.load_tensor(meta.name, outputs[meta.name], meta.dtype)
            done_bytes += sum(checkpoint.tensors[name].meta.nbytes for name in repack.inputs)
            update(done_bytes)
    finally:
        progress.finish()


def _by_file(plan: LoadPlan) -> dict[Path, list[Placement]]:
    files: dict[Path, list[Placement]] = {}
    for placement in plan.placements:
        if placement.offset is not None:
            files.setdefault(placement.path, []).append(placement)
    return files


def _entries(placements: list[Placement]) -> list[C.FileEntry]:
    from cpmcu import _extension

    file_entry = _extension.load().FileEntry
    return [
        file_entry(
            name=placement.target.name,
            dtype=placement.target.dtype,
            shape=list(placement.target.shape),
            offset=placement.offset or 0,
            nbytes=placement.target.nbytes,
        )
        for placement in placements
    ]
