"""vLLM's server flags."""

from __future__ import annotations

from toolkit_lm_vllm_names import values
from toolkit_lm_vllm_names.name import Name, free, refused, renamed, same

_CORS = ("origins", "methods", "headers")

SERVER: list[Name] = [
    *same(
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
    *same("api_key", "shutdown_timeout", of_server=True),
    *same("allow_credentials", is_switch=True, of_server=True),
    *(
        Name(
            f"allowed_{name}",
            "same",
            f"allowed_{name}",
            "JSON, too",
            values.texts(f"allowed_{name}"),
            of_server=True,
        )
        for name in _CORS
    ),
    *same(
        "middleware", convert=values.middleware, note="module.Class: module:Class", of_server=True
    ),
    *same(
        "tool_call_parser",
        convert=values.parser("tool_call_parser"),
        note="or auto: by the chat template",
        of_server=True,
    ),
    *same(
        "reasoning_parser",
        convert=values.parser("reasoning_parser"),
        note="or auto: by the chat template",
        of_server=True,
    ),
    *renamed(
        "trust_request_chat_template", "allow_request_chat_template", is_switch=True, of_server=True
    ),
    *renamed("uvicorn_log_level", "log_level", values.log_level, "trace: debug", of_server=True),
    *renamed(
        "disable_uvicorn_access_log",
        "access_log",
        values.when("access_log", False),
        is_switch=True,
        of_server=True,
    ),
    *renamed("enable_tokenizer_info_endpoint", "tokenizer_info", is_switch=True, of_server=True),
    *renamed(
        "enable_scale_out",
        "routes",
        values.when("routes", ["vllm_names"]),
        "vllm_names; /v1/chat/completions/render is not among them",
        is_switch=True,
        of_server=True,
    ),
    *renamed("enable_force_include_usage", "force_include_usage", is_switch=True, of_server=True),
    *free(
        "tools of a request are always read",
        "enable_auto_tool_choice",
        is_switch=True,
        of_server=True,
    ),
    *free(
        "always so",
        "enable_request_id_headers",
        "enable_prompt_tokens_details",
        "enable_server_load_tracking",
        is_switch=True,
        of_server=True,
    ),
    *free("/docs needs no other host", "enable_offline_docs", is_switch=True, of_server=True),
    *free("polls are never logged", "disable_access_log_for_endpoints", of_server=True),
    *free("prompts are never logged", "max_log_len", of_server=True),
    *free("prompts are never logged", "enable_log_deltas", is_switch=True, of_server=True),
    *free(
        "headers have a limit, max_header_size",
        "h11_max_incomplete_event_size",
        "h11_max_header_count",
        of_server=True,
    ),
    *free(
        "scores are made where it is fastest",
        "enable_flash_late_interaction",
        is_switch=True,
        of_server=True,
    ),
    *free(
        "there is one server",
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_interval_s",
        of_server=True,
    ),
    *free(
        "there is one server",
        "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold",
        of_server=True,
    ),
    *free("Cohere's form is of toolkit-lm-vendor-apis", "cohere_format", of_server=True),
    *free(
        "Cohere's form is of toolkit-lm-vendor-apis",
        "cohere_is_reasoning_model",
        is_switch=True,
        of_server=True,
    ),
    *free(
        "system_fingerprint is a digest of the configuration",
        "fingerprint_mode",
        "fingerprint_value",
        of_server=True,
    ),
    *free(
        "the reason of each error is in the log", "log_error_stack", is_switch=True, of_server=True
    ),
    *refused(
        "prompts and answers are never logged.",
        "enable_log_outputs",
        is_switch=True,
        of_server=True,
    ),
    *refused(
        "a request asks for it: return_tokens_as_token_ids.",
        "return_tokens_as_token_ids",
        is_switch=True,
        of_server=True,
    ),
    *refused(
        "a request's tools are in the prompt.",
        "exclude_tools_when_tool_choice_none",
        is_switch=True,
        of_server=True,
    ),
    *refused(
        "write a parser: the hook toolkit_register_parsers.", "tool_parser_plugin", of_server=True
    ),
    *refused("the server runs no tools.", "tool_server", of_server=True),
    *refused(
        "a request may give chat_template_kwargs.", "default_chat_template_kwargs", of_server=True
    ),
    *refused(
        "content is given to the template as it reads it.",
        "chat_template_content_format",
        of_server=True,
    ),
    *refused("the role is assistant.", "response_role", neutral=("assistant",), of_server=True),
    *renamed(
        "lora_modules", "plugin_option", values.adapter_modules, "lora.modules", of_server=True
    ),
    *refused(
        "one process serves; put several servers behind a proxy.",
        "api_server_count",
        neutral=(1,),
        of_server=True,
    ),
    *refused(
        "machines without a server run `toolkit worker`.",
        "headless",
        is_switch=True,
        of_server=True,
    ),
    *refused(
        "one process serves; put several servers behind a proxy.",
        "grpc",
        is_switch=True,
        of_server=True,
    ),
    *refused("set log_level and log_format.", "log_config_file", of_server=True),
    *refused(
        "a request asks for them: timings.",
        "enable_per_request_metrics",
        is_switch=True,
        of_server=True,
    ),
    *free(
        "certificates are read again when they change",
        "enable_ssl_refresh",
        is_switch=True,
        of_server=True,
    ),
    *refused("terminate TLS at a proxy for that.", "ssl_cert_reqs", "ssl_ciphers", of_server=True),
    *refused(
        "the description of the API is public.",
        "disable_fastapi_docs",
        is_switch=True,
        of_server=True,
    ),
]
