"""The table of vLLM's names: it names options that exist, translates values, and is what
docs/vllm.md says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shlex
from pathlib import Path

import pytest
import torch
from toolkit_lm import LLM
from toolkit_lm.config import CompilationOptions, VllmConfig, options_of
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_vllm_names.flags import flags_of, translate_flags
from toolkit_lm_vllm_names.migrate import migrate
from toolkit_lm_vllm_names.table import SHORT_FLAGS, TABLE, compilation_options, translate

DOCS = Path(__file__).parents[3] / "docs"
OURS = {o.name for o in VllmConfig.options()} | {o.name for o in options_of(ServerOptions)}

TRANSLATED = [
    ({"dtype": "half"}, {"dtype": "float16"}),
    ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
    ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory": "0.5"}),
    ({"gpu_memory_utilization": 0.9}, {}),
    ({"kv_cache_memory_bytes": 2**30}, {"kv_cache_memory": "1073741824"}),
    ({"kv_cache_memory_bytes": "2GiB"}, {"kv_cache_memory": "2GiB"}),
    ({"swap_space": 4}, {"swap_memory": "4GiB"}),
    ({"swap_space": 0}, {}),
    ({"num_gpu_blocks_override": 64}, {"num_kv_blocks": 64}),
    ({"skip_tokenizer_init": True}, {"renderer": "tokens"}),
    ({"skip_tokenizer_init": False}, {}),
    ({"tokenizer_mode": "auto"}, {}),
    ({"tokenizer_mode": "mistral"}, {"renderer": "mistral"}),
    ({"max_model_len": "32k"}, {"max_model_len": 32000}),
    ({"max_model_len": "2K"}, {"max_model_len": 2048}),
    ({"max_model_len": -1}, {}),
    (
        {"limit_mm_per_prompt": {"image": 2, "video": {"count": 1}}},
        {"limit_mm_per_prompt": ["image=2", "video=1"]},
    ),
    ({"limit_mm_per_prompt": '{"image": 2}'}, {"limit_mm_per_prompt": ["image=2"]}),
    ({"limit_mm_per_prompt": {}}, {}),
    ({"generation_config": "vllm"}, {"generation_config": "none"}),
    ({"attention_backend": "FLASH_ATTN"}, {"attention_backend": "flash_attn"}),
    ({"attention_config": {"backend": "TORCH_SDPA"}}, {"attention_backend": "sdpa"}),
    ({"attention_backend": "TRITON_ATTN"}, {"attention_backend": "triton"}),
    (
        {"pooler_config": {"pooling_type": "MEAN", "softmax": True}},
        {"pooling_type": "MEAN", "use_activation": True},
    ),
    ({"pooler_config": '{"normalize": false}'}, {"normalize": False}),
    ({"structured_outputs_config": {"backend": "auto"}}, {}),
    ({"kv_events_config": {"enable_kv_cache_events": False, "endpoint": "tcp://*:1"}}, {}),
    ({"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}, {}),
    (
        {"kv_events_config": '{"enable_kv_cache_events": true, "publisher": "zmq", "hwm": 5}'},
        {"plugin_option": {"kv_events": {"enabled": True, "hwm": 5}}},
    ),
    (
        {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:1"}},
        {"plugin_option": {"kv_events": {"enabled": True, "endpoint": "tcp://*:1"}}},
    ),
    (
        {"guided_decoding_backend": "guidance"},
        {"plugin_option": {"structured_output": {"backend": "llguidance"}}},
    ),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"drafter": ["ngram"], "plugin_option": {"drafters": {"num_speculative_tokens": 3}}},
    ),
    (
        {"speculative_config": '{"method": "suffix", "suffix_decoding_max_cached_requests": 0}'},
        {"drafter": ["suffix"], "plugin_option": {"drafters": {"suffix_memory": "0"}}},
    ),
    ({"speculative_config": {"method": ["ngram", "suffix"]}}, {"drafter": ["ngram", "suffix"]}),
    ({"speculative_config": {"method": "glm4_moe_mtp", "model": None}}, {"drafter": ["mtp"]}),
    (
        {"speculative_config": {"model": "x/a-eagle3-head", "method": "eagle3"}},
        {"drafter": ["eagle"], "plugin_option": {"drafters": {"model": "x/a-eagle3-head"}}},
    ),
    (
        {"speculative_config": {"model": "small"}},
        {"drafter": ["draft_model"], "plugin_option": {"drafters": {"model": "small"}}},
    ),
    (
        {
            "speculative_model": "[ngram]",
            "num_speculative_tokens": "5",
            "ngram_prompt_lookup_max": 4,
            "plugin_option": ["cpu.x=1"],
        },
        {
            "drafter": ["ngram"],
            "plugin_option": [
                "drafters.num_speculative_tokens=5",
                "drafters.prompt_lookup_max=4",
                "cpu.x=1",
            ],
        },
    ),
    ({"speculative_config": None}, {}),
    ({"task": "embed"}, {"runner": "pooling", "convert": "embed"}),
    ({"async_scheduling": True}, {"overlap": True}),
    ({"data_parallel_size": 2}, {"data_parallel_size": 2}),
    ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
    ({"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "model"}),
    ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
    (
        {"tool_call_parser": "llama4_json", "reasoning_parser": "qwen3"},
        {"tool_call_parser": "llama3_json", "reasoning_parser": "think"},
    ),
    ({"api_key": ["one", "two"]}, {"api_key": ["one", "two"]}),
    ({"allowed_origins": '["https://a.example"]'}, {"allowed_origins": ["https://a.example"]}),
    ({"allowed_methods": "GET"}, {"allowed_methods": ["GET"]}),
    ({"middleware": "package.module.Class"}, {"middleware": ["package.module:Class"]}),
    (
        {
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": "64",
            "max_cpu_loras": 5,
            "lora_modules": ["a=x", '{"name": "b", "path": "y", "base_model_name": "c"}'],
            "structured_outputs_config": {"backend": "xgrammar"},
        },
        {
            "plugin_option": {
                "lora": {
                    "enabled": True,
                    "max_adapters": 2,
                    "max_rank": 64,
                    "max_host_adapters": 5,
                    "modules": ["a=x", "b=y"],
                },
                "structured_output": {"backend": "xgrammar"},
            }
        },
    ),
    (
        {
            "data_parallel_size_local": 1,
            "cpu_offload_gb": 0,
            "enable_lora": False,
            "hf_overrides": {},
            "config_format": "hf",
        },
        {},
    ),
    (
        {
            "compilation_config": {
                "mode": 3,
                "compile_sizes": [1],
                "cudagraph_num_of_warmups": 1,
                "cudagraph_capture_sizes": None,
            }
        },
        {"optimization_level": 2, "compilation_config": '{"compile_sizes": [1]}'},
    ),
    (
        {
            "compilation_config": {
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": [1, 8],
            }
        },
        {
            "compilation_config": (
                '{"cudagraph_mode": "full_and_piecewise", "cudagraph_capture_sizes": [1, 8]}'
            )
        },
    ),
    ({"optimization_level": 2}, {"optimization_level": 2}),
    ({"enforce_eager": True, "disable_log_stats": True, "max_seq_len_to_capture": 8192}, {}),
    ({"enforce_eager": True, "compilation_config": 3}, {"optimization_level": 0}),
    ({"optimization_level": 3, "enforce_eager": True}, {"optimization_level": 0}),
    ({"compilation_config": 3}, {"optimization_level": 2}),
    ({"compilation_config": "3"}, {"optimization_level": 2}),
    ({"compilation_config": {"level": 3}}, {"optimization_level": 2}),
    ({"compilation_config": {"mode": "CompilationMode.VLLM_COMPILE"}}, {"optimization_level": 2}),
    ({"compilation_config": {"mode": "none"}}, {"optimization_level": 0}),
    ({"compilation_config": '{"mode": 1}'}, {"optimization_level": 1}),
    ({"optimization_level": 1, "compilation_config": {"mode": 3}}, {"optimization_level": 1}),
    ({"compilation_config": {"mode": 3}, "optimization_level": 1}, {"optimization_level": 1}),
    (
        {"compilation_config": {"full_cuda_graph": True}},
        {"compilation_config": '{"cudagraph_mode": "full"}'},
    ),
    (
        {"compilation_config": {"use_cudagraph": True}},
        {"compilation_config": '{"cudagraph_mode": "piecewise"}'},
    ),
    (
        {"compilation_config": {"use_cudagraph": False}},
        {"compilation_config": '{"cudagraph_mode": "none"}'},
    ),
    (
        {"compilation_config": {"use_inductor": False}},
        {"compilation_config": '{"backend": "eager"}'},
    ),
    ({"compilation_config": {"use_inductor": True, "backend": ""}}, {}),
    (
        {"cudagraph_capture_sizes": [1, 2]},
        {"compilation_config": '{"cudagraph_capture_sizes": [1, 2]}'},
    ),
    (
        {"cudagraph_capture_sizes": "[1, 2]", "compilation_config": {"cudagraph_mode": "FULL"}},
        {"compilation_config": '{"cudagraph_mode": "full", "cudagraph_capture_sizes": [1, 2]}'},
    ),
    ({"distributed_executor_backend": "ray"}, {"executor": "ray"}),
    ({"hf_overrides": {"is_matryoshka": True}}, {"matryoshka": True}),
    ({"hf_overrides": '{"a": {"b": 1}}'}, {"hf_overrides": '{"a": {"b": 1}}'}),
    (
        {"override_generation_config": {"top_p": 0.5}},
        {"override_generation_config": '{"top_p": 0.5}'},
    ),
    ({"distributed_executor_backend": "mp"}, {}),
    ({"nobody_has_it": 1, "block_size": 8}, {"nobody_has_it": 1, "block_size": 8}),
    ({"gpu_memory_utilization": 0.5, "kv_cache_memory": "1GiB"}, {"kv_cache_memory": "1GiB"}),
]
REFUSED = [
    (
        {"enable_lora_bias": True},
        r"'enable_lora_bias' cannot be True here: adapters .* by requests",
    ),
    ({"lora_modules": ['{"name": "a"}']}, "each needs a name and a path"),
    ({"data_parallel_size_local": 2}, "data_parallel_size"),
    ({"cpu_offload_gb": 1}, "stay on their device"),
    ({"rope_theta": 1.0}, "hf_overrides"),
    ({"hf_overrides": print}, "functions are not taken"),
    ({"override_generation_config": 3}, "a mapping of sampling parameters"),
    ({"logits_processors": ["nothing"]}, "give classes, or their paths"),
    ({"hf_config_path": "elsewhere"}, "config.json"),
    ({"config_format": "gguf"}, "known: auto, hf, mistral"),
    ({"reasoning_config": {"reasoning_start_str": "<think>"}}, "reasoning_parser"),
    ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
    ({"tokenizer_mode": "slow"}, "Use renderer"),
    ({"pooler_config": {"dimensions": 3}}, "no 'dimensions'"),
    ({"structured_outputs_config": {"backend": "outlines"}}, "use one of auto, guidance"),
    ({"structured_outputs_config": {"disable_any_whitespace": True}}, "asked for by requests"),
    ({"speculative_config": {"method": "medusa"}}, "'medusa': its heads are not built. Use eagle"),
    ({"speculative_config": {"method": "ngrams"}}, r"no method 'ngrams'\. Did you mean 'ngram'"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup": 3}}, "Did you mean 'prompt_loo"),
    ({"speculative_config": {"num_speculative_tokens": 3}}, "it has no method. Known: ngram"),
    ({"speculative_config": "ngram"}, "a mapping, or JSON, such as"),
    (
        {"speculative_config": {"method": "mtp", "parallel_drafting": True}},
        "drafts come one after the other",
    ),
    ({"max_model_len": "longk"}, "such as 32768 or 32k"),
    ({"compilation_config": 7}, "a mode is one of 0, 1, 2, 3 or NONE"),
    ({"compilation_config": {"modus": 3}}, "it has no key 'modus'. Known: backend, .*level"),
    (
        {"compilation_config": {"max_cudagraph_capture_size": 64}},
        "list the sizes: cudagraph_capture_sizes",
    ),
    ({"compilation_config": {"debug_dump_path": "/tmp"}}, "nothing is dumped"),
    ({"max_cudagraph_capture_size": 64}, "list the sizes"),
    ({"distributed_executor_backend": "torchrun"}, "use mp, uni, ray or external_launcher"),
]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"use_cudagraph": True, "full_cuda_graph": True},
            {"compilation_config": '{"cudagraph_mode": "full"}'},
        ),
        (
            {"use_cudagraph": False, "full_cuda_graph": True},
            {"compilation_config": '{"cudagraph_mode": "full"}'},
        ),
        (
            {"use_cudagraph": True, "full_cuda_graph": False},
            {"compilation_config": '{"cudagraph_mode": "piecewise"}'},
        ),
        (
            {"use_cudagraph": True, "full_cuda_graph": True, "cudagraph_mode": "FULL_DECODE_ONLY"},
            {"compilation_config": '{"cudagraph_mode": "full_decode_only"}'},
        ),
        ({"mode": 3, "level": 1}, {"optimization_level": 2}),
        ({"mode": 0, "level": 3}, {"optimization_level": 0}),
        (
            {"use_inductor": False, "backend": "inductor"},
            {"compilation_config": '{"backend": "inductor"}'},
        ),
        (
            {"level": 3, "use_inductor": False, "use_cudagraph": True, "full_cuda_graph": True},
            {
                "optimization_level": 2,
                "compilation_config": '{"backend": "eager", "cudagraph_mode": "full"}',
            },
        ),
    ],
)
def test_keys_of_compilation_config_count_in_a_stated_order(keys, expected):
    """Whichever order they are given in, together, or flag by flag."""
    for pairs in itertools.permutations(keys.items()):
        assert translate({"compilation_config": dict(pairs)}) == expected
        assert (
            compilation_options([("compilation_config", {key: value}) for key, value in pairs])
            == expected
        )


def test_values_of_one_key_count_together():
    given = [("compilation_config", {"inductor_compile_config": {name: 1}}) for name in ("a", "b")]
    assert compilation_options(given) == {
        "compilation_config": '{"inductor_compile_config": {"a": 1, "b": 1}}'
    }
    both = {"use_cudagraph": True, "compilation_config": {"full_cuda_graph": True}}
    assert (
        translate(both)
        == translate(dict(reversed(both.items())))
        == {"compilation_config": '{"cudagraph_mode": "full"}'}
    )


@pytest.mark.parametrize(
    ("options", "has_effect"),
    [
        ({}, False),
        ({"optimization_level": 0}, False),
        ({"compilation_config": {"mode": 0}}, False),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, False),
        ({"optimization_level": 2}, True),
        ({"compilation_config": 3}, True),
        ({"compilation_config": {"level": 3}}, True),
    ],
)
def test_enforce_eager_is_said_to_do_nothing_only_where_it_does_nothing(
    options, has_effect, caplog
):
    for given in ({"enforce_eager": True, **options}, {**options, "enforce_eager": True}):
        caplog.clear()
        without = translate(options)
        made = translate(given)
        assert (made != without) is has_effect
        assert ("enforce_eager has no effect" in caplog.text) is not has_effect
        caplog.clear()
        words = [
            f"--{name.replace('_', '-')}={json.dumps(value)}"
            for name, value in given.items()
            if name != "enforce_eager"
        ]
        words.append("--enforce-eager")
        assert translate_flags(words, []) == flags_of(made)
        assert ("enforce_eager has no effect" in caplog.text) is not has_effect
        needless = migrate(shlex.join(["vllm", "serve", "tiny", *words])).needless
        assert any(row.startswith("--enforce-eager") for row in needless) is not has_effect


def test_each_row_names_options_that_exist():
    for row in TABLE.values():
        ours = [name for name in row.ours.split(", ") if name not in ("", "...")]
        assert [name for name in ours if name not in OURS] == [], row.name
        assert bool(ours) == (row.kind in ("same", "renamed")), row.name
        assert row.note or row.kind in ("same", "renamed"), row.name
    assert {*SHORT_FLAGS.values()} <= {*TABLE}


def test_a_name_of_ours_is_the_same_in_the_table():
    """Else the table would take it away from its users."""
    assert [row.name for row in TABLE.values() if row.name in OURS and row.ours != row.name] == []


@pytest.mark.parametrize(("given", "expected"), TRANSLATED, ids=str)
def test_translation(given, expected):
    assert translate(given) == expected


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_none_asks_for_nothing(row):
    assert row.translate(None) == {}


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_what_cannot_be_had_is_refused_with_what_to_use(given, message):
    with pytest.raises(ConfigError, match=message):
        translate(given)


def test_the_page_has_the_table():
    spec = importlib.util.spec_from_file_location(
        "generate_vllm_names", DOCS / "generate_vllm_names.py"
    )
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (DOCS / "vllm.md").read_text(encoding="utf-8") == generator.page(), (
        "run python docs/generate_vllm_names.py"
    )


KEYS_OF_VLLM = (
    *(
        "mode",
        "level",
        "debug_dump_path",
        "cache_dir",
        "compile_cache_save_format",
        "backend",
        "custom_ops",
        "splitting_ops",
    ),
    *(
        "compile_mm_encoder",
        "cudagraph_mm_encoder",
        "use_inductor",
        "compile_sizes",
        "compile_ranges_endpoints",
    ),
    *(
        "compile_ranges_split_points",
        "inductor_compile_config",
        "inductor_passes",
        "cudagraph_mode",
        "use_cudagraph",
    ),
    *(
        "cudagraph_num_of_warmups",
        "cudagraph_capture_sizes",
        "cudagraph_copy_inputs",
        "cudagraph_specialize_lora",
    ),
    *(
        "full_cuda_graph",
        "use_inductor_graph_partition",
        "pass_config",
        "max_cudagraph_capture_size",
        "max_capture_size",
    ),
    *(
        "dynamic_shapes_config",
        "local_cache_dir",
        "bs_to_padded_graph_size",
        "fast_moe_cold_start",
        "use_aot_compile",
    ),
)
"""Fields of vLLM's CompilationConfig in the versions of the last two years."""
EXAMPLES = {
    "backend": "eager",
    "splitting_ops": [],
    "compile_sizes": [4],
    "compile_ranges": [[4, 8]],
    "inductor_compile_config": {"cpp.simdlen": 8},
    "cudagraph_mode": "full",
    "cudagraph_capture_sizes": [4],
    "cudagraph_query_len": 3,
    "cache_dir": "elsewhere",
    "use_inductor": False,
}
"""Values other than the default, of keys that do not take a number."""


