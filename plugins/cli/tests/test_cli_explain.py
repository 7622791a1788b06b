"""`toolkit explain`, on a small model, and `toolkit env`."""

from __future__ import annotations

import importlib
import json
import os
from importlib.metadata import version

import pytest
from toolkit_lm import LLM, VllmConfig, __version__
from toolkit_lm.events import WAITS
from toolkit_lm_cli.explanation import explain
from toolkit_lm_devkit import write_checkpoint


def test_explain_names_every_choice(toolkit, checkpoint):
    done = toolkit("explain", checkpoint)
    assert done.code == 0, done.err
    for part in ("LlamaForCausalLM", "plugin 'decoder'", "generate", "hf", "sdpa", "(2 layers)"):
        assert part in done.out
    found = json.loads(toolkit("explain", checkpoint, "--json").out)
    assert (found["plugin"], found["renderer"], len(found["layers"])) == ("decoder", "hf", 2)
    assert found["layers"][0]["backend"] == "sdpa"


def test_explain_lists_why_requests_may_wait(toolkit, checkpoint):
    waits = json.loads(toolkit("explain", checkpoint, "--json", "--max-num-seqs", "7").out)["waits"]
    assert waits["batch"] == "the batch has no free row (max_num_seqs 7)"
    assert waits.keys() <= WAITS.keys() and {"queue", "tokens", "blocks", "policy"} <= waits.keys()
    assert "media" not in waits
    shown = " ".join(toolkit("explain", checkpoint, "--max-num-seqs", "7").out.split())
    assert "may wait queue: its turn has not come batch: the batch" in shown


def test_explain_says_how_the_forward_pass_is_computed(toolkit, checkpoint):
    found = json.loads(toolkit("explain", checkpoint, "--json", "--kernels", "torch").out)
    assert (found["compiler"], found["compilers"]) == ("none", [])
    assert found["computed"] == [
        "optimization_level is 0, which starts fastest",
        "each layer by itself, with kernels 'torch'",
    ]
    fused = json.loads(toolkit("explain", checkpoint, "--json", "--kernels", "cpu").out)["computed"]
    assert fused[1] == (
        "kernels 'cpu' compute decoder layers in one call each where they have one for it, 2 "
        "at most"
    )
    done = toolkit(
        "explain",
        checkpoint,
        "--optimization-level",
        "2",
        "--compilation-config",
        '{"compile_sizes": [3, 1]}',
    )
    shown = " ".join(done.out.split())
    assert "compilation inductor optimization_level is 2" in shown
    assert "for any number of tokens, and for 1, 3" in shown and "toolkit_lm::attention" in shown


def test_explain_says_why_a_model_is_not_compiled(toolkit, checkpoint):
    done = toolkit(
        "explain", checkpoint, "--optimization-level", "1", "--pipeline-parallel-size", "2"
    )
    assert (
        done.code != 0
        and "no compiler can compile the model: inductor: it compiles" in " ".join(done.err.split())
    )


def test_explain_says_what_each_rank_holds(toolkit, checkpoint):
    def ranks(*options: str) -> list[dict]:
        return json.loads(toolkit("explain", "tiny", "--json", *options).out)["ranks"]

    [whole] = ranks()
    assert (whole["num_layers"], whole["num_bytes"]) == (6, 2 * whole["num_parameters"])
    # Both shards have the norms, two of each layer and one at the end.
    assert [
        2 * one["num_parameters"] - whole["num_parameters"]
        for one in ranks("--tensor-parallel-size", "2")
    ] == [13 * 128] * 2
    first, last = ranks("--pipeline-parallel-size", "2")
    # Embedding and head are one, of which both stages have a copy.
    assert first["num_parameters"] + last["num_parameters"] - whole["num_parameters"] == 1536 * 128
    assert (first["num_layers"], last["num_layers"]) == (3, 3)


