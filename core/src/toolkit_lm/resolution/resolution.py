"""From what was asked to what will run: a config in which nothing that can be known before the
model is loaded is left open.

Two choices stay with the loaded model: each layer's attention backend (the runner's), and the
number of KV cache blocks (the engine's).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit_lm.config import Checkpoint, PoolerConfig, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model.hf_config import HFConfig
from toolkit_lm.plugin import ExecutorEntry, ModelEntry, Plugins, RendererEntry
from toolkit_lm.resolution.checkpoint import (
    choose_load_format,
    choose_quantization,
    find_tokenizer,
    read_checkpoint,
)
from toolkit_lm.resolution.runner_type import RunnerChoice, choose_runner

_MOST_UNCUT = 8192
"""Tokens of the longest prompt for which a pooling model's step budget is raised, instead of
cutting the prompt."""
_MOST_UNASKED = 2**20
"""Tokens of the longest sequence that a checkpoint can have without being asked for: the rotary
table of 2**20 has half a gigabyte."""
_UNSTATED = 1024
"""Tokens of the longest sequence of a checkpoint that states none, of a model that has none."""
_WHOLE_TOKENS = {"float32": 4096, "bfloat16": 8192, "float16": 8192}
"""Of a step that computes whole prompts, by default: nobody waits for a next token, and larger
products are faster, up to where a step's intermediate results leave the processor's last cache.
"""
_STAGED_TOKENS = 512
"""Of a step over pipeline stages, by default: each stage waits for the first chunk, so chunks are
as short as products stay fast."""
_DTYPES = ("float32", "bfloat16", "float16")


def resolve(config: VllmConfig, plugins: Plugins) -> VllmConfig:
    """The config that an engine runs with. Raises ConfigError, CheckpointError, UnsupportedError,
    PluginError."""
    return resolve_device(resolve_configured(plugins.configure(config), plugins))


def resolve_configured(config: VllmConfig, plugins: Plugins) -> VllmConfig:
    """As `resolve`, for a config that the plugins' `toolkit_configure` has seen, and without a look
    at the device. Imports no torch."""
    asked_len = config.model.max_model_len
    config = config.replace(tokenizer=find_tokenizer(config))
    checkpoint = read_checkpoint(config, plugins)
    config = config.with_checkpoint(checkpoint)
    config = config.replace(
        dtype=_dtype(config.model.dtype, checkpoint),
        max_model_len=_max_model_len(asked_len, config, plugins),
        renderer=choose_renderer(config, plugins)[0],
        executor=choose_executor(config, plugins)[0],
        load_format=choose_load_format(config, plugins),
        quantization=choose_quantization(config, plugins),
    )
    config = config.replace(max_encoder_len=_max_encoder_len(config, plugins))
    choice = choose_runner(config, plugins)
    if choice.runner == "generate" and not config.model.extra_tasks:
        _check_no_pooler_option(config.pooler)
    profile = checkpoint.pooling_profile
    if (
        asked_len is None
        and choice.runner == "pooling"
        and profile is not None
        and profile.max_tokens is not None
    ):
        config = config.replace(max_model_len=min(config.max_model_len, profile.max_tokens))
    asked_budget = config.scheduler.max_num_batched_tokens
    config = _for_runner(config, choice, plugins.models.get(checkpoint.architecture))
    _check(config, plugins, asked_budget)
    return config


def _check_no_pooler_option(given: PoolerConfig) -> None:
    unset = PoolerConfig()
    for name in given.__struct_fields__:
        if getattr(given, name) != getattr(unset, name):
            raise ConfigError(
                f"option {name!r} has no effect on an engine that generates only: it is for "
                "pooling models."
            )


def _for_runner(config: VllmConfig, choice: RunnerChoice, entry: ModelEntry) -> VllmConfig:
    """The config with what follows from the runner type and the model class."""
    generates = choice.runner == "generate"
    caching = config.cache.enable_prefix_caching
    chunked = config.scheduler.enable_chunked_prefill
    if caching and not entry.caches_prefixes:
        raise ConfigError(
            f"the model {entry.key!r} keeps nothing that other requests could use. Able: "
            "--no-enable-prefix-caching."
        )
    budget = config.scheduler.max_num_batched_tokens
    if chunked is None:
        # A pooling model computes a prompt at once where it can: it then needs no KV cache. A
        # native one may see texts as a whole.
        too_long = choice.convert != "none" and config.max_model_len > max(_MOST_UNCUT, budget or 0)
        chunked = generates or bool(caching) or too_long
    if budget is None:
        in_chunks = (
            config.scheduler.token_budget
            if config.parallel.pipeline_parallel_size == 1
            else _STAGED_TOKENS
        )
        budget = max(
            in_chunks if chunked else _WHOLE_TOKENS[config.model.dtype],
            config.scheduler.max_num_seqs,
        )
        if not generates and choice.convert == "none":
            # An encoder computes texts as a whole, whatever was asked for.
            budget = max(budget, config.max_model_len)
    if not chunked:
        budget = max(budget, config.max_model_len)
    if config.max_encoder_len:
        # The encoder's prompt is computed in one step, with the decoder's first tokens.
        budget = max(budget, config.max_encoder_len + (1 if chunked else config.max_model_len))
    return config.replace(
        runner=choice.runner,
        convert=choice.convert,
        enable_prefix_caching=generates and entry.caches_prefixes if caching is None else caching,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
    )


def resolve_device(config: VllmConfig) -> VllmConfig:
    """The config with a device that is there. Raises ConfigError. For the process that computes: it
    imports torch."""
    return config.replace(device=_device(config.device.device, config.parallel.num_ranks))


def _device(wanted: str, num_ranks: int) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and num_ranks > 1 and torch.cuda.device_count():
        # The workers compute. Something of this process on a GPU would take half a gigabyte from
        # the first of them.
        return wanted
    try:
        # Whether a device is there shows when something is put on it; "meta" holds nothing.
        torch.empty(1, device="none" if wanted == "meta" else wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"device {wanted!r} cannot be used: {reason} Available: {', '.join(['cpu', *cuda])}."
        ) from None
    return wanted


def _dtype(wanted: str, checkpoint: Checkpoint) -> Any:
    """One of the option's values, beside "auto"."""
    if wanted != "auto":
        return wanted
    # transformers 5 writes `dtype`; earlier versions wrote `torch_dtype`.
    dtype = (
        checkpoint.hf_config.get("dtype") or checkpoint.hf_config.get("torch_dtype") or "float32"
    )
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype {dtype!r} cannot be run. Choose one with --dtype: "
            f"{', '.join(_DTYPES)}."
        )
    return dtype


