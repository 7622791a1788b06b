"""Batch invariance of the kernels `cpu`: what a request gets is the same, bit for bit, whatever the
engine does beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from toolkit_lm import LLM, PoolingParams, RequestOutput, SamplingParams
from toolkit_lm.attention import AttentionSpec
from toolkit_lm.config import PluginsConfig
from toolkit_lm.kv import FullSpec
from toolkit_lm.plugin import Plugins
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import make_checkpoint
from torch import Tensor

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
NIGHTLY = pytest.mark.nightly

VOCAB = 272
CPU = {
    "kernels": "cpu",
    "attention_backend": "cpu",
    "max_model_len": 128,
    "max_logprobs": VOCAB,
    "max_num_seqs": 32,
}
ROOMY = CPU | {"num_kv_blocks": 160, "enable_prefix_caching": False}
TIGHT = CPU | {"enable_prefix_caching": False}

LOUD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=VOCAB)
QUIET = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.2, top_k=90, top_p=0.98, min_p=0.001, seed=5, max_tokens=16, ignore_eos=True
)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
WINDOWED = {
    "head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama of small heads": ("LlamaForCausalLM", {"head_dim": 16}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "num_attention_heads": 4}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**WINDOWED, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3ForCausalLM", WINDOWED),
    "gpt2": ("GPT2LMHeadModel", {}),
}
GENERATOR = torch.Generator().manual_seed(1)


def prompt_of(length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": torch.randint(3, VOCAB, (length,), generator=GENERATOR).tolist()}


PROMPTS = [prompt_of(length) for length in (1, 6, 17, 40, 64)]
OTHERS = [prompt_of(length) for length in (33, 2, 90, 16, 5, 70, 11) * 5]


class Completion(NamedTuple):
    token_ids: list[int]
    logprobs: Tensor
    """[output tokens, V]"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function (class of transformers, fields of its config) -> the folder of a random
    checkpoint."""
    import transformers

    made: dict[str, Path] = {}

    def make(architecture: str, fields: dict[str, Any]) -> str:
        key = f"{architecture} {fields}"
        if key not in made:
            model_class = getattr(transformers, architecture)
            torch.manual_seed(0)
            model = model_class(model_class.config_class(**SHAPE | fields)).eval()
            made[key] = make_checkpoint(tmp_path_factory.mktemp(architecture), model)
        return str(made[key])

    return make


def completions(outputs: list[RequestOutput]) -> list[Completion]:
    found = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        rows = [
            [entries[token].logprob for token in sorted(entries)] for entries in completion.logprobs
        ]
        found.append(Completion(list(completion.token_ids), torch.tensor(rows)))
    return found


def beside(llm: LLM, others: int, params: SamplingParams = LOUD) -> list[RequestOutput]:
    """Outputs of PROMPTS, with `others` other prompts before, between and after them."""
    given: list[Any] = [(prompt, QUIET) for prompt in OTHERS[:others]]
    places = [(7 * i + 3) % (len(given) + 1) + i for i in range(len(PROMPTS))]
    for place, prompt in sorted(zip(places, PROMPTS, strict=True), key=lambda pair: pair[0]):
        given.insert(place, (prompt, params))
    outputs = llm.generate(
        [prompt for prompt, _ in given], [wish for _, wish in given], use_tqdm=False
    )
    by_prompt = {tuple(output.prompt_token_ids or ()): output for output in outputs}
    return [by_prompt[tuple(prompt["prompt_token_ids"])] for prompt in PROMPTS]


def assert_same(ours: list[Completion], reference: list[Completion]) -> None:
    for one, two in zip(ours, reference, strict=True):
        assert one.token_ids == two.token_ids
        assert torch.equal(one.logprobs, two.logprobs), (one.logprobs - two.logprobs).abs().max()


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


BY_DAY = [
    ("tiny", "float32"),
    ("llama", "float32"),
    ("llama of small heads", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("mixtral", "float32"),
    ("mixtral", "bfloat16"),
    ("gemma2", "bfloat16"),
    ("gemma3", "float32"),
    ("gpt2", "bfloat16"),
    ("tiny", "float16"),
]
"""Each family, each dtype, and experts, whose rows are gathered, in both that are computed
differently: float16 is as bfloat16. The kernels' own tests have every product in each dtype."""


