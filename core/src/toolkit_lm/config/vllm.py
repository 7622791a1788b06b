"""VllmConfig: one frozen object for a whole engine, in sections. Importing it needs no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct, field

from toolkit_lm.config.compilation import CompilationConfig
from toolkit_lm.config.memory import parse_memory
from toolkit_lm.config.options import Option, option, options_of
from toolkit_lm.config.pooling_profile import PoolingProfile
from toolkit_lm.errors import ConfigError, nearest


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model, and how long and in what precision it runs."""

    model: Annotated[
        str,
        option(
            "Model folder in Hugging Face layout, hub id, or file or name that a plugin knows "
            "('tiny')."
        ),
    ] = "tiny"
    revision: Annotated[str | None, option("Branch, tag or commit of a hub id.")] = None
    served_model_name: Annotated[
        list[str] | None,
        option(
            "Model name in the HTTP API. Answers tell the first of several.", none="MODEL as given"
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of weights and activations. auto: the checkpoint's."),
    ] = "auto"
    max_model_len: Annotated[
        int | None, option("Maximum tokens of prompt plus output.", none="the checkpoint's", ge=1)
    ] = None
    max_encoder_len: Annotated[
        int | None, option("Maximum tokens of an encoder prompt.", none="the checkpoint's", ge=1)
    ] = None
    generation_config: Annotated[
        str, option("Sampling defaults: checkpoint, none, or a folder of generation_config.json.")
    ] = "checkpoint"
    seed: Annotated[
        int | None,
        option(
            "Seed of requests that have none.",
            none="a fresh one for each request",
            ge=0,
            le=2**63 - 1,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, option("Run Python code that comes with the checkpoint.")
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        option("Runner type: what the engine is for. auto: as the checkpoint's architecture says."),
    ] = "auto"
    convert: Annotated[
        str,
        option(
            "Pooling adapter that converts the model: none, embed, classify or a plugin's. auto: "
            "the one that the runner type needs."
        ),
    ] = "auto"
    extra_tasks: Annotated[
        list[str], option("Pooling tasks that a generating engine serves: embed.")
    ] = field(default_factory=list)
    model_impl: Annotated[
        str,
        option(
            "Model implementation: auto, or a fallback by name, such as 'transformers'. auto: "
            "the class registered for the "
            "architecture, else a fallback."
        ),
    ] = "auto"
    verify_fallback: Annotated[
        bool,
        option(
            "Compare a fallback's first logits with those of its model by itself, and refuse it "
            "where they differ."
        ),
    ] = True


class LoadConfig(Struct, frozen=True, kw_only=True):
    """Where weights come from, and how they are held."""

    load_format: Annotated[
        str,
        option(
            "Load format of the weights, by name. dummy: random numbers, for measurements. auto: "
            "the first that reads MODEL."
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "Quantization of the weights, by name: the checkpoint's, or one that is made at "
            "load. auto: the checkpoint's, or none."
        ),
    ] = "auto"


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[int, option("Tokens per block of the KV cache.", ge=1, le=1024)] = 16
    kv_cache_memory: Annotated[
        str,
        option(
            "Memory of the KV cache: bytes ('2GiB') or a fraction ('0.5') of what a full step "
            "leaves. auto: what can be spared."
        ),
    ] = "auto"
    num_kv_blocks: Annotated[
        int | None,
        option(
            "Blocks of the KV cache, in place of an amount of memory. Of several pools: of the "
            "one that long sequences fill first.",
            none="as many as kv_cache_memory holds",
            ge=1,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        option(
            "Prefix caching: reuse the KV cache of earlier requests that begin alike.",
            none="on where text is generated",
        ),
    ] = None
    encoder_cache_memory: Annotated[
        str,
        option(
            "Memory for what encoders have made of images and other media, until prompts have "
            "been computed: bytes ('256MiB')."
        ),
    ] = "256MiB"
    feature_cache_memory: Annotated[
        str,
        option(
            "Memory for images and other media as encoders read them: one that comes again is "
            "not processed again. 0: none."
        ),
    ] = "1GiB"
    swap_memory: Annotated[
        str | None,
        option("Host memory for swaps: bytes ('4GiB') or a fraction of the free.", none="none"),
    ] = None

    def __post_init__(self) -> None:
        amounts = {
            "kv_cache_memory": self.kv_cache_memory,
            "swap_memory": self.swap_memory,
            "encoder_cache_memory": self.encoder_cache_memory,
            "feature_cache_memory": self.feature_cache_memory,
        }
        for name, text in amounts.items():
            if text is not None and (name, text) not in (
                ("kv_cache_memory", "auto"),
                ("feature_cache_memory", "0"),
            ):
                try:
                    if isinstance(parse_memory(text), float) and name in (
                        "encoder_cache_memory",
                        "feature_cache_memory",
                    ):
                        raise ConfigError(
                            f"{text!r} is a fraction; it takes bytes, such as '256MiB'."
                        )
                except ConfigError as error:
                    raise ConfigError(f"option {name!r}: {error}") from None

    @property
    def feature_cache_bytes(self) -> int:
        return (
            0 if self.feature_cache_memory == "0" else int(parse_memory(self.feature_cache_memory))
        )


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """How requests are batched. Prompts longer than what is left of a step's budget are computed in
    chunks."""

    max_num_seqs: Annotated[
        int, option("Maximum number of sequences in a step.", ge=1, le=65536)
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "Token budget of a step, over all sequences.",
            none="2048; over pipeline stages 512; for pooling in one step 8192, in float32 4096",
            ge=1,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool | None,
        option(
            "Chunked prefill: compute long prompts in several steps.",
            none="on where text is generated or max_model_len needs it",
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        option(
            "Order of admission, by name. fcfs: by arrival. fair: by turns between clients. "
            "priority: by the request's number, "
            "smallest first. Or a plugin's.",
            none="fair for the server, else fcfs",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option("Speculative decoding: the plugin that drafts tokens, by name.", none="none"),
    ] = None
    preemption_mode: Annotated[
        Literal["auto", "recompute", "swap"],
        option(
            "Preemption of a request. recompute: compute it again later. swap: move it to "
            "swap_memory. auto: what costs less."
        ),
    ] = "auto"

    @property
    def policy(self) -> str:
        """`scheduling_policy`, or its default where no server has set it."""
        return self.scheduling_policy or "fcfs"

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or its default where prompts are cut into chunks: larger ones
        hold up who waits for a next token."""
        return 2048 if self.max_num_batched_tokens is None else self.max_num_batched_tokens


class EngineConfig(Struct, frozen=True, kw_only=True):
    """How the engine's loop runs, and how it is watched."""

    engine_process: Annotated[
        bool | None, option("Run the engine in a process of its own.", none="on, but off for LLM")
    ] = None
    overlap: Annotated[
        bool | None,
        option("Plan the next step while one is computed. Results are the same.", none="off"),
    ] = None
    start_timeout: Annotated[
        float,
        option("Seconds that an engine process may take to load the model and warm up.", ge=0.1),
    ] = 1800.0
    step_timeout: Annotated[
        float, option("Seconds without progress after which the engine counts as stalled.", ge=0.1)
    ] = 120.0
    restart_engine: Annotated[
        int, option("Maximum number of restarts of an engine process that has died.", ge=0)
    ] = 0


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """Ranks. tensor x pipeline parallel size = number of workers of an engine, one per device."""

    tensor_parallel_size: Annotated[
        int, option("Tensor-parallel ranks, which share each layer.", ge=1)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, option("Pipeline-parallel ranks, each with a part of the layers.", ge=1)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "Expert parallelism: divide the experts of a layer over the tensor-parallel ranks, "
            "instead of cutting each one."
        ),
    ] = False
    data_parallel_size: Annotated[
        int,
        option("Engines with a copy of the model each, which share the requests.", ge=1, le=1024),
    ] = 1
    nodes: Annotated[
        int,
        option(
            "Machines that share the ranks. All but the first run `toolkit worker`.", ge=1, le=1024
        ),
    ] = 1
    executor: Annotated[
        str,
        option(
            "Executor, by name: how the engine reaches its workers. auto: the first that runs so "
            "many."
        ),
    ] = "auto"
    rank: int = 0
    """Global rank of the worker that holds this config; derived, not an option."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Node i holds the ranks from i times as many on."""
        return self.num_ranks // self.nodes

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size


class NodeConfig(Struct, frozen=True, kw_only=True):
    """Which of several machines this one is, and where they meet. TOOLKIT_LM_LAUNCH_KEY may hold
    the key itself."""

    node_rank: Annotated[int, option("Number of this machine. 0 holds the engine.", ge=0)] = 0
    master: Annotated[
        str | None, option("HOST:PORT of node 0, where the other nodes reach it.", none="none")
    ] = None
    launch_key_file: Annotated[
        str | None,
        option(
            "File of a secret, the same on all nodes: they prove that they know it.",
            none="TOOLKIT_LM_LAUNCH_KEY",
        ),
    ] = None
    node_timeout: Annotated[
        float,
        option(
            "Seconds without a sign of life after which another machine counts as lost.",
            ge=2.0,
            le=3600.0,
        ),
    ] = 15.0


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """Where the model runs."""

    device: Annotated[
        str, option("Torch device: cpu, cuda, cuda:1, ... auto: cuda where there is one, else cpu.")
    ] = "auto"
    kernels: Annotated[
        str,
        option("Kernels of layers, by name. torch: plain torch. auto: the best for the device."),
    ] = "auto"


class AttentionConfig(Struct, frozen=True, kw_only=True):
    """Which attention backend runs the layers."""

    attention_backend: Annotated[
        str,
        option(
            "Attention backend by name, or names by kind of layer: decoder=A,window=B,encoder=C. "
            "auto: for each layer the best that can run it."
        ),
    ] = "auto"


class RendererConfig(Struct, frozen=True, kw_only=True):
    """How input becomes tokens, and tokens become text."""

    renderer: Annotated[
        str,
        option(
            "Renderer, by name. auto: the model's, else the first that can read the checkpoint."
        ),
    ] = "auto"
    tokenizer: Annotated[
        str | None, option("Folder or hub id of the tokenizer.", none="the model's")
    ] = None
    chat_template: Annotated[
        str | None, option("Jinja chat template, or a file with one.", none="the checkpoint's")
    ] = None
    renderer_url: Annotated[
        list[str],
        option(
            "Render servers (toolkit render), such as http://127.0.0.1:8001, that render in "
            "place of this process."
        ),
    ] = field(default_factory=list)
    limit_mm_per_prompt: Annotated[
        list[str],
        option(
            "Maximum number of items of media in a prompt, by modality: image=8. What is not "
            "named: 16."
        ),
    ] = field(default_factory=list)
    allowed_media_hosts: Annotated[
        list[str], option("Hosts that media is fetched from: NAME or NAME:PORT.")
    ] = field(default_factory=list)
    max_media_bytes: Annotated[
        int, option("Maximum size of an image or other item of media, as a file.", ge=1)
    ] = 25 * 2**20
    max_media_pixels: Annotated[
        int, option("Maximum number of pixels of an image, or of a video's frames.", ge=1)
    ] = 36_000_000
    max_media_frames: Annotated[
        int, option("Maximum number of frames that are taken of a video.", ge=1)
    ] = 768
    max_audio_seconds: Annotated[
        float, option("Maximum length of a recording, in seconds.", gt=0)
    ] = 600.0


class PoolerConfig(Struct, frozen=True, kw_only=True):
    """How a pooling model's vectors and scores are made. What is not given is as the checkpoint
    says, else as the model class does."""

    pooling_type: Annotated[
        Literal[
            "auto", "CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN", "ALL", "STEP"
        ],
        option(
            "Pooling method: how the tokens' vectors become one. ALL and STEP, of reward models, "
            "keep one per token or step."
        ),
    ] = "auto"
    normalize: Annotated[
        bool | None, option("Scale embeddings to length 1 (L2), unless a request says otherwise.")
    ] = None
    matryoshka: Annotated[
        bool | None,
        option(
            "Requests may ask for the first dimensions of embeddings. Unset: where the "
            "checkpoint says that its model is made for it."
        ),
    ] = None
    use_activation: Annotated[
        bool | None,
        option(
            "Apply sigmoid or softmax to the logits of classes and scores, unless a request says "
            "otherwise."
        ),
    ] = None
    step_tag_id: Annotated[
        int | None, option("Process reward models: token that ends a step.", ge=0)
    ] = None
    returned_token_ids: Annotated[
        list[int] | None, option("Reward models: which logits are returned.")
    ] = None
    classifier_method: Annotated[
        Literal["auto", "from_2_way_softmax", "no_post_processing"],
        option(
            "Classifier made of rows of the language-modeling head, where the checkpoint has "
            "none. from_2_way_softmax: the "
            "difference of two rows. no_post_processing: rows as they are. auto: as the "
            "architecture's known reranker does."
        ),
    ] = "auto"
    classifier_tokens: Annotated[
        list[str] | None,
        option(
            "Words, one token each, whose rows of the head make the classifier. Of two words, "
            "the first is 'no'."
        ),
    ] = None
    score_template: Annotated[
        str | None,
        option(
            "Score template, by name or file: how a reranker reads a query and a document.",
            none="the known reranker's",
        ),
    ] = None
    logit_mean: Annotated[float | None, option("Number subtracted from logits.")] = None
    logit_sigma: Annotated[
        float | None, option("Number that logits are divided by, after logit_mean.", gt=0)
    ] = None


class LimitsConfig(Struct, frozen=True, kw_only=True):
    """Bounds on what a client may ask for. AsyncLLM and the server refuse requests beyond those
    that may wait."""

    max_n: Annotated[int, option("Maximum number of sequences per request (n).", ge=1)] = 128
    max_logprobs: Annotated[
        int,
        option("Maximum number of log probabilities per token (logprobs, prompt_logprobs).", ge=0),
    ] = 20
    max_queued_requests: Annotated[
        int | None, option("Maximum number of waiting requests.", none="no bound", ge=0)
    ] = 2048
    max_queued_tokens: Annotated[
        int | None,
        option("Maximum number of prompt tokens of waiting requests.", none="no bound", ge=0),
    ] = None


class PluginsConfig(Struct, frozen=True, kw_only=True):
    """Which plugins are loaded, and with what options."""

    plugins: Annotated[
        list[str] | None,
        option(
            "Plugins to load, and no others. If one of them fails, the start fails.",
            none="all that are installed",
        ),
    ] = None
    disable_plugins: Annotated[list[str], option("Plugins not to load.")] = field(
        default_factory=list
    )
    plugin_option: Annotated[
        dict[str, dict[str, Any]],
        option("Options of plugins: NAME.KEY=VALUE as a flag, a mapping in the file."),
    ] = field(default_factory=dict)


class Checkpoint(Struct, frozen=True, kw_only=True):
    """What was read from a checkpoint folder; derived, not options."""

    path: str
    """The folder of config.json, tokenizer and the like."""
    architecture: str
    """The model class's key in the registry: the entry of config.json's `architectures` that has a
    class, or a fallback's name."""
    hf_config: dict[str, Any]
    """config.json; for a multimodal checkpoint the whole of it."""
    source: str = ""
    """What holds the weights, where it is not that folder: a file."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    pooling_profile: PoolingProfile | None = None
    """What the files beside it say of pooling; None: there are none that do."""


_STATED = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}
"""Sampling parameters of generation_config.json that are taken, as vLLM does, and our names of
them."""
_USUAL_HIDDEN_SIZE = 4096
"""That of a Llama whose config.json states none."""


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
    """Set by `resolve`; None before."""

    @classmethod
    def options(cls) -> list[Option]:
        """Every option of every section, in order."""
        return [o for section in _SECTIONS.values() for o in options_of(section)]

    @classmethod
    def make(cls, **options: Any) -> VllmConfig:
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

    def replace(self, **options: Any) -> VllmConfig:
        """A copy with some options changed, by flat option name and checked. Raises ConfigError."""
        known = {
            o.name: (name, o) for name, section in _SECTIONS.items() for o in options_of(section)
        }
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}. {nearest(name, known)}")
            section_name, one = known[name]
            changed.setdefault(section_name, {})[name] = one.convert(value, f"option {name!r}")
        sections = {
            name: msgspec.structs.replace(getattr(self, name), **values)
            for name, values in changed.items()
        }
        return msgspec.structs.replace(self, **sections)

    def with_rank(self, rank: int) -> VllmConfig:
        """The copy of this config that the worker of `rank` holds."""
        return msgspec.structs.replace(
            self, parallel=msgspec.structs.replace(self.parallel, rank=rank)
        )

    def with_checkpoint(self, checkpoint: Checkpoint) -> VllmConfig:
        """The copy of this config that belongs to a checkpoint."""
        return msgspec.structs.replace(self, checkpoint=checkpoint)

    @property
    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's config.json. The config must be resolved."""
        assert self.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        return self.checkpoint.hf_config

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the checkpoint's language model; None where its config.json does not say."""
        size: int | None = (self.hf_config.get("text_config") or self.hf_config).get("vocab_size")
        return size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output. The config must be resolved."""
        assert self.model.max_model_len is not None, (
            "the config is not resolved: max_model_len is unset"
        )
        return self.model.max_model_len

    @property
    def max_encoder_len(self) -> int:
        """Most tokens of an encoder prompt; 0 where the model has no encoder beside its decoder.
        The config must be resolved."""
        return self.model.max_encoder_len or 0

    @property
    def keeps_kv_cache(self) -> bool:
        """False: every prompt is computed at once, and nothing comes after it. The config must be
        resolved."""
        return self.model.runner != "pooling" or bool(
            self.scheduler.enable_chunked_prefill or self.cache.enable_prefix_caching
        )

    @property
    def encoder_cache_embeds(self) -> int:
        """Embeddings of media that `encoder_cache_memory` holds. The config must be resolved."""
        hidden = (self.hf_config.get("text_config") or self.hf_config).get(
            "hidden_size"
        ) or _USUAL_HIDDEN_SIZE
        return int(parse_memory(self.cache.encoder_cache_memory)) // (
            hidden * (4 if self.model.dtype == "float32" else 2)
        )

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What generation_config.json states of sampling: for requests that say nothing else."""
        stated = (
            {}
            if self.checkpoint is None or self.model.generation_config == "none"
            else self.checkpoint.generation_config
        )
        return {
            ours: value for name, ours in _STATED.items() if (value := stated.get(name)) is not None
        }

    @property
    def served_model_names(self) -> list[str]:
        return self.model.served_model_name or [self.model.model]

    @property
    def served_model_name(self) -> str:
        """The first of them: what answers tell."""
        return self.served_model_names[0]


_SECTIONS: dict[str, type[Struct]] = {
    "model": ModelConfig,
    "load": LoadConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "engine": EngineConfig,
    "parallel": ParallelConfig,
    "node": NodeConfig,
    "device": DeviceConfig,
    "compilation": CompilationConfig,
    "attention": AttentionConfig,
    "renderer": RendererConfig,
    "pooler": PoolerConfig,
    "limits": LimitsConfig,
    "plugins": PluginsConfig,
}
