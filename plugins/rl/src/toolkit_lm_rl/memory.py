"""Memory of a model: all tensors that a loaded model holds, and how one takes over another's."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import Kernels, WrappingMethod
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_MADV_DONTNEED = 4


Put = Callable[[Any], object]
"""Puts another value in the place of one."""


class Pair(NamedTuple):
    """A tensor of a model, and what is in the same place of another."""

    place: str
    old: Any
    """A Tensor or an array; or what a layer has made in use."""
    new: Any
    """Of the same type as `old`; None for what a layer makes."""
    put: Put | None
    """Puts another in the old one's place. None: it cannot be replaced."""


class _Entry(NamedTuple):
    """A value of a model, and the value in the same place of another."""

    place: str
    left: Any
    right: Any
    put: Put | None = None
    is_made: bool = False
    """The value is an attribute that may be made in use, and is None before: of an object that
    binds no cache."""


def pairs(old: nn.Module, new: nn.Module) -> Iterator[Pair]:
    """Yields the tensors of two models of one architecture: parameters, buffers, and what linear
    methods and kernels have made of them. Raises UnsupportedError where the models differ in
    anything else."""
    seen: set[int] = set()
    stack = [_Entry("", old, new)]
    while stack:
        entry = stack.pop()
        place, left, right, put, is_made = entry
        if type(left) is not type(right):
            if isinstance(left, WrappingMethod):
                raise UnsupportedError(
                    f"the weights of {place.strip('.')} cannot change in place: "
                    f"{type(left).__name__} wraps them. Start the engine without adapters."
                )
            if right is None and is_made and _has_tensors(left):
                yield Pair(place, left, right, put)
            elif _has_tensors(left) or _has_tensors(right):
                raise _differs(place, left, right)
        elif isinstance(left, (float, bool)):
            if left != right and left == left:
                raise _differs(place, left, right)
        elif isinstance(left, (int, str, bytes, Kernels)) or id(left) in seen:
            continue
        elif isinstance(left, (Tensor, np.ndarray)):
            seen.add(id(left))
            yield Pair(place, left, right, put)
        else:
            seen.add(id(left))
            stack += _inside(entry)


def _inside(entry: _Entry) -> Iterator[_Entry]:
    """Yields what two objects hold, by the name under which both hold it."""
    place, left, right, *_ = entry
    if isinstance(left, dict):
        for key in left.keys() & right.keys():
            yield _Entry(f"{place}.{key}", left[key], right[key], partial(left.__setitem__, key))
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right) and _has_tensors([*left, *right]):
            raise _differs(place, left, right)
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            put = partial(left.__setitem__, index) if isinstance(left, list) else None
            yield _Entry(f"{place}.{index}", a, b, put)
    elif isinstance(left, FunctionType):
        for a, b in zip(left.__closure__ or (), right.__closure__ or (), strict=False):
            put = partial(setattr, a, "cell_contents")
            yield _Entry(place, a.cell_contents, b.cell_contents, put)
    elif isinstance(left, MethodType):
        yield _Entry(place, left.__self__, right.__self__)
    elif isinstance(left, partial):
        yield _Entry(place, left.func, right.func)
        yield _Entry(place, left.args, right.args)
        yield _Entry(place, left.keywords, right.keywords)
    elif isinstance(left, nn.Module) or type(left).__module__.startswith("toolkit_lm"):
        yield from _attributes(entry)


def _attributes(entry: _Entry) -> Iterator[_Entry]:
    place, left, right, *_ = entry
    names = {*getattr(left, "__dict__", ())}
    for kind in type(left).__mro__:
        slots = getattr(kind, "__slots__", ())
        names |= {slots} if isinstance(slots, str) else {*slots}
    is_made = not isinstance(left, CacheLayer)
    for name in names - {"__dict__", "__weakref__"}:
        if hasattr(left, name):
            yield _Entry(
                place if name in ("_modules", "_parameters", "_buffers") else f"{place}.{name}",
                getattr(left, name),
                getattr(right, name, None),
                partial(setattr, left, name),
                is_made,
            )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    # Products of blocks, for example, hide their copies of weights from this module.
    return isinstance(value, (Tensor, np.ndarray)) or getattr(value, "made_of_weights", False)


def _differs(place: str, left: object, right: object) -> UnsupportedError:
    return UnsupportedError(
        f"the weights cannot change in place: {place.strip('.')} is {_short(left)}, and would be "
        f"{_short(right)}. Start another engine."
    )


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return repr(value)[:40]


def copy_contents(old: nn.Module, new: nn.Module) -> None:
    """Copies the contents of all tensors of `new` to the memory of those of `old`: what refers to
    that memory, such as a graph, stays valid. Nothing is changed if it raises UnsupportedError."""
    found = [pair for pair in pairs(old, new) if pair.old is not pair.new]
    for pair in found:
        if pair.put is None and not _fits(pair):
            raise _differs(pair.place, pair.old, pair.new)
    with torch.inference_mode():
        for pair in found:
            if not _fits(pair):
                assert pair.put is not None, pair.place
                pair.put(pair.new)
            elif isinstance(pair.old, Tensor):
                pair.old.copy_(pair.new)
            else:
                np.copyto(pair.old, pair.new)
    forget_copies(old)


def _fits(pair: Pair) -> bool:
    """Whether the new contents fit into the old memory."""
    old = pair.old
    new = pair.new
    if isinstance(old, Tensor):
        return (
            isinstance(new, Tensor)
            and old.shape == new.shape
            and old.dtype == new.dtype
            and old.layout is torch.strided is new.layout
        )
    return isinstance(old, np.ndarray) and old.shape == new.shape and old.dtype == new.dtype


def forget_copies(model: nn.Module) -> None:
    """Forgets what kernels have made of weights, by the weight."""
    found = [vars(module).get("kernels") for module in model.modules()]
    stack: list[Any] = [kernels for kernels in found if isinstance(kernels, Kernels)]
    seen: set[int] = set()
    while stack:
        holder = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for value in vars(holder).values():
            if isinstance(value, WeakTensorKeyDictionary):
                value.clear()
            elif type(value).__module__.startswith("toolkit_lm") and hasattr(value, "__dict__"):
                stack.append(value)


def storages(model: nn.Module) -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors of a model, by its address."""
    found = {}
    for pair in pairs(model, model):
        if isinstance(pair.old, Tensor) and pair.old.layout is torch.strided:
            storage = pair.old.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
    return found


def whole_pages(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Addresses of the whole pages of memory on the host: start, end. There may be none."""
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    end = (storage.data_ptr() + storage.nbytes()) // page * page
    return start, max(start, end)


def release_pages(storage: torch.UntypedStorage) -> int:
    """Gives the whole pages of memory on the host back to the system. Addresses stay valid, and
    their contents are lost. Returns the number of bytes."""
    start, end = whole_pages(storage)
    if end == start:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
    return 0 if done else end - start


def collect() -> None:
    """Collects garbage, such as a KV cache that is no longer used: a process that rests makes no
    objects, so that Python would not collect it by itself. What the C library keeps of freed memory
    goes back to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
