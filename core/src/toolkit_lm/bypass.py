"""Conditions under which modules may be left uncalled, because something else computes their
result.

Two things forbid it: a class or an object with a forward pass of its own, and a hook that waits for
the call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which torch stores the hooks of a module's calls."""
_HARMLESS = frozenset(
    {
        "__abstractmethods__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__init__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__repr__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
        "extra_repr",
        "seams",
    }
)
"""Names that any class body may define: they do not affect a forward pass."""


_BODIES: dict[type, dict[str, FunctionType]] = {}
"""Functions of the classes that guarantee their forward pass, as their bodies define them."""


def alteration(thing: object, kind: type, seams: Collection[str]) -> str | None:
    """Name of a function of `kind` that a subclass, or `thing` itself, replaces; None: `thing`
    computes as `kind` does.

    `seams`: names that may be replaced. Names that are new to `kind` may be defined.
    """
    own = type(thing)
    allowed = {*_HARMLESS, *seams}
    state = vars(thing)
    held: set[str] = {*state}
    for kept in ("_modules", "_parameters", "_buffers"):
        held |= state.get(kept, {}).keys()
    for cls in own.__mro__[: own.__mro__.index(kind)]:
        for name in vars(cls):
            if name not in allowed and (hasattr(kind, name) or name in held):
                return f"{cls.__name__} overrides {name} of {kind.__name__}"
    for name in state:
        if name not in allowed and callable(getattr(kind, name, None)):
            return f"{name} of a {own.__name__} has been replaced"
    return None


def module_alteration(module: nn.Module) -> str | None:
    """Name that a module's class or object replaces, compared with the first of its classes whose
    own body states `seams`. A module without such a class counts as altered.

    A class in whose body a function was replaced counts as altered too.
    """
    own = type(module)
    kind = next((cls for cls in own.__mro__ if "seams" in vars(cls)), None)
    if kind is None:
        return f"{own.__name__} does not state seams"
    for cls in kind.__mro__:
        for name, function in _BODIES.get(cls, {}).items():
            if vars(cls).get(name) is not function:
                return f"{name} of {cls.__name__} has been replaced"
    return alteration(module, kind, vars(kind)["seams"])


def has_hook(modules: Iterable[nn.Module]) -> bool:
    """Whether a forward or backward hook waits for a call of any of these modules, or of all
    modules. A hook whose attribute `waits_for_call` is False gets its data from elsewhere, and does
    not count."""
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    for module in modules:
        kept = vars(module)
        for name in _HOOKS:
            if any(getattr(hook, "waits_for_call", True) for hook in kept.get(name, {}).values()):
                return True
    return False


def look_again() -> None:
    """Makes bypassing code check again whether it may bypass modules: a new handle counts as a
    hook."""
    RemovableHandle(OrderedDict())


class Bypassable(nn.Module):
    """Base of modules that may be left uncalled, or whose parts may be: those that kernels compute
    in one call."""

    seams: ClassVar[frozenset[str]]
    """Names that a subclass may override while the module can be left uncalled: they are used only
    in construction.

    Only the class whose body states them guarantees the forward pass. A subclass that overrides any
    other name does not.
    """

    _seen: int = -1
    """Number of hooks ever registered when this module was last found free of hooks."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "seams" in vars(cls):
            functions = {
                name: value for name, value in vars(cls).items() if isinstance(value, FunctionType)
            }
            _BODIES[cls] = {
                name: value for name, value in functions.items() if name not in cls.seams
            }

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if callable(getattr(type(self), name, None)):
            # A method is replaced.
            look_again()

    def refuses_bypass(self) -> str | None:
        """Returns why the module must be called, apart from hooks; None: it need not be."""
        return module_alteration(self)

    def may_bypass(self) -> bool:
        """Whether the module may be left uncalled. Between two registrations of hooks the answer is
        cached."""
        seen = RemovableHandle.next_id
        if self._seen == seen:
            return True
        # A removed hook does not change the count, so a module with hooks is checked each time.
        if has_hook(self.modules()) or self.refuses_bypass() is not None:
            return False
        self._seen = seen
        return True
