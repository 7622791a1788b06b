"""The compiler: captures a model's forward passes, compiles their parts or finds them in the cache,
and runs them."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from toolkit_lm.attention import BatchLimits, GraphSupport
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    GraphShape,
    IntermediateTensors,
    Model,
    ModelCompiler,
    torch_dtype,
)
from toolkit_lm.plugin import Plugins
from torch import Tensor, fx

from toolkit_lm_compile.capture import capture, module_files
from toolkit_lm_compile.describe import describe_parts
from toolkit_lm_compile.graphs import describe as describe_graphs, make_graphs
from toolkit_lm_compile.key import ingredients, key_of, source_digest
from toolkit_lm_compile.options import Band, bands_of, options_of
from toolkit_lm_compile.parts import (
    ANY,
    NarrowError,
    check_patches,
    compile_part,
    compiles_bands,
    instructions_here,
    is_kept,
    load_part,
    symbols_of,
)
from toolkit_lm_compile.program import Program
from toolkit_lm_compile.split import ForwardPlan, Split, split
from toolkit_lm_compile.store import DamagedError, Entry, Manifest, default_root, open_root

logger = logging.getLogger(__name__)

_TOKENS = 16
_ENCODED = 24
"""Numbers of tokens, and of encoder states, in traced examples. No code depends on them."""
_lock = threading.Lock()
"""Lock around torch's compiler: its settings are global to the process."""