def test_explain_says_what_weights_of_each_kind_take(toolkit, checkpoint):
    """A matrix of 128 inputs in int4 has 4 bits a weight, and a float32 scale of each 32."""

    def weights(*options: str) -> dict[str, dict]:
        found = json.loads(toolkit("explain", "tiny", "--json", *options).out)
        kinds = {one["kind"]: one for one in found["weights"]}
        total = sum(one["num_bytes"] for one in kinds.values())
        assert sum(rank["num_bytes"] for rank in found["ranks"]) == total
        return kinds

    plain = weights()
    assert plain.keys() == {"embedding", "linear", "lm_head", "other"}
    assert all(one["num_bytes"] == one["num_float_bytes"] for one in plain.values())
    assert plain["lm_head"]["num_bytes"] == 0
    int4 = ("--quantization", "int4", "--kernels", "torch")
    by = "multiplied by torch, which dequantizes it at each product"
    found = weights(*int4)
    count = plain["linear"]["num_weights"]
    assert found["linear"] == plain["linear"] | {
        "num_bytes": count * 5 // 8,
        "methods": {f"int4 in groups of 32, {by}": 24},
    }
    assert found["embedding"]["num_bytes"] == 1536 * (128 + 4)
    shown = " ".join(toolkit("explain", "tiny", *int4).out.split())
    assert f"0.9 MiB of 2.8, 5.00 bits a weight (24 by int4 in groups of 32, {by})" in shown
    assert f"lm_head: the embedding's (1 by int8, {by})" in shown


