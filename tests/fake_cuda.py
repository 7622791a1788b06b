"""A GPU without a GPU: "cuda" tensors that live on the host, and whose work is done late, as a
stream's is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
_FACTORIES = {
    torch.zeros,
    torch.empty,
    torch.ones,
    torch.full,
    torch.arange,
    torch.tensor,
    torch.as_tensor,
    torch.eye,
    torch.randn,
}
_TO = {Tensor.to, Tensor.cuda}
_ON_HOST = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
}
_PROPERTIES = {
    Tensor.device.__get__: CUDA,
    Tensor.is_cuda.__get__: True,
    Tensor.is_meta.__get__: False,
}
_WHOLE = {aten.scaled_dot_product_attention, aten.where}
"""Composite operations that would make tensors of "meta" if decomposed."""
_WAITS = {
    aten.nonzero,
    aten.equal,
    aten.masked_select,
    aten.unique_consecutive,
    aten._unique2,
    aten._local_scalar_dense,
    aten.item,
}
"""Operations that no stream can postpone: the host needs the numbers, or the result's shape depends
on them."""


class CudaTensor(Tensor):
    """Knows its shape at once (`meta`), and what it holds (`held`) when the stream has come to
    it."""

    meta: Tensor
    held: Tensor
    cuda: FakeCuda

    @staticmethod
    def __new__(cls, cuda: FakeCuda, meta: Tensor) -> CudaTensor:
        layout = {
            "strides": meta.stride(),
            "storage_offset": meta.storage_offset(),
            "dtype": meta.dtype,
        }
        # A torch without CUDA refuses to slice one of its tensors: this is one of "meta", and says
        # to Python that it is of "cuda".
        with torch.inference_mode(False):
            made: CudaTensor = Tensor._make_wrapper_subclass(
                cls, meta.shape, device="meta", **layout
            )
        made.cuda = cuda
        made.meta = meta
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _PROPERTIES:
            return _PROPERTIES[func]
        if func is Tensor.__setitem__ and isinstance(args[2], int | float):
            # torch would make a tensor of "meta" of it.
            args = *args[:2], torch.tensor(args[2], dtype=args[0].dtype)
        if func in _ON_HOST:
            return func(args[0].cpu(), *args[1:], **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda = next(
            leaf.cuda for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CudaTensor)
        )
        return cuda.call(func, args, kwargs or {})


class FakeCuda(TorchFunctionMode):
    """Inside, "cuda" is a device whose stream does nothing until the host waits for it: as late as
    a GPU may be.

    A copy from pinned memory is late too, so that what the host writes meanwhile is what is copied.
    Tensors of the CPU and of the GPU do not mix, but for scalars and for indices, which the real
    one brings over, with a wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """Operations that made the host wait for the stream."""
        self.uploads: list[torch.Size] = []
        """Shapes of what was copied to the device."""
        self.calls: list[str] = []
        """The operations on the device."""
        self._stream: list[Callable[[], None]] = []
        self._done = 0
        self._pinned: list[Tensor] = []
        self._patches = ExitStack()

    def __enter__(self) -> FakeCuda:
        super().__enter__()
        stream = SimpleNamespace(synchronize=lambda: self.wait("stream"))
        self._patches.enter_context(
            mock.patch.object(torch.cuda, "Event", lambda *args, **options: Event(self))
        )
        self._patches.enter_context(mock.patch.object(torch.cuda, "device", CurrentDevice))
        self._patches.enter_context(
            mock.patch.object(torch.cuda, "current_stream", lambda device=None: stream)
        )
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()
        super().__exit__(*raised)

    @property
    def num_pending(self) -> int:
        """Pieces of work that are not done."""
        return len(self._stream) - self._done

    def wait(self, what: str, until: int | None = None) -> None:
        """The host waits, for all or for the first `until` pieces of work."""
        self.waits.append(what)
        until = len(self._stream) if until is None else until
        with torch.inference_mode(), torch._C.DisableTorchFunction():
            while self._done < until:
                work, self._stream[self._done] = self._stream[self._done], _nothing
                self._done += 1
                work()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PROPERTIES and isinstance(args[0], CudaTensor):
            return _PROPERTIES[func]
        if func in _FACTORIES:
            device = kwargs.pop("device", None)
            pin = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            if pin:
                self._pinned.append(made)
            if not _is_cuda(device):
                return made
            is_made_there = func not in (torch.tensor, torch.as_tensor)
            if not is_made_there:
                self.wait(f"{func.__name__} of pageable memory")
            return self._upload(made, late=False, counts=not is_made_there)
        if func in _TO and not isinstance(args[0], CudaTensor):
            places = [one for one in (*args[1:], kwargs.get("device")) if _is_cuda(one)]
            likes = [one for one in args[1:] if isinstance(one, CudaTensor)]
            if places or likes or func is Tensor.cuda:
                dtypes = [
                    one
                    for one in (*args[1:], kwargs.get("dtype"), *(like.dtype for like in likes))
                    if isinstance(one, torch.dtype)
                ]
                source = args[0].to(dtypes[0]) if dtypes else args[0]
                late = kwargs.get("non_blocking", False)
                if not late:
                    self.wait(f"{func.__name__} of pageable memory")
                return self._upload(source, late)
        return func(*args, **kwargs)

    def _upload(self, source: Tensor, late: bool, counts: bool = True) -> CudaTensor:
        target = CudaTensor(self, source.to("meta"))
        if not (late and self._is_pinned(source)):
            source = source.clone()
        if counts:
            self.uploads.append(source.shape)

        def copy() -> None:
            target.held = source.clone()

        self._stream.append(copy)
        return target

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == storage for one in self._pinned)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation later, like a kernel."""
        if (
            func.overloadpacket not in _WHOLE
            and (parts := func.decompose(*args, **kwargs)) is not NotImplemented
        ):
            return parts
        name = func.name()
        if (
            func is aten._to_copy.default
            and kwargs.get("device") is not None
            and not _is_cuda(kwargs["device"])
        ):
            self.wait(name)
            return args[0].held.to(kwargs.get("dtype") or args[0].dtype, copy=True)
        if func is aten.copy_.default and not isinstance(args[0], CudaTensor):
            self.wait(name)
            return args[0].copy_(args[1].held)
        if func is aten.copy_.default and not isinstance(args[1], CudaTensor):
            # torch copies what has gaps through pageable memory.
            late = len(args) > 2 and args[2] and args[0].is_contiguous() and args[1].is_contiguous()
            if not late:
                self.wait(f"{name} of pageable memory")
            source = args[1] if late and self._is_pinned(args[1]) else args[1].clone()
            self.uploads.append(source.shape)
            self._stream.append(lambda: args[0].held.copy_(source))
            return args[0]
        self.calls.append(name)
        func, args = _as_cuda_divides(func, args)
        args, kwargs = tree_map(lambda one: self._here(one, name), (args, kwargs))
        _check_mask(func, args, kwargs)
        if func.overloadpacket in _WAITS or _has_bool_index(func, args):
            self.wait(name)
            found = func(*_real(args), **_real(kwargs))
            return tree_map(
                lambda one: self._computed(one) if isinstance(one, Tensor) else one, found
            )
        shapes = func(*_meta(args), **_meta(kwargs))
        given = {
            id(one.meta): one for one in tree_leaves((args, kwargs)) if isinstance(one, CudaTensor)
        }
        made = tree_map(
            lambda one: (
                given.get(id(one), CudaTensor(self, one)) if isinstance(one, Tensor) else one
            ),
            shapes,
        )

        def work() -> None:
            found = func(*_real(args), **_real(kwargs))
            for target, one in zip(tree_leaves(made), tree_leaves(found), strict=True):
                if isinstance(target, CudaTensor) and id(target.meta) not in given:
                    target.held = one

        self._stream.append(work)
        return made

    def _computed(self, real: Tensor) -> CudaTensor:
        made = CudaTensor(self, real.to("meta"))
        made.held = real
        return made

    def _here(self, one: Any, name: str) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, CudaTensor):
            return one
        assert not one.is_meta, f"{name} is given a tensor that holds nothing"
        if one.ndim == 0:
            return one
        if name.startswith(("aten::index", "aten::_index")):
            self.wait(f"{name} by indices on the host")
            return self._upload(one, late=False)
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu"
        )


class CurrentDevice:
    """Stand-in for torch.cuda.device: the current GPU of each thread."""

    of_thread = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        self.before = 0

    def __enter__(self) -> None:
        self.before = self.now()
        self.of_thread.index = self.index

    def __exit__(self, *raised: object) -> None:
        self.of_thread.index = self.before

    @classmethod
    def now(cls) -> int:
        return getattr(cls.of_thread, "index", 0)


class Event:
    """Stand-in for torch.cuda.Event."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._after = 0

    def record(self, stream: object = None) -> None:
        self._after = len(self._cuda._stream)

    def synchronize(self) -> None:
        self._cuda.wait("event", self._after)


