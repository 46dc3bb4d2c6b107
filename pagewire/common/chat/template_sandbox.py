"""Chat templates: Jinja2 code of a model's author, in a sandbox where everything it does is paid for.

Jinja2's own sandbox keeps a template from Python's insides, not from running for ever or filling the memory. Here each
iteration of a loop, call, filter and comparison takes from a budget, and so does each text or list, before it is made
where its size can be known. What a template can do is therefore bounded by a count, the same on any machine.
"""

import collections
import json
import re
import threading
import traceback
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import wraps
from types import UnionType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_TEMPLATE_CHARS = 1 << 20
_CHARS_PER_STEP = 64
_MAX_BITS = 4096  # of an integer
_MAX_WIDTH = 1000  # that a text may be filled up to, or indented by
_MAX_REASON_CHARS = 300
_FILE_NAME = "<template>"  # what Jinja2 calls a template without a file
# Filters that look at no more of a sequence than its ends, and those that look at its items but not into them.
_CONSTANT_FILTERS = {"count", "d", "default", "first", "last", "length"}
_SHALLOW_FILTERS = {"list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
# They look at the characters of a text one by one, as at the items of a list.
_ITEM_FILTERS = {"batch", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique", "wordcount"}
# They repeat or loop at will, or write of what is no text; wordwrap copies a long word for each of its lines.
_REMOVED_FILTERS = {"pprint", "random", "urlize", "wordwrap", "xmlattr"}
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})|\{[^}]*(?:\{|\d{4})")  # a format whose width is not small
_CONTAINERS = list | tuple | set | frozenset | KeysView | ValuesView | ItemsView
_FILLING = {"center", "expandtabs", "ljust", "rjust", "zfill"}
# Methods of texts that compare each character with all of another text.
_COMPARING = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
# What may be called of a value; nothing else of Python's own types has a cost that is known.
_TEXT_METHODS = {name for name in dir(str) if not name.startswith("_")} - {"encode", "maketrans", "translate"}
_METHODS: tuple[tuple[type | UnionType, set[str]], ...] = (
    (type, set()),
    (str, _TEXT_METHODS),
    (dict, {"copy", "get", "items", "keys", "values"}),
    (list | tuple | range, {"copy", "count", "index"}),
    (int | float, {"bit_length", "is_integer"}),
    (bytes | bytearray | complex | set | frozenset | type(None), set()),
)
_SPACES = re.compile(r"\s")


class TemplateFailure(ValueError):
    """A template that cannot be used, or not with these variables; why and, where that is known, in which line."""


class Overspent(TemplateFailure):
    """It did not end within its budget."""


class Template:
    """A compiled chat template. May be used on several threads at the same time."""

    def __init__(self, text: str) -> None:
        """Raises TemplateFailure."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TemplateFailure(f"it has {len(text)} characters; {MAX_TEMPLATE_CHARS} are the most")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(text)
        except Exception as error:  # deep nesting, say, fails in Python's own compiler
            raise _failure(error) from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises TemplateFailure."""
        self._environment.renew_budget()
        try:
            return self._template.render(variables)
        except Exception as error:  # whatever the author's code raises
            raise _failure(error) from None


def _failure(error: Exception) -> TemplateFailure:
    """Return the failure in words that help a person: the reason, and the line of the template."""
    reason = (str(error) or type(error).__name__).partition("\n")[0]
    if isinstance(error, MemoryError | RecursionError):
        reason = f"it is nested too deeply or makes too much ({type(error).__name__})"
    if len(reason) > _MAX_REASON_CHARS:
        reason = f"{reason[:_MAX_REASON_CHARS]}..."
    if isinstance(error, TemplateSyntaxError):
        line: int | None = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == _FILE_NAME), None)
    kind = Overspent if isinstance(error, Overspent) else TemplateFailure
    return kind(reason if line is None else f"line {line}: {reason}")