def test_explain_shows_each_rank(toolkit, checkpoint):
    found = json.loads(
        toolkit(
            "explain",
            checkpoint,
            "--json",
            "--tensor-parallel-size",
            "2",
            "--pipeline-parallel-size",
            "2",
        ).out
    )
    assert found["executor"] == "mp"
    assert [(one["stage"], one["shard"]) for one in found["ranks"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len({one["backend"] for one in found["layers"]}) == 1 and len(found["layers"]) == 2
    done = toolkit(
        "explain",
        checkpoint,
        "--tensor-parallel-size",
        "2",
        "--num-kv-blocks",
        "8",
        "--block-size",
        "16",
        "--max-model-len",
        "64",
    )
    shown = " ".join(done.out.split())
    assert (
        "rank 1 (stage 0, shard 1): " in shown
        and "128 tokens, with the memory that is free now" in shown
    )


def test_explain_says_what_experts_each_rank_holds(toolkit, tmp_path):
    """Two layers of 5 experts of 3 x 24 x 16 weights: cut in two, and divided."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 272,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "dtype": "float32",
    }
    write_checkpoint(tmp_path, config, {})
    asked = ("explain", tmp_path, "--device", "cpu", "--tensor-parallel-size", "2")
    one = 4 * 3 * 24 * 16
    layers = 2
    for more, experts in (((), [2.5, 2.5]), (("--enable-expert-parallel",), [2, 3])):
        done = toolkit(*asked, *more, "--json")
        assert done.code == 0, done.err
        ranks = json.loads(done.out)["ranks"]
        assert [rank["num_expert_bytes"] for rank in ranks] == [
            layers * one * count for count in experts
        ]
        assert len({rank["num_bytes"] - rank["num_expert_bytes"] for rank in ranks}) == 1
    shown = " ".join(toolkit(*asked, "--enable-expert-parallel").out.split())
    assert f"MiB ({2 * layers * one / 2**20:.1f} MiB of experts); 2 layers" in shown
    alone = json.loads(
        toolkit("explain", tmp_path, "--device", "cpu", "--kernels", "cpu", "--json").out
    )["computed"]
    assert (
        "one call each where they have one for it, 2 at most, 2 of them up to the experts"
        in alone[1]
    )
    done = toolkit("explain", "tiny", "--tensor-parallel-size", "2", "--enable-expert-parallel")
    assert (
        done.code != 0
        and "--enable-expert-parallel: " in done.err
        and "of experts" not in toolkit("explain", "tiny").out
    )


def test_explain_says_what_does_not_fit(toolkit, checkpoint):
    refused = json.loads(
        toolkit(
            "explain", checkpoint, "--json", "--num-kv-blocks", "1", "--max-model-len", "64"
        ).out
    )
    assert (
        refused["kv_tokens"] is None
        and "cannot hold one sequence of max_model_len 64" in refused["kv_refusal"]
    )
    done = toolkit("explain", checkpoint, "--tensor-parallel-size", "3")
    assert done.code != 0 and "cannot be split evenly over --tensor-parallel-size 3" in done.err


def test_explain_tells_of_several_engines(toolkit, checkpoint):
    assert "engines" not in toolkit("explain", checkpoint).out
    done = toolkit("explain", checkpoint, "--data-parallel-size", "3")
    assert done.code == 0 and "3, each with all of the model on 1 of the devices" in " ".join(
        done.out.split()
    )
    found = json.loads(toolkit("explain", checkpoint, "--data-parallel-size", "3", "--json").out)
    assert found["config"]["parallel"]["data_parallel_size"] == 3


def test_explain_names_the_drafters(toolkit, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "drafters" not in toolkit("explain", checkpoint).out
    chain = ("explain", checkpoint, "--drafter", "ngram,suffix")
    options = ("--plugin-option", "drafters.prompt_lookup_max=3")
    shown = " ".join(toolkit(*chain, *options).out.split())
    assert (
        "(plugin 'drafters', prompt_lookup_max 3) a draft's time is not known: no start on this "
        "machine has kept it suffix: toolkit_lm_drafters.suffix"
    ) in shown
    found = json.loads(toolkit(*chain, "--json").out)["drafters"]
    assert [drafter["name"] for drafter in found] == ["ngram", "suffix"]


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_explain_tells_what_a_drafter_costs(monkeypatch, tmp_path, drafter):
    """Its weights, and its time if a start has kept what it measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm_up = importlib.import_module("toolkit_lm.runner.warm_up")
    monkeypatch.setattr(warm_up, "_KEPT", -1.0)
    monkeypatch.setattr(warm_up, "_MEASURING", 1e9)
    monkeypatch.setattr(warm_up, "product", lambda *_: [(0, 1), (1, 1)])
    monkeypatch.setattr(
        warm_up, "_seconds_of_decode", lambda runner, rows, drafts: 0.002 if drafts else 0.003
    )
    model = {"draft_model": "tiny-draft", "eagle": "tiny-eagle"}[drafter]
    options = {"drafter": drafter, "plugin_option": [f"drafters.model={model}"], "kernels": "torch"}
    config = VllmConfig.make(model="tiny", max_model_len=64, **options)
    [found] = explain(config).drafters
    unknown = "a draft's time is not known: no start on this machine has kept it"
    assert found.costs[1:] == [unknown]
    with LLM("tiny", max_model_len=64, **options) as llm:
        part = llm.engine.client.core.executor.runner.parts.by_name["drafter"]
        weights = list(part._drafters[drafter].network.parameters())
    size = sum(weight.nbytes for weight in weights) / 2**20
    assert explain(config).drafters[0].costs == [
        f"{sum(weight.numel() for weight in weights):,} parameters of its own, {size:.1f} MiB; "
        f"{len(part.layers())} {'layer' if drafter == 'eagle' else 'layers'} with a KV cache",
        "a draft takes, by rows of the step: 1.00 ms beside 2.00 for 1",
    ]


def test_an_unknown_architecture_is_one_error(toolkit, checkpoint):
    done = toolkit("explain", checkpoint, "--plugins", "cli", "--plugins", "sdpa")
    assert (done.code, done.out) == (1, "")
    assert "'LlamaForCausalLM'" in done.err


def test_names_that_nobody_has_registered_are_found_before_a_start(toolkit, checkpoint):
    done = toolkit("explain", checkpoint, "--drafter", "nope")
    assert (done.code, done.out) == (2, "") and "no drafter 'nope' is registered" in done.err
    done = toolkit("explain", checkpoint, "--scheduling-policy", "fifo")
    assert (done.code, done.out) == (
        2,
        "",
    ) and "no scheduling policy 'fifo' is registered. Known: fair, fcfs, priority" in done.err


def test_env_names_versions_and_machine(toolkit):
    facts = json.loads(toolkit("env", "--json").out)
    assert (facts["toolkit-lm"], facts["packages"]["torch"], facts["cpu count"]) == (
        __version__,
        version("torch"),
        os.cpu_count(),
    )
    assert facts["plugins"]["core"] == f"{__version__} ok"
    assert version("torch") in toolkit("env").out
