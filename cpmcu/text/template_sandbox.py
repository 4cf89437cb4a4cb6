"""A Jinja sandbox for templates of checkpoints that bounds the cost of one rendering.

Jinja's own sandbox restricts a template to its variables. This module adds limits:

| limit | on |
|---|---|
| MAX_SIZE | each text or list that the template makes |
| MAX_TOTAL | all of these together |
| MAX_SECONDS | CPU time, checked every _STEPS loop iterations or calls |

Filters whose cost does not follow from the size of their input are removed. Exceeding a limit
raises LimitError.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 1 << 20  # limit of one value, in characters; a list counts _ITEM for each item
GROWTH = 4  # if the input is large, the limit of one value is GROWTH times the input's size
MAX_TOTAL = 256  # limit of all values together, dead ones included, in limits of one value
MAX_INPUT = 1 << 28
MAX_SECONDS = 2.0  # maximum CPU time
MAX_NUMBER = 1_000_000  # maximum of a width or a repetition count
MAX_BITS = 1 << 17  # maximum size of an integer
_ITEM = 8  # size of an item of a list, in characters
_STEPS = 256  # loop iterations or calls between checks of the time

# Names whose cost does not follow from the size of their input, or that bypass the checks.
_REFUSED_FILTERS = ("attr", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_GLOBALS = ("lipsum",)
_REFUSED_METHODS = {"expandtabs", "format_map", "translate", "to_bytes"}
_TEXT_METHODS = {
    name for name in dir(str) if not name.startswith("_") and name != "format"
} - _REFUSED_METHODS
_DICT_METHODS = frozenset(dir(dict))
# A format field with a long width or precision, or one that is an argument or a nested field.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%(]*(\*|\d{5})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{5})")


class LimitError(TemplateRuntimeError):
    """A rendering exceeds a limit."""


class _Budget:
    """The remaining budget of one rendering."""

    def __init__(self, input_size: int) -> None:
        self.max_size = max(MAX_SIZE, GROWTH * input_size)
        self.left = MAX_TOTAL * self.max_size
        self.steps = 0
        self.deadline = time.thread_time() + MAX_SECONDS

    def take(self, size: int) -> None:
        """Charges a value: before it is made if its size is known, else afterwards."""
        self.left -= size
        if size > self.max_size:
            raise LimitError(f"it makes more than {self.max_size} characters")
        if self.left < 0:
            total = MAX_TOTAL * self.max_size
            raise LimitError(f"it makes more than {total} characters in total")

    def step(self) -> None:
        """Counts an iteration of a loop or a call."""
        self.steps += 1
        if self.steps % _STEPS == 0 and time.thread_time() > self.deadline:
            raise LimitError(f"it takes longer than {MAX_SECONDS:g} s")

    def weigh(self, value: Any) -> int:
        """See the function `weigh`."""
        return weigh(value, self.max_size)


def weigh(value: Any, limit: int) -> int:
    """Approximate number of characters of a value as text. A repeated item counts repeatedly.

    Raises LimitError if the number exceeds `limit`.
    """
    size, rest = 0, [value]
    while rest:
        found = rest.pop()
        if isinstance(found, str):
            size += len(found) + 1
        elif isinstance(found, Mapping):
            rest += found.keys()
            rest += found.values()
            size += 1
        elif isinstance(found, (list, tuple, set, frozenset)):
            rest += found
            size += 1
        elif isinstance(found, int):
            size += 1 + found.bit_length() // 3
        else:
            size += _ITEM
        if size + len(rest) > limit:
            raise LimitError(f"it processes more than {limit} characters")
    return size


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limited(variables: Mapping[str, Any]) -> Iterator[None]:
    """Renderings in this context share one budget, which follows from the size of `variables`."""
    token = _budget.set(_Budget(weigh(variables, MAX_INPUT)))
    try:
        yield
    finally:
        _budget.reset(token)


class _Compiler(CodeGenerator):
    """A code generator without constant folding, which would run without limits."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Call(self, node: nodes.Call, frame: Any, forward_caller: bool = False) -> None:
        """Calls functions of the environment directly. Only `_call` inserts such calls."""
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment. Its templates must be rendered within `limited`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Compiler

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_finalize, **options)
        self.concat = _concat  # type: ignore[method-assign]
        for name in _REFUSED_FILTERS:
            self.filters.pop(name)
        for name in _REFUSED_GLOBALS:
            self.globals.pop(name)
        self.limit_filters()

    def limit_filters(self) -> None:
        """Limits the results of all filters, also of filters added since the last call."""
        for name, function in self.filters.items():
            if not hasattr(function, "is_limited"):
                self.filters[name] = _limited_filter(name, function)

    def _parse(self, *arguments: Any) -> nodes.Template:
        tree = super()._parse(*arguments)
        _count_steps(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Binary operators whose result can be much larger than their operands."""
        if type(left) is str and type(right) is str and operator == "+":  # the common case
            _budget.get().take(len(left) + len(right))
            return left + right
        budget = _budget.get()
        if isinstance(left, str) and operator == "%":
            _check_format(_WIDE_PERCENT, left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (operator == "**" and bits * abs(right) > MAX_BITS) or (
                operator == "*" and bits + right.bit_length() > MAX_BITS
            ):
                raise LimitError(f"it makes a number of more than {MAX_BITS} bits")
        elif operator == "*":
            times = left if isinstance(left, int) else right
            size = _size(left) + _size(right)
            if isinstance(times, int):
                budget.take(size * max(times, 0))
        elif operator == "+":
            budget.take(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls of functions, macros and methods."""
        budget = _budget.get()
        budget.step()
        if isinstance(__obj, BuiltinMethodType):
            kwargs.pop("_loop_vars", None)  # added by the compiled code for pass_context functions
            kwargs.pop("_block_vars", None)
            if isinstance(__obj.__self__, (str, bytes)):
                _check_method(__obj.__self__, __obj.__name__, args, kwargs)
            result = __obj(*args, **kwargs)
            budget.take(_size(result))
            return result
        if isinstance(__obj, Macro):
            budget.take(sum(map(_size, args)) + sum(map(_size, kwargs.values())))
        elif isinstance(__obj, type):  # dict, namespace, cycler, joiner
            given = [value for name, value in kwargs.items() if not name.startswith("_")]
            budget.take(budget.weigh(args) + budget.weigh(given))
        result = super().call(__context, __obj, *args, **kwargs)
        budget.take(_size(result))
        return result

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Attribute access. `str.format` is replaced by a bounded version."""
        kind = type(obj)  # the two common types first, without Jinja's look-up
        if kind is dict and attribute in obj and attribute not in _DICT_METHODS:
            return obj[attribute]
        if kind is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        if isinstance(obj, str) and attribute == "format":
            return functools.partial(_format, super().getattr(obj, attribute), obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Item access. For a string, an item with a string key is an attribute."""
        if isinstance(obj, str) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """May a template use this attribute?"""
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def step() -> None:
        """Counts an iteration of a loop."""
        _budget.get().step()

    @staticmethod
    def weighed(value: Any) -> Any:
        """Charges a list or dictionary literal of a template."""
        budget = _budget.get()
        budget.take(budget.weigh(value))
        return value

    @staticmethod
    def joined(*values: Any) -> str:
        """The operator ~ (concatenation)."""
        return _concat(str(_finalize(value)) for value in values)


# ---- compilation of templates


def _count_steps(tree: nodes.Template) -> None:
    """Inserts calls: `step` in loops, `joined` for `~`, `weighed` for lists and dictionaries."""
    loops: Iterable[Any] = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
    for loop in loops:
        loop.body.insert(0, nodes.ExprStmt(_call("step", [], loop.lineno), lineno=loop.lineno))
    _replace(tree)
    tree.set_environment(tree.environment)  # type: ignore[arg-type]


def _replace(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))
        elif isinstance(value, list):
            value[:] = [_replaced(v) if isinstance(v, nodes.Node) else v for v in value]


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace(node)
    if isinstance(node, nodes.Concat):
        return _call("joined", node.nodes, node.lineno)
    is_made = isinstance(node, (nodes.List, nodes.Dict)) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )
    if is_made and not all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
        return _call("weighed", [node], node.lineno)
    return node


