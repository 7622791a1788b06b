"""Each option has an effect, is refused, or is told to have none, with the reason: nothing is
accepted and ignored."""

from __future__ import annotations

import ast
import inspect
import logging
from functools import cache
from pathlib import Path

import pytest
from toolkit_lm import LLM, AsyncLLM
from toolkit_lm.config import CompilationOptions, PoolerConfig, VllmConfig
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution.no_effect import RULES, without_effect, without_effect_offline
from toolkit_lm.resolution.resolution import resolve_configured
from toolkit_lm_cli import run
from toolkit_lm_poolers.options import _KINDS

ROOT = Path(__file__).parents[1]
OPTIONS = {o.name: o for o in VllmConfig.options()}
POOLS = {"convert": "embed"}

ALWAYS = {
    *(
        "model",
        "served_model_name",
        "dtype",
        "hf_overrides",
        "max_model_len",
        "trust_remote_code",
        "runner",
        "convert",
        "model_impl",
    ),
    *(
        "load_format",
        "quantization",
        "enable_prefix_caching",
        "max_num_seqs",
        "enable_chunked_prefill",
        "scheduling_policy",
    ),
    *(
        "engine_process",
        "step_timeout",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "nodes",
    ),
    *(
        "start_timeout",
        "executor",
        "device",
        "kernels",
        "optimization_level",
        "attention_backend",
        "renderer",
        "tokenizer",
    ),
    *("max_queued_requests", "max_queued_tokens", "plugins", "disable_plugins", "plugin_option"),
}
"""Options that do something whatever the others are, or name something that must be there."""
REFUSED = {
    "max_encoder_len": {"max_encoder_len": 8},
    "drafter": {"drafter": "nobody"},
    "enable_expert_parallel": {"enable_expert_parallel": True},
    "chat_template": {"chat_template": "{{ nothing", "renderer": "hf"},
    "extra_tasks": {"extra_tasks": ["embed"], **POOLS},
    "normalize": {"normalize": True},
    "matryoshka": {"matryoshka": True},
    "pooling_type": {"pooling_type": "MEAN"},
    "use_activation": {"use_activation": True},
    "step_tag_id": {"step_tag_id": 1},
    "returned_token_ids": {"returned_token_ids": [1]},
    "classifier_method": {"classifier_method": "from_2_way_softmax"},
    "classifier_tokens": {"classifier_tokens": ["a", "b"]},
    "score_template": {"score_template": "x"},
    "logit_mean": {"logit_mean": 1.0},
    "logit_sigma": {"logit_sigma": 1.0},
}
"""Options that an engine that can do nothing with them refuses, with options of which it is one."""
TOLD = {
    "revision": ({"revision": "main"}, None),
    "verify_fallback": (
        {"verify_fallback": False},
        {"verify_fallback": False, "model_impl": "transformers"},
    ),
    "generation_config": ({"generation_config": "none", **POOLS}, {"generation_config": "none"}),
    "override_generation_config": (
        {"override_generation_config": {"top_p": 0.5}, **POOLS},
        {"override_generation_config": {"top_p": 0.5}},
    ),
    "seed": ({"seed": 1, **POOLS}, {"seed": 1}),
    "quantization_skip": (
        {"quantization_skip": ["lm_head"]},
        {"quantization_skip": ["lm_head"], "quantization": "int8"},
    ),
    "quantization_override": (
        {"quantization_override": ["lm_head=int8"]},
        {"quantization_override": ["lm_head=int8"], "quantization": "int4"},
    ),
    "quantization_group_size": (
        {"quantization_group_size": 64},
        {"quantization_group_size": 64, "quantization": "int4"},
    ),
    "block_size": ({"block_size": 8, **POOLS}, {"block_size": 8}),
    "kv_cache_memory": (
        {"kv_cache_memory": "8MiB", "num_kv_blocks": 64},
        {"kv_cache_memory": "8MiB"},
    ),
    "kv_cache_dtype": ({"kv_cache_dtype": "int8", **POOLS}, {"kv_cache_dtype": "int8"}),
    "kv_cache_dtype_skip_layers": (
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"kv_cache_dtype_skip_layers": ["0"], "kv_cache_dtype": "int8"},
    ),
    "num_kv_blocks": ({"num_kv_blocks": 64, **POOLS}, {"num_kv_blocks": 64}),
    "encoder_cache_memory": (
        {"encoder_cache_memory": "8MiB"},
        {"encoder_cache_memory": "8MiB", "model": "tiny-vision"},
    ),
    "feature_cache_memory": (
        {"feature_cache_memory": "8MiB"},
        {"feature_cache_memory": "8MiB", "model": "tiny-vision"},
    ),
    "swap_memory": (
        {"swap_memory": "1MiB", "preemption_mode": "recompute"},
        {"swap_memory": "1MiB"},
    ),
    "preemption_mode": (
        {"preemption_mode": "recompute", **POOLS},
        {"preemption_mode": "recompute"},
    ),
    "max_num_batched_tokens": (
        {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    ),
    "overlap": (
        {"overlap": True, "drafter": "draft", "draft_budget": "all"},
        {"overlap": True, "drafter": "draft"},
    ),
    "step_time_target": (
        {"step_time_target": 1.0},
        {"step_time_target": 1.0, "scheduling_policy": "fair"},
    ),
    "draft_budget": ({"draft_budget": "all"}, {"draft_budget": "all", "drafter": "draft"}),
    "restart_engine": ({"restart_engine": 1}, {"restart_engine": 1, "engine_process": True}),
    "node_rank": ({"node_rank": 1}, None),
    "master": ({"master": "127.0.0.1:1"}, None),
    "launch_key_file": ({"launch_key_file": "key"}, None),
    "node_timeout": ({"node_timeout": 30.0}, None),
    "compile_cache": ({"compile_cache": False}, {"compile_cache": False, "optimization_level": 1}),
    "renderer_url": (
        {"renderer_url": ["http://127.0.0.1:1"], "renderer": "hf"},
        {"renderer_url": ["http://127.0.0.1:1"]},
    ),
    "limit_mm_per_prompt": (
        {"limit_mm_per_prompt": ["image=1"]},
        {"limit_mm_per_prompt": ["image=1"], "model": "tiny-vision"},
    ),
    "allowed_media_hosts": (
        {"allowed_media_hosts": ["a"]},
        {"allowed_media_hosts": ["a"], "model": "tiny-vision"},
    ),
    "max_media_bytes": ({"max_media_bytes": 9}, {"max_media_bytes": 9, "model": "tiny-vision"}),
    "max_media_pixels": ({"max_media_pixels": 9}, {"max_media_pixels": 9, "model": "tiny-vision"}),
    "max_media_frames": ({"max_media_frames": 9}, {"max_media_frames": 9, "model": "tiny-vision"}),
    "max_audio_seconds": (
        {"max_audio_seconds": 9.0},
        {"max_audio_seconds": 9.0, "model": "tiny-vision"},
    ),
    "max_n": ({"max_n": 3, **POOLS}, {"max_n": 3}),
    "max_logprobs": ({"max_logprobs": 3, **POOLS}, {"max_logprobs": 3}),
    "logprobs_mode": (
        {"logprobs_mode": "raw_logits", **POOLS},
        {"logprobs_mode": "raw_logits"},
    ),
    "compilation_config": ({"compilation_config": {"compile_sizes": [4]}}, None),
}
"""Options with which each does nothing, and with which it does something, where that is here."""
KEYS = {
    "backend": ("eager", 0, 1),
    "splitting_ops": ((), 0, 1),
    "compile_sizes": ([4], 1, 2),
    "compile_ranges": ([[4, 8]], 1, 2),
    "inductor_compile_config": ({"cpp.simdlen": 8}, 0, 1),
    "cudagraph_mode": ("full", 0, None),
    "cudagraph_capture_sizes": ([4], 1, None),
    "cudagraph_query_len": (3, 1, None),
    "cache_dir": ("elsewhere", 0, 1),
}
"""Keys of compilation_config: a value, a level at which it has no effect, and one at which it has
an effect on a CPU."""