@pytest.mark.parametrize(
    ("family", "dtype", "cache"),
    [(*one, "auto") for one in BY_DAY]
    + [
        pytest.param(family, dtype, "auto", marks=NIGHTLY)
        for dtype in ("float32", "bfloat16", "float16")
        for family in (*DECODERS, "tiny")
        if (family, dtype) not in BY_DAY
    ]
    + [("gemma2", "bfloat16", "int8"), ("llama", "float32", "fp8")],
)
def test_generation(folder_of, watch, family, dtype, cache) -> None:
    """Alone; beside others; in chunks; after a prefix of another's; after preemptions of both
    kinds; in so many threads."""
    model = {
        "model": "tiny" if family == "tiny" else folder_of(*DECODERS[family]),
        "dtype": dtype,
        "kv_cache_dtype": cache,
    }
    torch.set_num_threads(2)
    with LLM(**model, **ROOMY) as llm:
        alone = completions([llm.generate(prompt, LOUD, use_tqdm=False)[0] for prompt in PROMPTS])
        drawn = token_ids([llm.generate(prompt, SEEDED, use_tqdm=False)[0] for prompt in PROMPTS])
        for others in (1, 7, 30):
            assert_same(completions(beside(llm, others)), alone)
        assert token_ids(beside(llm, 7, SEEDED)) == drawn
    torch.set_num_threads(1)
    with LLM(
        **model,
        **ROOMY | {"enable_prefix_caching": True, "overlap": True, "max_num_batched_tokens": 40},
    ) as llm:
        # The first time in chunks, the second time out of the cache, the third time with the
        # beginnings of others.
        for _ in range(2):
            assert_same(completions(beside(llm, 7)), alone)
        assert token_ids(beside(llm, 7, SEEDED)) == drawn
    torch.set_num_threads(3)
    # Room for one sequence of max_model_len, and not for all.
    blocks = 20 if family.startswith("gemma") else 12
    for options in (
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "swap_memory": "8MiB"},
    ):
        before = watch.count("preempted")
        with LLM(plugins=[watch], num_kv_blocks=blocks, **model, **TIGHT, **options) as llm:
            assert_same(completions(beside(llm, 7)), alone)
            assert token_ids(beside(llm, 7, SEEDED)) == drawn
        assert watch.count("preempted") > before
        assert (watch.most("num_used_host_blocks") > 0) == (options["preemption_mode"] == "swap")


WIDE = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6}
POOLING: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[PoolingParams]]] = {
    "bert": (
        "BertModel",
        {},
        {},
        [PoolingParams(task="embed"), PoolingParams(task="token_embed", normalize=False)],
    ),
    "bert's sum": (
        "BertModel",
        {},
        {"pooling_type": "MEAN_SQRT_LEN"},
        [PoolingParams(task="embed")],
    ),
    "score": (
        "BertForSequenceClassification",
        {"num_labels": 1},
        {},
        [PoolingParams(task="classify")],
    ),
    "classes": (
        "BertForSequenceClassification",
        {"num_labels": 3},
        {},
        [PoolingParams(task="classify")],
    ),
    "classes of tokens": (
        "BertForTokenClassification",
        {"num_labels": 5},
        {},
        [PoolingParams(task="token_classify")],
    ),
    "modernbert": (
        "ModernBertForSequenceClassification",
        {"num_labels": 2},
        {},
        [PoolingParams(task="classify")],
    ),
    "gte": ("GteModel", {}, {}, [PoolingParams(task="embed")]),
    "nomic": ("NomicBertModel", {}, {}, [PoolingParams(task="embed")]),
    "last token": (
        "LlamaForCausalLM",
        {},
        {"convert": "embed"},
        [PoolingParams(task="embed"), PoolingParams(task="token_embed")],
    ),
    "mean": (
        "LlamaForCausalLM",
        {},
        {"convert": "embed", "pooling_type": "MEAN"},
        [PoolingParams(task="embed")],
    ),
    "weighted mean": (
        "LlamaForCausalLM",
        {},
        {"convert": "embed", "pooling_type": "WEIGHTED_MEAN"},
        [PoolingParams(task="embed")],
    ),
    "converted": (
        "Qwen3ForSequenceClassification",
        {"num_labels": 1, "head_dim": 32},
        {},
        [PoolingParams(task="classify")],
    ),
}


