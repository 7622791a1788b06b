"""Rules for request fields that a body does not state: those of vLLM, SGLang, llama.cpp, TGI,
Ollama, OpenAI and others.

A field that would change the answer is obeyed, or refused by name. The checks of bodies and the
documentation's page on request fields come from this table. `peer_fields` lists the fields of each
project.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from toolkit_lm.params import SAMPLING_PARAMS

from toolkit_lm_server.field_kinds import exactly, kind_schema

Becomes = Literal["refused", "idle", "reported", "renamed"]
"""Fates of a field. "refused": an error, unless its value changes nothing. "idle": without effect
on any answer.

"reported": ignored, and named by a header and the log, because clients cannot leave it out.
"renamed": obeyed under another name. A body that states both names must give both the same value.
"""


class Verdict(NamedTuple):
    """The rule for one field."""

    becomes: Becomes
    note: str
    """The reason of an idle field, the alternative to a refused one, or our name of a renamed
    one."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing. null is always one. false and empty values are, too, unless true
    is one."""
    qualifies: tuple[str, ...] = ()
    """Fields of which a body must have one for this field to mean anything."""
    false_asks: bool = False
    """The value false would change the answer."""

    def is_neutral(self, value: Any, body: Mapping[str, Any] | None = None) -> bool:
        """Whether a value changes nothing. `body`: the body that has it."""
        if value is None or any(same(value, neutral) for neutral in self.neutral):
            return True
        if (
            self.qualifies
            and body is not None
            and not any(body.get(name) for name in self.qualifies)
        ):
            return True
        return asks_nothing(value) and not (
            value is False and (self.false_asks or True in self.neutral)
        )


def same(value: Any, other: Any) -> bool:
    """Whether two values are the same in JSON: 1 equals 1.0, and does not equal true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def asks_nothing(value: Any) -> bool:
    """Whether a value is null, false or empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


Verdicts = Mapping[str, Verdict]


def refused(
    note: str, names: str, *neutral: Any, qualifies: Collection[str] = (), false_asks: bool = False
) -> dict[str, Verdict]:
    """Rules for fields that are refused. `names`: several, with spaces between them."""
    return dict.fromkeys(
        names.split(), Verdict("refused", note, neutral, tuple(qualifies), false_asks)
    )


def idle(note: str, names: str) -> dict[str, Verdict]:
    """Rules for fields that have no effect on answers."""
    return dict.fromkeys(names.split(), Verdict("idle", note))


def reported(note: str, names: str, *neutral: Any) -> dict[str, Verdict]:
    """Rules for fields that are ignored and reported."""
    return dict.fromkeys(names.split(), Verdict("reported", note, neutral))


def renamed(**names: str) -> dict[str, Verdict]:
    """Rules for fields that are obeyed under another name."""
    return {theirs: Verdict("renamed", ours) for theirs, ours in names.items()}


_OF_THE_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Parameters that the checkpoint may set where a body says nothing. So no value of theirs is
neutral."""


def sampling_parameters(note: str) -> dict[str, Verdict]:
    """Rules for all sampling parameters, for a body that states few of them. Values other than
    their defaults are refused."""
    return {
        name: Verdict("refused", note, () if name in _OF_THE_CHECKPOINT else (o.default,))
        for name, o in SAMPLING_PARAMS.items()
    }


_ADAPTERS = "give an adapter's name as the model"
_OWN_FIELDS = "parameters of plugins are fields of their own"
_REASONING = "the operator chooses how reasoning is read (reasoning_parser): leave it out"
_STRUCTURE = "use structured_outputs or response_format"
_TIMINGS = "it asks for timings in the answer: /metrics has them"
_TOOL_CALLS = "the operator chooses how tool calls are read (tool_call_parser): leave it out"
_TEMPLATE = "use chat_template_kwargs"
_PENALTIES = ("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty")

