"""The memory of models: what one needs, what its processes take, and what the machine has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct
from toolkit_lm.config import VllmConfig, parse_memory

PROCESS = 400 * 2**20
"""Bytes of an engine process without a model: the interpreter, torch, and its buffers."""
_MOST_HEADER = 100 * 2**20
"""Most bytes of a safetensors file's header."""
_AUTO_BYTES = 4 * 2**30
"""Most bytes of a KV cache for which an entry states no size."""
_AUTO_SHARE = 8
"""A KV cache for which an entry states no size has one part in as many of the budget."""
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


class Need(Struct, frozen=True):
    """Bytes that a model needs, by kind, in all of its processes."""

    process: int
    weights: int
    kv_cache: int
    workspace: int
    num_caches: int = 1
    """Ranks of all its engines: each has a part of the KV cache."""

    @property
    def total(self) -> int:
        return self.process + self.weights + self.kv_cache + self.workspace


def need_of(config: VllmConfig, budget: int) -> Need:
    """An estimate, from a resolved config and the headers of the weights."""
    parallel = config.parallel
    engines = parallel.data_parallel_size
    # Several ranks are workers of an engine, whose process has no model.
    processes = 1 if parallel.num_ranks == 1 else 1 + parallel.ranks_per_node
    return Need(
        process=PROCESS * engines * processes,
        weights=weight_bytes(config) * engines // parallel.nodes,
        kv_cache=kv_bytes(config, budget),
        workspace=_workspace(config) * _num_caches(config),
        num_caches=_num_caches(config),
    )


def _num_caches(config: VllmConfig) -> int:
    """Ranks on this machine, of all engines."""
    return config.parallel.data_parallel_size * config.parallel.ranks_per_node


def weight_bytes(config: VllmConfig) -> int:
    """Bytes of an engine's weights in the config's dtype, with those of a draft model, from the
    headers of safetensors files. Of other files: their sizes."""
    assert config.checkpoint is not None, "the config is resolved"
    sources = [Path(config.checkpoint.source or config.checkpoint.path)]
    if (draft := _draft_folder(config)) is not None:
        sources.append(draft)
    width = _WIDTH.get(config.model.dtype, 4)
    return sum(
        _file_bytes(file, width)
        for source in sources
        for file in ([source] if source.is_file() else sorted(_weight_files(source)))
    )


def _draft_folder(config: VllmConfig) -> Path | None:
    """The folder of a drafter's own checkpoint. None: it has none, or names
    something other than a folder."""
    if not {"draft_model", "eagle"} & {*(config.scheduler.drafter or ())}:
        return None
    model = config.plugins.plugin_option.get("drafters", {}).get("model")
    folder = Path(model) if isinstance(model, str) else None
    return folder if folder is not None and folder.is_dir() else None


def _weight_files(folder: Path) -> Iterable[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")]
    return []


def _file_bytes(path: Path, width: int) -> int:
    try:
        if path.suffix != ".safetensors":
            return path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MOST_HEADER else {}
        return sum(
            _tensor_bytes(entry, width) for name, entry in header.items() if name[:2] != "__"
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # A broken file is told when the model is loaded.
        return 0


def _tensor_bytes(entry: Mapping[str, Any], width: int) -> int:
    """Bytes of a tensor in memory. Floating point tensors get the model's dtype."""
    first, last = entry["data_offsets"]
    if entry["dtype"] in ("F32", "BF16", "F16"):
        return int(math.prod(entry["shape"])) * width
    return int(last) - int(first)


def kv_bytes(config: VllmConfig, budget: int) -> int:
    """Bytes of the KV caches of all ranks: what the options state, else a share of the budget."""
    if not config.keeps_kv_cache:
        return 0
    caches = _num_caches(config)
    per_token = _kv_per_token(config) * caches // config.parallel.num_ranks
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks * cache.block_size * per_token
    if cache.kv_cache_memory != "auto":
        amount = parse_memory(cache.kv_cache_memory)
        return amount * caches if isinstance(amount, int) else int(amount * budget)
    longest = config.max_model_len + config.max_encoder_len + 2 * cache.block_size
    most = per_token * longest * max(config.scheduler.max_num_seqs, 64)
    return max(min(most, budget // _AUTO_SHARE, _AUTO_BYTES), 2 * per_token * longest)


def _kv_per_token(config: VllmConfig) -> int:
    """Bytes of one token's keys and values in all layers and ranks of an engine, as models with
    plain attention have them."""
    width = _WIDTH.get(config.model.dtype, 4)
    if config.cache.kv_cache_dtype in ("int8", "fp8"):
        width = 1
    ranks = config.parallel.tensor_parallel_size
    found = _kv_numbers(config.hf_config, ranks) * width
    if (draft := _draft_folder(config)) is not None:
        with suppress(OSError, ValueError, AttributeError):
            facts = json.loads((draft / "config.json").read_text(encoding="utf-8"))
            found += _kv_numbers(facts, ranks) * width
    return found


def _kv_numbers(config: Mapping[str, Any], num_ranks: int) -> int:
    """Numbers that tensor-parallel ranks cache of a token. Heads fewer than ranks are there several
    times."""
    facts = config.get("text_config") or config
    layers = _number(facts, "num_hidden_layers", "n_layer", "decoder_layers", "num_layers") or 1
    heads = _number(facts, "num_attention_heads", "n_head", "decoder_attention_heads") or 1
    hidden = _number(facts, "hidden_size", "n_embd", "d_model") or 4096
    size = _number(facts, "head_dim") or max(hidden // heads, 1)
    cached = max(_number(facts, "num_key_value_heads") or heads, num_ranks)
    return 2 * layers * cached * size


def _workspace(config: VllmConfig) -> int:
    """Bytes of a full step's intermediate results: two widest layers, and logits."""
    facts = config.hf_config.get("text_config") or config.hf_config
    hidden = _number(facts, "hidden_size", "n_embd", "d_model") or 4096
    wide = _number(facts, "intermediate_size", "decoder_ffn_dim", "n_inner") or 4 * hidden
    tokens = config.scheduler.token_budget
    logits = config.scheduler.max_num_seqs * (config.vocab_size or 0)
    return 4 * (tokens * (2 * wide + 8 * hidden) + 3 * logits)


def _number(facts: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that is a number. 0: there is none."""
    found = (facts.get(name) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def memory_of(pids: Iterable[int]) -> int:
    """Bytes of processes and their children: the proportional set size, in which pages that
    several processes share count once altogether."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                total += pss(each)
    return total


def pss(process: psutil.Process) -> int:
    """Bytes of one process: its proportional set size. 0: it has ended."""
    with suppress(psutil.Error, OSError):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup")
        if rollup.exists():
            for line in rollup.read_text().splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
        return int(process.memory_info().rss)
    return 0


def budget_bytes(models_memory: str) -> int:
    """The budget that an option states: bytes, or a fraction of the machine's memory or of the
    control group's around this process. Raises ConfigError."""
    amount = parse_memory(models_memory)
    return amount if isinstance(amount, int) else int(amount * _memory_here())


def _memory_here(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    most = psutil.virtual_memory().total
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            inner = Path(path.lstrip("/"))
            for folder in (inner, *inner.parents):
                for name in ("memory.max", "memory.limit_in_bytes"):
                    with suppress(OSError, ValueError):
                        most = min(most, int((root / controllers / folder / name).read_text()))
    return most


def as_size(num_bytes: int) -> str:
    """A size for people, in GiB or MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"
