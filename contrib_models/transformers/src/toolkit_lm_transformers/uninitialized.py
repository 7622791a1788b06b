"""Making modules without spending time on random weights that a checkpoint replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset({Tensor.normal_, Tensor.uniform_})
_RANDOM = frozenset(
    {
        init.kaiming_normal_,
        init.kaiming_uniform_,
        init.normal_,
        init.trunc_normal_,
        init.uniform_,
        init.xavier_normal_,
        init.xavier_uniform_,
    }
)


class Uninitialized(TorchFunctionMode):
    """While active, functions that draw a tensor's values at random leave it as it is. It holds for
    this thread only.

    What they are made of gives zeros: some draw until all values are within bounds
    (`trunc_normal_`), which memory never is by itself.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            return (args[0] if args else kwargs["self"]).zero_()
        if func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
