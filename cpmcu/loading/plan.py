"""Plans the load of a checkpoint into an engine before weights are read.

The plan checks name, shape and dtype of every tensor. One error lists all mismatches, and no model
is loaded in part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cpmcu.loading.progress import list_names
from cpmcu.loading.tensors import FLOAT_DTYPES, STORAGE_DTYPES, Checkpoint, TensorMeta, itemsize
from cpmcu.models.common import SpecFields
from cpmcu.models.names import NameMap
from cpmcu.quant.registry import Arrays, QuantPlan, Repack

MAX_LISTED = 8  # maximum number of mismatches that a message lists
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Placement:
    """A range of rows of a stored tensor and its tensor in the engine."""

    source: str  # name of the tensor in the checkpoint
    target: TensorMeta  # the engine's name, the dtype of the file, the shape of the rows
    first_row: int
    path: Path
    # Offset from the start of the file in bytes; None: the tensor cannot be streamed.
    offset: int | None
    transposed: bool = False  # the tensor is transposed, as in Piece


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Placements and repacks of a checkpoint, unused tensors, and dtype conversions."""

    placements: list[Placement]
    repacks: list[Repack]
    unused: dict[str, str]  # name of a tensor in the checkpoint -> reason
    # (dtype in the file, dtype in the engine) -> number of tensors.
    conversions: dict[tuple[str, str], int]
    total_bytes: int  # bytes that are read from the checkpoint's files

    def conversions_to(self, dtype: str) -> dict[str, int]:
        """Dtype in the file -> number of tensors that are converted to `dtype`.

        A model of 16 bits keeps some small tensors in float32, whatever their dtype in the file is.
        """
        return {found: count for (found, to), count in self.conversions.items() if to == dtype}


def plan_load(
    checkpoint: Checkpoint,
    fields: SpecFields,
    names: NameMap,
    quant: QuantPlan,
    expected: Mapping[str, TensorMeta],
    required: Iterable[str],
) -> LoadPlan:
    """Places every tensor of the checkpoint. `expected`: engine's name -> accepted tensor.

    Raises ValueError with the first mismatches: shapes, dtypes, names given twice, and missing
    required tensors. Also raises the errors of the scheme's `verify`.
    """
    problems: list[str] = []
    unused: dict[str, str] = {}
    conversions: Counter[tuple[str, str]] = Counter()
    provided: set[str] = set()
    total_bytes = 0
    skipped = {name for repack in quant.repacks for name in repack.inputs} | set(quant.ignored)

    def accept(source: str, target: TensorMeta) -> bool:
        problem = _mismatch(target, expected[target.name])
        if problem is None and target.name in provided:
            problem = f"{target.name} is given twice, the second time by {source}"
        provided.add(target.name)
        if problem is not None:
            problems.append(problem)
            return False
        wanted = expected[target.name].dtype
        if target.dtype != wanted:
            conversions[target.dtype, wanted] += 1
        return True

    placements = []
    for placement in _place(checkpoint, fields, names, skipped, unused, problems):
        placement = _as_expected(placement, expected)
        if placement.target.name not in expected:
            unused[placement.source] = _why_unused(placement.target.name, fields)
        elif accept(placement.source, placement.target):
            placements.append(placement)
            total_bytes += placement.target.nbytes
    repacks = [named for repack in quant.repacks for named in _named(repack, names, fields)]
    for repack in repacks:
        for output in repack.outputs:
            if output.name in expected:
                accept(", ".join(repack.inputs), output)
            else:
                problems.append(f"{output.name} (repacked) is not a tensor of this model")
        total_bytes += sum(checkpoint.tensors[name].meta.nbytes for name in repack.inputs)
    missing = [name for name in required if name not in provided]
    _raise_problems(checkpoint.directory, problems, missing, unused)
    if quant.verify is not None:
        try:
            quant.verify(checkpoint.read)
        except ValueError as error:
            raise ValueError(f"{checkpoint.directory}: {error}") from error
    return LoadPlan(placements, repacks, unused, dict(conversions), total_bytes)


def by_engine_names(
    values: Mapping[str, Value], names: NameMap, fields: SpecFields
) -> dict[str, Value]:
    """Returns values by the engine's names of modules, from those by the checkpoint's names."""
    found = {}
    for module, value in values.items():
        # Any leaf except "weight": the name map splits weights of fused projections.
        for piece in names(f"{module}.scales", fields):
            found[piece.name.removesuffix(".scales")] = value
    return found


