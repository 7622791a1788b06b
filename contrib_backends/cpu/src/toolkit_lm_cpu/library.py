"""The compiled kernels, and the numbers that they know element types by."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache

import torch
from toolkit_lm.errors import ConfigError

from toolkit_lm_cpu.quota import granted_cores

try:
    from toolkit_lm_cpu import _kernels as _kernels
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
AVX512_BF16 = 6
AMX = 7
AMX_INPUTS = 32
"""What a sum's length must be a multiple of, for AMX."""
_PARALLEL = 2**18
"""Elements that torch shares out to its threads."""
_on_core = threading.Lock()
_local = threading.local()
KERNELS: Mapping[str, Mapping[torch.dtype, int]] = {
    "avx2": {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2},
    "avx512": {torch.float32: 3, torch.float16: 4, torch.bfloat16: 5},
    "avx512_bf16": {torch.bfloat16: AVX512_BF16},
    "amx": {torch.bfloat16: AMX},
}
"""By instructions, from the oldest on, and dtype: its number in module.c."""


def refusal() -> str | None:
    """Why this machine cannot run the kernels; None when it can."""
    if _missing is not None:
        return _missing
    return None if _kernels.supports("avx2") else "this processor lacks AVX2, FMA or F16C"


@cache
def usable_types() -> dict[torch.dtype, int]:
    """By dtype, its number in module.c, with the best instructions that the processor has and the
    environment allows. Both are asked once, when kernels are first chosen. Empty: there are none.

    Raises ConfigError for instructions that the environment names wrongly.
    """
    names = list(KERNELS)
    most = os.environ.get(ISA_VARIABLE) or names[-1]
    if most not in names:
        raise ConfigError(
            f"environment variable {ISA_VARIABLE}: {most!r} is not one of {', '.join(names)}."
        )
    if refusal() is not None:
        return {}
    found: dict[torch.dtype, int] = {}
    for name in names[: names.index(most) + 1]:
        if _kernels.supports(name):
            found |= KERNELS[name]
    return found


def use_threads() -> None:
    """Gives the kernels as many threads as torch has, but no more than a control group lets run."""
    granted = granted_cores()
    _kernels.set_threads(
        min(torch.get_num_threads(), math.ceil(granted or torch.get_num_threads()))
    )


def bind_threads() -> int | None:
    """Binds the kernels' threads to cores, and returns the one for the thread that computes. After
    `use_threads`.

    Only where each of the process's cores has a thread, and no control group limits them; else
    None. Threads that stay where they are get more of their cores beside a busy process.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1 or len(cores) != torch.get_num_threads() or granted_cores() is not None:
        return None
    _kernels.bind_threads(tuple(cores))
    return cores[0]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """For a while the calling thread keeps to a core, unless another one does."""
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
    """The number of the best kernel for products with `inputs` terms."""
    best = usable_types()[dtype]
    return AVX512_BF16 if best == AMX and inputs % AMX_INPUTS else best
