"""Resolves a config: fills in everything that can be known before the model is loaded.

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
from toolkit_lm.plugin import ExecutorEntry, Plugins, RendererEntry
from toolkit_lm.resolution.checkpoint import (
    choose_load_format,
    choose_quantization,
    find_tokenizer,
    read_checkpoint,
)
from toolkit_lm.resolution.runner_type import RunnerChoice, choose_runner

_MOST_UNCUT = 8192
"""Longest prompt, in tokens, for which a pooling model's step budget is raised instead of splitting
the prompt."""
_MOST_UNASKED = 2**20
"""Longest default sequence of a checkpoint, in tokens: the rotary table of 2**20 has half a
gigabyte."""
_UNSTATED = 1024
"""Longest sequence, in tokens, of a checkpoint that states none, for a model without a limit."""
_WHOLE_TOKENS = {"float32": 4096, "bfloat16": 8192, "float16": 8192}
"""Default tokens of a step that computes whole prompts. No request waits for a next token, and
larger products are faster. The limit is where a step's intermediate results leave the processor's
last cache."""
_STAGED_TOKENS = 512
"""Default tokens of a step over pipeline stages. Each stage waits for the first chunk, so chunks
are as short as products stay fast."""
_DTYPES = ("float32", "bfloat16", "float16")


def resolve(config: VllmConfig, plugins: Plugins) -> VllmConfig:
    """Returns the config that an engine runs with. Raises ConfigError, CheckpointError,
    UnsupportedError, PluginError."""
    return resolve_device(resolve_configured(plugins.configure(config), plugins))


def resolve_configured(config: VllmConfig, plugins: Plugins) -> VllmConfig:
    """Resolves a config after the plugins' `toolkit_configure`, without the device. Imports no
    torch."""
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
    config = _for_runner(config, choice)
    _check(config, plugins, asked_budget)
    return config


def _check_no_pooler_option(pooler: PoolerConfig) -> None:
    unset = PoolerConfig()
    for name in pooler.__struct_fields__:
        if getattr(pooler, name) != getattr(unset, name):
            raise ConfigError(
                f"option {name!r} has no effect on an engine that generates only: it is for "
                "pooling models."
            )


def _for_runner(config: VllmConfig, choice: RunnerChoice) -> VllmConfig:
    """Returns the config with the values that follow from the runner type."""
    generates = choice.runner == "generate"
    caching = config.cache.enable_prefix_caching
    chunked = config.scheduler.enable_chunked_prefill
    budget = config.scheduler.max_num_batched_tokens
    if chunked is None:
        # A pooling model computes a prompt at once if it can: it then needs no KV cache. A native
        # one may attend to texts as a whole.
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
            # An encoder computes texts as a whole, whatever the options say.
            budget = max(budget, config.max_model_len)
    if not chunked:
        budget = max(budget, config.max_model_len)
    if config.max_encoder_len:
        # The encoder's prompt is computed in one step, with the decoder's first tokens.
        budget = max(budget, config.max_encoder_len + (1 if chunked else config.max_model_len))
    return config.replace(
        runner=choice.runner,
        convert=choice.convert,
        # Where text is generated, it is on as far as the model's layers allow.
        enable_prefix_caching=False if caching is None and not generates else caching,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
    )


def resolve_device(config: VllmConfig) -> VllmConfig:
    """Returns the config with a device that exists. Raises ConfigError. For the process that
    computes: it imports torch."""
    return config.replace(device=_device(config.device.device, config.parallel.num_ranks))


def _device(wanted: str, num_ranks: int) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and num_ranks > 1 and torch.cuda.device_count():
        # The workers compute. Memory of this process on a GPU would take half a gigabyte from the
        # first of them.
        return wanted
    try:
        # Whether a device exists shows when a tensor is put on it; "meta" holds none.
        torch.empty(1, device="none" if wanted == "meta" else wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"device {wanted!r} cannot be used: {reason} Available: {', '.join(['cpu', *cuda])}."
        ) from None
    return wanted


def _dtype(wanted: str, checkpoint: Checkpoint) -> Any:
    """The dtype for the option's value; "auto" follows the checkpoint."""
    if wanted != "auto":
        return wanted
    # transformers 5 writes `dtype`; earlier versions wrote `torch_dtype`.
    dtype = (
        checkpoint.hf_config.get("dtype") or checkpoint.hf_config.get("torch_dtype") or "float32"
    )
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype {dtype!r} cannot be run. Choose a dtype: {', '.join(_DTYPES)}."
        )
    return dtype


