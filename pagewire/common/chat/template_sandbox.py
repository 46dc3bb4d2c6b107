"""A sandbox for chat templates, which are Jinja2 code by a model's author, with a budget for their work.

Jinja2's own sandbox protects Python's internals, but does not limit time or memory. Here each loop iteration, call,
filter and comparison is charged to a budget. Each text and list is charged too, in advance if its size can be known. A
count therefore bounds the work of a template, and the count is the same on any machine.
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
_MAX_WIDTH = 1000  # the largest width to which a text may be padded or indented
_MAX_REASON_CHARS = 300
_FILE_NAME = "<template>"  # Jinja2's file name for a template without a file
# Filters that read only the ends of a sequence, and filters that read its items but not the items' contents.
_CONSTANT_FILTERS = {"count", "d", "default", "first", "last", "length"}
_SHALLOW_FILTERS = {"list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
# Filters that process a text character by character, like the items of a list.
_ITEM_FILTERS = {"batch", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique", "wordcount"}
# Removed because their work is unbounded or they write values that are no texts. wordwrap copies a long word per line.
_REMOVED_FILTERS = {"pprint", "random", "urlize", "wordwrap", "xmlattr"}
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})|\{[^}]*(?:\{|\d{4})")  # a format with a width that is large or unknown
_CONTAINERS = list | tuple | set | frozenset | KeysView | ValuesView | ItemsView
_FILLING = {"center", "expandtabs", "ljust", "rjust", "zfill"}
# Methods of texts that compare each character with the whole of another text.
_COMPARING = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
# The methods that templates may call. Other methods of Python's own types have no known cost.
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
    """A chat template cannot be compiled, or cannot render a conversation. The message has the reason and, if known,
    the line of the template.
    """


class BudgetExceeded(TemplateFailure):
    """The rendering of a chat template needs more steps than its budget allows, for example because of a very long
    loop.
    """


class Template:
    """A chat template that is compiled in the sandbox. Several threads may render the same template at
    the same time.
    """

    def __init__(self, text: str) -> None:
        """Compile the text of a chat template. Raises TemplateFailure if the text is too long or is no
        valid template.
        """
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TemplateFailure(f"it has {len(text)} characters, but at most {MAX_TEMPLATE_CHARS} are allowed")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(text)
        except Exception as error:  # such as deep nesting, which fails in Python's own compiler
            raise _failure(error) from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the chat template renders with the given variables. Raises BudgetExceeded if the
        rendering needs too many steps, and TemplateFailure for any other error in the template.
        """
        self._environment.renew_budget()
        try:
            return self._template.render(variables)
        except Exception as error:  # the template's code can raise any exception
            raise _failure(error) from None


def _failure(error: Exception) -> TemplateFailure:
    """Convert an error in a chat template to a TemplateFailure. The message gives the reason and, if known, the line of
    the template.
    """
    reason = (str(error) or type(error).__name__).partition("\n")[0]
    if isinstance(error, MemoryError | RecursionError):
        reason = f"it is nested too deeply or needs too much memory ({type(error).__name__})"
    if len(reason) > _MAX_REASON_CHARS:
        reason = f"{reason[:_MAX_REASON_CHARS]}..."
    if isinstance(error, TemplateSyntaxError):
        line: int | None = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == _FILE_NAME), None)
    kind = BudgetExceeded if isinstance(error, BudgetExceeded) else TemplateFailure
    return kind(reason if line is None else f"line {line}: {reason}")


