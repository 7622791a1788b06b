"""Executors: the one in the engine's process, and ranks as threads, by a third party; both pass the
conformance kit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import moe_families
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm_devkit import ExecutorConformance, WorkersConformance, make_checkpoint, randomize
from toolkit_lm_moe.experts import RoutedExperts

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
SIZES = [(2, 1), (1, 2), (2, 2)]


class TestInProcess(ExecutorConformance):
    executor = "in_process"


class TestThreads(WorkersConformance):
    executor = "threads"
    plugins = (THREADS,)
    ranks = ((1, 1), *SIZES)

    def kill(self, executor):
        def dying(plan):
            raise SystemExit("the worker had enough")

        executor.runners[-1].execute = dying


def threads(folder, tensor: int, pipeline: int, **options) -> LLM:
    options = {
        "num_kv_blocks": 64,
        "block_size": 4,
        "max_model_len": 64,
        "executor": "threads",
    } | options
    return LLM(
        str(folder),
        plugins=[THREADS],
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        **options,
    )


def prompt_tokens(length: int, start: int = 3) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(start * k) % 250 + 3 for k in range(1, length + 1)]}


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
def test_the_first_stage_may_have_no_layer_of_a_group(
    make_windowed, assert_parity, tensor, pipeline
):
    """The one layer without a window is in the last stage."""
    folder, model = make_windowed()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=272)
    with threads(
        folder,
        tensor,
        pipeline,
        max_logprobs=272,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        num_kv_blocks=80,
    ) as llm:
        assert_parity(
            model,
            llm.generate(
                [prompt_tokens(30), prompt_tokens(7), prompt_tokens(45)], params, use_tqdm=False
            ),
        )


@pytest.mark.parametrize(("pipeline", "budget"), [(1, 2048), (2, 512)])
def test_the_token_budget_is_smaller_over_stages(make_llama, pipeline, budget):
    folder, _ = make_llama("ranks")
    with threads(folder, 1, pipeline) as llm:
        assert llm.config.scheduler.max_num_batched_tokens == budget


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
def test_beams_are_those_of_one_rank(make_llama, tensor, pipeline):
    folder, _ = make_llama("ranks")
    params = SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=10)
    found = []
    for sizes in [(1, 1), (tensor, pipeline)]:
        with threads(folder, *sizes) as llm:
            outputs = llm.generate([prompt_tokens(9), prompt_tokens(20)], params, use_tqdm=False)
        found.append([[list(one.token_ids) for one in output.outputs] for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
def test_vectors_are_those_of_one_rank(make_llama, tensor, pipeline):
    """Whole prompts and no cache, and prompts in chunks: the last stage pools."""
    folder, _ = make_llama("ranks")
    prompts = [prompt_tokens(length) for length in (3, 30, 12)]
    for options in (
        {},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    ):
        vectors = []
        for sizes in [(1, 1), (tensor, pipeline)]:
            with threads(folder, *sizes, runner="pooling", convert="embed", **options) as llm:
                vectors.append(
                    [
                        list(output.outputs.embedding)
                        for output in llm.embed(prompts, use_tqdm=False)
                    ]
                )
        for one, other in zip(*vectors, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
def test_a_request_that_one_rank_fails_on_ends_alone(make_llama, tensor, pipeline):
    folder, _ = make_llama("ranks")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [prompt_tokens(5), prompt_tokens(13), prompt_tokens(9)]
    with threads(folder, tensor, pipeline) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        for runner in llm.engine.client.core.executor.runners[1:]:
            runner.execute = failing_at(13, runner.execute)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "thirteen" in outputs[1].error and "on rank 1" in outputs[1].error
    for index in (0, 2):
        assert outputs[index].outputs[0].token_ids == expected[index].outputs[0].token_ids


def failing_at(length, execute):
    def run(plan):
        if any(new.num_prompt_tokens == length for new in plan.new):
            raise RuntimeError("no prompt of thirteen tokens")
        return execute(plan)

    return run


@pytest.mark.parametrize("family", moe_families.SPLIT)
def test_whole_experts_give_the_tokens_of_one_rank(tmp_path, family):
    """Expert parallelism, with prompts in chunks, and a second time after cached prefixes."""
    model = moe_families.make(family, "4 of 8")
    randomize(model)
    make_checkpoint(tmp_path, model)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [prompt_tokens(30), prompt_tokens(7), prompt_tokens(45)]
    found = []
    for tensor in (1, 2):
        options = {
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            "enable_expert_parallel": tensor > 1,
        }
        with threads(tmp_path, tensor, 1, **options) as llm:
            outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            shares = [
                expert_shares(runner.model) for runner in llm.engine.client.core.executor.runners
            ]
        assert [output.error for each in outputs for output in each] == [None] * 6
        found.append([[list(output.outputs[0].token_ids) for output in each] for each in outputs])
        assert shares == ([[range(8)] * 2] if tensor == 1 else [[range(4)] * 2, [range(4, 8)] * 2])
    assert found[0] == found[1]


def expert_shares(model) -> list[range]:
    return [module.held for module in model.modules() if isinstance(module, RoutedExperts)]


def test_expert_parallel_is_refused_where_nothing_is_divided(make_llama, tmp_path):
    folder, _ = make_llama("ranks")
    with pytest.raises(
        UnsupportedError,
        match="enable_expert_parallel: LlamaForCausalLM has no experts that it can divide over "
        "ranks",
    ):
        threads(folder, 2, 1, enable_expert_parallel=True)
    make_checkpoint(tmp_path, moe_families.make("mixtral", "2 of 4"))
    with pytest.raises(
        ConfigError,
        match=r"enable_expert_parallel divides experts over .* give tensor_parallel_size=2 or "
        r"more",
    ):
        threads(tmp_path, 1, 1, enable_expert_parallel=True)


def test_in_process_is_refused_for_two_ranks(make_llama):
    folder, _ = make_llama("ranks")
    with pytest.raises(
        UnsupportedError,
        match=r"'in_process' cannot run tensor_parallel_size 2 .*: 2 workers are needed, "
        r"and it supports at most 1\. "
        r"Supported: mp, external_launcher, ray, threads\.",
    ):
        threads(folder, 2, 1, executor="in_process")
