"""The first process of the kit: card, versions and limits, and what each attention backend says to
an 8B shape.

usage: python -m gpu_kit.machine [--quick]
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from gpu_kit.limits import measure_limits
from gpu_kit.report import MissedError, checking, die_with_the_kit, emit
from gpu_kit.shape_8b import FULL, QUICK

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "numpy")
OTHERS = ("flashinfer", "xformers")
"""Backends that are asked, too, where their plugins are not installed."""
CARD = "card"
REFUSALS = "refusals"


def card() -> dict[str, Any]:
    """Properties of the card."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "card": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory": f"{found.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
        "driver": _driver(),
    }


def _driver() -> str:
    if (tool := shutil.which("nvidia-smi")) is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return done.stdout.strip().partition("\n")[0] or "unknown"


def no_card() -> str | None:
    """Reason why no card can be used; None: there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda or "no CUDA"
    seen = (
        "nvidia-smi is not there"
        if shutil.which("nvidia-smi") is None
        else f"nvidia-smi names the driver {_driver()}"
    )
    return (
        f"torch {torch.__version__} (built with {built}) sees no card, and {seen}. --quick runs "
        "on a CPU."
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "toolkit-lm": metadata.version("toolkit-lm-core")}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def refusals(device: str) -> dict[str, str | None]:
    """Reasons to refuse layers of an 8B shape, or None, by attention backend."""
    from toolkit_lm.attention import AttentionSpec, AttentionType
    from toolkit_lm.kv import FullSpec
    from toolkit_lm.plugin import Plugins

    registry = Plugins.load().attention_backends
    dtype = "bfloat16" if device == "cuda" else "float32"
    cache = FullSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=dtype)
    spec = AttentionSpec(
        layer="model.layers.0.self_attn.attn",
        type=AttentionType.DECODER,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=dtype,
        device=device,
        kv_cache=cache,
    )
    found: dict[str, str | None] = {}
    for name in dict.fromkeys([*registry, *OTHERS]):
        missing = f"not installed: pip install toolkit-lm-{name.replace('_', '-')}"
        found[name] = registry.ask(name, spec) if name in registry else missing
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    die_with_the_kit()
    if not args.quick and (why := no_card()) is not None:
        emit(CARD, "failed", why=why)
        sys.exit(3)
    with checking(CARD) as found:
        found.update({"card": "none, a dry run on a CPU"} if args.quick else card())
    with checking("versions") as found:
        found.update(versions())
    with checking(REFUSALS) as found:
        found.update(refusals("cpu" if args.quick else "cuda"))
        if "sdpa" not in found or found["sdpa"] is not None:
            raise MissedError(
                "the attention backend sdpa is not there, or refuses: are the plugins?"
            )
    measure_limits(QUICK if args.quick else FULL)


if __name__ == "__main__":
    main()
