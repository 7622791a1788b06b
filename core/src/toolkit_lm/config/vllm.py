"""VllmConfig: one frozen object for a whole engine, in sections. Importing it needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
from msgspec import Struct, field

from toolkit_lm.config.cache import CacheConfig
from toolkit_lm.config.checkpoint import Checkpoint
from toolkit_lm.config.compilation import CompilationConfig
from toolkit_lm.config.device import AttentionConfig, DeviceConfig
from toolkit_lm.config.engine import EngineConfig
from toolkit_lm.config.limits import LimitsConfig
from toolkit_lm.config.memory import parse_memory
from toolkit_lm.config.model import LoadConfig, ModelConfig
from toolkit_lm.config.options import Option, options_of
from toolkit_lm.config.parallel import NodeConfig, ParallelConfig
from toolkit_lm.config.plugins import PluginsConfig
from toolkit_lm.config.pooler import PoolerConfig
from toolkit_lm.config.renderer import RendererConfig
from toolkit_lm.config.scheduler import SchedulerConfig
from toolkit_lm.errors import ConfigError, nearest

if TYPE_CHECKING:
    from toolkit_lm.config import VllmOptions

_STATED = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}
"""Sampling parameters that generation_config.json may set, as in vLLM, mapped to the names here."""
_USUAL_HIDDEN_SIZE = 4096
"""Hidden size of a Llama whose config.json states none."""


class VllmConfig(Struct, frozen=True, kw_only=True):
    """The configuration of one engine. `VllmConfig.make(model=..., block_size=...)` makes one from
    flat option names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    renderer: RendererConfig = field(default_factory=RendererConfig)
    pooler: PoolerConfig = field(default_factory=PoolerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    checkpoint: Checkpoint | None = None
    """Data of the checkpoint, set by `resolve`; None before."""

    @classmethod
    def options(cls) -> list[Option]:
        """Every option of every section, in order."""
        return [o for section in _SECTIONS.values() for o in options_of(section)]

    @classmethod
    def make(cls, **options: Unpack[VllmOptions]) -> VllmConfig:
        """A config from flat option names, checked. Raises ConfigError for an unknown name or a
        wrong value."""
        return cls().replace(**options)

    @classmethod
    def default(cls, hf_config: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
        """A resolved config for unit tests of single components: cpu, float32, and `hf_config` as
        the checkpoint's config.json."""
        plain = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 512,
            "load_format": "safetensors",
            "quantization": "none",
        }
        options = {**plain, **options}
        hf_config = hf_config or {}
        architecture = (hf_config.get("architectures") or ["none"])[0]
        return cls.make(**options).with_checkpoint(
            Checkpoint(path="", architecture=architecture, hf_config=hf_config)
        )

    def replace(self, **options: Unpack[VllmOptions]) -> VllmConfig:
        """A copy with some options changed, by flat option name and checked. Raises ConfigError."""
        known = {
            o.name: (name, o) for name, section in _SECTIONS.items() for o in options_of(section)
        }
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}. {nearest(name, known)}")
            section_name, kind = known[name]
            changed.setdefault(section_name, {})[name] = kind.convert(value, name)
        sections = {
            name: msgspec.structs.replace(getattr(self, name), **values)
            for name, values in changed.items()
        }
        return msgspec.structs.replace(self, **sections)

    def with_rank(self, rank: int) -> VllmConfig:
        """Returns the config of the worker of `rank`."""
        return msgspec.structs.replace(
            self, parallel=msgspec.structs.replace(self.parallel, rank=rank)
        )

    def with_checkpoint(self, checkpoint: Checkpoint) -> VllmConfig:
        """Returns the config with this checkpoint."""
        return msgspec.structs.replace(self, checkpoint=checkpoint)

    @property
    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's config.json. The config must be resolved."""
        assert self.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        return self.checkpoint.hf_config

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the checkpoint's language model; None if its config.json does not
        state it."""
        config = self.hf_config
        size: int | None = (config.get("text_config") or config).get("vocab_size")
        return size or (config.get("decoder") or {}).get("vocab_size", config.get("tgt_vocab_size"))

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output. The config must be resolved."""
        assert self.model.max_model_len is not None, (
            "the config is not resolved: max_model_len is unset"
        )
        return self.model.max_model_len

    @property
    def max_encoder_len(self) -> int:
        """Most tokens of an encoder prompt; 0 if the model has no encoder next to its decoder. The
        config must be resolved."""
        return self.model.max_encoder_len or 0

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether the engine needs a KV cache. False: every prompt is computed at once, and nothing
        follows. The config must be resolved."""
        return self.model.runner != "pooling" or bool(
            self.scheduler.enable_chunked_prefill or self.cache.enable_prefix_caching
        )

    @property
    def encoder_cache_embeds(self) -> int:
        """Number of multimodal embeddings that `encoder_cache_memory` holds. The config must be
        resolved."""
        hidden = (self.hf_config.get("text_config") or self.hf_config).get(
            "hidden_size"
        ) or _USUAL_HIDDEN_SIZE
        return int(parse_memory(self.cache.encoder_cache_memory)) // (
            hidden * (4 if self.model.dtype == "float32" else 2)
        )

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling defaults of generation_config.json, for requests that do not set them."""
        stated = (
            msgspec.json.decode(self.model.override_generation_config)
            if self.checkpoint is None or self.model.generation_config == "none"
            else self.checkpoint.generation_config
        )
        return {
            ours: value for name, ours in _STATED.items() if (value := stated.get(name)) is not None
        }

    @property
    def served_model_names(self) -> list[str]:
        if self.model.served_model_name:
            return self.model.served_model_name
        found = self.checkpoint
        # For a checkpoint that is one file, the source of its weights is not a folder.
        is_file = found is not None and found.source not in ("", found.path)
        return [Path(self.model.model).stem if is_file else self.model.model]

    @property
    def served_model_name(self) -> str:
        """The first served model name, which responses use."""
        return self.served_model_names[0]


_SECTIONS: dict[str, type[Struct]] = {
    field.name: field.type
    for field in msgspec.structs.fields(VllmConfig)
    if field.name != "checkpoint"
}