class InductorCompiler(ModelCompiler):
    """Compiles the parts between attention ops with torch.compile."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        if vllm_config.parallel.pipeline_parallel_size > 1:
            return (
                "it compiles models of one pipeline stage only (pipeline_parallel_size=1); "
                "tensor parallel ranks it can"
            )
        options = options_of(vllm_config)
        bands = bands_of(options, vllm_config.compilation.optimization_level)
        if bands and options.backend == "inductor" and not compiles_bands():
            return (
                "compile_sizes and compile_ranges need torch 2.13, and this is "
                f"{torch.__version__}: level 1 does without"
            )
        return None

    @classmethod
    def describe(
        cls, vllm_config: VllmConfig, supports: Mapping[str, GraphSupport | str]
    ) -> list[str]:
        return [
            *describe_parts(vllm_config),
            describe_graphs(options_of(vllm_config), vllm_config, supports),
        ]

    def __init__(self, model: Model, vllm_config: VllmConfig, plugins: Plugins) -> None:
        self.model = model
        self.num_compiled = 0
        """Number of compilations by Inductor: each part counts once per band."""
        self.compiled_when_sealed: int | None = None
        self.num_eager_steps = 0
        """Forward passes that ran eagerly because there was no program for them."""
        self.was_cached = False
        self._level = vllm_config.compilation.optimization_level
        self._options = options_of(vllm_config)
        self._bands = bands_of(self._options, self._level)
        self._patches = dict(self._options.inductor_compile_config)
        if self._level >= 3:
            self._patches = {"max_autotune": True, **self._patches}
        self._programs: dict[tuple[tuple[str, str, int], ...], Program] = {}
        check_patches(self._patches)
        with _lock:
            self._make(vllm_config, plugins)
        self.graphs = make_graphs(model, self._options, vllm_config)

    def __call__(self, input_ids: Tensor, **arguments: Tensor) -> Tensor | IntermediateTensors:
        present = {
            "input_ids": input_ids,
            **{name: value for name, value in arguments.items() if value is not None},
        }
        form = _form(present)
        program = self._programs.get(form) if len(input_ids) <= ANY.last else None
        if self.graphs is None:
            return self._compute(program, present)
        out: Tensor | IntermediateTensors = self.graphs(
            form, present, program, partial(self._compute, program)
        )
        return out

    def bind(self, limits: BatchLimits, supports: Mapping[str, GraphSupport | str]) -> None:
        if self.graphs is not None:
            self.graphs.bind(limits, supports)

    def estimate(self, step: Callable[[], object]) -> int:
        return 0 if self.graphs is None else self.graphs.estimate(step)

    def capture(self, step: Callable[[], object]) -> None:
        if self.graphs is not None and self.compiled_when_sealed is None:
            self.graphs.capture(step)

    def begin_step(
        self, num_rows: int, num_tokens: int, max_query_len: int, *, whole: bool
    ) -> GraphShape | None:
        return (
            None
            if self.graphs is None
            else self.graphs.begin_step(num_rows, num_tokens, max_query_len, whole=whole)
        )

    def seal(self) -> None:
        self.compiled_when_sealed = self.num_compiled

    def _compute(
        self, program: Program | None, arguments: Mapping[str, Tensor]
    ) -> Tensor | IntermediateTensors:
        return (
            self._eager(arguments)
            if program is None
            else program(len(arguments["input_ids"]), arguments)
        )

    def _eager(self, arguments: Mapping[str, Tensor]) -> Tensor | IntermediateTensors:
        if not self.num_eager_steps:
            form = f"{', '.join(arguments)} ({len(arguments['input_ids'])} tokens)"
            logger.warning(
                "steps with the arguments %s are not compiled: they are computed as without "
                "compilation",
                form,
            )
        self.num_eager_steps += 1
        out: Tensor | IntermediateTensors = self.model(**arguments)
        return out

    def _make(self, config: VllmConfig, plugins: Plugins) -> None:
        start = time.perf_counter()
        if self._options.backend == "eager" or not config.compilation.compile_cache:
            with tempfile.TemporaryDirectory(prefix="toolkit_lm-compile-") as folder:
                self._compile(config, Path(folder), {})
        else:
            self._find_or_compile(config, plugins)
        how = "found in the cache" if self.was_cached else f"compiled {self.num_compiled}"
        parts = [part for program in self._programs.values() for part in program.plan.parts]
        logger.info(
            "compilation: %d forward passes of %d parts, %d of them different: %s, in %.1f s",
            len(self._programs),
            len(parts),
            len(set(parts)),
            how,
            time.perf_counter() - start,
        )

    def _find_or_compile(self, config: VllmConfig, plugins: Plugins) -> None:
        found = ingredients(self.model, config, self._options, plugins)
        root = open_root(
            Path(self._options.cache_dir) if self._options.cache_dir else default_root()
        )
        entry = Entry(
            root,
            key_of(found),
            f"rank_{config.parallel.tensor_parallel_rank}_{config.parallel.pipeline_parallel_rank}",
        )
        logger.debug("compile cache: %s of %s", entry.folder, found)
        with entry.locked():
            try:
                if self._load(entry):
                    return
            except Exception as error:
                logger.warning(
                    "the compile cache %s is damaged (%s): it is made anew", entry.folder, error
                )
                self._programs.clear()
                entry.discard()
            with entry.staged() as folder:
                manifest = self._compile(config, folder, found)
                if manifest is not None:
                    entry.publish(folder, manifest)

    def _load(self, entry: Entry) -> bool:
        manifest = entry.read()
        if manifest is None:
            logger.debug("compile cache: a miss, there is no such folder")
            return False
        for module, digest in manifest.sources.items():
            if source_digest(module) != digest:
                logger.debug("compile cache: a miss, the source of %s has changed", module)
                return False
        parts: dict[tuple[str, Band | None], Callable[..., Any]] = {}
        # Only parts that the manifest names are loaded.
        for key, place in manifest.parts:
            loaded = load_part(
                entry.folder / "parts" / key / place, manifest.instructions, self._patches
            )
            parts[key, None if place == "any" else Band.of(place)] = loaded
        missing = {part for plan in manifest.plans for part in plan.parts} - {
            key for key, band in parts if band is None
        }
        if missing:
            raise DamagedError(f"it lacks the parts {sorted(missing)}")
        for plan in manifest.plans:
            self._add(plan, parts)
        self.was_cached = True
        return True

    def _compile(self, config: VllmConfig, folder: Path, found: dict[str, str]) -> Manifest | None:
        """Compiles into a folder. Returns its manifest, or None if something in it cannot be
        kept, or if nothing is compiled."""
        splits, files = self._traced(config)
        graphs: dict[str, fx.GraphModule] = {}
        for part in splits:
            for key, graph in part.graphs.items():
                graphs.setdefault(key, graph)
        parts, kept = self._compiled_parts(graphs, folder)
        for number, part in enumerate(splits):
            (folder / f"graph_{number}.py").write_text(part.code, encoding="utf-8")
            self._add(part.plan, parts)
        if self._options.backend == "eager":
            return None
        if not kept:
            logger.warning(
                "what was compiled cannot be kept for the next start: torch cannot store a part "
                "of it"
            )
            return None
        sources = {
            name: source_digest(name) or ""
            for name in module_files(sorted(files))
            if name.partition(".")[0] != "torch"
        }
        context = (
            f"{config.checkpoint.architecture if config.checkpoint else ''} {config.model.dtype} "
            f"-O{self._level}"
        )
        return Manifest(
            model=context,
            ingredients=found,
            sources=sources,
            plans=[split.plan for split in splits],
            bands=[str(band) for band in self._bands],
            # g++ takes many seconds to test them, and code for a GPU has none.
            instructions=instructions_here() if config.device.device == "cpu" else {},
        )

    def _traced(self, config: VllmConfig) -> tuple[list[Split], set[str]]:
        """Traces the model. Returns its graphs, split at the splitting ops, and their source
        files."""
        splits: list[Split] = []
        files: set[str] = set()
        for arguments, dynamic in _examples(self.model, config):
            start = time.perf_counter()
            captured = capture(self.model, arguments, dynamic)
            files |= {*captured.files}
            splits.append(
                split(
                    captured,
                    {name: list(rest) for name, *rest in _form(arguments)},
                    self._options.splitting_ops,
                )
            )
            logger.debug(
                "traced %s(%s) in %.1f s",
                type(self.model).__name__,
                ", ".join(arguments),
                time.perf_counter() - start,
            )
        return splits, files

    def _compiled_parts(
        self, graphs: Mapping[str, fx.GraphModule], folder: Path
    ) -> tuple[dict[tuple[str, Band | None], Callable[..., Any]], bool]:
        """Compiles the parts. Returns their code by key and band, and whether all of it can be
        kept."""
        parts: dict[tuple[str, Band | None], Callable[..., Any]] = {}
        kept = True
        for key, graph in graphs.items():
            for band in [None, *(self._bands if len(symbols_of(graph)) == 1 else [])]:
                if self._options.backend == "eager":
                    parts[key, band] = graph.forward
                    continue
                start = time.perf_counter()
                place = folder / "parts" / key / ("any" if band is None else str(band))
                place.mkdir(mode=0o700, parents=True)
                try:
                    parts[key, band] = compile_part(graph, place, band, self._patches)
                except NarrowError as error:
                    logger.warning(
                        "part %s is not compiled for %s tokens: Inductor's code holds only where "
                        "%s",
                        key,
                        place.name,
                        error,
                    )
                    kept = False
                    if band is None:
                        parts[key, band] = graph.forward
                    continue
                kept = kept and is_kept(place)
                shutil.rmtree(place / "locks", ignore_errors=True)
                self.num_compiled += 1
                logger.debug(
                    "compiled part %s for %s tokens in %.1f s",
                    key,
                    place.name,
                    time.perf_counter() - start,
                )
        return parts, kept

    def _add(
        self, plan: ForwardPlan, parts: Mapping[tuple[str, Band | None], Callable[..., Any]]
    ) -> None:
        form = tuple(
            (name, str(dtype), int(ndim)) for name, (dtype, ndim) in plan.arguments.items()
        )
        self._programs[form] = Program(plan, self.model, parts, self._bands)


def _form(arguments: Mapping[str, Tensor]) -> tuple[tuple[str, str, int], ...]:
    """The key of a program: names, dtypes and numbers of dimensions of its arguments."""
    return tuple((name, str(value.dtype), value.ndim) for name, value in sorted(arguments.items()))


def _examples(
    model: Model, config: VllmConfig
) -> Iterator[tuple[dict[str, Tensor], dict[str, int]]]:
    """The arguments of each kind of forward pass, and which of their dimensions count tokens."""
    plain = {"input_ids": 0, "positions": 0}
    if model.takes_token_types:
        plain["token_type_ids"] = 0
    others: list[dict[str, int]] = [{}]
    if "encoder" in model.parts:
        others.append({"encoder_hidden_states": 0})
    if "media" in model.parts:
        others.append({"inputs_embeds": 0})
        if hasattr(model, "prompt_positions"):
            others += [{"positions": 1}, {"positions": 1, "inputs_embeds": 0}]
    for other in others:
        dynamic = plain | other
        with torch.inference_mode():
            arguments = {
                name: _example(model, config, name, dimension)
                for name, dimension in dynamic.items()
            }
        yield arguments, dynamic


def _example(model: Model, config: VllmConfig, name: str, dimension: int) -> Tensor:
    device = torch.device(config.device.device)
    if name in ("inputs_embeds", "encoder_hidden_states"):
        part = "encoder" if name == "encoder_hidden_states" else "text_config"
        sizes = config.hf_config.get(part) or config.hf_config
        num_tokens = _ENCODED if name == "encoder_hidden_states" else _TOKENS
        size = next(sizes[key] for key in ("hidden_size", "d_model", "n_embd") if key in sizes)
        # A model whose `inputs_embeds` are wider than its hidden states says so.
        size = getattr(model, "embed_size", size) if name == "inputs_embeds" else size
        return torch.zeros(num_tokens, size, dtype=torch_dtype(config.model.dtype), device=device)
    return torch.zeros((3, _TOKENS) if dimension else (_TOKENS,), dtype=torch.int64, device=device)
