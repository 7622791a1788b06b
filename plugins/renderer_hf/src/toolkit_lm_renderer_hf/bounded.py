"""Sandboxed Jinja for chat templates from untrusted sources: each rendering has a budget of time
and of characters.

Generated code checks the budget at the start of each block (a loop's body, a macro, a branch) and
charges it for the results of expressions. Operations that can multiply the size of their input (a
product, a format, a filter with a width) are estimated before they run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from toolkit_lm.errors import RequestError

T = TypeVar("T")
MOST_SECONDS = 3.0
"""Seconds of processor time that one rendering may take. Usual templates take less than a
thousandth."""
MOST_SOURCE = 2**18
"""Characters of a template; the longest known have some 30,000."""
_MOST_WIDTH = 100_000
"""Largest width of padding, and largest length of range()."""
_FAR_MORE = "it makes far more characters than a prompt can have"
_WIDE = f"it asks for a width of more than {_MOST_WIDTH}, or for one that is a value of a format"
_METHODS = (BuiltinMethodType, MethodType)
_TEXT = (str, bytes)
_HOLDS = (str, bytes, list, tuple, dict)
_MOST_TERMS = 8
"""Terms of a sum whose size is counted in one go."""
_ITEM = 8
"""Characters that an item of a list counts as."""
_MOST_BITS = 2**16
_UNSAFE = frozenset({"expandtabs", "format_map", "maketrans", "striptags", "to_bytes", "translate"})
"""Methods that make much of little, and that no template needs."""
_REMOVED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters of the same kind, or that take long."""
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_WIDE_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "tojson"})
_CHECKED = frozenset({*_WIDE_FILTERS, "format", "join", "replace", "sum"})
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\d{5}|:[^}]*\{)")


class OverBudgetError(RequestError):
    """A rendering has used up its time, or its characters."""


def _too_large(label: str) -> OverBudgetError:
    return OverBudgetError(f"the chat template grew too large: {label}.", "messages")


class _SizedList(list[Any]):
    """A list that knows how much it holds. Templates cannot change it."""

    __slots__ = ("size",)
    size: int


