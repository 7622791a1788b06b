"""The request body of POST /generate, and its translation to a plain completion."""

from __future__ import annotations

import json
from typing import Any

from toolkit_lm.errors import RequestError
from toolkit_lm_server.errors import missing
from toolkit_lm_server.fields import Items
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import COMMON, idle, refused

NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
    "routed_experts_prompt_start": "routed_experts_start_len",
}
"""SGLang's names of parameters, by ours."""
_MOST = 128
"""Tokens of an answer where the body sets no limit."""
_OF_THE_BODY = (
    *("prompt", "encoder_prompt", "decoder_prompt", "suffix", "echo", "stream", "stream_options"),
    *("model", "logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids"),
    *("return_tokens_as_token_ids", "add_special_tokens", "truncation_side", "n_predict"),
    *("priority", "timeout", "cache_salt", "best_of", "use_beam_search"),
)
"""Fields of plain completions that SGLang's sampling parameters do not include."""
_RECORDED = ("return_hidden_states", "return_routed_experts")
"""Fields of plain completions that an engine with the plugin `rl` takes."""
OneOrEach = dict[str, Any] | list[dict[str, Any]]


class SglangGenerateBody(EngineBody):
    """The body of POST /generate."""

    verdicts = {
        **COMMON,
        **refused("send them in messages: /v1/chat/completions", "audio_data video_data"),
        **idle("it concerns the server's own figures", "log_metrics"),
    }

    model_config = examples(
        {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}},
        {"input_ids": [[5, 6, 7], [8, 9]], "return_logprob": True, "stream": True},
    )

    text: str | Items[str] | None = None
    """The prompts, as texts."""
    input_ids: Items[int] | Items[Items[int]] | None = None
    """The prompts, as token ids, in place of texts."""
    sampling_params: OneOrEach | None = None
    """The sampling parameters, by SGLang's names. A list has those of each prompt, which must be
    equal."""
    rid: str | Items[str] | None = None
    """Ids of the requests, which the answers tell."""
    return_logprob: bool | Items[bool] | None = None
    """The answers have log probabilities."""
    logprob_start_len: int | Items[int] | None = None
    """The first token of the prompt that log probabilities are told of. -1: none of them."""
    top_logprobs_num: int | Items[int] | None = None
    """Number of likeliest tokens that are told for each token."""
    token_ids_logprob: Items[int] | Items[Items[int]] | None = None
    """Tokens whose log probabilities are told for each token of the answer."""
    return_text_in_logprobs: bool = False
    """Log probabilities have the texts of tokens."""
    return_hidden_states: bool = False
    """The answers have the hidden states of their tokens, if the engine records them."""
    return_routed_experts: bool = False
    """The answers have the experts that their tokens went to, if the engine records them."""
    routed_experts_start_len: int = 0
    """The first token whose experts are returned."""
    stream: bool = False
    """The answer comes as server-sent events, each with the text so far."""

    @property
    def is_several(self) -> bool:
        """Whether the body has a list of prompts."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list)

    @property
    def wants_logprobs(self) -> bool:
        return bool(_same(self.return_logprob, "return_logprob"))

    @property
    def top(self) -> int:
        """Number of likeliest tokens that are told."""
        return int(_same(self.top_logprobs_num, "top_logprobs_num") or 0)

    @property
    def start(self) -> int:
        """The first token of the prompt that log probabilities are told of, or -1."""
        found = _same(self.logprob_start_len, "logprob_start_len")
        return -1 if found is None else int(found)

    @property
    def named(self) -> list[int] | None:
        """The tokens that log probabilities are told of by name."""
        found: Any = self.token_ids_logprob
        if found and isinstance(found[0], list):
            found = _same(found, "token_ids_logprob")
        return found or None

    def completion(self) -> dict[str, Any]:
        """The fields of a plain completion. Raises RequestError and ApiError."""
        if (self.text is None) == (self.input_ids is None):
            if self.text is None:
                raise missing("text")
            raise RequestError("give either text or input_ids, not both.", "text")
        fields = {"max_tokens": _MOST, **self._sampling()}
        fields |= {"prompt": self.text if self.input_ids is None else self.input_ids}
        fields |= {"stream": self.stream, "model": self.model}
        fields |= {name: getattr(self, name) for name in ("priority", "timeout", "cache_salt")}
        fields |= {name: True for name in _RECORDED if getattr(self, name)}
        if self.routed_experts_start_len:
            fields["routed_experts_prompt_start"] = self.routed_experts_start_len
        if self.wants_logprobs:
            fields["logprobs"] = self.top
            if self.named:
                fields["logprob_token_ids"] = self.named
        if self.wants_logprobs and self.start >= 0:
            fields["prompt_logprobs"] = self.top
        elif fields["max_tokens"] == 0:
            # A prompt is read without an answer for its log probabilities, as one piece.
            fields |= {"prompt_logprobs": 0, "stream": False}
        if self.start < -1:
            raise RequestError("logprob_start_len must be at least -1.", "logprob_start_len")
        return fields

    def _sampling(self) -> dict[str, Any]:
        params = _same(self.sampling_params, "sampling_params") or {}
        if wrong := [name for name in _OF_THE_BODY if params.get(name) is not None]:
            raise RequestError(
                f"{wrong[0]} is no sampling parameter: the body has it, or nothing does.",
                "sampling_params",
            )
        fields = {name: value for name, value in params.items() if value is not None}
        for theirs, ours in (("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens")):
            if theirs in fields:
                fields[ours] = fields.pop(theirs)
        for name in ("json_schema", "structural_tag"):
            if isinstance(text := fields.get(name), str):
                fields[name] = _read(text, name)
        if isinstance(tag := fields.pop("structural_tag", None), dict):
            if "response_format" in fields:
                raise RequestError(
                    "give either structural_tag or response_format, not both.", "structural_tag"
                )
            fields["response_format"] = {**tag, "type": "structural_tag"}
        elif tag is not None:
            raise RequestError("structural_tag must be an object, as a text.", "structural_tag")
        return fields


def _read(text: str, name: str) -> Any:
    """The JSON in a sampling parameter's text. Raises RequestError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"{name} must be JSON, as a text.", name) from None


def id_of(rid: str | list[str] | None, prompt: int, default: str) -> str:
    """The id of a prompt's request. `rid`: the body's."""
    if isinstance(rid, list):
        return rid[prompt] if prompt < len(rid) else default
    return rid or default


def _same(value: Any, name: str) -> Any:
    """A value, or what all items of a list are. Raises RequestError where they differ."""
    if not isinstance(value, list):
        return value
    if any(item != value[0] for item in value[1:]):
        raise RequestError(
            f"{name} must be the same for all prompts of a request: send the others in requests of "
            "their own.",
            name,
        )
    return value[0] if value else None