COMMON: Verdicts = {
    **idle(
        "it identifies the client, or labels the request",
        "user metadata safety_identifier service_tier custom_labels user_profile_id workspace_id",
    ),
    **idle("it names the request: send the header x-request-id", "request_id rid"),
    **idle(
        "it may change the speed of an answer, not its content",
        "prediction prompt_cache_key prompt_cache_retention prompt_cache_options cache_prompt "
        "n_cache_reuse id_slot session_id "
        "ngram_corpus_id routed_dp_rank data_parallel_rank disagg_prefill_dp_rank backend_sampling",
    ),
    **idle("answers have them anyway", "return_cached_tokens_details"),
    **idle(
        "it concerns how a stream is split into events",
        "stream_interval sse_ping_interval stream_reasoning",
    ),
    **idle("it asks for events before the first token", "return_progress"),
    **idle(_TIMINGS, "timings_per_token"),
    **idle(
        "a context is never shifted: an answer that reaches its end has the finish_reason length",
        "n_keep n_discard",
    ),
    # Fields that only plugins or other routes implement.
    **refused("this route has no tools", "tools tool_choice", "none", "auto"),
    **refused("this route has no tools", "parallel_tool_calls", True, False),
    **refused("use tools", "functions function_call", "none", "auto"),
    **refused("this route has no structured output", "response_format", {"type": "text"}),
    **refused("this route has no reasoning", "include_reasoning reasoning_effort", True, False),
    **refused("answers are texts", "audio"),
    **refused("answers are texts", "modalities", ["text"]),
    **refused("ask for it in a message", "verbosity", "medium"),
    **refused("this server keeps no chats", "store"),
    **refused("this route fills in no middle", "suffix"),
    **refused("there are no tools that run on the server", "web_search_options"),
    **refused("there is no moderation", "moderation"),
    # Arguments of a client, where they were written into the body.
    **refused(
        "it is an argument of the client library: put its content at the top level of the body",
        "extra_body extra_headers extra_query parameters sampling_params",
    ),
    **refused(_OWN_FIELDS, "extra_args vllm_xargs custom_params"),
    **refused("bring a logits processor as a plugin", "logits_processors custom_logit_processor"),
    **refused(_ADAPTERS, "lora_request lora_path lora adapter_id adapters adapter_name"),
    # vLLM.
    **refused("prompts are texts or token ids", "prompt_embeds input_embeds input_ids inputs"),
    **refused("toolkit-lm-kv-transfer transfers caches between engines", "kv_transfer_params"),
    **refused(
        "there is no transfer of caches between engines",
        "ec_transfer_params bootstrap_host bootstrap_port bootstrap_room",
    ),
    **refused("a tokenizer joins tokens in one way", "spaces_between_special_tokens", True),
    **refused("there are no watermarks", "watermarking watermark"),
    **refused("use the penalties, or no_repeat_ngram_size", "repetition_detection"),
    **refused(
        "use mm_processor_kwargs",
        "media_io_kwargs images_config max_dynamic_patch min_dynamic_patch use_audio_in_video",
    ),
    **refused("use return_token_ids", "return_prompt_text return_prompt_token_ids return_tokens"),
    **refused(
        "toolkit-lm-rl returns hidden states and routed experts",
        "return_hidden_states return_routed_experts",
    ),
    **refused(
        "toolkit-lm-rl returns hidden states and routed experts",
        "routed_experts_prompt_start routed_experts_start_len",
        0,
    ),
    **refused("/tokenize has the tokens", "return_token_offsets"),
    **refused("the route renders whole features", "return_mm_kwargs", True),
    # SGLang.
    **refused("use stop", "stop_regex"),
    **refused("use cache_salt", "extra_key"),
    **refused("the answer has usage and finish_reason", "return_meta_info verbose"),
    **refused(_REASONING, "separate_reasoning", True),
    **refused("requests have no sessions", "session_params"),
    **refused("write the task into a message", "task"),
    **refused("use reasoning_effort", "reasoning"),
    # llama.cpp.
    **refused("use max_draft_tokens", "speculative.n_max"),
    **refused("use max_draft_tokens", "speculative.n_min speculative.p_min", 0),
    **refused("use temperature", "dynatemp_range", 0),
    **refused("use temperature", "dynatemp_exponent", 1, qualifies=["dynatemp_range"]),
    **refused("use min_p", "top_n_sigma", -1, 0),
    **refused("use mirostat_tau", "adaptive_target", -1),
    **refused("use mirostat_tau", "adaptive_decay", qualifies=["adaptive_target"]),
    **refused("penalties cover the whole context (-1)", "repeat_last_n", -1, qualifies=_PENALTIES),
    **refused(
        "DRY covers the whole context (-1)", "dry_penalty_last_n", -1, qualifies=["dry_multiplier"]
    ),
    **refused("penalties apply to all tokens", "penalize_nl penalize_newline", True),
    **refused("use top_p, min_p or typical_p", "tfs_z tfs", 1),
    **refused("it comes with toolkit-lm-sampling-extra", "mirostat", 0),
    **refused("use logprobs", "n_probs", 0),
    **refused("log probabilities are of the model's own distribution", "post_sampling_probs"),
    **refused("filters keep the likeliest token, and no more", "min_keep", 0, 1),
    **refused("filters come in one order", "samplers"),
    **refused("lines begin where the model begins them", "n_indent", 0),
    **refused("use timeout", "t_max_predict_ms t_max_prompt_ms", 0, -1),
    **refused("answers have all of their fields", "response_fields"),
    **refused(_STRUCTURE, "grammar_lazy grammar_triggers grammar_type preserved_tokens"),
    **refused(_STRUCTURE, "grammar json_schema regex ebnf structural_tag"),
    **refused(_TOOL_CALLS, "chat_format"),
    **refused(_TOOL_CALLS, "parse_tool_calls", True),
    **refused(_REASONING, "reasoning_format", "auto", "deepseek"),
    **refused(_REASONING, "reasoning_in_content thinking_forced_open"),
    **refused("send images in messages", "image_data multimodal_data"),
    **refused("write it into the prompt", "penalty_prompt"),
    # TGI, and transformers.
    **refused("false is temperature 0", "do_sample", True, false_asks=True),
    **refused("use echo", "return_full_text", false_asks=False),
    **refused("use top_logprobs", "top_n_tokens", 0),
    **refused("use prompt_logprobs", "decoder_input_details"),
    **refused("use logprobs", "details"),
    **refused("use truncate_prompt_tokens", "truncate"),
    **refused("use a system message", "tool_prompt guideline"),
    **refused("use use_beam_search and beam_width", "num_beams", 1),
    **refused("use max_tokens", "max_length"),
    # Template variables: giving one at the top level is a frequent mistake.
    **refused(_TEMPLATE, "enable_thinking thinking", false_asks=True),
    **refused("use thinking_token_budget", "thinking_budget reasoning_budget"),
}
"""Rules for fields that mean the same on every route of OpenAI's kind."""