class Draft:
    name = "draft"

    @staticmethod
    def add(drafters) -> None:
        drafters.add("draft", "nowhere:Draft")


def load() -> Plugins:
    from toolkit_lm.plugin import hookimpl

    plugin = Draft()
    plugin.toolkit_register_drafters = hookimpl(lambda drafters: Draft.add(drafters))
    return Plugins.load(extra=[plugin])


@cache
def plugins() -> Plugins:
    return load()


def told(options) -> dict[str, str]:
    asked = VllmConfig.make(**{"model": "tiny", **options})
    return {
        one.option: one.reason
        for one in without_effect(asked, resolve_configured(asked, plugins()), plugins())
    }


def test_each_option_is_one_of_these():
    """Whoever adds an option says here what it does, or when it does nothing."""
    kinds = [ALWAYS, {*REFUSED}, {*TOLD}]
    assert {*OPTIONS} == set().union(*kinds)
    assert len(OPTIONS) == sum(map(len, kinds)), "an option is of two kinds"
    assert {*RULES} == {*TOLD} - {"max_num_batched_tokens", "compilation_config"}
    assert {*KEYS} == {*CompilationOptions.__struct_fields__}


@cache
def attributes() -> frozenset[str]:
    """All names that follow a dot in the sources, but for those of the config itself."""
    found = set()
    for folder in ("core", "libs", "plugins", "contrib_models", "contrib_backends"):
        for file in (ROOT / folder).rglob("src/**/*.py"):
            if file.parent != ROOT / "core/src/toolkit_lm/config":
                nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(found)


