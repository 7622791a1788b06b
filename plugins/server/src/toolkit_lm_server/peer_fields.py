"""Fields of other projects' request bodies, by route and by project. The docs and the test of
`request_fields` use them."""

from __future__ import annotations

from collections.abc import Mapping

_VLLM_BOTH = (
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format "
    "seed stop stream stream_options temperature "
    "top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty "
    "stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens truncation_side prompt_logprobs "
    "logprob_token_ids allowed_token_ids bad_words echo add_special_tokens structured_outputs "
    "priority request_id session_id "
    "return_tokens_as_token_ids return_token_ids routed_experts_prompt_start "
    "return_token_offsets return_mm_kwargs cache_salt "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval "
    "thinking_token_budget best_of logits_processors "
    "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern lora_request"
)
_SGLANG_BOTH = (
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options temperature top_p user "
    "return_hidden_states return_routed_experts routed_experts_start_len "
    "return_cached_tokens_details return_token_ids top_k min_p "
    "min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos "
    "skip_special_tokens lora_path session_id "
    "session_params response_format custom_params custom_logit_processor images_config "
    "bootstrap_host bootstrap_port bootstrap_room "
    "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt "
    "ngram_corpus_id priority"
)
_LLAMA_CPP = (
    "verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress "
    "sse_ping_interval n_predict "
    "max_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse t_max_predict_ms "
    "response_fields top_k top_p min_p "
    "top_n_sigma xtc_probability xtc_threshold typical_p temperature dynatemp_range "
    "dynatemp_exponent repeat_last_n "
    "repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base "
    "dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay "
    "seed n_probs min_keep "
    "backend_sampling post_sampling_probs lora json_schema grammar grammar_lazy grammar_type "
    "grammar_triggers "
    "preserved_tokens chat_format reasoning_format reasoning_in_content thinking_forced_open "
    "parse_tool_calls logit_bias stop "
    "samplers ignore_eos id_slot"
)
_TGI_CHAT = (
    "messages model frequency_penalty guideline logit_bias logprobs max_tokens n "
    "presence_penalty response_format seed stop stream "
    "stream_options temperature tool_choice tool_prompt tools top_logprobs top_p"
)
_TGI_PARAMETERS = (
    "adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar "
    "max_new_tokens repetition_penalty "
    "return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p watermark"
)
_OPTIONS = (
    "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap "
    "use_mlock embedding_only num_thread "
    "num_keep seed num_predict top_k top_p min_p tfs_z typical_p repeat_last_n temperature "
    "repeat_penalty presence_penalty "
    "frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline stop draft_num_predict"
)
_OLLAMA_OPTIONS = " ".join(("options", *(f"options.{name}" for name in _OPTIONS.split())))
_CLIENT = "extra_body extra_headers extra_query enable_thinking thinking_budget"

