"""From vLLM's values to ours: functions that give options in our names. A ValueError says what to
use in place of a value."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

_DTYPES = {"half": "float16", "float": "float32"}
_BACKENDS = {
    "torch_sdpa": "sdpa",
    "flex_attention": "flex",
    "cpu_attn": "cpu",
    "flash_attn_vllm_v1": "flash_attn",
    "triton_attn": "triton",
}
_TASKS: dict[str, dict[str, Any]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
    "token_embed": {"runner": "pooling", "convert": "embed"},
    "token_classify": {"runner": "pooling"},
    "plugin": {"runner": "pooling"},
}
_PARSERS = {
    "tool_call_parser": {
        "cohere_command3": "cohere",
        "cohere_command4": "cohere",
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "ernie45": "hermes",
        "functiongemma": "gemma",
        "gemma4": "gemma",
        "gigachat3": "gigachat",
        "glm45": "glm",
        "glm47": "glm",
        "granite-20b-fc": "granite_code",
        "granite4": "hermes",
        "hunyuan_a13b": "hunyuan",
        "hy_v3": "hunyuan_v3",
        "jamba": "hunyuan",
        "llama3_pythonic": "pythonic",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "mimo": "qwen3_coder",
        "minicpm5": "minicpm",
        "minimax_m2": "minimax",
        "openai": "harmony",
        "openai_gptoss": "harmony",
        "phi4_mini_json": "phi4_mini",
        "qwen": "hermes",
        "qwen3_xml": "qwen3_coder",
        "poolside_v1": "glm",
        "seed_oss": "seed",
        "solar_open2": "solar",
        "step3p5": "qwen3_coder",
        "xlam": "llama3_json",
    },
    "reasoning_parser": {
        "cohere_command3": "cohere_think",
        "cohere_command4": "cohere_think",
        "deepseek_v3": "think",
        "deepseek_v31": "think",
        "deepseek_v32": "think",
        "deepseek_v4": "think",
        "ernie45": "response_think",
        "gemma4": "gemma_think",
        "glm45": "think",
        "glm47": "think",
        "granite": "granite_think",
        "holo2": "think",
        "hunyuan_a13b": "answer_think",
        "hy_v3": "think",
        "kimi_k2": "think",
        "kimi_k3": "kimi_think",
        "minimax_m2": "think",
        "minimax_m3": "minimax_think",
        "mistral": "mistral_think",
        "nemotron_v3": "think",
        "olmo3": "think",
        "openai": "harmony",
        "openai_gptoss": "harmony",
        "qwen3": "think",
        "poolside_v1": "think",
        "seed_oss": "seed_think",
        "solar_open2": "solar_think",
        "step3": "think",
        "step3p5": "think",
    },
}
"""vLLM's names of parsers that have other names here, by the option."""
_GRAMMARS = {
    "auto": "auto",
    "guidance": "llguidance",
    "llguidance": "llguidance",
    "xgrammar": "xgrammar",
}
"""vLLM's names of what compiles grammars."""
_POOLER = {
    "pooling_type": "pooling_type",
    "seq_pooling_type": "pooling_type",
    "tok_pooling_type": "pooling_type",
    "normalize": "normalize",
    "activation": "use_activation",
    "use_activation": "use_activation",
    "softmax": "use_activation",
    "step_tag_id": "step_tag_id",
    "returned_token_ids": "returned_token_ids",
    "logit_bias": "logit_mean",
    "logit_mean": "logit_mean",
    "logit_sigma": "logit_sigma",
}
_CLASSIFIER = "ForSequenceClassification"
_DEFAULT_SHARE = 0.9


