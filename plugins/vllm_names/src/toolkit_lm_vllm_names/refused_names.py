"""vLLM's engine options that are refused here, and their replacements."""

from __future__ import annotations

from toolkit_lm_vllm_names.name import Name, refused

_ONE_DEVICE = (
    "no model is spread by this kind of parallelism. Use tensor_parallel_size, "
    "pipeline_parallel_size or data_parallel_size."
)
_MASTER = "both are one option: master, HOST:PORT of node 0."
_NO_SUCH_ADAPTERS = "adapters (LoRA) are chosen by requests, and are of language models' layers."
_NO_OFFLOAD = "weights and caches stay on their device."
_NO_TRANSFER = (
    "vLLM's connectors are not there. The options kv_transfer.listen and kv_transfer.peers send KV "
    "caches between engines."
)
_OVERRIDES = "set the field of config.json by hf_overrides."
_CHECKPOINT = "put it into the config.json of a copy of the checkpoint's folder."
_HUB = "set the variables of huggingface_hub: HF_HOME, HF_HUB_CACHE, HF_TOKEN."
_TRACES = "install toolkit-lm-opentelemetry and set OTEL_EXPORTER_OTLP_ENDPOINT."
_MEDIA = "media is read as the checkpoint's processor says. A prompt may give mm_processor_kwargs."
_PER_REQUEST = "a request asks for it: structured_outputs."

REFUSED: list[Name] = [
    *refused("list the sizes: cudagraph_capture_sizes.", "max_cudagraph_capture_size"),
    *refused(
        "prompts and answers are never logged. A plugin may watch requests: the hook "
        "toolkit_watch.",
        "enable_log_requests",
        is_switch=True,
    ),
    *refused(_ONE_DEVICE, "data_parallel_size_local", "decode_context_parallel_size", neutral=(1,)),
    *refused(_ONE_DEVICE, "prefill_context_parallel_size", neutral=(1,)),
    *refused(
        _ONE_DEVICE,
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_address",
        "data_parallel_rpc_port",
    ),
    *refused(_ONE_DEVICE, "data_parallel_backend", neutral=("mp",)),
    *refused(_ONE_DEVICE, "data_parallel_hybrid_lb", "data_parallel_external_lb", is_switch=True),
    *refused(
        _ONE_DEVICE,
        "enable_eplb",
        "enable_elastic_ep",
        "enable_dbo",
        "ray_workers_use_nsight",
        "numa_bind",
        is_switch=True,
    ),
    *refused(
        _ONE_DEVICE,
        "enable_ep_weight_filter",
        "enable_multimodal_encoder_data_parallel",
        "eplb_log_balancedness",
        is_switch=True,
    ),
    *refused(_ONE_DEVICE, "eplb_config", "expert_placement_strategy", "all2all_backend"),
    *refused(_MASTER, "master_addr", neutral=("127.0.0.1",)),
    *refused(_MASTER, "master_port", neutral=(29501,)),
    *refused(
        _NO_SUCH_ADAPTERS,
        "fully_sharded_loras",
        "enable_prompt_adapter",
        "enable_lora_bias",
        "enable_tower_connector_lora",
        is_switch=True,
    ),
    *refused(_NO_SUCH_ADAPTERS, "default_mm_loras", "lora_target_modules"),
    *refused(_NO_OFFLOAD, "cpu_offload_gb", "cpu_offload_params", "kv_offloading_size"),
    *refused(_NO_OFFLOAD, "offload_group_size", "offload_params"),
    *refused(_NO_TRANSFER, "kv_transfer_config"),
    *refused("outputs of encoders stay in their engine.", "ec_transfer_config"),
    *refused(
        "the state has the dtype of the model.",
        "enable_mamba_cache_stochastic_rounding",
        "use_replayssm",
        is_switch=True,
    ),
    *refused(
        "the state has the dtype of the model.",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_block_size",
    ),
    *refused(_OVERRIDES, "rope_scaling", "rope_theta", "quantization_config"),
    *refused(_CHECKPOINT, "override_attention_dtype"),
    *refused(_CHECKPOINT, "hf_config_path"),
    *refused(
        "where reasoning begins and ends, its parser knows: reasoning_parser.", "reasoning_config"
    ),
    *refused(
        _CHECKPOINT, "disable_sliding_window", "allow_deprecated_quantization", is_switch=True
    ),
    *refused(_HUB, "download_dir", "hf_token"),
    *refused("the revision is that of the model.", "code_revision", "tokenizer_revision"),
    *refused(
        "set plugin_option, or load a plugin for the format of weights.",
        "model_loader_extra_config",
        "additional_config",
    ),
    *refused(
        "write a logits processor: the hook toolkit_register_logits_processors.",
        "logits_processor_pattern",
    ),
    *refused(
        "write a scheduling policy: the hook toolkit_register_scheduling_policies.", "scheduler_cls"
    ),
    *refused(
        "write an executor: the hook toolkit_register_executors.",
        "worker_cls",
    ),
    *refused("write a renderer: the hook toolkit_register_renderers.", "io_processor_plugin"),
    *refused("write a parser: the hook toolkit_register_parsers.", "reasoning_parser_plugin"),
    *refused(
        _PER_REQUEST,
        "guided_decoding_disable_any_whitespace",
        "guided_decoding_disable_additional_properties",
        is_switch=True,
    ),
    *refused(
        "answers hold tokens, texts and log probabilities.",
        "return_sampling_mask",
        is_switch=True,
    ),
    *refused(
        "requests are drawn as their seeds say.",
        "use_fp64_gumbel",
        is_switch=True,
    ),
    *refused("write a model: the hook toolkit_register_models.", "model_class_overrides"),
    *refused(
        _MEDIA,
        "mm_processor_kwargs",
        "media_io_kwargs",
        "video_pruning_rate",
        "mm_encoder_attn_backend",
    ),
    *refused(
        _MEDIA,
        "enable_mm_embeds",
        "interleave_mm_strings",
        "mm_encoder_only",
        "language_model_only",
        is_switch=True,
    ),
    *refused(_MEDIA, "mm_encoder_tp_mode", neutral=("weights",)),
    *refused(
        "media is fetched from hosts, and comes as data; files of the server are never read.",
        "allowed_local_media_path",
    ),
    *refused(_TRACES, "enable_layerwise_nvtx_tracing", is_switch=True),
    *refused("set restart_engine.", "fault_tolerance_config"),
    *refused("set restart_engine.", "enable_fault_tolerance", is_switch=True),
    *refused(
        _MEDIA,
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path",
    ),
    *refused(_TRACES, "otlp_traces_endpoint", "collect_detailed_traces", "profiler_config"),
    *refused("the metrics have no other names.", "show_hidden_metrics_for_version"),
    *refused("start several servers.", "renderer_num_workers", neutral=(1,)),
    *refused("start the server with renderer=tokens.", "tokens_only", is_switch=True),
]
