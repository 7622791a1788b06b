"""The table: what vLLM calls an option of its engine or of its server, and what it is here, or why
it is not.

Aliases, hints in errors, `toolkit migrate-vllm` and the page "Coming from vLLM" are made from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from toolkit_lm.errors import ConfigError

from toolkit_lm_vllm_names import compilation, values

logger = logging.getLogger(__name__)

Kind = Literal["same", "renamed", "free", "refused"]
"""same: as here. renamed: another option here. free: any value is taken, for it changes nothing.
refused: only what asks for nothing."""
Convert = Callable[[Any], dict[str, Any]]
"""From vLLM's value to options in our names. It raises ValueError, with what to use, for a value
that cannot be had."""


class Name(NamedTuple):
    """One option of vLLM."""

    name: str
    kind: Kind
    ours: str = ""
    """The option here; empty: there is none."""
    note: str = ""
    """What becomes of its values; of what is refused: what to use."""
    convert: Convert | None = None
    is_switch: bool = False
    """Its flag takes no value."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, beside those of `values.asks_nothing`."""
    of_server: bool = False
    """Of `vllm serve` alone."""
    ignored: Callable[[Any], list[str]] | None = None
    """What of a value changes nothing: a sentence for each."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def translate(self, value: Any) -> dict[str, Any]:
        """Options in our names. Raises ConfigError for what cannot be had."""
        if value is None or self.kind == "free":
            return {}
        try:
            if self.convert is not None:
                return self.convert(value)
            if self.kind != "refused":
                return {self.ours: value}
            if values.asks_nothing(value, self.neutral):
                return {}
            raise ValueError(self.note)
        except ValueError as error:
            raise ConfigError(
                f"vLLM's {self.name!r} cannot be {values.shown(value)} here: {error}"
            ) from None

    def without_effect(self, value: Any) -> list[str]:
        """What of a value changes nothing here, and why: a sentence for each."""
        if value is None or (self.kind == "free" and values.asks_nothing(value)):
            return []
        if self.ignored is not None:
            return self.ignored(value)
        return [f"{self.name} has no effect: {self.note}"] if self.kind == "free" else []


def _same(*names: str, **traits: Any) -> list[Name]:
    return [Name(name, "same", name, **traits) for name in names]


def _free(note: str, *names: str, **traits: Any) -> list[Name]:
    return [Name(name, "free", note=note, **traits) for name in names]


def _refused(note: str, *names: str, **traits: Any) -> list[Name]:
    return [Name(name, "refused", note=note, **traits) for name in names]


def _renamed(
    name: str, ours: str, convert: Convert | None = None, note: str = "", **traits: Any
) -> list[Name]:
    return [Name(name, "renamed", ours, note, convert, **traits)]


_ONE_DEVICE = (
    "no model is spread by this kind of parallelism. Use tensor_parallel_size, "
    "pipeline_parallel_size or data_parallel_size."
)
_MASTER = "both are one option: master, HOST:PORT of node 0."
_NO_ADAPTERS = "adapters (LoRA) are not loaded. Merge them into the checkpoint."
_NO_GRAPHS = (
    "nothing is compiled unless optimization_level asks for it, and no graph is captured unless "
    "compilation_config does"
)
_EAGER = (
    "nothing is compiled unless optimization_level or a mode asks for it; beside these it makes "
    "the level 0"
)
_NO_OFFLOAD = "weights and caches stay on their device."
_NO_TRANSFER = "an engine neither sends nor fetches KV caches or weights."
_OWN_LAYOUT = "there is one layout of weights and caches, and the results are the same"
_CHECKPOINT = "put it into the config.json of a copy of the checkpoint's folder."
_HUB = "set the variables of huggingface_hub: HF_HOME, HF_HUB_CACHE, HF_TOKEN."
_TRACES = "install toolkit-lm-opentelemetry and set OTEL_EXPORTER_OTLP_ENDPOINT."
_MEDIA = "media is read as the checkpoint's processor says. A prompt may give mm_processor_kwargs."

_NO_DRAFTS = "write a drafter: the hook toolkit_register_drafters."
_PER_REQUEST = "a request asks for it: structured_outputs."
_CORS = ("origins", "methods", "headers")

_ENGINE: list[Name] = [
    *_same(
        "model", "revision", "seed", "runner", "convert", "load_format", "tokenizer", "model_impl"
    ),
    *_same(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "node_rank",
        "scheduling_policy",
        "preemption_mode",
        "max_logprobs",
        "block_size",
        "device",
    ),
    *_same(
        "enable_expert_parallel",
        is_switch=True,
        note="over the tensor-parallel ranks of each engine alone",
    ),
    *_same("trust_remote_code", "enable_prefix_caching", "enable_chunked_prefill", is_switch=True),
    *_same("served_model_name"),
    *_same("dtype", convert=values.dtype, note="half and float, too"),
    *_same("quantization", convert=values.named("quantization")),
    *(
        Name(name, "same", name, "32k, too", values.count(name))
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    ),
    *_same("limit_mm_per_prompt", convert=values.limits, note="a mapping, too"),
    *_same(
        "generation_config", convert=values.generation_config, note="auto: checkpoint; vllm: none"
    ),
    *_same("optimization_level", note="-O2, too"),
    *_same(
        "compilation_config",
        convert=compilation.compilation_config,
        note="a mode (3: level 2) and older keys, too",
        ignored=compilation.without_effect,
    ),
    *_same(
        "attention_backend", convert=values.attention_backend, note="FLASH_ATTN: flash_attn; ..."
    ),
    *_renamed(
        "task",
        "runner, convert",
        values.task,
        "one task: the runner type and the pooling adapter that serve it",
    ),
    *_renamed(
        "gpu_memory_utilization",
        "kv_cache_memory",
        values.memory_share,
        "a share of what the model leaves; 0.9 is auto",
    ),
    *_renamed("kv_cache_memory_bytes", "kv_cache_memory", values.memory),
    *_renamed("num_gpu_blocks_override", "num_kv_blocks"),
    *_renamed("swap_space", "swap_memory", values.gibibytes("swap_memory"), "GiB"),
    *_renamed(
        "mm_processor_cache_gb",
        "feature_cache_memory",
        values.gibibytes("feature_cache_memory", none="0"),
        "GiB",
    ),
    *_renamed(
        "skip_tokenizer_init",
        "renderer",
        values.when("renderer", "tokens"),
        "True: tokens",
        is_switch=True,
    ),
    *_renamed(
        "tokenizer_mode",
        "renderer",
        values.tokenizer_mode,
        "mistral: mistral; auto, hf: by the checkpoint",
    ),
    *_renamed(
        "distributed_executor_backend", "executor", values.executor, "mp, uni: auto; ray: ray"
    ),
    *_renamed("nnodes", "nodes"),
    *_renamed("async_scheduling", "overlap", is_switch=True),
    *_renamed(
        "attention_config",
        "attention_backend",
        values.attention_config,
        "its backend",
        ignored=values.ignored_of_attention,
    ),
    *_renamed(
        "pooler_config",
        "pooling_type, ...",
        values.pooler_config,
        "its fields are options of their own",
    ),
    *_renamed(
        "override_pooler_config", "pooling_type, ...", values.pooler_config, "as pooler_config"
    ),
    *_renamed("allowed_media_domains", "allowed_media_hosts"),
    *_free(_EAGER, "enforce_eager", is_switch=True),
    *_free(_NO_GRAPHS, "enable_flashinfer_autotune", is_switch=True),
    *_renamed(
        "cudagraph_capture_sizes",
        "compilation_config",
        compilation.capture_sizes,
        "its key of this name",
    ),
    *_renamed(
        "cuda_graph_sizes",
        "compilation_config",
        compilation.capture_sizes,
        "its key cudagraph_capture_sizes",
    ),
    *_renamed(
        "use_cudagraph",
        "compilation_config",
        compilation.use_cudagraph,
        "its cudagraph_mode, piecewise or none",
        is_switch=True,
    ),
    *_refused("list the sizes: cudagraph_capture_sizes.", "max_cudagraph_capture_size"),
    *_free(_NO_GRAPHS, "max_seq_len_to_capture", "kernel_config"),
    *_free(
        _OWN_LAYOUT,
        "disable_custom_all_reduce",
        "disable_cascade_attn",
        "use_v2_block_manager",
        is_switch=True,
    ),
    *_free(
        _OWN_LAYOUT,
        "disable_hybrid_kv_cache_manager",
        "disable_chunked_mm_input",
        "use_tqdm_on_load",
        is_switch=True,
    ),
    *_free(
        _OWN_LAYOUT,
        "pt_load_map_location",
        "safetensors_load_strategy",
        "ignore_patterns",
        "max_parallel_loading_workers",
    ),
    *_free(
        _OWN_LAYOUT,
        "prefix_caching_hash_algo",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
    ),
    *_free(
        _OWN_LAYOUT,
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "long_prefill_token_threshold",
        "stream_interval",
    ),
    *_free(_OWN_LAYOUT, "num_lookahead_slots", "performance_mode", "offload_backend"),
    *_free(
        "the server's log and metrics have options of their own",
        "disable_log_stats",
        "aggregate_engine_logging",
        is_switch=True,
    ),
    *_free("prompts are never logged", "disable_log_requests", is_switch=True),
    *_free(
        "there are no variables of vLLM's to check", "fail_on_environ_validation", is_switch=True
    ),
    *_free(
        _NO_GRAPHS,
        "ir_op_priority",
        "moe_backend",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "mamba_backend",
    ),
    *_free(_NO_GRAPHS, "mamba_ssu_algorithm", "mamba_config"),
    *_free(
        _OWN_LAYOUT,
        "enable_cumem_allocator",
        "enable_nccl_comm_suspend",
        "disable_async_output_proc",
        is_switch=True,
    ),
    *_free(
        _OWN_LAYOUT,
        "kv_sharing_fast_prefill",
        "multi_step_stream_outputs",
        "scheduler_reserve_full_isl",
        is_switch=True,
    ),
    *_free(
        _OWN_LAYOUT,
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "mamba_cache_mode",
        "prefix_match_unit",
    ),
    *_free(
        _OWN_LAYOUT,
        "scheduler_delay_factor",
        "num_scheduler_steps",
        "tokenizer_pool_size",
        "tokenizer_pool_type",
    ),
    *_free(_OWN_LAYOUT, "tokenizer_pool_extra_config", "distributed_timeout_seconds"),
    *_free(
        "the caches of media have sizes: feature_cache_memory, encoder_cache_memory",
        "disable_mm_preprocessor_cache",
        is_switch=True,
    ),
    *_free("there is no profiling of media at the start", "skip_mm_profiling", is_switch=True),
    *_refused(
        "prompts and answers are never logged. A plugin may watch requests: the hook "
        "toolkit_watch.",
        "enable_log_requests",
        is_switch=True,
    ),
    *_refused(
        _ONE_DEVICE, "data_parallel_size_local", "decode_context_parallel_size", neutral=(1,)
    ),
    *_refused(_ONE_DEVICE, "prefill_context_parallel_size", neutral=(1,)),
    *_refused(
        _ONE_DEVICE,
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_address",
        "data_parallel_rpc_port",
    ),
    *_refused(_ONE_DEVICE, "data_parallel_backend", neutral=("mp",)),
    *_refused(_ONE_DEVICE, "data_parallel_hybrid_lb", "data_parallel_external_lb", is_switch=True),
    *_refused(
        _ONE_DEVICE,
        "enable_eplb",
        "enable_elastic_ep",
        "enable_dbo",
        "ray_workers_use_nsight",
        "numa_bind",
        is_switch=True,
    ),
    *_refused(
        _ONE_DEVICE,
        "enable_ep_weight_filter",
        "enable_multimodal_encoder_data_parallel",
        "eplb_log_balancedness",
        is_switch=True,
    ),
    *_free(
        "no model is spread so",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "ubatch_size",
        "num_redundant_experts",
    ),
    *_free(
        "no model is spread so",
        "eplb_window_size",
        "eplb_step_interval",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
    ),
    *_free(
        "no model is spread so", "cp_kv_cache_interleave_size", "numa_bind_nodes", "numa_bind_cpus"
    ),
    *_free("no model is spread so", "disable_nccl_for_dp_synchronization", is_switch=True),
    *_refused(_ONE_DEVICE, "eplb_config", "expert_placement_strategy", "all2all_backend"),
    *_refused(_MASTER, "master_addr", neutral=("127.0.0.1",)),
    *_refused(_MASTER, "master_port", neutral=(29501,)),
    *_refused(
        _NO_ADAPTERS,
        "enable_lora",
        "fully_sharded_loras",
        "enable_prompt_adapter",
        "enable_lora_bias",
        is_switch=True,
    ),
    *_free(
        "no adapters are loaded",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "lora_dtype",
        "lora_extra_vocab_size",
    ),
    *_free(
        "no adapters are loaded",
        "max_prompt_adapters",
        "max_prompt_adapter_token",
        "long_lora_scaling_factors",
    ),
    *_free(
        "no adapters are loaded",
        "enable_tower_connector_lora",
        "specialize_active_lora",
        is_switch=True,
    ),
    *_refused(_NO_ADAPTERS, "default_mm_loras", "lora_target_modules"),
    *_refused(_NO_OFFLOAD, "cpu_offload_gb", "cpu_offload_params", "kv_offloading_size"),
    *_free(
        "nothing is moved off its device",
        "kv_offloading_backend",
        "offload_num_in_group",
        "offload_prefetch_step",
    ),
    *_refused(_NO_OFFLOAD, "offload_group_size", "offload_params"),
    *_refused(
        _NO_TRANSFER,
        "kv_transfer_config",
        "kv_events_config",
        "ec_transfer_config",
        "weight_transfer_config",
    ),
    *_refused("the cache has the dtype of the model.", "kv_cache_dtype"),
    *_refused("the cache has the dtype of the model.", "calculate_kv_scales", is_switch=True),
    *_refused("the cache has the dtype of the model.", "kv_cache_dtype_skip_layers"),
    *_refused(
        "the state has the dtype of the model.",
        "enable_mamba_cache_stochastic_rounding",
        "use_replayssm",
        is_switch=True,
    ),
    *_free(
        "the state has the dtype of the model", "mamba_cache_philox_rounds", "replayssm_buffer_len"
    ),
    *_refused(
        "the state has the dtype of the model.",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_block_size",
    ),
    *_refused(
        _CHECKPOINT,
        "hf_overrides",
        "rope_scaling",
        "rope_theta",
        "quantization_config",
        "override_attention_dtype",
    ),
    *_refused(_CHECKPOINT, "hf_config_path"),
    *_refused("the config.json of a checkpoint is read.", "config_format", neutral=("hf",)),
    *_refused(
        "where reasoning begins and ends, its parser knows: reasoning_parser.", "reasoning_config"
    ),
    *_refused(
        _CHECKPOINT, "disable_sliding_window", "allow_deprecated_quantization", is_switch=True
    ),
    *_refused(
        "write a generation_config.json, and give its folder as generation_config.",
        "override_generation_config",
    ),
    *_refused(_HUB, "download_dir", "hf_token"),
    *_refused("the revision is that of the model.", "code_revision", "tokenizer_revision"),
    *_refused(
        "set plugin_option, or load a plugin for the format of weights.",
        "model_loader_extra_config",
        "additional_config",
    ),
    *_refused(_NO_DRAFTS, "speculative_config", "speculative_model", "num_speculative_tokens"),
    *_refused(_NO_DRAFTS, "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
    *_refused(
        "write a logits processor: the hook toolkit_register_logits_processors.",
        "logits_processors",
        "logits_processor_pattern",
    ),
    *_refused(
        "write a scheduling policy: the hook toolkit_register_scheduling_policies.", "scheduler_cls"
    ),
    *_refused(
        "write an executor: the hook toolkit_register_executors.",
        "worker_cls",
        "worker_extension_cls",
    ),
    *_refused("write a renderer: the hook toolkit_register_renderers.", "io_processor_plugin"),
    *_refused("write a parser: the hook toolkit_register_parsers.", "reasoning_parser_plugin"),
    *_renamed(
        "structured_outputs_config",
        "plugin_option",
        values.structured_outputs,
        "its backend: structured_output.backend",
    ),
    *_renamed(
        "guided_decoding_backend",
        "plugin_option",
        values.structured_outputs,
        "structured_output.backend",
    ),
    *_refused(
        _PER_REQUEST,
        "guided_decoding_disable_any_whitespace",
        "guided_decoding_disable_additional_properties",
        is_switch=True,
    ),
    *_free(
        "there is no other backend to fall back to",
        "guided_decoding_disable_fallback",
        is_switch=True,
    ),
    *_refused(
        "log probabilities are those of the model, before sampling parameters.",
        "logprobs_mode",
        neutral=("raw_logprobs",),
    ),
    *_refused(
        "answers hold tokens, texts and log probabilities.",
        "enable_return_routed_experts",
        "return_sampling_mask",
        is_switch=True,
    ),
    *_refused(
        "requests are drawn as their seeds say.",
        "use_fp64_gumbel",
        "enable_trace_replay",
        is_switch=True,
    ),
    *_refused("write a model: the hook toolkit_register_models.", "model_class_overrides"),
    *_refused("prompts are texts and token ids.", "enable_prompt_embeds", is_switch=True),
    *_refused(
        _MEDIA,
        "mm_processor_kwargs",
        "media_io_kwargs",
        "video_pruning_rate",
        "mm_encoder_attn_backend",
    ),
    *_refused(
        _MEDIA,
        "enable_mm_embeds",
        "interleave_mm_strings",
        "mm_encoder_only",
        "language_model_only",
        is_switch=True,
    ),
    *_refused(_MEDIA, "mm_encoder_tp_mode", neutral=("weights",)),
    *_refused(
        "media is fetched from hosts, and comes as data; files of the server are never read.",
        "allowed_local_media_path",
    ),
    *_refused("stop the engine, and start it again.", "enable_sleep_mode", is_switch=True),
    *_free(
        "metrics are those of the page Observability",
        *(
            "kv_cache_metrics",
            "cudagraph_metrics",
            "enable_mfu_metrics",
            "enable_mm_processor_stats",
            "enable_logging_iteration_details",
        ),
        is_switch=True,
    ),
    *_free("metrics are those of the page Observability", "kv_cache_metrics_sample"),
    *_refused(_TRACES, "enable_layerwise_nvtx_tracing", is_switch=True),
    *_refused("set restart_engine.", "fault_tolerance_config"),
    *_refused("set restart_engine.", "enable_fault_tolerance", is_switch=True),
    *_refused(
        _MEDIA,
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path",
    ),
    *_free("media is encoded in the model's dtype", "mm_encoder_fp8_scale_save_margin"),
    *_refused(_TRACES, "otlp_traces_endpoint", "collect_detailed_traces", "profiler_config"),
    *_refused("the metrics have no other names.", "show_hidden_metrics_for_version"),
    *_refused("start several servers.", "renderer_num_workers", neutral=(1,)),
    *_refused("start the server with renderer=tokens.", "tokens_only", is_switch=True),
]

_SERVER: list[Name] = [
    *_same(
        "host",
        "port",
        "uds",
        "root_path",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        "chat_template",
        of_server=True,
    ),
    *_same("api_key", "shutdown_timeout", of_server=True),
    *_same("allow_credentials", is_switch=True, of_server=True),
    *(
        Name(
            f"allowed_{of}",
            "same",
            f"allowed_{of}",
            "JSON, too",
            values.texts(f"allowed_{of}"),
            of_server=True,
        )
        for of in _CORS
    ),
    *_same(
        "middleware", convert=values.middleware, note="module.Class: module:Class", of_server=True
    ),
    *_same(
        "tool_call_parser",
        convert=values.parser("tool_call_parser"),
        note="or auto: by the chat template",
        of_server=True,
    ),
    *_same(
        "reasoning_parser",
        convert=values.parser("reasoning_parser"),
        note="or auto: by the chat template",
        of_server=True,
    ),
    *_renamed(
        "trust_request_chat_template", "allow_request_chat_template", is_switch=True, of_server=True
    ),
    *_renamed("uvicorn_log_level", "log_level", values.log_level, "trace: debug", of_server=True),
    *_renamed(
        "disable_uvicorn_access_log",
        "access_log",
        values.when("access_log", False),
        is_switch=True,
        of_server=True,
    ),
    *_renamed("enable_tokenizer_info_endpoint", "tokenizer_info", is_switch=True, of_server=True),
    *_renamed("enable_force_include_usage", "force_include_usage", is_switch=True, of_server=True),
    *_free(
        "tools of a request are always read",
        "enable_auto_tool_choice",
        is_switch=True,
        of_server=True,
    ),
    *_free(
        "always so",
        "enable_request_id_headers",
        "enable_prompt_tokens_details",
        "enable_server_load_tracking",
        is_switch=True,
        of_server=True,
    ),
    *_free("/docs needs no other host", "enable_offline_docs", is_switch=True, of_server=True),
    *_free("polls are never logged", "disable_access_log_for_endpoints", of_server=True),
    *_free("prompts are never logged", "max_log_len", of_server=True),
    *_free("prompts are never logged", "enable_log_deltas", is_switch=True, of_server=True),
    *_free(
        "headers have a limit, max_header_size",
        "h11_max_incomplete_event_size",
        "h11_max_header_count",
        of_server=True,
    ),
    *_free(
        "scores are made where it is fastest",
        "enable_flash_late_interaction",
        is_switch=True,
        of_server=True,
    ),
    *_free(
        "there is one server",
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_interval_s",
        of_server=True,
    ),
    *_free(
        "there is one server",
        "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold",
        of_server=True,
    ),
    *_free("Cohere's form is of toolkit-lm-vendor-apis", "cohere_format", of_server=True),
    *_free(
        "Cohere's form is of toolkit-lm-vendor-apis",
        "cohere_is_reasoning_model",
        is_switch=True,
        of_server=True,
    ),
    *_free(
        "answers have no system_fingerprint",
        "fingerprint_mode",
        "fingerprint_value",
        of_server=True,
    ),
    *_free(
        "the reason of each error is in the log", "log_error_stack", is_switch=True, of_server=True
    ),
    *_refused(
        "prompts and answers are never logged.",
        "enable_log_outputs",
        is_switch=True,
        of_server=True,
    ),
    *_refused(
        "a request asks for it: return_tokens_as_token_ids.",
        "return_tokens_as_token_ids",
        is_switch=True,
        of_server=True,
    ),
    *_refused(
        "a request's tools are in the prompt.",
        "exclude_tools_when_tool_choice_none",
        is_switch=True,
        of_server=True,
    ),
    *_refused(
        "write a parser: the hook toolkit_register_parsers.", "tool_parser_plugin", of_server=True
    ),
    *_refused("the server runs no tools.", "tool_server", of_server=True),
    *_refused(
        "a request may give chat_template_kwargs.", "default_chat_template_kwargs", of_server=True
    ),
    *_refused(
        "content is given to the template as it reads it.",
        "chat_template_content_format",
        of_server=True,
    ),
    *_refused("the role is assistant.", "response_role", neutral=("assistant",), of_server=True),
    *_refused(_NO_ADAPTERS, "lora_modules", of_server=True),
    *_refused(
        "one process serves; put several servers behind a proxy.",
        "api_server_count",
        neutral=(1,),
        of_server=True,
    ),
    *_refused(
        "machines without a server run `toolkit worker`.",
        "headless",
        is_switch=True,
        of_server=True,
    ),
    *_refused(
        "one process serves; put several servers behind a proxy.",
        "grpc",
        is_switch=True,
        of_server=True,
    ),
    *_refused("set log_level and log_format.", "log_config_file", of_server=True),
    *_refused(
        "timings are metrics and traces.",
        "enable_per_request_metrics",
        is_switch=True,
        of_server=True,
    ),
    *_refused(
        "terminate TLS at a proxy for that.", "enable_ssl_refresh", is_switch=True, of_server=True
    ),
    *_refused("terminate TLS at a proxy for that.", "ssl_cert_reqs", "ssl_ciphers", of_server=True),
    *_refused(
        "the description of the API is public.",
        "disable_fastapi_docs",
        is_switch=True,
        of_server=True,
    ),
]

TABLE: dict[str, Name] = {one.name: one for one in (*_ENGINE, *_SERVER)}
"""All names of vLLM, those of its engine first."""

COMPILATION = (
    *("optimization_level", "compilation_config", "enforce_eager"),
    *("cudagraph_capture_sizes", "cuda_graph_sizes", "use_cudagraph"),
)
"""Options that say together how the forward pass is compiled."""

SHORT_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-q": "quantization",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-asc": "api_server_count",
}
"""vLLM's short flags."""