def _max_model_len(wanted: int | None, config: VllmConfig, plugins: Plugins) -> int:
    """The maximum model length of a config whose checkpoint is known."""
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
            raise ConfigError(f"{lack}: give max_model_len.")
        return wanted
    longest = _stretched(stated, checkpoint.hf_config) - plugins.models.reserved_positions(
        entry.key, config
    )
    if wanted is not None and wanted > longest and entry.bounded:
        raise ConfigError(
            f"max_model_len is {wanted}, but the checkpoint has {longest} positions: give "
            f"max_model_len={longest} or less."
        )
    if wanted is None and longest > _MOST_UNASKED:
        raise ConfigError(
            f"the checkpoint states {longest} positions, which take much memory: give "
            "max_model_len."
        )
    return wanted or longest


def _max_encoder_len(config: VllmConfig, plugins: Plugins) -> int | None:
    """The maximum encoder length of a config whose max_model_len is resolved. None: the model has
    no encoder next to its decoder."""
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
            f"max_encoder_len={longest} or less."
        )
    return wanted or longest or config.max_model_len


def _stated(hf_config: dict[str, Any], keys: Sequence[str]) -> int | None:
    """The first of these keys that config.json states as an integer. "decoder.x" is x of the object
    `decoder`."""
    for key in keys:
        value: Any = hf_config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, int):
            return value
    return None


def _stretched(length: int, hf_config: dict[str, Any]) -> int:
    """Number of distinct positions of a checkpoint that states `length`, rotary scaling
    included."""
    checkpoint = HFConfig(hf_config)
    rope = HFConfig(
        checkpoint.get("rope_parameters", dict, {}) or checkpoint.get("rope_scaling", dict, {})
    )
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
    """Name of the renderer, and each candidate with the reason for its refusal (None: able). Raises
    UnsupportedError."""
    assert config.checkpoint is not None
    folder = Path(config.renderer.tokenizer or config.checkpoint.path)

    def refusal(entry: RendererEntry, by_name: bool) -> str | None:
        if by_name or any((folder / name).exists() for name in entry.reads):
            return plugins.renderers.ask(entry.key, config, by_name=by_name)
        files = ", ".join(entry.reads)
        return (
            f"{str(folder)!r} has none of {files}"
            if files
            else f"only renderer={entry.key!r} takes it"
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
    """The renderer for the servers that renderer_url names. Raises UnsupportedError."""
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
    """Name of the executor, and each candidate with the reason for its refusal (None: able). Raises
    UnsupportedError."""
    parallel = config.parallel

    def refusal(entry: ExecutorEntry, by_name: bool) -> str | None:
        if parallel.nodes > 1 and not entry.runs_nodes:
            return f"{parallel.nodes} nodes are needed, and it supports 1"
        most = entry.max_ranks
        if most is None or parallel.num_ranks <= most:
            return None
        return f"{parallel.num_ranks} workers are needed, and it supports at most {most}"

    sizes = (
        f"tensor_parallel_size {parallel.tensor_parallel_size} x pipeline_parallel_size "
        f"{parallel.pipeline_parallel_size}"
    )
    return plugins.executors.choose(f"run {sizes}", refusal, parallel.executor)


def _check(config: VllmConfig, plugins: Plugins, asked_budget: int | None) -> None:
    """Raises an error for unknown names, and for options that conflict. `asked_budget`:
    max_num_batched_tokens as it was given."""
    scheduler = config.scheduler
    plugins.scheduling_policies.get(scheduler.policy)
    drafters = scheduler.drafter or []
    for name in drafters:
        plugins.drafters.get(name)
        if drafters.count(name) > 1:
            raise ConfigError(f"drafter names {name!r} twice.")
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
            "tensor_parallel_size=2 or more."
        )
    if scheduler.preemption_mode == "swap" and config.cache.swap_memory is None:
        raise ConfigError("preemption_mode 'swap' needs host memory to swap to: give swap_memory.")
    # If whole prompts are only pooled, none of them waits for a token in each step.
    in_parts = config.model.runner != "pooling" or scheduler.enable_chunked_prefill
    if in_parts and scheduler.token_budget < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({asked_budget}) must be at least max_num_seqs "
            f"({scheduler.max_num_seqs}), so that each running "
            f"sequence can get a token in each step: raise it to {scheduler.max_num_seqs}, or "
            f"give max_num_seqs={asked_budget}."
        )
