"""The compiled kernels, and the numbers that select them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache

import torch
from toolkit_lm.errors import ConfigError

from toolkit_lm_cpu.arguments import check_fields
from toolkit_lm_cpu.quota import granted_cores

try:
    from toolkit_lm_cpu import _kernels as _kernels

    check_fields(getattr(_kernels, "FIELDS", {}))
except ImportError as error:
    # The other modules name it, and where `refusal` says that it is missing nothing of theirs is
    # called.
    _kernels = None  # type: ignore[assignment]
    _missing: str | None = (
        f"its kernels are not there ({error}): a wheel has them, an installation from the "
        "sources compiles them"
    )
else:
    _missing = None

ISA_VARIABLE = "TOOLKIT_LM_CPU_ISA"
_PARALLEL = 2**18
"""Number of elements from which on torch uses several threads."""
_on_core = threading.Lock()
_local = threading.local()


def exported(name: str) -> int:
    """An integer constant of the kernels. 0: there are no kernels, and the value is unused."""
    number: int = getattr(_kernels, name, 0)
    return number


def _numbers() -> Mapping[str, Mapping[torch.dtype, int]]:
    kernels: dict[str, dict[torch.dtype, int]] = {}
    for number, (isa, dtype, _) in enumerate(getattr(_kernels, "KERNELS", ())):
        kernels.setdefault(isa, {})[getattr(torch, dtype)] = number
    return kernels


KERNELS = _numbers()
"""Numbers of the kernels by instruction set, the oldest first, and by dtype. Empty: there are no
kernels."""
PAIRS = {dtype: pair for _, dtype, pair in getattr(_kernels, "KERNELS", ())}
"""Elements that lie together in caches and panels, by the name of their dtype."""
AMX_INPUTS = exported("AMX_INPUTS")


def refusal() -> str | None:
    """Why this machine cannot run the kernels. None: it can."""
    if _missing is not None:
        return _missing
    return None if _kernels.supports("avx2") else "this processor lacks AVX2, FMA or F16C"


@cache
def usable_types() -> dict[torch.dtype, int]:
    """The kernels' number by dtype, for the best instruction set that the CPU has and the
    environment allows.

    Both are read once per process. Empty: there are no kernels. Raises ConfigError if the
    environment names an unknown instruction set.
    """
    if refusal() is not None:
        return {}
    names = list(KERNELS)
    most = os.environ.get(ISA_VARIABLE) or names[-1]
    if most not in names:
        raise ConfigError(
            f"environment variable {ISA_VARIABLE}: {most!r} is not one of {', '.join(names)}."
        )
    found: dict[torch.dtype, int] = {}
    for name in names[: names.index(most) + 1]:
        if _kernels.supports(name):
            found |= KERNELS[name]
    return found


@cache
def code_kernel() -> int:
    """The number of the best kernels for quantized weights. The environment's limit holds for them
    too."""
    return max(number for number, why in enumerate(_code_refusals()) if why is None)


def code_isa(number: int) -> str:
    """The instruction set of a `code_kernel`, and why each faster one is not taken."""
    names = _kernels.CODE_KERNELS
    others = zip(names[number + 1 :], _code_refusals()[number + 1 :], strict=True)
    reasons = ", ".join(f"{name}: {why}" for name, why in others)
    return names[number] + (f" ({reasons})" if reasons else "")


def _code_refusals() -> list[str | None]:
    """Why each of the kernels for quantized weights cannot be taken; None: it can."""
    limit = os.environ.get(ISA_VARIABLE) or "amx"
    names = _kernels.CODE_KERNELS
    within = {"avx2": 1, "amx": len(names)}.get(limit, len(names) - 1)
    refusals: list[str | None] = []
    for number, isa in enumerate(names):
        if number >= within:
            refusals.append(f"{ISA_VARIABLE} is {limit}")
        elif _kernels.supports(isa):
            refusals.append(None)
        else:
            refusals.append("this processor lacks it")
    return refusals


def use_threads() -> None:
    """Gives the kernels as many threads as torch has, up to the control group's quota."""
    granted = granted_cores()
    _kernels.set_threads(
        min(torch.get_num_threads(), math.ceil(granted or torch.get_num_threads()))
    )


def bind_threads() -> int | None:
    """Binds the kernels' threads to cores. Returns the core for the calling thread, or None if
    nothing is bound. Call `use_threads` first.

    Threads are bound only if each core of the process has a thread and no control group limits
    them. Bound threads get more of their cores beside a busy process.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1 or len(cores) != torch.get_num_threads() or granted_cores() is not None:
        return None
    _kernels.bind_threads(tuple(cores))
    return cores[0]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Context that keeps the calling thread on a core. It does nothing while another thread is in
    it."""
    if not _on_core.acquire(blocking=False):
        yield
        return
    if not hasattr(_local, "has_torch_threads"):
        # Torch makes them for each thread that shares out its work, and made on a core they would
        # stay there.
        torch.zeros(_PARALLEL).add_(1)
        _local.has_torch_threads = True
    before = os.sched_getaffinity(0)
    try:
        # A container may have lost the core since.
        with suppress(OSError):
            os.sched_setaffinity(0, {core})
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
        _on_core.release()


def product_type(dtype: torch.dtype, inputs: int) -> int:
    """The number of the best kernels for matrix products with `inputs` terms."""
    best = usable_types()[dtype]
    if best == KERNELS["amx"].get(dtype) and inputs % AMX_INPUTS:
        return KERNELS["avx512_bf16"][dtype]
    return best