def _max_model_len(wanted: int | None, config: VllmConfig, plugins: Plugins) -> int:
    """Of a config whose checkpoint is known."""
    checkpoint = config.checkpoint
    assert checkpoint is not None
    entry = plugins.models.get(checkpoint.architecture)
    stated = _stated(checkpoint.hf_config, entry.length_keys)
    if stated is None:
        if wanted is None and not entry.bounded:
            return _UNSTATED
        if wanted is None:
            keys = " or ".join(entry.length_keys)
            lack = (
                f"the checkpoint's config.json states no {keys}"
                if keys
                else f"{entry.key} has no longest sequence"
            )
            raise ConfigError(f"{lack}: give --max-model-len.")
        return wanted
    longest = _stretched(stated, checkpoint.hf_config) - plugins.models.reserved_positions(
        entry.key, config
    )
    if wanted is not None and wanted > longest and entry.bounded:
        raise ConfigError(
            f"max_model_len is {wanted}, but the checkpoint has {longest} positions: give "
            f"--max-model-len {longest} or less."
        )
    if wanted is None and longest > _MOST_UNASKED:
        raise ConfigError(
            f"the checkpoint states {longest} positions, which take much memory: give "
            "--max-model-len."
        )
    return wanted or longest


def _max_encoder_len(config: VllmConfig, plugins: Plugins) -> int | None:
    """Of a config whose max_model_len is resolved; None for a model without an encoder beside its
    decoder."""
    assert config.checkpoint is not None
    wanted = config.model.max_encoder_len
    entry = plugins.models.get(config.checkpoint.architecture)
    if entry.encoder_decoder is None:
        if wanted is not None:
            raise ConfigError(
                f"max_encoder_len is for encoder-decoder models, and {entry.key!r} is none."
            )
        return None
    longest = _stated(config.hf_config, plugins.models.load_rules(entry.key).encoder_length_keys)
    if wanted is not None and longest is not None and wanted > longest and entry.bounded:
        raise ConfigError(
            f"max_encoder_len is {wanted}, but the encoder has {longest} positions: give "
            f"--max-encoder-len {longest} or less."
        )
    return wanted or longest or config.max_model_len


def _stated(hf_config: dict[str, Any], keys: Sequence[str]) -> int | None:
    """The first of these that config.json states as an integer. "decoder.x" is x of its object
    `decoder`."""
    for key in keys:
        value: Any = hf_config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, int):
            return value
    return None