SAMPLING: Verdicts = {
    **COMMON,
    **renamed(
        repeat_penalty="repetition_penalty",
        n_predict="max_tokens",
        max_new_tokens="max_tokens",
        min_new_tokens="min_tokens",
        no_stop_trim="include_stop_str_in_output",
        sampling_seed="seed",
        n_cmpl="n",
    ),
    "timings_per_token": Verdict("renamed", "timings"),
}
"""Rules for bodies with sampling parameters."""

INFILL: Verdicts = {
    **SAMPLING,
    **idle(_TIMINGS, "timings_per_token"),
    **reported(
        "editors always send it; here the order of filters is fixed, and an answer ends by its "
        "length or `timeout`",
        "samplers t_max_predict_ms t_max_prompt_ms n_indent response_fields",
        0,
    ),
}

CHAT: Verdicts = {
    **SAMPLING,
    **renamed(max_completion_tokens="max_tokens"),
    **reported("chats are kept by a server with max_stored_responses", "store"),
}

RESPONSES: Verdicts = {
    **SAMPLING,
    **renamed(max_output_tokens="max_tokens"),
    **refused(
        "this server has no such feature",
        "access_programs background_options context_management image moderation",
    ),
    **refused("this server keeps no prompts: send the whole one as input", "prompt"),
    **refused("input is one answer's: logprobs come by include", "echo"),
    **refused("use max_output_tokens", "max_completion_tokens"),
    **refused("ask /v1/chat/completions", "chat_template mm_processor_kwargs documents"),
}

TEXT: Verdicts = {}
"""Rules for fields inside of `text`."""
REASONING: Verdicts = reported(
    "reasoning is returned whole, as the model writes it",
    "summary generate_summary context mode",
    "auto",
)
"""Rules for fields inside of `reasoning`."""
STREAM_OPTIONS: Verdicts = idle("nothing is obfuscated", "include_obfuscation")
"""Rules for fields inside of `stream_options`."""