READ_AS = {
    "encoder_cache_memory": "encoder_cache_embeds",
    "feature_cache_memory": "feature_cache_bytes",
    "compilation_config": "details",
    "scheduling_policy": "policy",
}
"""Options that are read by a property of their section."""
BY_NAME = {
    "normalize",
    "use_activation",
    "step_tag_id",
    "returned_token_ids",
    "classifier_method",
    "classifier_tokens",
    "score_template",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_read_somewhere(name):
    assert READ_AS.get(name, name) in attributes() or name in BY_NAME


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_cannot_do_is_refused(name):
    with pytest.raises(ToolkitError, match=f"{name}|{name.replace('_', ' ')}"):
        LLM("tiny", max_model_len=64, **REFUSED[name])


@pytest.mark.parametrize("name", TOLD)
def test_what_has_no_effect_is_told_with_the_reason(name):
    without, within = TOLD[name]
    found = told(without)
    assert [option for option in found if option.partition(".")[0] == name], found
    assert within is None or name not in told(within)


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({}, True),
        ({"executor": "in_process"}, True),
        ({"engine_process": True}, False),
        ({"executor": "mp"}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"pipeline_parallel_size": 2}, False),
        ({"nodes": 2, "tensor_parallel_size": 2}, False),
        ({"data_parallel_size": 2}, False),
    ],
)
def test_start_timeout_does_nothing_where_no_other_process_starts(options, is_told):
    """The server holds requests by it, whatever the engine is: LLM alone tells."""
    config = VllmConfig.make(model="tiny", start_timeout=5.0, **options)
    assert ("start_timeout" in [one.option for one in without_effect_offline(config)]) is is_told
    asked = {"start_timeout": 5.0, "num_kv_blocks": 64, **options}
    if options.get("nodes", 1) == 1:
        assert "start_timeout" not in told(asked)


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_compilation_config(key):
    value, idle, working = KEYS[key]
    name = f"compilation_config.{key}"
    assert name in told(
        {"optimization_level": idle, "compilation_config": {key: value}, "device": "cpu"}
    )
    if working is not None:
        assert name not in told(
            {"optimization_level": working, "compilation_config": {key: value}, "device": "cpu"}
        )


def test_usual_options_are_told_nothing_of():
    for options in (
        {},
        {"max_num_seqs": 4, "num_kv_blocks": 64},
        {"model": "tiny-vision", "max_media_pixels": 9},
        POOLS,
    ):
        assert told(options) == {}


def test_the_start_and_explain_say_so(capsys, caplog):
    with (
        caplog.at_level(logging.WARNING),
        LLM("tiny", compilation_config={"compile_sizes": [1]}, seed=1, restart_engine=2),
    ):
        pass
    assert (
        "option 'compilation_config.compile_sizes' has no effect: nothing is compiled or "
        "captured at optimization_level 0."
    ) in caplog.text
    assert "option 'restart_engine' has no effect: it is for AsyncLLM and the server" in caplog.text
    assert "'seed'" not in caplog.text
    assert (
        run(
            [
                "explain",
                "tiny",
                "--compilation-config",
                '{"compile_sizes": [1]}',
                "--revision",
                "main",
            ]
        )
        == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "no effect revision: MODEL 'tiny' is here, and not on a hub "
        "compilation_config.compile_sizes: nothing is compiled"
    ) in shown


def test_a_misspelt_keyword_of_chat_is_told_the_right_one():
    messages = [{"role": "user", "content": "a"}]
    with LLM("tiny", max_model_len=64) as llm:
        for name in ("cache_salt", "use_tqdm", "progress"):
            with pytest.raises(
                TypeError, match=rf"LLM\.chat\(\) takes no '{name}_'\. Did you mean '{name}'"
            ):
                llm.chat(messages, **{f"{name}_": 1})
        with pytest.raises(RequestError, match=r"takes no option 'tools_'\. Did you mean 'tools'"):
            llm.chat(messages, tools_=[1])


@pytest.mark.anyio
async def test_a_misspelt_keyword_of_async_llm_is_told_the_right_one():
    async with AsyncLLM(
        VllmConfig.make(model="tiny", convert="embed", engine_process=False)
    ) as llm:
        with pytest.raises(RequestError, match=r"unknown option 'task'\. Known: .*pooling_task"):
            await llm.encode("a", task="embed")


METHODS = ("generate", "encode", "embed", "classify", "reward", "score", "rerank")


@pytest.mark.parametrize("method", METHODS)
def test_a_misspelt_keyword_is_told_the_right_one(method):
    """Each that a method takes is in the list of those that it takes."""
    call = getattr(LLM, method)
    own = [
        one.name
        for one in inspect.signature(call).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    ]
    with LLM("tiny", max_model_len=64) as llm:
        for name in own:
            with pytest.raises(TypeError, match=rf"takes no '{name}_'\. Did you mean '{name}'"):
                getattr(llm, method)(
                    *["a"] * (2 if method in ("score", "rerank") else 1), **{f"{name}_": 1}
                )
        if method == "encode":
            with pytest.raises(TypeError, match=r"takes no 'task'\. .*pooling_task"):
                llm.encode("a", task="embed")
        with pytest.raises(
            RequestError,
            match=r"no key 'prompts'\. Known: prompt, prompt_token_ids, multi_modal_data",
        ):
            llm.generate({"prompts": "a"})


def test_each_option_of_poolers_is_refused_by_some_models():
    """One that is not in the table would be ignored by models to which it means nothing."""
    assert {*_KINDS} == {*PoolerConfig.__struct_fields__}