class _Budget:
    """The remaining steps that one rendering of a chat template may use. Loop iterations, calls, items of lists, and
    every 64 characters of text cost one step each.
    """

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def charge(self, num_steps: int = 1) -> None:
        self._num_left -= num_steps
        if self._num_left < 0:
            raise BudgetExceeded(f"it does not end within {MAX_STEPS} steps")

    def charge_text(self, num_chars: int) -> None:
        self.charge(1 + num_chars // _CHARS_PER_STEP)

    def charge_tree(self, value: Any) -> None:
        """Charge every text, item and key in a nested value to the rendering's budget. An object that occurs twice in
        the value is charged twice, because the template would write the object twice.
        """
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.charge_items(item)
            if isinstance(item, dict):
                waiting += item.items()
            elif isinstance(item, _CONTAINERS):
                waiting += item

    def charge_items(self, value: Any) -> None:
        """Charge a value and the number of its items to the rendering's budget, but not the contents of the items.
        Raises TemplateError for an integer with too many bits.
        """
        if isinstance(value, str):
            self.charge_text(len(value))
        elif isinstance(value, int):
            self.charge()
            _check_bits(value.bit_length())
        elif isinstance(value, dict | range | _CONTAINERS):
            self.charge(1 + len(value))
        else:
            self.charge()

    def counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.charge()
            yield item


class _Environment(ImmutableSandboxedEnvironment):
    """A Jinja2 sandbox environment that charges the work of a chat template to a budget.

    Special filters make the charges. Their names contain a space, so that no template can use them. `_Metering` inserts
    these filters wherever work must be charged.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # no constant folding, because no budget exists at compile time
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
        )
        self._rendering = threading.local()  # per thread
        self.renew_budget()
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]  # it generates text of any length
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
        """The budget of steps for the chat template that the current thread renders."""
        budget: _Budget = self._rendering.budget
        return budget

    def renew_budget(self) -> None:
        self._rendering.budget = _Budget()

    def _generate(self, source: nodes.Template, *args: Any, **settings: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **settings)

    # The meters that `_Metering` inserts.

    def _iteration(self, num_chars: int) -> bool:
        """Charge one loop iteration or macro call to the rendering's budget. `num_chars` is the number of characters of
        template text in the body. Always return True, so that the call can be part of a loop condition.
        """
        self.budget.charge_text(num_chars)
        return True

    def _weighed(self, value: Any) -> Any:
        self.budget.charge_tree(value)
        return value

    def _cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Charge a slice of a value to the rendering's budget, and return the slice."""
        self.budget.charge_items(value)
        return value[slice(start, stop, step)]

    def _concatenated(self, *values: Any) -> str:
        self.budget.charge_tree(values)
        return "".join(map(str, values))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return a value as JSON without escapes for HTML, and charge each piece of the text to the rendering's budget.
        The filter `tojson` of transformers has the same options in the same order.
        """
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = []
        for piece in encoder.iterencode(value):
            self.budget.charge_text(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    # Hooks that Jinja2's sandbox calls.

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.charge()
        if not isinstance(__obj, Macro | LoopContext):
            budget.charge_tree((args, kwargs))
            _check_method(budget, getattr(__obj, "__wrapped__", __obj), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge_items(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.charge()
        if isinstance(argument, tuple):  # it gets hashed
            self.budget.charge_tree(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.charge()
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.charge_items(left)
        if operator == "+":
            budget.charge_items(right)
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def _metered(self, name: str, function: Any) -> Callable[..., Any]:
        """Wrap a Jinja2 filter or test in a function that charges the work and the result to the rendering's budget."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            given = args[num_passed:]
            self._charge_filter(name, given, kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                return self.budget.counted(result)
            self.budget.charge_items(result)
            return result

        return metered

    def _charge_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Charge the work of a Jinja2 filter or test to the rendering's budget before the filter runs. Raises
        TemplateError for arguments that the sandbox does not allow, such as very large widths.
        """
        budget, value = self.budget, args[0]
        if name in _CONSTANT_FILTERS:
            budget.charge()
            return
        (budget.charge_items if name in _SHALLOW_FILTERS else budget.charge_tree)(value)
        if isinstance(value, str) and name in _ITEM_FILTERS:
            budget.charge(len(value))
        others = (*args[1:], *kwargs.values())
        budget.charge_tree(others)
        for other in others:
            if (
                isinstance(other, int)
                and abs(other) > _MAX_WIDTH
                and name not in ("in", "eq", "ne", "lt", "le", "gt", "ge")
            ):
                raise TemplateError(f"the filter {name} has the argument {other}, but at most {_MAX_WIDTH} is allowed")
        if name == "replace":
            _check_replace(budget, str(value), *map(str, others[:2]))
        elif name == "join":
            _check_join(budget, str(others[0]) if others else "", value)
        elif name == "format":
            _check_format(budget, str(value), others)
        elif name in ("indent", "center", "batch"):  # each line or item grows up to the given width
            sized = [other for other in others if isinstance(other, str | int)]
            widths = [len(other) if isinstance(other, str) else abs(other) for other in sized]
            num_lines = len(value.splitlines()) + 1 if isinstance(value, str) else 1
            budget.charge_text(num_lines * max(widths, default=4))
        elif name == "striptags":  # copies the remaining text for each tag
            budget.charge_text(len(str(value)) * str(value).count("<"))
        elif name == "trim":
            budget.charge_text(len(str(value)) * max((len(str(other)) for other in others), default=1))
        elif name == "sum" and not all(isinstance(other, int | float | str | None) for other in others):
            raise TemplateError("the filter sum adds only numbers")


class _Metering(NodeTransformer):
    """A transformer that inserts charges to the rendering's budget into a parsed Jinja2 template. Jinja2 compiles some
    operations, such as loops and comparisons, to plain Python, which would run without a charge. The transformer adds a
    filter of `_Environment` to each of these operations.
    """

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.For) -> nodes.Node:
        iteration = _meter(_Environment._iteration, nodes.Const(_num_own_chars(node.body)))
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(iteration), *node.body]
        return node

    visit_CallBlock = visit_Macro

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # also for an iteration that the condition skips
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
        node.key = _meter(_Environment._weighed, node.key)  # it gets hashed
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [nodes.Const(None) if end is None else end for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _meter(_Environment._cut, node.node, *ends)


class _Namespace(Namespace):
    """A Jinja2 namespace object whose contents cannot be printed, because the printed text would not be charged to the
    rendering's budget.
    """

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """The Jinja2 tag `{% generation %}`. In training, the tag marks the text generated by the model. Here the tag has
    no effect.
    """

    tags = {"generation"}  # noqa: RUF012 - as in Jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _meter_name(name: str) -> str:
    return f"meter {name}"  # templates name no filter with a space


def _meter(method: Any, first: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(first, _meter_name(method.__name__), list(args), [], None, None)


def _num_own_chars(body: Iterable[nodes.Node]) -> int:
    """Return the number of characters of template text in the body of a loop or macro. Nested loops and macros are not
    counted, because they are charged separately.
    """
    total = 0
    for node in body:
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif not isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            total += _num_own_chars(node.iter_child_nodes())
    return total


@pass_context  # otherwise Jinja2 would finalize constants once, at compile time and without a budget
def _finalize(context: Context, value: Any) -> str:
    """Convert the value of an expression in a chat template to the text that appears in the prompt. Charge the value
    and the text to the rendering's budget.
    """
    assert isinstance(context.environment, _Environment)
    budget = context.environment.budget
    budget.charge_tree(value)
    text = str(value)
    budget.charge_text(len(text))
    return text


def _check_method(budget: _Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Charge a call of a method of a built-in object, such as `str.split`, to the rendering's budget. The charge
    depends on the size of the object whose method is called. Raises TemplateError for a method that chat templates may
    not call.
    """
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    served = next((names for kind, names in _METHODS if isinstance(owner, kind)), None)
    if served is None or owner is None:  # a plain function, or an object of Jinja2's own
        return
    if name not in served:
        raise TemplateError(f"the method {name} of {type(owner).__name__} cannot be used in a chat template")
    budget.charge_items(owner)
    if isinstance(owner, list | tuple):  # each item is compared
        budget.charge_tree(owner)
    if isinstance(owner, str):
        _check_text_method(budget, owner, name, args, kwargs)


def _check_text_method(
    budget: _Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Charge a call of a string method to the rendering's budget. The charge covers the length of the output, and the
    work of a method that scans the string several times. Raises TemplateError if a width is too large.
    """
    if name in _COMPARING:
        budget.charge_text(len(owner) * max((len(arg) for arg in args if isinstance(arg, str)), default=1))
    if name in ("split", "rsplit", "splitlines"):
        separator = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, str) and arg), None)
        most = next((arg for arg in (*args, *kwargs.values()) if type(arg) is int and arg >= 0), len(owner))
        if separator is not None:
            budget.charge(min(owner.count(separator), most))
        else:
            collections.deque(budget.counted(_SPACES.finditer(owner)), maxlen=0)
    if name in _FILLING:
        width = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), 8)
        if width > _MAX_WIDTH:
            raise TemplateError(f"{name} has the width {width}, but at most {_MAX_WIDTH} is allowed")
        budget.charge_text(width * (owner.count("\t") + 1))
    elif name == "replace" and len(args) >= 2:
        _check_replace(budget, owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        _check_join(budget, owner, args[0])
    elif name in ("format", "format_map"):
        _check_format(budget, owner, (args, kwargs))


def _check_replace(budget: _Budget, text: str, old: str, new: str = "") -> None:
    budget.charge_text(len(text) + text.count(old) * len(new))


def _check_join(budget: _Budget, separator: str, items: Any) -> None:
    budget.charge_tree(items)
    if isinstance(items, dict | range | str | _CONTAINERS):
        budget.charge_text(len(items) * len(separator))
    elif len(separator) > _CHARS_PER_STEP:
        raise TemplateError(f"join has a separator of {len(separator)} characters, but its items have no known length")


def _check_format(budget: _Budget, form: str, values: Any) -> None:
    if _WIDE.search(form):
        raise TemplateError(f"the format {form[:40]!r} has a width that is variable or has over 3 digits")
    for _ in range(1 + form.count("%") + form.count("{")):  # each placeholder may write all values
        budget.charge_tree(values)


def _check_product(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, str):
            budget.charge_text(len(sequence) * max(times, 0))
        elif isinstance(times, int) and isinstance(sequence, list | tuple):
            budget.charge(len(sequence) * max(times, 0))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise TemplateError(f"a number would have {num_bits} bits, but at most {_MAX_BITS} are allowed")


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_WIDTH or _WIDE.search(form):
        raise TemplateError(f"the format of strftime_now has {len(form)} characters, or a width of over 3 digits")
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