def _named(repack: Repack, names: NameMap, fields: SpecFields) -> Iterator[Repack]:
    """The repack with the engine's names of outputs; nothing if they are not the model's."""
    mapped = {
        meta.name: piece.name for meta in repack.outputs for piece in names(meta.name, fields)
    }
    if not mapped:
        return

    def run(arrays: Arrays) -> Arrays:
        return {mapped[name]: array for name, array in repack.run(arrays).items()}

    outputs = tuple(replace(meta, name=mapped[meta.name]) for meta in repack.outputs)
    yield Repack(repack.inputs, outputs, run)


def _place(
    checkpoint: Checkpoint,
    fields: SpecFields,
    names: NameMap,
    skipped: set[str],
    unused: dict[str, str],
    problems: list[str],
) -> Iterator[Placement]:
    for name, stored in checkpoint.tensors.items():
        if name in skipped:
            continue
        meta = stored.meta
        pieces = names(name, fields)
        whole = all(piece.first_row == 0 and piece.num_rows is None for piece in pieces)
        row_dims = len(pieces[0].leading) or 1 if pieces else 1
        if pieces and pieces[0].transposed and len(meta.shape) == 3:
            meta = replace(meta, shape=(meta.shape[0], meta.shape[2], meta.shape[1]))
        if pieces and not whole:
            total_rows = sum(piece.num_rows or 0 for piece in pieces)
            leading = pieces[0].leading or (total_rows,)
            if meta.shape[:row_dims] != leading:
                parts = [piece.name for piece in pieces]
                problems.append(
                    f"{name} has shape {list(meta.shape)}, expected {_rows_text(leading)} "
                    f"(together {list_names(parts, MAX_LISTED)})"
                )
                continue
        if meta.dtype not in STORAGE_DTYPES:
            unused[name] = f"dtype {meta.dtype} is unknown"
            continue
        row_elements = math.prod(meta.shape[row_dims:]) if meta.num_elements else 0
        for piece in pieces:
            shape = meta.shape
            if piece.num_rows is not None:
                shape = (piece.num_rows, *meta.shape[row_dims:])
            offset = stored.offset
            if piece.transposed:
                offset = None
            if offset is not None:
                offset += piece.first_row * row_elements * itemsize(meta.dtype)
            target = TensorMeta(piece.name, meta.dtype, shape)
            yield Placement(name, target, piece.first_row, stored.path, offset, piece.transposed)


def _as_expected(placement: Placement, expected: Mapping[str, TensorMeta]) -> Placement:
    """Gives a scale the expected shape if it differs in dimensions of 1 only.

    Tools write the scale of a matrix as [], [1] or [1, 1], and those of rows as [N] or [N, 1].
    Bytes of powers of two are uint8 in the engine.
    """
    found = placement.target
    wanted = expected.get(found.name)
    if wanted is None or not found.name.endswith(_SCALES):
        return placement
    if (found.dtype, wanted.dtype) == ("float8_e8m0fnu", "uint8"):
        found = replace(found, dtype="uint8")
        placement = replace(placement, target=found)
    if [size for size in found.shape if size != 1] != [size for size in wanted.shape if size != 1]:
        return placement
    return replace(placement, target=replace(found, shape=wanted.shape))


def _rows_text(leading: tuple[int, ...]) -> str:
    return f"{leading[0]} rows" if len(leading) == 1 else f"[{', '.join(map(str, leading))}, ...]"


def _mismatch(found: TensorMeta, expected: TensorMeta) -> str | None:
    if found.shape != expected.shape:
        return f"{found.name} has shape {list(found.shape)}, expected {list(expected.shape)}"
    if found.dtype == expected.dtype:
        return None
    if found.dtype in FLOAT_DTYPES and expected.dtype in FLOAT_DTYPES:
        return None
    wanted = " or ".join(FLOAT_DTYPES) if expected.dtype in FLOAT_DTYPES else expected.dtype
    return f"{found.name} has dtype {found.dtype}, expected {wanted}"


def _why_unused(name: str, fields: SpecFields) -> str:
    if name == "lm_head.weight" and fields.tie_word_embeddings:
        return "tie_word_embeddings is true: the head is the embedding table"
    if name.endswith((".k_scale", ".v_scale")):
        return "an fp8 KV cache computes the scale of each token"
    return "not part of this model"


def _raise_problems(
    directory: Path, problems: list[str], missing: list[str], unused: Mapping[str, str]
) -> None:
    if not problems and not missing:
        return
    sentences = []
    if problems:
        shown = "; ".join(problems[:MAX_LISTED])
        rest = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        sentences.append(f"{len(problems)} tensors do not fit config.json: {shown}{rest}")
    if missing:
        sentences.append(
            f"{len(missing)} tensors are missing that config.json asks for: "
            f"{list_names(missing, MAX_LISTED)}"
        )
        if unused:
            sentences.append(f"not used were: {list_names(sorted(unused), MAX_LISTED)}")
    raise ValueError(f"{directory}: " + "; ".join(sentences))