class Budget:
    """Remaining budget of one rendering, in the thread that renders. Its methods raise
    OverBudgetError when the budget is spent."""

    def __init__(self, max_length: int) -> None:
        """`max_length`: characters of the text that is to come out."""
        self.max_length = max_length
        self._end = time.thread_time() + MOST_SECONDS
        self._next_look = time.monotonic() + MOST_SECONDS
        self._most = 4 * max_length
        """Characters of one value."""
        self._left = min(256 * max_length, 2**30)
        """Characters of all values together."""

    def tick(self) -> None:
        """Raises OverBudgetError when the thread has used up its processor time. Wall time does not
        count: a busy machine is not the template's fault."""
        # The clock on the wall costs less to read, and is never behind.
        if time.monotonic() <= self._next_look:
            return
        left = self._end - time.thread_time()
        if left <= 0:
            raise OverBudgetError(
                f"the chat template took too long: more than {MOST_SECONDS:g} seconds of "
                "processor time.",
                "messages",
            )
        self._next_look = time.monotonic() + left

    def spend(self, value: T) -> T:
        """Counts a value that was made, and returns it."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, _HOLDS):
            self.charge(self.size(value))
        return value

    def add(self, *terms: Any) -> Any:
        """Their sum, counted. A list that grows item by item is not looked through each time."""
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        if type(total) is not list:
            return self.spend(total)
        # The items' contents exist already.
        self.charge(_ITEM * len(total))
        sized = _SizedList(total)
        sized.size = sum(map(self.size, terms))
        if sized.size > self._most:
            raise _too_large(_FAR_MORE)
        return sized

    def charge(self, size: int) -> None:
        """Counts what is about to be made."""
        self._left -= size
        if size > self._most or self._left < 0:
            raise _too_large(_FAR_MORE)

    def size(self, value: object) -> int:
        """Characters of a value, and of what it holds."""
        if isinstance(value, _TEXT):
            return len(value)
        total = 0
        todo = [value]
        while todo and total <= self._most:
            item = todo.pop()
            if isinstance(item, _TEXT):
                total += len(item)
            elif isinstance(item, _SizedList):
                total += item.size
            elif isinstance(item, _HOLDS):
                total += _ITEM * (len(item) + 1)
                todo += item
                if isinstance(item, dict):
                    todo += item.values()
        return total

    def meter(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each counted when it comes."""
        for item in items:
            self.tick()
            self.charge(_ITEM + self.size(item))
            yield item

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the pieces of text that a block has written."""
        pieces = list(pieces)
        self.charge(sum(map(len, pieces)))
        return "".join(pieces)


_BUDGET: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def rendering(max_length: int) -> Iterator[None]:
    """Gives one budget to everything rendered in this context. Use it in one thread, and do not
    nest it."""
    token = _BUDGET.set(Budget(max_length))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def _counting(name: str) -> Callable[[CodeGenerator, Any, Frame], None]:
    """The method of a kind of node, which has what the node makes counted."""
    visit = getattr(CodeGenerator, f"visit_{name}")

    def visit_counted(self: CodeGenerator, node: Any, frame: Frame) -> None:
        makes_nothing = isinstance(node, nodes.Tuple) and node.ctx != "load"
        if makes_nothing or (
            isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        ):
            visit(self, node, frame)
        else:
            self.write("budget.spend(")
            visit(self, node, frame)
            self.write(")")

    return visit_counted


class _Generator(CodeGenerator):
    """Generates code that asks the budget, under the name `budget`. Variables of templates have
    other names."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("budget = environment.budget()")
        self.writeline("concat = budget.concat")

    def blockvisit(self, statements: Iterable[nodes.Node], frame: Frame) -> None:
        # A branch has no loop that is not a block of its own.
        if not frame.soft_frame:
            self.writeline("budget.tick()")
        super().blockvisit(statements, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        terms: list[nodes.Expr] = [node.right]
        first = node.left
        while isinstance(first, nodes.Add) and len(terms) < _MOST_TERMS:
            terms.append(first.right)
            first = first.left
        self.write("budget.add(")
        for term in (first, *reversed(terms)):
            self.visit(term, frame)
            self.write(", ")
        self.write(")")


for _name in ("Concat", "Dict", "Getitem", "List", "Tuple"):
    setattr(_Generator, f"visit_{_name}", _counting(_name))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are rendered within `rendering`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Without the optimizer, which would compute constant expressions while no budget is there.
        super().__init__(optimized=False, **options)
        for name in _REMOVED:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """The filter, within the budget."""
        self.filters[name] = _bounded(name, function)

    @staticmethod
    def budget() -> Budget:
        return _BUDGET.get()

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        return _BUDGET.get().concat(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        current = _BUDGET.get()
        if operator == "%":
            if isinstance(left, str | bytes):
                _check_percent(current, left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * right
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            if bits > _MOST_BITS:
                raise _too_large(f"it has numbers of more than {_MOST_BITS} bits")
        elif operator == "*":
            count, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int):
                current.charge(max(count, 0) * current.size(value))
        return super().call_binop(context, operator, left, right)

    def call(
        __self,  # noqa: N805
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        current = _BUDGET.get()
        method = __obj if isinstance(__obj, _METHODS) else getattr(__obj, "__wrapped__", None)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, _TEXT):
            args = _check_method(
                current, owner, str(getattr(method, "__name__", "")), args, _own(kwargs)
            )
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            current.spend((args, _own(kwargs)))
        return current.spend(super().call(__context, __obj, *args, **kwargs))


def _own(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` without the entries that generated code adds to the template's arguments."""
    return {
        name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")
    }


def _check_method(
    current: Budget, owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Raises for a method of a text that makes too much of it; returns its arguments."""
    if name in _WIDE_METHODS:
        _check_widths((*args, *kwargs.values()))
    elif name == "replace" and len(args) > 1:
        _check_replace(current, owner, args[0], args[1])
    elif name == "join" and args:
        items = list(args[0])
        current.charge(len(owner) * len(items))
        return (items,)
    elif name == "format":
        if _WIDE_BRACES.search(str(owner)):
            raise _too_large(_WIDE)
        current.charge(str(owner).count("{") * current.size((args, kwargs)))
    return args


def _check_filter(
    current: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Raises for a filter that makes too much of a value; returns the value."""
    arguments = (*args, *kwargs.values())
    if name in _WIDE_FILTERS:
        _check_widths(arguments)
    if name == "indent":
        lines = str(value).count("\n") + 1
        current.charge(
            lines * sum(len(width) if isinstance(width, str) else int(width) for width in arguments)
        )
    elif name == "replace" and len(arguments) > 1:
        _check_replace(current, str(value), arguments[0], arguments[1])
    elif name == "join" and not isinstance(value, str):
        value = list(value)
        current.charge(len(value) * sum(len(text) for text in arguments if isinstance(text, str)))
    elif name == "format":
        _check_percent(current, str(value), (args, kwargs))
    elif name == "sum" and any(isinstance(start, list | tuple) for start in arguments):
        raise SecurityError("sums of lists")
    return value


def _check_widths(values: Iterable[Any]) -> None:
    if any(_width(value) > _MOST_WIDTH for value in values):
        raise _too_large(_WIDE)


def _width(value: Any) -> int:
    """Characters that a value asks for: a number of them, or a text as long."""
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, str) else 0


def _check_replace(current: Budget, text: str | bytes, old: Any, new: Any) -> None:
    if isinstance(new, str | bytes) and isinstance(
        old, type(text) if isinstance(text, bytes) else str
    ):
        current.charge(text.count(old) * len(new))  # type: ignore[arg-type]


def _check_percent(current: Budget, text: str | bytes, values: Any) -> None:
    shown = text if isinstance(text, str) else text.decode("latin-1")
    if _WIDE_PERCENT.search(shown):
        raise _too_large(_WIDE)
    current.charge(shown.count("%") * current.size(values))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, within the budget. It is given what Jinja passes before the value, as `function`
    asks for it."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        current = _BUDGET.get()
        current.tick()
        passed, value, args = args[:num_passed], args[num_passed], args[num_passed + 1 :]
        if name in _CHECKED:
            value = _check_filter(current, name, value, args, kwargs)
        result = function(*passed, value, *args, **kwargs)
        return current.meter(result) if isinstance(result, Iterator) else current.spend(result)

    return bounded
