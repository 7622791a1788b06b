"""vLLM's engine options that are accepted here: unchanged, under another name, or without
effect."""

from __future__ import annotations

from toolkit_lm_vllm_names import (
    compilation,
    formats,
    kv_events,
    speculation,
    values,
    weight_config,
)
from toolkit_lm_vllm_names.name import Name, free, renamed, same

_NO_GRAPHS = (
    "nothing is compiled unless optimization_level asks for it, and no graph is captured unless "
    "compilation_config does"
)
_EAGER = (
    "nothing is compiled unless optimization_level or a mode asks for it; beside these it makes "
    "the level 0"
)
_OWN_LAYOUT = "there is one layout of weights and caches, and the results are the same"

ENGINE: list[Name] = [
    *same(
        *("model", "revision", "seed", "runner", "convert", "tokenizer"),
    ),
    *same("model_impl", convert=values.model_impl, note="vllm: auto"),
    *same(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "node_rank",
        "scheduling_policy",
        "preemption_mode",
        "logprobs_mode",
        "block_size",
        "device",
    ),
    *same("max_logprobs", convert=values.max_logprobs, note="-1: any number"),
    *same(
        "enable_expert_parallel",
        is_switch=True,
        note="over the tensor-parallel ranks of each engine alone",
    ),
    *same("trust_remote_code", "enable_prefix_caching", "enable_chunked_prefill", is_switch=True),
    *same("served_model_name"),
    *same("dtype", convert=values.dtype, note="half and float, too"),
    *same(
        "kv_cache_dtype",
        convert=values.cache_dtype,
        note="fp8_e4m3: fp8; int8_per_token_head: int8; float32, bfloat16, float16: model",
    ),
    *same("kv_cache_dtype_skip_layers"),
    *free(
        "a quantized cache has a scale per token and head, made as it is written",
        "calculate_kv_scales",
        is_switch=True,
    ),
    *same("quantization", convert=values.named("quantization")),
    *(
        Name(name, "same", name, "32k, too", values.count(name))
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    ),
    *same("limit_mm_per_prompt", convert=values.limits, note="a mapping, too"),
    *same(
        "generation_config", convert=values.generation_config, note="auto: checkpoint; vllm: none"
    ),
    *same("optimization_level", note="-O2, too"),
    *same(
        "compilation_config",
        convert=compilation.compilation_config,
        note="a mode (3: level 2) and older keys, too",
        ignored=compilation.without_effect,
    ),
    *same(
        "attention_backend", convert=values.attention_backend, note="FLASH_ATTN: flash_attn; ..."
    ),
    *renamed(
        "task",
        "runner, convert",
        values.task,
        "one task: the runner type and the pooling adapter that serve it",
    ),
    *renamed(
        "gpu_memory_utilization",
        "kv_cache_memory",
        values.memory_share,
        "a share of what the model leaves; 0.9 is auto",
    ),
    *renamed("kv_cache_memory_bytes", "kv_cache_memory", values.memory),
    *renamed("num_gpu_blocks_override", "num_kv_blocks"),
    *renamed("swap_space", "swap_memory", values.gibibytes("swap_memory"), "GiB"),
    *renamed(
        "mm_processor_cache_gb",
        "feature_cache_memory",
        values.gibibytes("feature_cache_memory", none="0"),
        "GiB",
    ),
    *renamed(
        "skip_tokenizer_init",
        "renderer",
        values.when("renderer", "tokens"),
        "True: tokens",
        is_switch=True,
    ),
    *renamed(
        "tokenizer_mode",
        "renderer",
        values.tokenizer_mode,
        "mistral: mistral; auto, hf: by the checkpoint",
    ),
    *renamed(
        "distributed_executor_backend",
        "executor",
        values.executor,
        "mp, uni: auto; ray, external_launcher",
    ),
    *renamed("nnodes", "nodes"),
    *renamed("async_scheduling", "overlap", is_switch=True),
    *renamed(
        "attention_config",
        "attention_backend",
        values.attention_config,
        "its backend",
        ignored=values.ignored_of_attention,
    ),
    *renamed(
        "pooler_config",
        "pooling_type, ...",
        values.pooler_config,
        "its fields are options of their own",
    ),
    *renamed(
        "override_pooler_config", "pooling_type, ...", values.pooler_config, "as pooler_config"
    ),
    *renamed("allowed_media_domains", "allowed_media_hosts"),
    *free(_EAGER, "enforce_eager", is_switch=True),
    *free(_NO_GRAPHS, "enable_flashinfer_autotune", is_switch=True),
    *free("every engine can sleep", "enable_sleep_mode", is_switch=True),
    *renamed(
        "cudagraph_capture_sizes",
        "compilation_config",
        compilation.capture_sizes,
        "its key of this name",
    ),
    *renamed(
        "cuda_graph_sizes",
        "compilation_config",
        compilation.capture_sizes,
        "its key cudagraph_capture_sizes",
    ),
    *renamed(
        "use_cudagraph",
        "compilation_config",
        compilation.use_cudagraph,
        "its cudagraph_mode, piecewise or none",
        is_switch=True,
    ),
    *free(_NO_GRAPHS, "max_seq_len_to_capture", "kernel_config"),
    *free(
        _OWN_LAYOUT,
        "disable_custom_all_reduce",
        "disable_cascade_attn",
        "use_v2_block_manager",
        is_switch=True,
    ),
    *free(
        _OWN_LAYOUT,
        "disable_hybrid_kv_cache_manager",
        "disable_chunked_mm_input",
        "use_tqdm_on_load",
        is_switch=True,
    ),
    *free(
        _OWN_LAYOUT,
        "pt_load_map_location",
        "safetensors_load_strategy",
        "ignore_patterns",
        "max_parallel_loading_workers",
    ),
    *free(
        _OWN_LAYOUT,
        "prefix_caching_hash_algo",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
    ),
    *free(
        _OWN_LAYOUT,
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "long_prefill_token_threshold",
        "stream_interval",
    ),
    *free(_OWN_LAYOUT, "num_lookahead_slots", "performance_mode", "offload_backend"),
    *free(
        "the server's log and metrics have options of their own",
        "disable_log_stats",
        "aggregate_engine_logging",
        is_switch=True,
    ),
    *free("prompts are never logged", "disable_log_requests", is_switch=True),
    *free(
        "there are no variables of vLLM's to check", "fail_on_environ_validation", is_switch=True
    ),
    *free(
        _NO_GRAPHS,
        "ir_op_priority",
        "moe_backend",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "mamba_backend",
    ),
    *free(_NO_GRAPHS, "mamba_ssu_algorithm", "mamba_config"),
    *free(
        _OWN_LAYOUT,
        "enable_cumem_allocator",
        "enable_nccl_comm_suspend",
        "disable_async_output_proc",
        is_switch=True,
    ),
    *free(
        _OWN_LAYOUT,
        "kv_sharing_fast_prefill",
        "multi_step_stream_outputs",
        "scheduler_reserve_full_isl",
        is_switch=True,
    ),
    *free(
        _OWN_LAYOUT,
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "mamba_cache_mode",
        "prefix_match_unit",
    ),
    *free(
        _OWN_LAYOUT,
        "scheduler_delay_factor",
        "num_scheduler_steps",
        "tokenizer_pool_size",
        "tokenizer_pool_type",
    ),
    *free(_OWN_LAYOUT, "tokenizer_pool_extra_config", "distributed_timeout_seconds"),
    *free(
        "the caches of media have sizes: feature_cache_memory, encoder_cache_memory",
        "disable_mm_preprocessor_cache",
        is_switch=True,
    ),
    *free("there is no profiling of media at the start", "skip_mm_profiling", is_switch=True),
    *free(
        "no model is spread so",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "ubatch_size",
        "num_redundant_experts",
    ),
    *free(
        "no model is spread so",
        "eplb_window_size",
        "eplb_step_interval",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
    ),
    *free(
        "no model is spread so", "cp_kv_cache_interleave_size", "numa_bind_nodes", "numa_bind_cpus"
    ),
    *free("no model is spread so", "disable_nccl_for_dp_synchronization", is_switch=True),
    *renamed(
        "worker_extension_cls",
        "plugin_option",
        values.worker_extension,
        "rl.worker_extension_cls",
    ),
    *renamed(
        "enable_return_routed_experts",
        "plugin_option",
        values.routed_experts,
        "rl.routed_experts: always",
        is_switch=True,
    ),
    *renamed(
        "kv_events_config",
        "plugin_option",
        kv_events.kv_events_config,
        "its keys are options of the plugin kv_events. Without endpoint: tcp://127.0.0.1:5557",
    ),
    *renamed(
        "weight_transfer_config",
        "plugin_option",
        weight_config.weight_transfer_config,
        "rl.weight_transfer. Backend nccl, too: a trainer's tensors come by Gloo, and it imports "
        "vLLM's names of us",
    ),
    *renamed("enable_lora", "plugin_option", values.adapters_on, "lora.enabled", is_switch=True),
    *renamed("max_loras", "plugin_option", values.adapters("max_adapters"), "lora.max_adapters"),
    *renamed("max_lora_rank", "plugin_option", values.adapters("max_rank"), "lora.max_rank"),
    *renamed(
        "max_cpu_loras",
        "plugin_option",
        values.adapters("max_host_adapters"),
        "lora.max_host_adapters",
    ),
    *free("adapters have the dtype of the model", "lora_dtype"),
    *free("no adapter adds to the vocabulary", "lora_extra_vocab_size"),
    *free(
        "no prompt adapters are loaded",
        "max_prompt_adapters",
        "max_prompt_adapter_token",
        "long_lora_scaling_factors",
    ),
    *free("graphs are made for no number of adapters", "specialize_active_lora", is_switch=True),
    *free(
        "nothing is moved off its device",
        "kv_offloading_backend",
        "offload_num_in_group",
        "offload_prefetch_step",
    ),
    *free(
        "the state has the dtype of the model", "mamba_cache_philox_rounds", "replayssm_buffer_len"
    ),
    *renamed(
        "speculative_config",
        "drafter",
        speculation.speculative_config,
        "its method; its other keys are options of the plugin drafters: drafters.model, ...",
        ignored=speculation.without_effect,
    ),
    *renamed("speculative_model", "drafter", speculation.speculative_model, "and drafters.model"),
    *(
        row
        for theirs, ours in (
            ("num_speculative_tokens", "num_speculative_tokens"),
            ("ngram_prompt_lookup_max", "prompt_lookup_max"),
            ("ngram_prompt_lookup_min", "prompt_lookup_min"),
        )
        for row in renamed(
            theirs, "plugin_option", speculation.drafters_option(ours), f"drafters.{ours}"
        )
    ),
    *renamed(
        "structured_outputs_config",
        "plugin_option",
        values.structured_outputs,
        "its backend: structured_output.backend",
    ),
    *renamed(
        "guided_decoding_backend",
        "plugin_option",
        values.structured_outputs,
        "structured_output.backend",
    ),
    *same(
        "hf_overrides",
        convert=values.hf_overrides,
        note="is_matryoshka: matryoshka; classifier_from_token: classifier_tokens",
    ),
    *same("override_generation_config", convert=values.override_generation_config),
    *renamed(
        "logits_processors",
        "plugin_option",
        values.logits_processors,
        "vllm_names.logits_processors: classes, or their paths",
    ),
    *same("load_format", convert=formats.load_format, note="auto, hf: by the checkpoint"),
    *renamed(
        "config_format",
        "load_format",
        formats.config_format,
        "mistral: mistral; auto, hf: by the checkpoint. A config.json counts where there is one",
    ),
    *renamed(
        "enable_prompt_embeds",
        "plugin_option",
        values.prompt_embeds,
        "vllm_names.enable_prompt_embeds",
        is_switch=True,
    ),
    *free(
        "there is no other backend to fall back to",
        "guided_decoding_disable_fallback",
        is_switch=True,
    ),
    *free(
        "a request may always give trace_decode_token_ids", "enable_trace_replay", is_switch=True
    ),
    *free(
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
    *free("metrics are those of the page Observability", "kv_cache_metrics_sample"),
    *free("media is encoded in the model's dtype", "mm_encoder_fp8_scale_save_margin"),
]
