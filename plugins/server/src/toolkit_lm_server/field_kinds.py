"""JSON types of other projects' request fields that have no effect here, or only with others. They
are for the description of the API: no value is refused for its type."""

from __future__ import annotations

from typing import Any

_KINDS = {
    "string": "user safety_identifier service_tier user_profile_id workspace_id request_id rid "
    "prompt_cache_key prompt_cache_retention session_id ngram_corpus_id billing_policy template "
    "system",
    "object": "metadata custom_labels prediction prompt_cache_options cache_control "
    "context_management diagnostics citation_options",
    "boolean": "cache_prompt backend_sampling return_cached_tokens_details stream_reasoning "
    "timings_per_token return_progress truncate shift verbose stream_include_usage "
    "stream_continuous_usage_stats include_obfuscation",
    "integer": "n_cache_reuse id_slot routed_dp_rank data_parallel_rank disagg_prefill_dp_rank "
    "stream_interval n_keep n_discard repeat_last_n dry_penalty_last_n n_indent t_max_predict_ms "
    "t_max_prompt_ms max_tokens top_k",
    "number": "sse_ping_interval dynatemp_exponent adaptive_decay temperature top_p",
    "array": "betas samplers response_fields stop_sequences",
}
KINDS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""JSON types by field."""
_SEVERAL = {"keep_alive": ("string", "number"), "speed": ("string",), "stream": ("boolean",)}


def kind_schema(name: str) -> dict[str, Any]:
    """The schema of a field's type. Any type where it is not known."""
    kinds = _SEVERAL.get(name) or ((KINDS[name],) if name in KINDS else _ANY)
    return {"type": [*kinds, "null"]} | ({"items": {}} if "array" in kinds else {})


_ANY = ("string", "number", "boolean", "object", "array")


def exactly(value: Any) -> dict[str, Any]:
    """The schema of one value, in terms that generators of clients understand."""
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"type": "boolean", "const": value}
        case int():
            return {"type": "integer", "const": value}
        case float():
            return {"type": "number", "const": value}
        case str():
            return {"type": "string", "const": value}
        case dict():
            return {
                "type": "object",
                "properties": {name: exactly(part) for name, part in value.items()},
                "required": [*value],
                "additionalProperties": False,
            }
        case _:
            return {
                "type": "array",
                "items": {"anyOf": [exactly(part) for part in value]},
                "minItems": len(value),
                "maxItems": len(value),
            }