PEER_FIELDS: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {
        "OpenAI": "audio frequency_penalty function_call functions logit_bias logprobs "
        "max_completion_tokens max_tokens messages metadata "
        "modalities model moderation n parallel_tool_calls prediction presence_penalty "
        "prompt_cache_key prompt_cache_options "
        "prompt_cache_retention reasoning_effort response_format safety_identifier seed "
        "service_tier stop store stream stream_options "
        "temperature tool_choice tools top_logprobs top_p user verbosity web_search_options "
        "stream_options.include_usage "
        "stream_options.include_obfuscation",
        "vLLM": f"{_VLLM_BOTH} messages top_logprobs max_completion_tokens tools tool_choice "
        "reasoning_effort include_reasoning "
        "parallel_tool_calls add_generation_prompt continue_final_message documents "
        "chat_template chat_template_kwargs media_io_kwargs "
        "mm_processor_kwargs return_prompt_text stream_options.continuous_usage_stats",
        "SGLang": f"{_SGLANG_BOTH} messages top_logprobs max_completion_tokens tools tool_choice "
        "parallel_tool_calls "
        "return_prompt_token_ids return_meta_info reasoning_effort reasoning task "
        "continue_final_message separate_reasoning "
        "stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch "
        "use_audio_in_video input_ids",
        "llama.cpp": f"{_LLAMA_CPP} messages model tools tool_choice parallel_tool_calls "
        "response_format chat_template_kwargs "
        "add_generation_prompt logprobs top_logprobs max_completion_tokens",
        "TGI": _TGI_CHAT,
        "clients, by mistake": _CLIENT,
    },
    "/v1/completions": {
        "OpenAI": "best_of echo frequency_penalty logit_bias logprobs max_tokens model n "
        "presence_penalty prompt seed stop stream "
        "stream_options suffix temperature top_p user",
        "vLLM": f"{_VLLM_BOTH} prompt suffix prompt_embeds",
        "SGLang": f"{_SGLANG_BOTH} prompt best_of suffix json_schema custom_labels",
        "llama.cpp": f"{_LLAMA_CPP} prompt model",
        "TGI": f"{_TGI_PARAMETERS} inputs parameters",
        "clients, by mistake": _CLIENT,
    },
    "/infill": {
        "llama.cpp": f"{_LLAMA_CPP} input_prefix input_suffix input_extra prompt t_max_prompt_ms",
    },
    "/completion": {"llama.cpp": f"{_LLAMA_CPP} prompt model"},
    "/generate": {
        "SGLang": "text input_ids input_embeds image_data audio_data video_data sampling_params "
        "rid return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
        "return_text_in_logprobs stream log_metrics session_params lora_path "
        "custom_logit_processor return_hidden_states return_routed_experts extra_key priority "
        "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank",
    },
    "/v1/responses": {
        "OpenAI": "access_programs background background_options context_management conversation "
        "image include input instructions "
        "max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls "
        "previous_response_id prompt prompt_cache_key "
        "prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier "
        "store stream stream_options temperature text "
        "tool_choice tools top_logprobs top_p truncation user text.format "
        "text.verbosity reasoning.effort reasoning.summary "
        "reasoning.generate_summary reasoning.context reasoning.mode "
        "stream_options.include_obfuscation",
        "vLLM": "background include input instructions max_output_tokens max_tool_calls metadata "
        "model parallel_tool_calls "
        "previous_response_id prompt reasoning service_tier store stream temperature text "
        "tool_choice tools top_logprobs top_p top_k "
        "truncation user request_id mm_processor_kwargs priority cache_salt "
        "enable_response_messages repetition_penalty seed stop "
        "ignore_eos skip_special_tokens include_stop_str_in_output structured_outputs logit_bias "
        "presence_penalty frequency_penalty "
        "chat_template chat_template_kwargs media_io_kwargs vllm_xargs",
    },
    "/v1/messages": {
        "Anthropic": "max_tokens messages model billing_policy cache_control compaction "
        "container context_management diagnostics "
        "fallback_credit_token fallbacks inference_geo mcp_servers metadata output_config "
        "output_config.effort output_config.format "
        "output_config.task_budget output_format service_tier speed stop_sequences stream system "
        "temperature thinking thinking.type "
        "thinking.budget_tokens thinking.display thread tool_choice tool_choice.type "
        "tool_choice.name "
        "tool_choice.disable_parallel_tool_use tools top_k top_p betas user_profile_id "
        "workspace_id",
    },
    "/v1/messages/count_tokens": {
        "Anthropic": "messages model cache_control output_config speed system thinking "
        "tool_choice tools user_profile_id workspace_id "
        "mcp_servers context_management betas",
    },
    "/v2/chat": {
        "Cohere": "model messages tools strict_tools documents citation_options response_format "
        "response_format.type "
        "response_format.schema response_format.json_schema safety_mode max_tokens "
        "stop_sequences temperature seed frequency_penalty "
        "presence_penalty k p logprobs tool_choice thinking thinking.type thinking.token_budget "
        "priority stream raw_prompting message "
        "chat_history preamble connectors search_queries_only",
    },
    "/api/chat": {
        "Ollama": f"model messages tools format {_OLLAMA_OPTIONS} stream keep_alive think "
        "logprobs top_logprobs truncate shift "
        "_debug_render_only",
    },
    "/api/generate": {
        "Ollama": f"model prompt suffix images format {_OLLAMA_OPTIONS} system template context "
        "stream raw keep_alive think logprobs "
        "top_logprobs truncate shift width height steps _debug_render_only",
    },
    "/api/embed": {"Ollama": f"model input truncate {_OLLAMA_OPTIONS} keep_alive dimensions"},
    "/api/embeddings": {"Ollama": f"model prompt {_OLLAMA_OPTIONS} keep_alive"},
    "/api/show": {"Ollama": "model verbose system template options"},
    "/v1/embeddings": {
        "OpenAI": "dimensions encoding_format input model user",
        "vLLM": "model input messages encoding_format dimensions user truncate_prompt_tokens "
        "truncation_side add_special_tokens priority "
        "request_id normalize use_activation embed_dtype endianness add_generation_prompt "
        "continue_final_message chat_template "
        "chat_template_kwargs mm_processor_kwargs media_io_kwargs cache_salt",
        "SGLang": "input model encoding_format dimensions user rid priority lora_path",
        "llama.cpp": "input content model encoding_format embd_normalize",
        "Jina": "model input task late_chunking dimensions embedding_type normalized truncate",
    },
    "/pooling": {
        "vLLM": "model input messages task dimensions encoding_format user "
        "truncate_prompt_tokens priority request_id normalize "
        "use_activation softmax activation embed_dtype endianness step_tag_id returned_token_ids "
        "chat_template",
    },
    "/classify": {
        "vLLM": (
            "model input messages user truncate_prompt_tokens priority request_id use_activation "
            "activation softmax"
        ),
        "SGLang": "model input user rid priority",
    },
    "/score": {
        "vLLM": "model queries documents text_1 text_2 data_1 data_2 items instruction "
        "truncate_prompt_tokens mm_processor_kwargs "
        "priority request_id use_activation activation chat_template",
        "SGLang": "model items label_token_ids apply_softmax item_first",
    },
    "/rerank": {
        "vLLM": "model query documents top_n truncate_prompt_tokens mm_processor_kwargs priority "
        "request_id use_activation "
        "max_tokens_per_doc return_documents instruction chat_template",
        "SGLang": "query documents instruct top_n return_documents user",
        "Jina": "model query documents top_n return_documents",
        "Cohere": (
            "model query documents top_n max_tokens_per_doc priority return_documents "
            "rank_fields max_chunks_per_doc relevant_spans"
        ),
    },
    "/v2/embed": {
        "Cohere": (
            "model texts images inputs input_type max_tokens output_dimension embedding_types "
            "truncate priority"
        ),
    },
    "/tokenize": {
        "vLLM": "model prompt messages add_special_tokens return_token_strs "
        "add_generation_prompt continue_final_message chat_template "
        "chat_template_kwargs media_io_kwargs mm_processor_kwargs tools",
        "SGLang": "model prompt messages add_special_tokens",
        "llama.cpp": "content add_special parse_special with_pieces",
    },
    "/detokenize": {
        "vLLM": "model tokens",
        "SGLang": "model tokens skip_special_tokens",
        "llama.cpp": "tokens",
    },
    "/v1/audio/transcriptions": {
        "OpenAI": "file model language languages prompt response_format temperature stream "
        "chunking_strategy include[] keywords "
        "known_speaker_names[] known_speaker_references[] timestamp_granularities[]",
        "vLLM": "file model language prompt response_format stream stream_include_usage "
        "stream_continuous_usage_stats temperature "
        "timestamp_granularities[] to_language vllm_xargs seed top_p top_k min_p "
        "frequency_penalty presence_penalty repetition_penalty "
        "max_completion_tokens use_beam_search n length_penalty hotwords",
    },
    "/v1/audio/translations": {
        "OpenAI": "file model prompt response_format temperature",
        "vLLM": "file model prompt response_format temperature seed stream language to_language "
        "stream_include_usage "
        "stream_continuous_usage_stats max_completion_tokens",
    },
}
"""Fields by route and project, with spaces between them. `options.seed` is the field `seed` of the
object `options`."""