def tell_of_no_effect(row: Name, value: Any) -> None:
    """Logs what of a value changes nothing here."""
    for sentence in row.without_effect(value):
        logger.warning("vLLM's %s.", sentence)


def tell_of_compilation(given: Sequence[tuple[str, Any]]) -> None:
    """Logs what of options of `COMPILATION` changes nothing here, beside each other."""
    lowers = lowers_level(given)
    for name, value in given:
        if name != "enforce_eager" or not lowers:
            tell_of_no_effect(TABLE[name], value)


def translate(options: dict[str, Any]) -> dict[str, Any]:
    """Options in our names; those that vLLM does not have are left as they are, and win. Raises
    ConfigError."""
    about_compilation = [(name, value) for name, value in options.items() if name in COMPILATION]
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name in TABLE and name not in COMPILATION:
            tell_of_no_effect(TABLE[name], value)
            made |= TABLE[name].translate(value)
    tell_of_compilation(about_compilation)
    made |= compilation_options(about_compilation)
    return made | {name: value for name, value in options.items() if name not in TABLE}


def compilation_options(given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What options of `COMPILATION` say together: a level that is given wins over a mode, and
    enforce_eager over both."""
    made = _asked_of_compilation(given)
    if lowers_level(given):
        made["optimization_level"] = 0
    return made


def lowers_level(given: Sequence[tuple[str, Any]]) -> bool:
    """Whether enforce_eager is among options of `COMPILATION` of which others ask for code to be
    compiled."""
    is_eager = any(
        name == "enforce_eager" and not values.asks_nothing(value) for name, value in given
    )
    return is_eager and not values.asks_nothing(
        _asked_of_compilation(given).get("optimization_level")
    )


def _asked_of_compilation(given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What all but enforce_eager say. Their keys are read as those of one compilation_config."""
    keys: dict[str, Any] = {}
    level: dict[str, Any] = {}
    for name, value in given:
        if value is None or name == "enforce_eager":
            continue
        if name == "optimization_level":
            level = TABLE[name].translate(value)
        elif name == "compilation_config":
            keys = compilation.merged(keys, compilation.mapping(value))
        elif name == "use_cudagraph":
            keys[name] = value
        else:
            keys |= json.loads(TABLE[name].translate(value).get("compilation_config", "{}"))
    return TABLE["compilation_config"].translate(keys) | level


def names(rows: Iterable[Name], *, of_server: bool) -> list[Name]:
    """Those of the server, or of the engine."""
    return [row for row in rows if row.of_server == of_server]