def asks_nothing(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    """Nothing is wanted by it: None, False, 0, "auto", what is empty, or one of `neutral`."""
    if isinstance(value, Mapping | list | tuple | set):
        return not value
    text = str(value).lower()
    return text in (
        "",
        "none",
        "false",
        "0",
        "0.0",
        "auto",
        "{}",
        "[]",
        *(str(value).lower() for value in neutral),
    )


def shown(value: Any) -> str:
    """A value in an error."""
    return reprlib.repr(value)


def parsed(text: Any) -> Any:
    """Value of a flag's text: a number, a boolean, a mapping or list in JSON, or the text
    itself."""
    if not isinstance(text, str):
        return text
    if text in ("None", "none", ""):
        return None
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def named(ours: str) -> Callable[[Any], dict[str, Any]]:
    """Converter for an option that is a name."""
    return lambda value: {ours: str(value)}


def when(ours: str, wanted: Any) -> Callable[[Any], dict[str, Any]]:
    """Converter for a switch: if it is on, `ours` is set to `wanted`."""
    return lambda value: {} if asks_nothing(value) else {ours: wanted}


def dtype(value: Any) -> dict[str, Any]:
    """A name, or torch's dtype."""
    name = str(value).removeprefix("torch.")
    return {"dtype": _DTYPES.get(name, name)}


def cache_dtype(value: Any) -> dict[str, Any]:
    """`kv_cache_dtype`."""
    known = {
        "fp8_e4m3": "fp8",
        "fp8_per_token_head": "fp8",
        "int8_per_token_head": "int8",
        **dict.fromkeys(("bfloat16", "float16", "float32"), "model"),
    }
    return {"kv_cache_dtype": known.get(value, value)}


def count(ours: str) -> Callable[[Any], dict[str, Any]]:
    """A number, or "32k" (thousands), "32K" (1024); -1 and auto: the default."""

    def convert(value: Any) -> dict[str, Any]:
        if str(value).lower() in ("auto", "-1", "none"):
            return {}
        text = str(value).strip()
        units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
        if text[-1:] in units:
            try:
                return {ours: int(float(text[:-1]) * units[text[-1]])}
            except ValueError:
                raise ValueError("write a number, such as 32768 or 32k.") from None
        return {ours: value}

    return convert


def memory(value: Any) -> dict[str, Any]:
    """Bytes, or "25G", "25GiB"."""
    return {} if asks_nothing(value) else {"kv_cache_memory": str(value)}


def memory_share(value: Any) -> dict[str, Any]:
    """vLLM's default is what `auto` does."""
    share = _number(value)
    if not 0 < share <= 1:
        raise ValueError("it is a share of memory, above 0 and at most 1.")
    return {} if share == _DEFAULT_SHARE else {"kv_cache_memory": str(float(share))}


def gibibytes(ours: str, none: str | None = None) -> Callable[[Any], dict[str, Any]]:
    """A number of GiB; 0 is `none`."""

    def convert(value: Any) -> dict[str, Any]:
        amount = _number(value)
        if amount <= 0:
            return {} if none is None else {ours: none}
        return {ours: f"{amount:g}GiB"}

    return convert


def limits(value: Any) -> dict[str, Any]:
    """{"image": 2} -> ["image=2"]; a mapping of a modality may hold "count"."""
    value = parsed(value)
    if not isinstance(value, Mapping):
        return {"limit_mm_per_prompt": value}
    counts = {
        name: item.get("count") if isinstance(item, Mapping) else item
        for name, item in value.items()
    }
    made = [f"{name}={number}" for name, number in counts.items() if number is not None]
    return {"limit_mm_per_prompt": made} if made else {}


def generation_config(value: Any) -> dict[str, Any]:
    """Converts the source of sampling defaults."""
    return {"generation_config": {"auto": "checkpoint", "vllm": "none"}.get(str(value), str(value))}


def attention_backend(value: Any) -> dict[str, Any]:
    """A name, in capitals, or a member of vLLM's enumeration."""
    name = str(getattr(value, "name", value)).lower()
    return {"attention_backend": _BACKENDS.get(name, name)}


def attention_config(value: Any) -> dict[str, Any]:
    """{"backend": ...}."""
    value = parsed(value)
    if not isinstance(value, Mapping) and not hasattr(value, "backend"):
        raise ValueError("it is a mapping with the key backend.")
    backend = value.get("backend") if isinstance(value, Mapping) else value.backend
    return {} if backend is None else attention_backend(backend)


def ignored_of_attention(value: Any) -> list[str]:
    """The other keys of attention_config: they change no result."""
    value = parsed(value)
    names = (
        [name for name, item in value.items() if name != "backend" and not asks_nothing(item)]
        if isinstance(value, Mapping)
        else []
    )
    return [
        f"attention_config: {name} has no effect: a backend's details are options of its plugin"
        for name in names
    ]


def prompt_embeds(value: Any) -> dict[str, Any]:
    """True, or False."""
    on = {"plugin_option": {"vllm_names": {"enable_prompt_embeds": True}}}
    return on if parsed(value) else {}


def task(value: Any) -> dict[str, Any]:
    """The runner type, and the pooling adapter."""
    if value not in _TASKS:
        raise ValueError(f"known: {', '.join(_TASKS)}. Use runner and convert.")
    return _TASKS[value]


def tokenizer_mode(value: Any) -> dict[str, Any]:
    """The renderer that has such a tokenizer."""
    if value in ("mistral", "harmony"):
        return {"renderer": value}
    if value not in ("auto", "hf", "fast"):
        raise ValueError("tokenizers are the fast ones. Use renderer, by name.")
    return {}


def executor(value: Any) -> dict[str, Any]:
    """Converts the executor's name. Executors on this machine are chosen by the number of
    workers."""
    if value not in ("mp", "uni", "auto", "ray", "external_launcher"):
        raise ValueError(
            "use mp, uni, ray or external_launcher, or a plugin's executor: the option executor."
        )
    return {"executor": value} if value in ("ray", "external_launcher") else {}


def model_impl(value: Any) -> dict[str, Any]:
    """vLLM's own classes are ours."""
    return {"model_impl": "auto" if value == "vllm" else value}


def hf_overrides(value: Any) -> dict[str, Any]:
    """Fields of config.json. is_matryoshka and those of a classifier made of the head's rows are
    options."""
    found = parsed(value)
    if not isinstance(found, Mapping):
        raise ValueError("it is a mapping of fields; functions are not taken.")
    fields = dict(found)
    made: dict[str, Any] = {"matryoshka": True} if fields.pop("is_matryoshka", False) else {}
    made |= _classifier_of_head(fields)
    return made | {"hf_overrides": json.dumps(fields)} if fields else made


def _classifier_of_head(fields: dict[str, Any]) -> dict[str, Any]:
    """Options of a classifier made of the head's rows. Their fields are taken out of `fields`, with
    the name of a class that vLLM converts the model to."""
    words = fields.pop("classifier_from_token", None)
    method = fields.pop("method", None)
    original = fields.pop("is_original_qwen3_reranker", False)
    if words is None:
        if method is not None or original:
            raise ValueError("method and is_original_qwen3_reranker need classifier_from_token.")
        return {}
    [name, *others] = fields.get("architectures") or [""]
    if name.endswith(_CLASSIFIER) and not others:
        del fields["architectures"]
    if method is None:
        method = "from_2_way_softmax" if original else "no_post_processing"
    return {
        "convert": "classify",
        "classifier_tokens": list(words),
        "classifier_method": method,
        # Prompts of pairs are those of the caller.
        "score_template": "pair",
    }


def override_generation_config(value: Any) -> dict[str, Any]:
    """Sampling defaults."""
    found = parsed(value)
    if not isinstance(found, Mapping):
        raise ValueError("it is a mapping of sampling parameters.")
    return {"override_generation_config": json.dumps(dict(found))} if found else {}


def max_logprobs(value: Any) -> dict[str, Any]:
    """Number of log probabilities per token; -1: any, up to the whole vocabulary."""
    found = parsed(value)
    return {"max_logprobs": 2**20 if found == -1 else found}


def pooler_config(value: Any) -> dict[str, Any]:
    """Converts the pooler config's fields to options."""
    value = parsed(value)
    fields = (
        value
        if isinstance(value, Mapping)
        else {name: getattr(value, name, None) for name in _POOLER}
    )
    ignored = ("enable_flash_late_interaction", "task")
    stated = {
        name: value for name, value in fields.items() if value is not None and name not in ignored
    }
    if unknown := stated.keys() - _POOLER.keys():
        raise ValueError(f"there is no {sorted(unknown)[0]!r}. Known: {', '.join(_POOLER)}.")
    return {_POOLER[name]: value for name, value in stated.items()}


def structured_outputs(value: Any) -> dict[str, Any]:
    """{"backend": ...}, or the backend."""
    found = parsed(value)
    fields = (
        dict(found) if isinstance(found, Mapping) else {"backend": getattr(found, "backend", found)}
    )
    backend = str(fields.pop("backend", "auto"))
    if others := sorted(name for name, value in fields.items() if not asks_nothing(value)):
        raise ValueError(f"{others[0]!r} is asked for by requests: structured_outputs.")
    if backend not in _GRAMMARS:
        raise ValueError(f"use one of {', '.join(_GRAMMARS)}.")
    return (
        {}
        if backend == "auto"
        else {"plugin_option": {"structured_output": {"backend": _GRAMMARS[backend]}}}
    )


def texts(ours: str) -> Callable[[Any], dict[str, Any]]:
    """Converter for a list of texts, or one in JSON."""

    def convert(value: Any) -> dict[str, Any]:
        found = parsed(value)
        return {ours: [found] if isinstance(found, str) else found}

    return convert


def middleware(value: Any) -> dict[str, Any]:
    """Converts one middleware or a list: "module.Class" -> "module:Class"."""
    found = [value] if isinstance(value, str) else list(value)
    return (
        {
            "middleware": [
                class_path if ":" in class_path else ":".join(class_path.rsplit(".", 1))
                for class_path in found
            ]
        }
        if found
        else {}
    )


def parser(ours: str) -> Callable[[Any], dict[str, Any]]:
    """A parser of answers, by vLLM's name."""
    return lambda value: (
        {} if asks_nothing(value) else {ours: _PARSERS[ours].get(str(value), str(value))}
    )


def log_level(value: Any) -> dict[str, Any]:
    """uvicorn's."""
    return {"log_level": "debug" if value == "trace" else value}


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("it is a number.") from None


def adapters(name: str) -> Callable[[Any], dict[str, Any]]:
    """Converter for an option of adapters."""
    return lambda value: {"plugin_option": {"lora": {name: parsed(value)}}}


def worker_extension(value: Any) -> dict[str, Any]:
    """The path of a class, module.Class, or the class."""
    path = f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else str(value)
    return {"plugin_option": {"rl": {"worker_extension_cls": path}}} if path else {}


def routed_experts(value: Any) -> dict[str, Any]:
    """True, or False."""
    return {"plugin_option": {"rl": {"routed_experts": "always"}}} if parsed(value) else {}


def adapters_on(value: Any) -> dict[str, Any]:
    """True, or False."""
    return adapters("enabled")(True) if parsed(value) else {}


def adapter_modules(value: Any) -> dict[str, Any]:
    """NAME=PATH, or JSON with name and path, or several of them."""
    modules = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        found = parsed(entry)
        if isinstance(found, Mapping):
            if not {"name", "path"} <= found.keys():
                raise ValueError("each needs a name and a path.")
            found = f"{found['name']}={found['path']}"
        modules.append(str(found))
    return adapters("modules")(modules)


def logits_processors(value: Any) -> dict[str, Any]:
    """Classes of vLLM's form, or their paths: MODULE:CLASS or MODULE.CLASS."""
    found = parsed(value)
    paths = []
    for processor in found if isinstance(found, list | tuple) else [found]:
        if isinstance(processor, type):
            path = f"{processor.__module__}:{processor.__qualname__}"
            if "<locals>" in path:
                raise ValueError(f"{path} is of a function: define it in a module.")
        elif isinstance(processor, str) and ("." in processor or ":" in processor):
            path = processor if ":" in processor else ":".join(processor.rsplit(".", 1))
        else:
            raise ValueError("give classes, or their paths, MODULE:CLASS.")
        paths.append(path)
    return {"plugin_option": {"vllm_names": {"logits_processors": paths}}} if paths else {}
