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
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "qwen3_xml": "qwen3_coder",
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama3_pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "functiongemma": "gemma",
    "gemma4": "gemma",
    "qwen3": "think",
    "glm45": "think",
    "minimax_m2": "think",
    "seed_oss": "seed_think",
}
"""vLLM's names of parsers that have other names here, of tool calls and of reasoning."""
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
    if value not in ("mp", "uni", "auto", "ray"):
        raise ValueError("use mp, uni or ray, or an executor of a plugin: the option executor.")
    return {"executor": "ray"} if value == "ray" else {}


def pooler_config(value: Any) -> dict[str, Any]:
    """Converts the pooler config's fields to options."""
    value = parsed(value)
    fields = (
        value
        if isinstance(value, Mapping)
        else {name: getattr(value, name, None) for name in _POOLER}
    )
    stated = {name: value for name, value in fields.items() if value is not None}
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
    return lambda value: {} if asks_nothing(value) else {ours: _PARSERS.get(str(value), str(value))}


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