def _stretched(length: int, hf_config: dict[str, Any]) -> int:
    """The positions that a checkpoint can tell apart, rotary scaling included, where it states
    `length`."""
    given = HFConfig(hf_config)
    rope = HFConfig(given.get("rope_parameters", dict, {}) or given.get("rope_scaling", dict, {}))
    kind = rope.values.get("rope_type") or rope.values.get("type")
    factor = rope.get("factor", float)
    if factor is not None and not 0 < factor < _MOST_UNASKED:
        raise CheckpointError(
            "config.json: the rotary scaling's factor must be a number from 0 to "
            f"{_MOST_UNASKED}, not {factor!r}."
        )
    # linear and dynamic state the trained length, yarn may; llama3 and longrope state the stretched
    # one.
    if factor and kind in ("linear", "dynamic"):
        return int(length * factor)
    if factor and kind == "yarn":
        return max(length, int(rope.get("original_max_position_embeddings", int, length) * factor))
    return length


def choose_renderer(
    config: VllmConfig, plugins: Plugins
) -> tuple[str, list[tuple[str, str | None]]]:
    """The name of the renderer, and each candidate with the reason it was refused (None: able).
    Raises UnsupportedError."""
    assert config.checkpoint is not None
    folder = Path(config.renderer.tokenizer or config.checkpoint.path)

    def refusal(entry: RendererEntry, by_name: bool) -> str | None:
        if by_name or any((folder / name).exists() for name in entry.reads):
            return plugins.renderers.ask(entry.key, config, by_name=by_name)
        files = ", ".join(entry.reads)
        return (
            f"{str(folder)!r} has none of {files}"
            if files
            else f"only --renderer {entry.key} takes it"
        )

    wanted = config.renderer.renderer
    if wanted == "auto":
        wanted = (
            _asking_servers(plugins)
            if config.renderer.renderer_url
            else plugins.models.get(config.checkpoint.architecture).renderer or "auto"
        )
    return plugins.renderers.choose(
        f"read the tokenizer of {config.model.model!r}", refusal, wanted
    )


def _asking_servers(plugins: Plugins) -> str:
    """The renderer for servers that renderer_url names. Raises UnsupportedError."""
    for entry in plugins.renderers.entries():
        if entry.asks_servers:
            return entry.key
    raise UnsupportedError(
        "renderer_url names servers, and no installed renderer asks any. "
        f"{plugins.renderers.way_out}".rstrip()
    )


def choose_executor(
    config: VllmConfig, plugins: Plugins
) -> tuple[str, list[tuple[str, str | None]]]:
    """The name of the executor, and each candidate with the reason it was refused (None: able).
    Raises UnsupportedError."""
    parallel = config.parallel

    def refusal(entry: ExecutorEntry, by_name: bool) -> str | None:
        if parallel.nodes > 1 and not entry.runs_nodes:
            return f"it runs 1 of {parallel.nodes} nodes"
        fits = entry.max_ranks is None or parallel.num_ranks <= entry.max_ranks
        return None if fits else f"it runs {entry.max_ranks} of {parallel.num_ranks} workers"

    sizes = (
        f"tensor_parallel_size {parallel.tensor_parallel_size} x pipeline_parallel_size "
        f"{parallel.pipeline_parallel_size}"
    )
    return plugins.executors.choose(f"run {sizes}", refusal, parallel.executor)


def _check(config: VllmConfig, plugins: Plugins, asked_budget: int | None) -> None:
    """Unknown names, and options that are fine each, but not together. `asked_budget`:
    max_num_batched_tokens as it was given."""
    scheduler = config.scheduler
    plugins.scheduling_policies.get(scheduler.policy)
    if scheduler.drafter is not None:
        plugins.drafters.get(scheduler.drafter)
    parallel = config.parallel
    if parallel.num_ranks % parallel.nodes:
        raise ConfigError(
            f"{parallel.num_ranks} ranks (tensor_parallel_size {parallel.tensor_parallel_size} x "
            "pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}) cannot be shared evenly by nodes={parallel.nodes}."
        )
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size == 1:
        raise ConfigError(
            "enable_expert_parallel divides experts over the ranks of one engine: give "
            "--tensor-parallel-size 2 or more."
        )
    if scheduler.preemption_mode == "swap" and config.cache.swap_memory is None:
        raise ConfigError(
            "preemption_mode 'swap' needs host memory to swap to: give --swap-memory."
        )
    # Where prompts are only pooled, and whole, none of them waits for a token in each step.
    in_parts = config.model.runner != "pooling" or scheduler.enable_chunked_prefill
    if in_parts and scheduler.token_budget < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({asked_budget}) must be at least max_num_seqs "
            f"({scheduler.max_num_seqs}), so that each running "
            f"sequence can get a token in each step: raise it to {scheduler.max_num_seqs}, or "
            f"give --max-num-seqs {asked_budget}."
        )