POOLING: Verdicts = {
    **COMMON,
    **refused("/v1/embeddings and /pooling have it", "normalize normalized", false_asks=True),
    **refused(
        "/classify, /score, /rerank and /pooling have it",
        "use_activation activation softmax",
        false_asks=True,
    ),
    **refused("use the prompt of the checkpoint: prompt_name", "instruct"),
    **refused(
        "vectors are of length 1, or as the model makes them: normalize", "embd_normalize", 2
    ),
    **refused("each input is read by itself", "late_chunking"),
    **refused("use encoding_format", "embedding_type output_dtype"),
    **refused("send texts", "images inputs"),
    **refused("documents are texts", "rank_fields relevant_spans"),
    **refused("use max_tokens_per_doc", "max_chunks_per_doc"),
    **refused(
        "use /classify, or logprob_token_ids of /v1/completions",
        "label_token_ids apply_softmax item_first",
    ),
    **refused("use input", "content"),
    **refused(
        "this route renders no conversation",
        "chat_template chat_template_kwargs mm_processor_kwargs add_special_tokens",
    ),
    **refused("embeddings are of all dimensions here", "dimensions output_dimension"),
}
"""Rules for bodies of pooling models."""
ACTIVATION: Verdicts = renamed(activation="use_activation", softmax="use_activation")
"""Rules for bodies of pooling models with an activation."""

TOKENS: Verdicts = {
    **COMMON,
    **refused("use prompt", "content text"),
    **refused("use add_special_tokens", "add_special"),
    **refused(
        "the tokenizer reads texts of special tokens as these",
        "parse_special",
        True,
        false_asks=True,
    ),
    **refused("use return_token_strs", "with_pieces"),
    **refused("texts are returned unchanged", "skip_special_tokens", True, false_asks=False),
}
"""Rules for bodies about tokens."""

SPEECH: Verdicts = {
    **COMMON,
    **refused("windows follow the timestamps that the model sets", "chunking_strategy", "auto"),
    **refused("write the words into prompt", "keywords hotwords"),
    **refused("use language", "languages"),
    **refused(
        "there is no speaker diarization", "known_speaker_names[] known_speaker_references[]"
    ),
    **refused("there are no log probabilities", "include include[]"),
    **refused("timestamps are of segments", "timestamp_granularities[]"),
    **refused("translations are English", "language to_language"),
    **refused(
        "each window is decoded as Whisper decodes it",
        "seed top_p top_k min_p frequency_penalty presence_penalty repetition_penalty",
    ),
    **refused(
        "each window is decoded as Whisper decodes it",
        "max_completion_tokens use_beam_search n length_penalty",
    ),
    **idle("a stream ends with its usage", "stream_include_usage stream_continuous_usage_stats"),
}
"""Rules for forms with recordings."""


def described_others(verdicts: Verdicts, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of a JSON Schema for fields which a body does not state, and which may have a
    value. `stated`: the properties of the fields that it states."""
    properties: dict[str, Any] = {}
    for name, verdict in sorted(verdicts.items()):
        match verdict.becomes:
            case "refused" if verdict.qualifies:
                text = f"It is refused with {' or '.join(verdict.qualifies)}: {verdict.note}."
                properties[name] = {**kind_schema(name), "description": text}
            case "refused" if not verdict.neutral:
                # No value asks for anything: clients need not know the field.
                continue
            case "refused":
                nothing = [None] if True in verdict.neutral or verdict.false_asks else [None, False]
                properties[name] = {
                    "anyOf": [exactly(value) for value in (*nothing, *verdict.neutral)],
                    "description": f"Any other value is refused: {verdict.note}.",
                }
            case "renamed":
                shape = {
                    word: part
                    for word, part in stated.get(verdict.note, {}).items()
                    if word not in ("title", "default", "examples")
                }
                properties[name] = {**shape, "description": f"Another name of {verdict.note}."}
            case _:
                text = f"It has no effect: {verdict.note}."
                properties[name] = {**kind_schema(name), "description": text}
    return properties