def _call(name: str, args: list[Any], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, args, [], None, None, lineno=line)


# ---- run time of templates


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return _ITEM * len(value) if isinstance(value, (list, tuple, dict)) else 0


def _finalize(value: Any) -> Any:
    """Checks the size of a value that becomes text."""
    if not isinstance(value, str):
        _budget.get().weigh(value)
    return value


def _concat(parts: Iterable[str]) -> str:
    budget, found, size = _budget.get(), [], 0
    for part in parts:
        size += len(part)
        if size > budget.max_size:
            budget.take(size)
        found.append(part)
    budget.take(size)
    return "".join(found)


def _check_format(wide: re.Pattern[str], text: str, arguments: Any) -> None:
    budget = _budget.get()
    if wide.search(text):
        raise LimitError("it formats a text with a width that is too large or not written out")
    fields = text.count("%") + text.count("{")
    budget.take(len(text) + fields * budget.weigh(arguments))


def _format(function: Callable[..., str], text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(_WIDE_BRACES, text, [args, kwargs])
    return function(*args, **kwargs)


def _check_method(text: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks and charges a call of a method of `str` or `bytes`."""
    budget = _budget.get()
    if any(isinstance(value, int) and value > MAX_NUMBER for value in args):
        raise LimitError(f"it calls {name} with a number above {MAX_NUMBER}")
    if name == "replace" and len(args) >= 2:
        budget.take(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        budget.take(budget.weigh(args[0]) + len(text) * _length(args[0]))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _limited_filter(name: str, function: Any) -> Any:
    """A filter that counts its calls and charges its result."""

    @functools.wraps(function)  # also copies the attributes that Jinja sets
    def limited_filter(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        own = args[1:] if hasattr(function, "jinja_pass_arg") else args  # the value comes first
        args = (*args[: len(args) - len(own)], *_check_filter(name, own, kwargs))
        result = function(*args, **kwargs)
        budget.take(_size(result))
        return result

    limited_filter.is_limited = True  # type: ignore[attr-defined]
    return limited_filter


def _check_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, with an iterator converted to a list. Raises LimitError."""
    budget, value, rest = _budget.get(), args[0], [*args[1:], *kwargs.values()]
    if name == "round" and any(isinstance(number, int) and abs(number) > 99 for number in rest):
        raise LimitError("it rounds to more than 99 digits")
    if name in ("center", "indent", "batch", "slice", "tojson", "truncate"):
        numbers = [number for number in rest if isinstance(number, int)]
        if any(number > MAX_NUMBER for number in numbers):
            raise LimitError(f"it calls {name} with a number above {MAX_NUMBER}")
        width = max([*numbers, *map(_length, rest)], default=4 if name == "indent" else 0)
        if name in ("indent", "tojson"):
            lines = str(value).count("\n") + 1 if name == "indent" else budget.weigh(value)
            budget.take(lines * max(width, 1))
        elif name == "batch":
            budget.take(_ITEM * width)
    elif name in ("string", "join", "sum", "escape", "e", "forceescape", "urlencode"):
        if name in ("join", "sum") and not isinstance(value, (str, Mapping, list, tuple)):
            value = list(value)
        budget.take(budget.weigh(value))
        if name == "join":
            separator = rest[0] if rest else ""
            budget.take(budget.weigh(separator) * len(value) if separator else 0)
    elif name == "format":
        _check_format(_WIDE_PERCENT, str(value), rest)
    elif name == "replace" and len(rest) >= 2:
        text = str(_finalize(value))
        budget.take(len(text) + text.count(str(rest[0])) * len(str(rest[1])))
    return (value, *args[1:])
