"""Prompts of embeddings, at the front: vLLM's `prompt_embeds`. Placeholder tokens stand for the
rows of a tensor, which the workers' half puts in the place of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from msgspec import Raw
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing import RequestHalf
from toolkit_lm.prompts import TokensPrompt, each_of

from toolkit_lm_vllm_names.arguments import PLACEHOLDER, embeds_enabled, read_embeds, single
from toolkit_lm_vllm_names.embeds_format import PARAM

_ROWS = 16
"""Rows of a cache key: prompts share the cached blocks of equal rows before the first unequal
group."""
_READ_PROMPTS = ("dry_multiplier", "no_repeat_ngram_size")
"""Parameters of plugins whose logits processors read a prompt's tokens."""


def is_enabled(config: VllmConfig) -> bool:
    """Whether the engine takes prompts of embeddings."""
    return embeds_enabled(config)


class EmbedsRequests(RequestHalf):
    """The front half: checks a prompt of embeddings, and keeps cached prefixes apart by the
    rows."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        self._config = config

    def prompt_of(self, params: SamplingParams) -> TokensPrompt | None:
        """Placeholder tokens of the embeddings in `params`; None: there are none. Raises
        RequestError."""
        text = single((params.extra_args or {}).get(PARAM))
        if text is None:
            return None
        embeds = read_embeds(text, self._config)
        return {"prompt_token_ids": [PLACEHOLDER] * embeds.num_tokens}

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        if not arguments:
            return None, []
        num_tokens = arguments["num_tokens"]
        if request.prompt_token_ids != [PLACEHOLDER] * num_tokens or request.features:
            raise RequestError(
                "prompt_embeds is a prompt by itself: leave out texts, tokens, media, suffix and "
                "truncate_prompt_tokens.",
                PARAM,
            )
        params = request.params
        _check(params)
        # The workers read the arguments, and nobody the text.
        rest = {name: value for name, value in (params.extra_args or {}).items() if name != PARAM}
        request.params = params.replace(extra_args=rest or None)
        data = arguments["data"]
        row = len(data) // num_tokens
        # Keys cover more than one token, so that no client's salt can equal them.
        kind = f"embeds {arguments['dtype']}"
        return None, [
            CacheKey(
                start,
                start + _ROWS,
                f"{kind} {sha256(data[start * row : (start + _ROWS) * row]).hexdigest()}",
            )
            for start in range(0, num_tokens, _ROWS)
        ]


def prompt_and_params(prompt: Any, params: SamplingParams) -> tuple[Any, SamplingParams]:
    """A prompt {"prompt_embeds": tensor} as placeholder tokens, and its parameters with the tensor.
    Other prompts pass. Raises RequestError."""
    if not isinstance(prompt, Mapping) or prompt.get(PARAM) is None:
        return prompt, params
    unknown = prompt.keys() - {PARAM, "cache_salt"}
    if unknown := {name for name in unknown if prompt[name] is not None}:
        raise RequestError(f"a prompt has prompt_embeds or {min(unknown)}, not both.", PARAM)
    from toolkit_lm_vllm_names.tensors import encoded

    text = encoded(prompt[PARAM])
    shape = prompt[PARAM].shape
    extra_args = {**(params.extra_args or {}), PARAM: text}
    return {"prompt_token_ids": [PLACEHOLDER] * int(shape[-2])}, params.replace(
        extra_args=extra_args
    )


def with_embeds(prompts: list[Any], params: Any) -> tuple[list[Any], Any]:
    """Prompts and their parameters, as `prompt_and_params` gives each of them. `params`: those of
    all prompts, or a list of one for each."""
    if not any(isinstance(prompt, Mapping) and PARAM in prompt for prompt in prompts):
        return prompts, params
    each = each_of(params, "sampling_params", len(prompts))
    pairs = [prompt_and_params(prompt, entry) for prompt, entry in zip(prompts, each, strict=True)]
    return [prompt for prompt, _ in pairs], [entry for _, entry in pairs]


def _check(params: SamplingParams) -> None:
    """Raises RequestError for parameters that read the tokens of a prompt, which are unknown."""
    if params.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs is not supported with prompt_embeds: a prompt of embeddings has no "
            "tokens.",
            "prompt_logprobs",
        )
    reads = ["repetition_penalty"] if params.repetition_penalty != 1 else []
    reads += [name for name in _READ_PROMPTS if (params.extra_args or {}).get(name)]
    if reads:
        raise RequestError(
            f"{reads[0]} reads the tokens of the prompt, which a prompt of embeddings has not: use "
            "presence_penalty or frequency_penalty.",
            reads[0],
        )
