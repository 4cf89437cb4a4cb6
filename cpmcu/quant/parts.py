"""Puts a plan together from groups of modules, each stored in its own form.

The tensors determine which modules are quantised, not the config's lists of exceptions. A quantised
module uses the C++ method "packed". A module with a plain `weight` stays dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.registry import LinearOptions, QuantPlan, Read, Repack

# One matrix of the engine -> its parts in a checkpoint.
_STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_STACK_OF = {part: stack for stack, parts in _STACKS.items() for part in parts}
_LINEARS = {*_STACK_OF, *_STACKS, "o_proj", "out_proj", "down_proj", "lm_head", "fc"}
_LINEARS |= {"kernel_projection", "hidden_projection"}  # of DFlash2


@dataclass(frozen=True, slots=True)
class Part:
    """Quantised modules of one form."""

    modules: Sequence[str]
    options: LinearOptions
    what: str  # name of the form, for messages
    repacks: Sequence[Repack] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)  # redundant tensor -> reason
    verify: Callable[[Read], None] | None = None  # QuantPlan.verify for these modules


def plan_parts(scheme: str, tensors: Mapping[str, TensorMeta], parts: Sequence[Part]) -> QuantPlan:
    """The plan of a checkpoint whose quantised modules are those of `parts`.

    Raises ValueError for parts of one matrix that differ in their form.
    """
    most = max(parts, key=lambda part: len(part.modules))
    ignored: dict[str, str] = {}
    for part in parts:
        ignored |= part.ignored

    def verify(read: Read) -> None:
        for part in parts:
            if part.verify is not None:
                part.verify(read)

    return QuantPlan(
        scheme=scheme,
        linear_method="packed",
        linear_options=most.options,
        linear_overrides=_dense(tensors, {module for part in parts for module in part.modules}),
        module_options=_own_options(parts, most.options),
        repacks=[repack for part in parts for repack in part.repacks],
        ignored=ignored,
        verify=verify,
    )


def leaf(module: str) -> str:
    """The last part of a module's name."""
    return module.rpartition(".")[2]


def stack_of(module: str) -> str:
    """The name of the engine's matrix that holds a module."""
    prefix, _, last = module.rpartition(".")
    stack = _STACK_OF.get(last, last)
    return f"{prefix}.{stack}" if prefix else stack


def _others(module: str) -> Iterator[str]:
    """The modules that share the matrix of a module, itself included."""
    stack = stack_of(module)
    prefix, dot, last = stack.rpartition(".")
    for part in (*_STACKS.get(last, ()), last):
        yield prefix + dot + part


def _own_options(parts: Sequence[Part], common: LinearOptions) -> dict[str, LinearOptions]:
    """Returns the options of the matrices whose options differ from the common ones."""
    form_of = {module: part for part in parts for module in part.modules}
    own = {}
    for module, part in form_of.items():
        for other in _others(module):
            if other in form_of and form_of[other].options != part.options:
                raise ValueError(
                    f"{module} has {part.what} and {other} has {form_of[other].what}, expected "
                    "both the same: they are one matrix here"
                )
        if part.options != common:
            own[stack_of(module)] = part.options
    return own


def _dense(tensors: Mapping[str, TensorMeta], quantised: set[str]) -> dict[str, str]:
    """Returns "dense" for the matrix of each module with plain weights."""
    dense = {
        name.removesuffix(".weight")
        for name, meta in tensors.items()
        if name.endswith(".weight") and len(meta.shape) == 2
    }
    overrides: dict[str, str] = {}
    for module in sorted(dense):
        if leaf(module) not in _LINEARS or module in quantised:
            continue
        for other in _others(module):
            if other in quantised:
                raise ValueError(
                    f"{module} is dense and {other} is quantised, expected both the same: they "
                    "are one matrix here"
                )
        overrides[stack_of(module)] = "dense"
    if "lm_head" not in quantised:
        overrides["lm_head"] = "dense"
    return overrides