@pytest.mark.parametrize("key", sorted({*KEYS_OF_VLLM, *CompilationOptions.__struct_fields__}))
def test_each_key_of_compilation_config_has_an_effect_or_is_refused_or_told(key, caplog):
    """The next key of ours, or of vLLM's, is one of these, too."""
    value = {"compilation_config": {key: EXAMPLES.get(key, 3)}}
    try:
        made = translate(value)
    except ConfigError as error:
        assert key in str(error)
        return
    changed = VllmConfig.make(**made).compilation != VllmConfig.make().compilation
    assert changed or f"compilation_config: {key} has no effect: " in caplog.text


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_each_name_of_vllms_has_an_effect_or_is_refused_or_told(row, caplog):
    """Values that ask for something."""
    told = []
    for value in (
        True,
        7,
        "something",
        ["something"],
        {"image": 7},
        {"backend": "x", "more": 1},
        "embed",
        "ray",
        "mistral",
        "xgrammar",
    ):
        caplog.clear()
        try:
            made = translate({row.name: value})
        except (ConfigError, TypeError, ValueError):
            made = {"refused": True}
        told.append(bool(made) or f"{row.name} has no effect" in caplog.text)
    assert any(told)
    if row.kind == "free":
        assert all(told)


class TestLLM:
    def test_a_mapping_needs_no_other_distribution(self):
        options = {"compilation_config": {"compile_sizes": [1, 8]}, "optimization_level": 0}
        with LLM("tiny", disable_plugins=["vllm_names"], **options) as llm:
            assert llm.config.compilation.details.compile_sizes == (1, 8)
        with pytest.raises(
            ConfigError, match=r"unknown field 'mode'.*Keys: backend, .*compile_sizes"
        ):
            LLM("tiny", disable_plugins=["vllm_names"], compilation_config={"mode": 3})

    @pytest.mark.parametrize("given", [0, {"level": 0}, {"mode": 0}, {"full_cuda_graph": True}])
    def test_a_mode_is_a_level(self, given):
        with LLM("tiny", compilation_config=given) as llm:
            compilation = llm.config.compilation
        assert compilation.optimization_level == 0
        assert compilation.details.cudagraph_mode == (
            "full" if given == {"full_cuda_graph": True} else "none"
        )

    def test_it_takes_vllms_names(self):
        names = {
            "gpu_memory_utilization": 0.5,
            "swap_space": 0,
            "enforce_eager": True,
            "quantization": None,
            "dtype": "float",
        }
        with LLM("tiny", **names, hf_overrides={}, disable_log_stats=True, max_num_seqs=8) as llm:
            config = llm.config
        assert (
            config.cache.kv_cache_memory,
            config.model.dtype,
            config.scheduler.max_num_seqs,
        ) == ("0.5", "float32", 8)

    def test_it_says_what_to_use(self):
        with pytest.raises(ConfigError, match="Use tensor_parallel_size"):
            LLM("tiny", decode_context_parallel_size=2)

    def test_a_slip_is_told_as_without_a_translator(self):
        with pytest.raises(
            ConfigError, match=r"unknown option 'max_num_seq'\. Did you mean 'max_num_seqs'"
        ):
            LLM("tiny", max_num_seq=2)

    def test_without_the_plugin_the_names_are_unknown(self):
        with pytest.raises(ConfigError, match="unknown option 'gpu_memory_utilization'"):
            LLM("tiny", gpu_memory_utilization=0.5, disable_plugins=["vllm_names"])

    def test_plugins_that_are_loaded_already_are_asked(self):
        with LLM("tiny", gpu_memory_utilization=0.5, plugins=Plugins.load()) as llm:
            assert llm.config.cache.kv_cache_memory == "0.5"