def _nothing() -> None:
    pass


def _as_cuda_divides(func: Any, args: Any) -> tuple[Any, Any]:
    """A division by a number of the host is a product by its reciprocal, in float32."""
    if func not in (aten.div.Tensor, aten.div_.Tensor) or not args[0].is_floating_point():
        return func, args
    divisor = args[1]
    if isinstance(divisor, Tensor) and (isinstance(divisor, CudaTensor) or divisor.ndim):
        return func, args
    reciprocal = float(torch.tensor(float(divisor), dtype=torch.float32).reciprocal())
    product = aten.mul.Tensor if func is aten.div.Tensor else aten.mul_.Tensor
    return product, (args[0], reciprocal)


def _check_mask(func: Any, args: Any, kwargs: Any) -> None:
    """Kernels of attention add a bias in the queries' dtype alone."""
    if func.overloadpacket is not aten.scaled_dot_product_attention:
        return
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is not None and mask.dtype not in (torch.bool, args[0].dtype):
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


def _is_cuda(device: Any) -> bool:
    return not isinstance(device, Tensor) and device is not None and str(device).startswith("cuda")


def _has_bool_index(func: Any, args: Any) -> bool:
    indices = (
        args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else []
    )
    return any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices
    )


def _meta(tree: Any) -> Any:
    return tree_map(lambda one: one.meta if isinstance(one, CudaTensor) else _to_meta(one), tree)


def _to_meta(one: Any) -> Any:
    return torch.device("meta") if isinstance(one, torch.device) else one


def _real(tree: Any) -> Any:
    return tree_map(lambda one: one.held if isinstance(one, CudaTensor) else _to_host(one), tree)


def _to_host(one: Any) -> Any:
    return torch.device("cpu") if isinstance(one, torch.device) else one