class _Budget:
    """The steps that are left of one rendering."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def take(self, num_steps: int = 1) -> None:
        self._num_left -= num_steps
        if self._num_left < 0:
            raise Overspent(f"it does not end within {MAX_STEPS} steps")

    def take_text(self, num_chars: int) -> None:
        self.take(1 + num_chars // _CHARS_PER_STEP)

    def take_tree(self, value: Any) -> None:
        """Pay for every text, item and key of a value. What is in it twice counts twice, as where it is written out."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.take_items(item)
            if isinstance(item, dict):
                waiting += item.items()
            elif isinstance(item, _CONTAINERS):
                waiting += item

    def take_items(self, value: Any) -> None:
        """Pay for a value, but not for what is in its items."""
        if isinstance(value, str):
            self.take_text(len(value))
        elif isinstance(value, int):
            self.take()
            _check_bits(value.bit_length())
        elif isinstance(value, dict | range | _CONTAINERS):
            self.take(1 + len(value))
        else:
            self.take()

    def counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.take()
            yield item


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2's, with a meter: filters that no template can name, put by `_Metering` where something is to be paid."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before there is a budget
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
        )
        self._rendering = threading.local()  # of each thread
        self.renew_budget()
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]  # it makes text at will
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        for method in (self._iteration, self._weighed, self._cut, self._concatenated):
            self.filters[_meter_name(method.__name__)] = method
        self.tests = {name: self._metered(name, function) for name, function in self.tests.items()}
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @property
    def budget(self) -> _Budget:
        """The budget of the rendering on this thread."""
        budget: _Budget = self._rendering.budget
        return budget

    def renew_budget(self) -> None:
        self._rendering.budget = _Budget()

    def _generate(self, source: nodes.Template, *args: Any, **settings: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **settings)

    # What `_Metering` puts in

    def _iteration(self, num_chars: int) -> bool:
        """An iteration of a loop, or a call of a macro, with so much text of the template's own."""
        self.budget.take_text(num_chars)
        return True

    def _weighed(self, value: Any) -> Any:
        self.budget.take_tree(value)
        return value

    def _cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """A slice."""
        self.budget.take_items(value)
        return value[slice(start, stop, step)]

    def _concatenated(self, *values: Any) -> str:
        self.budget.take_tree(values)
        return "".join(map(str, values))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return the JSON of a value, not escaped for HTML, as transformers does, whose options these are in its
        order; each piece is paid for."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = []
        for piece in encoder.iterencode(value):
            self.budget.take_text(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    # What Jinja2's sandbox calls

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.take()
        if not isinstance(__obj, Macro | LoopContext):
            budget.take_tree((args, kwargs))
            _check_method(budget, getattr(__obj, "__wrapped__", __obj), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.take_items(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.take()
        if isinstance(argument, tuple):  # to be hashed
            self.budget.take_tree(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.take()
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.take_items(left)
        if operator == "+":
            budget.take_items(right)
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def _metered(self, name: str, function: Any) -> Callable[..., Any]:
        """A filter or test that is paid for."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            given = args[num_passed:]
            self._take_filter(name, given, kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                return self.budget.counted(result)
            self.budget.take_items(result)
            return result

        return metered

    def _take_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pay before it is carried out."""
        budget, value = self.budget, args[0]
        if name in _CONSTANT_FILTERS:
            budget.take()
            return
        (budget.take_items if name in _SHALLOW_FILTERS else budget.take_tree)(value)
        if isinstance(value, str) and name in _ITEM_FILTERS:
            budget.take(len(value))
        others = (*args[1:], *kwargs.values())
        budget.take_tree(others)
        for other in others:
            if (
                isinstance(other, int)
                and abs(other) > _MAX_WIDTH
                and name not in ("in", "eq", "ne", "lt", "le", "gt", "ge")
            ):
                raise TemplateError(f"the filter {name} is given {other}; {_MAX_WIDTH} is the most")
        if name == "replace":
            _check_replace(budget, str(value), *map(str, others[:2]))
        elif name == "join":
            _check_join(budget, str(others[0]) if others else "", value)
        elif name == "format":
            _check_format(budget, str(value), others)
        elif name in ("indent", "center", "batch"):  # up to that width for each line or item
            sized = [other for other in others if isinstance(other, str | int)]
            widths = [len(other) if isinstance(other, str) else abs(other) for other in sized]
            num_lines = len(value.splitlines()) + 1 if isinstance(value, str) else 1
            budget.take_text(num_lines * max(widths, default=4))
        elif name == "striptags":  # copies what is left for each tag
            budget.take_text(len(str(value)) * str(value).count("<"))
        elif name == "trim":
            budget.take_text(len(str(value)) * max((len(str(other)) for other in others), default=1))
        elif name == "sum" and not all(isinstance(other, int | float | str | None) for other in others):
            raise TemplateError("the filter sum adds numbers only")


class _Metering(NodeTransformer):
    """Puts what has to be paid for, and what Jinja2 compiles to bare Python, into calls of the environment."""

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.For) -> nodes.Node:
        iteration = _meter(_Environment._iteration, nodes.Const(_num_own_chars(node.body)))
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(iteration), *node.body]
        return node

    visit_CallBlock = visit_Macro

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # an iteration that the condition skips is one too
            node.test = nodes.And(_meter(_Environment._iteration, nodes.Const(0)), node.test)
        return self.visit_Macro(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _meter(_Environment._concatenated, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _meter(_Environment._weighed, node.expr)
        for operand in node.ops:
            operand.expr = _meter(_Environment._weighed, operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _meter(_Environment._weighed, node.key)  # to be hashed
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [nodes.Const(None) if end is None else end for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _meter(_Environment._cut, node.node, *ends)


class _Namespace(Namespace):
    """Does not write out what is in it, which is not in the budget."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """`{% generation %}`, by which training tells the model's own words from others. Here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - as in Jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _meter_name(name: str) -> str:
    return f"meter {name}"  # templates name no filter with a space


def _meter(method: Any, first: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(first, _meter_name(method.__name__), list(args), [], None, None)


def _num_own_chars(body: Iterable[nodes.Node]) -> int:
    """Characters of the template's text in a body, without those of loops and macros in it, which count their own."""
    total = 0
    for node in body:
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif not isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            total += _num_own_chars(node.iter_child_nodes())
    return total


@pass_context  # else Jinja2 would finalize constants once and for all, and without the budget
def _finalize(context: Context, value: Any) -> str:
    """The text of what is written out."""
    assert isinstance(context.environment, _Environment)
    budget = context.environment.budget
    budget.take_tree(value)
    text = str(value)
    budget.take_text(len(text))
    return text


def _check_method(budget: _Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Pay for a method of a text or a container, which works on all of it."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    served = next((names for kind, names in _METHODS if isinstance(owner, kind)), None)
    if served is None or owner is None:  # a function, or of Jinja2's own
        return
    if name not in served:
        raise TemplateError(f"the method {name} of {type(owner).__name__} cannot be used in a chat template")
    budget.take_items(owner)
    if isinstance(owner, list | tuple):  # each item is compared
        budget.take_tree(owner)
    if isinstance(owner, str):
        _check_text_method(budget, owner, name, args, kwargs)


def _check_text_method(
    budget: _Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Pay for what a method of a text makes, or does more than once."""
    if name in _COMPARING:
        budget.take_text(len(owner) * max((len(arg) for arg in args if isinstance(arg, str)), default=1))
    if name in ("split", "rsplit", "splitlines"):
        separator = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, str) and arg), None)
        most = next((arg for arg in (*args, *kwargs.values()) if type(arg) is int and arg >= 0), len(owner))
        if separator is not None:
            budget.take(min(owner.count(separator), most))
        else:
            collections.deque(budget.counted(_SPACES.finditer(owner)), maxlen=0)
    if name in _FILLING:
        width = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), 8)
        if width > _MAX_WIDTH:
            raise TemplateError(f"{name} is given the width {width}; {_MAX_WIDTH} is the most")
        budget.take_text(width * (owner.count("\t") + 1))
    elif name == "replace" and len(args) >= 2:
        _check_replace(budget, owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        _check_join(budget, owner, args[0])
    elif name in ("format", "format_map"):
        _check_format(budget, owner, (args, kwargs))


def _check_replace(budget: _Budget, text: str, old: str, new: str = "") -> None:
    budget.take_text(len(text) + text.count(old) * len(new))


def _check_join(budget: _Budget, separator: str, items: Any) -> None:
    budget.take_tree(items)
    if isinstance(items, dict | range | str | _CONTAINERS):
        budget.take_text(len(items) * len(separator))
    elif len(separator) > _CHARS_PER_STEP:
        raise TemplateError(f"join is given a separator of {len(separator)} characters for what has no length")


def _check_format(budget: _Budget, form: str, values: Any) -> None:
    if _WIDE.search(form):
        raise TemplateError(f"the format {form[:40]!r} has a width that is not small")
    for _ in range(1 + form.count("%") + form.count("{")):  # each place may take all of it
        budget.take_tree(values)


def _check_product(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, str):
            budget.take_text(len(sequence) * max(times, 0))
        elif isinstance(times, int) and isinstance(sequence, list | tuple):
            budget.take(len(sequence) * max(times, 0))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise TemplateError(f"a number would have {num_bits} bits; {_MAX_BITS} are the most")


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_WIDTH or _WIDE.search(form):
        raise TemplateError(f"strftime_now is given a format of {len(form)} characters, or a width that is not small")
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
