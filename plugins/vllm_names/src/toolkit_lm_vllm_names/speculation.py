"""vLLM's speculative_config: its methods are drafters here, and its keys options of the plugin
`drafters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.errors import nearest

from toolkit_lm_vllm_names.values import asks_nothing, parsed, shown

METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "suffix": "suffix",
    "draft_model": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "mtp",
    **dict.fromkeys(
        ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"
    ),
}
"""Drafters by vLLM's methods."""
REFUSED_METHODS = dict.fromkeys(
    ("medusa", "mlp_speculator", "p_eagle", "peagle", "pard", "dflash", "dspark"),
    "its heads are not built. Use eagle, mtp or draft_model with weights, ngram or suffix without",
)
"""Methods that are not built, and what to use."""
_OPTIONS = (
    *("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model", "quantization"),
    *(
        f"suffix_decoding_{name}"
        for name in ("max_spec_factor", "min_token_prob", "max_tree_depth")
    ),
)
"""Keys that are options of the plugin under the same names."""
NO_EFFECT = {
    "suffix_decoding_max_cached_requests": "finished outputs have a limit of memory: "
    "drafters.suffix_memory",
    "rejection_sample_method": "the tokens are always those without drafts",
    "draft_sample_method": "drafts are sampled with the random numbers of the tokens",
    "disable_by_batch_size": "each step takes as many drafts as fit",
    "num_speculative_tokens_per_batch_size": "each step takes as many drafts as fit",
    "disable_padded_drafter_batch": "batches are not padded",
    "disable_logprobs": "log probabilities are those without drafts",
    "enforce_eager": "the drafter is compiled as the target is, or not at all",
    "max_model_len": "the drafter has the length of the target",
    "attention_backend": "the drafter has the target's",
    "moe_backend": "the drafter has the target's kernels",
    "draft_tensor_parallel_size": "the drafter is on each rank of the target",
}
"""Keys that change no token and have no part here, and why."""
_REFUSED = {
    "speculative_token_tree": "drafts are chains",
    "parallel_drafting": "drafts come one after the other",
    "use_heterogeneous_vocab": "a draft model has the target's vocabulary",
    "synthetic_acceptance_rate": "drafts are accepted if they are sampled",
    "synthetic_acceptance_rates": "drafts are accepted if they are sampled",
    "revision": "download it, and give its folder as model",
    "code_revision": "no code of a checkpoint runs",
    "draft_load_config": "load_format is that of the target",
}


def speculative_config(value: Any) -> dict[str, Any]:
    """A mapping, or its JSON. `method` may name several, for a chain of drafters."""
    keys = {key: item for key, item in _mapping(value).items() if item is not None}
    known = ("method", *_OPTIONS, *NO_EFFECT, *_REFUSED)
    for key, item in keys.items():
        if key not in known:
            raise ValueError(f"it has no key {key!r}. {nearest(key, known)}")
        if key in _REFUSED and not asks_nothing(item):
            raise ValueError(f"{key!r}: {_REFUSED[key]}.")
    if not keys:
        return {}
    options = {key: keys[key] for key in _OPTIONS if key in keys}
    drafters = _drafters(keys.get("method"), options.get("model"))
    if str(options.get("model")) in METHODS:
        # vLLM's older form: the method in place of a model.
        del options["model"]
    if keys.get("suffix_decoding_max_cached_requests") == 0:
        options["suffix_memory"] = "0"
    made: dict[str, Any] = {"drafter": drafters}
    return made | {"plugin_option": {"drafters": options}} if options else made


def speculative_model(value: Any) -> dict[str, Any]:
    """vLLM's older option: a model, or "[ngram]"."""
    return speculative_config({"model": value})


def drafters_option(name: str) -> Any:
    """Converter for an older option that is one of the plugin's."""
    return lambda value: {"plugin_option": {"drafters": {name: parsed(value)}}}


def without_effect(value: Any) -> list[str]:
    """The keys of a value that change nothing, with the reasons."""
    value = parsed(value)
    return [
        f"speculative_config: {key} has no effect: {NO_EFFECT[key]}"
        for key, item in (value.items() if isinstance(value, Mapping) else ())
        if key in NO_EFFECT and not asks_nothing(item)
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    value = parsed(value)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            'it is a mapping, or JSON, such as {"method": "ngram", "num_speculative_tokens": 4}.'
        )
    return value


def _drafters(method: Any, model: Any) -> list[str]:
    """Names of the drafters. Without a method, the model tells it, as in vLLM."""
    if method is None:
        if model is None:
            raise ValueError(f"it has no method. Known: {', '.join(METHODS)}.")
        if model in METHODS:
            method = model
        else:
            method = "eagle" if "eagle" in str(model) else "draft_model"
    names = method if isinstance(method, list | tuple) else str(method).split(",")
    return list(dict.fromkeys(_drafter(str(name).strip().lower()) for name in names))


def _drafter(method: str) -> str:
    if method in REFUSED_METHODS:
        raise ValueError(f"method {method!r}: {REFUSED_METHODS[method]}.")
    if method not in METHODS and not method.endswith("_mtp"):
        raise ValueError(f"there is no method {shown(method)}. {nearest(method, METHODS)}")
    return METHODS.get(method, "mtp")