def pooled(llm: LLM, prompts: list[dict[str, list[int]]], params: PoolingParams) -> list[Tensor]:
    outputs = llm.encode(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [torch.tensor(output.outputs.data) for output in outputs]


# Each in one dtype by day, the first two in both.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if number < 2 or (number + place) % 2 else NIGHTLY)
        for place, dtype in enumerate(("float32", "bfloat16"))
        for number, name in enumerate(POOLING)
    ],
)
def test_pooling(folder_of, name, dtype) -> None:
    """Alone, beside others, in chunks, in so many threads."""
    architecture, fields, options, tasks = POOLING[name]
    options = {
        "model": folder_of(architecture, SHAPE | WIDE | fields),
        "dtype": dtype,
        "num_kv_blocks": 400,
        **CPU,
        **options,
    }
    causal = "For" in architecture and "Bert" not in architecture
    chunks = (
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 37}
        if causal
        else {"max_num_batched_tokens": 130}
    )
    torch.set_num_threads(2)
    with LLM(**options) as llm:
        alone = [[pooled(llm, [prompt], params)[0] for prompt in PROMPTS] for params in tasks]
    for threads, more in ((3, {}), (1, chunks)):
        torch.set_num_threads(threads)
        with LLM(**options | more) as llm:
            for others in (0, 30):
                for params, reference in zip(tasks, alone, strict=True):
                    found = pooled(llm, [*OTHERS[:others], *PROMPTS], params)[others:]
                    for ours, theirs in zip(found, reference, strict=True):
                        assert torch.equal(ours, theirs), (
                            threads,
                            more,
                            others,
                            (ours - theirs).abs().max(),
                        )


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_a_backend_gives_a_cached_prefix_the_bits_of_a_cold_one_or_does_not_say_so(
    folder_of, block_size, caplog
):
    """Each backend that runs here, and the one that the engine takes: of that, it warns."""
    registry = Plugins.load(PluginsConfig()).attention_backends
    cache = FullSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype="float32")
    layer = {"layer": "attn", "type": "decoder", "num_heads": 2, "num_kv_heads": 1, "head_size": 32}
    asked = AttentionSpec(**layer, dtype="float32", device="cpu", kv_cache=cache)
    able = [name for name in registry if registry.ask(name, asked) is None]
    assert ("cpu" in able) == (block_size % 16 == 0) and "sdpa" in able
    for name in ["auto", *(one for one in able if registry.load(one).batch_invariant)]:
        caplog.clear()
        with LLM(
            folder_of(*DECODERS["llama"]),
            **CPU | {"attention_backend": name, "block_size": block_size, "num_kv_blocks": 160},
            dtype="float32",
        ) as llm:
            [taken] = {
                one.backend for one in llm.engine.client.core.executor.runner.selections.values()
            }
            cold, warm = (llm.generate(PROMPTS, LOUD, use_tqdm=False) for _ in range(2))
        assert sum(one.num_cached_tokens for one in warm) > 60
        warned = "last bits of its results depend on the rest of the batch" in caplog.text
        assert warned == (not taken.batch_invariant)
        if taken.batch_invariant:
            assert_same(completions(warm), completions(cold))
        else:
            assert f"block_size {block_size} is not a multiple of 16" in caplog.text
