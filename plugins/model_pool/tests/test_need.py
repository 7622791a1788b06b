"""Estimates of the memory that a model needs, of all of its processes."""

from __future__ import annotations

import pytest
import transformers
from toolkit_lm.config import VllmConfig
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_model_pool.entries import Entry
from toolkit_lm_model_pool.model import PooledModel, settings_of
from toolkit_lm_model_pool.need import PROCESS
from toolkit_lm_server.options import ServerOptions

BUDGET = 2**36
PER_TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values: 3 layers with 2 heads of 16 in float32."""
DRAFT_PER_TOKEN = 2 * 1 * 2 * 16 * 4
BLOCKS = 100
CACHE = BLOCKS * 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("need")
    found = {}
    for name, layers in (("model", 3), ("draft", 1)):
        config = transformers.LlamaConfig(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        found[name] = str(make_checkpoint(root / name, model))
    return found


def prepared(folders, **options) -> PooledModel:
    entry = Entry(name="m", checkpoint=folders["model"], options={"dtype": "float32", **options})
    config = VllmConfig.make(device="cpu")
    model = PooledModel(entry, settings_of(entry, config, ServerOptions(), None))
    model.prepare(BUDGET)
    assert model.need is not None, model.reason
    return model


def weights_of(folders, name: str) -> int:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    return sum(4 * tensor.numel() for tensor in model.state_dict().values())


def drafting(folders) -> dict:
    plugins = {"drafters": {"model": folders["draft"]}}
    return {"drafter": ["draft_model"], "plugin_option": plugins}


@pytest.mark.parametrize(
    ("options", "processes", "engines", "caches", "kv"),
    [
        ({}, 1, 1, 1, PER_TOKEN),
        ({"tensor_parallel_size": 2}, 3, 1, 2, PER_TOKEN),
        # Four ranks share two heads: each head is there twice.
        ({"tensor_parallel_size": 4}, 5, 1, 4, 2 * PER_TOKEN),
        ({"pipeline_parallel_size": 3}, 4, 1, 3, PER_TOKEN),
        ({"data_parallel_size": 2}, 2, 2, 2, 2 * PER_TOKEN),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 6, 2, 4, 2 * PER_TOKEN),
        ({"drafter": ["ngram"]}, 1, 1, 1, PER_TOKEN),
    ],
)
def test_ranks_engines_and_drafters_count(folders, options, processes, engines, caches, kv):
    alone = prepared(folders, num_kv_blocks=BLOCKS).need
    need = prepared(folders, num_kv_blocks=BLOCKS, **options).need
    assert need.process == processes * PROCESS
    assert need.weights == engines * weights_of(folders, "model")
    assert need.kv_cache == CACHE * kv
    # Stages share the tokens of a step.
    assert need.workspace >= alone.workspace
    assert need.workspace % caches == 0
    assert need.num_caches == caches


def test_a_draft_model_counts(folders):
    need = prepared(folders, num_kv_blocks=BLOCKS, **drafting(folders)).need
    assert need.weights == weights_of(folders, "model") + weights_of(folders, "draft")
    assert need.kv_cache == CACHE * (PER_TOKEN + DRAFT_PER_TOKEN)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "tensor_parallel_size": 2},
    ],
)
@pytest.mark.parametrize("memory", ["auto", "64MiB", "0.01"])
def test_each_rank_gets_its_part_of_the_kv_cache(folders, options, memory):
    """A size in bytes is each rank's, as without a pool. Others are of all ranks together."""
    model = prepared(folders, kv_cache_memory=memory, **options)
    stated = int(model._sized().cache.kv_cache_memory)
    assert stated * model.need.num_caches == pytest.approx(model.need.kv_cache, abs=16)
    if memory == "64MiB":
        assert stated == 64 * 2**20
    elif memory == "0.01":
        assert model.need.kv_cache == int(0.01 * BUDGET)
