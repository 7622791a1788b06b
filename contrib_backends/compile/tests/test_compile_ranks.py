"""Tensor parallel ranks, compiled: what they compute together is what one rank computes,
uncompiled."""

from __future__ import annotations

import decoder_families
import moe_families
import pytest
import torch
from compile_harness import BATCHES, PLUGINS, Stage, compiled
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import make_compiler
from toolkit_lm_devkit import hidden_states, load_checkpoint, randomize
from toolkit_lm_devkit.thread_ranks import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

# test_compile_engine.py compiles two ranks with Inductor, too.
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.nightly)]


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_llama(folder):
    theirs = LlamaForCausalLM(LlamaConfig(**decoder_families.LLAMA_LIKE))
    randomize(theirs)
    theirs.save_pretrained(folder)


def sequences_of(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 90, (length,), generator=generator) for length in lengths]


def check_ranks(model_class, folder, backend, *, divides_experts=False, **options):
    whole = load_checkpoint(model_class, folder, **options)
    expected = [torch.cat(hidden_states([whole], sequences_of(lengths))) for lengths in BATCHES]

    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": divides_experts}
    # They compile one after the other, and would wait for each other in a step.
    compilers = [
        compiled(
            load_checkpoint(model_class, folder, rank=rank, **ranks, **options), backend=backend
        )
        for rank in (0, 1)
    ]
    outs = run_ranks(
        lambda rank: [
            torch.cat(hidden_states([Stage(compilers[rank])], sequences_of(lengths)))
            for lengths in BATCHES
        ]
    )
    for found in outs:
        for ours, one in zip(found, expected, strict=True):
            assert one.std() > 0.01
            torch.testing.assert_close(ours, one, atol=1e-4, rtol=1e-4)
    assert not any(compiler.num_eager_steps for compiler in compilers)
    return [program.plan for compiler in compilers for program in compiler._programs.values()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_of_a_decoder(tmp_path, backend):
    make_llama(tmp_path)
    plans = check_ranks(
        PLUGINS.models.load("LlamaForCausalLM"), tmp_path, backend, max_model_len=96
    )
    assert all(len(set(plan.parts)) == 3 for plan in plans)


# Whole experts are computed in the same op as cut ones, so that the graph is the same.
@pytest.mark.parametrize(
    ("backend", "divides_experts"),
    [("eager", False), ("eager", True), pytest.param("inductor", False, marks=pytest.mark.nightly)],
)
def test_two_ranks_of_a_mixture_of_experts(tmp_path, backend, divides_experts):
    theirs = moe_families.make("mixtral", "2 of 4")
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    check_ranks(
        moe_families.FAMILIES["mixtral"][0], tmp_path, backend, divides_experts=divides_experts
    )


def test_gathered_tensors_are_joined_along_their_axis():
    def work(rank):
        x = torch.arange(6.0).view(2, 3) + 10 * rank
        return torch.ops.toolkit_lm.all_gather(x, 1, 2), torch.ops.toolkit_lm.all_reduce(x.T, 2), x

    for gathered, reduced, x in run_ranks(work):
        assert torch.equal(gathered[0], torch.tensor([0.0, 1, 2, 10, 11, 12]))
        assert torch.equal(reduced, (2 * torch.arange(6.0).view(2, 3) + 10).T)
        assert reduced.is_contiguous() and x[0, 0] % 10 == 0
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3)
        assert torch.ops.toolkit_lm.all_gather(x, 1, 2).shape == (2, 6)
        assert torch.ops.toolkit_lm.all_reduce(x.T, 2).is_contiguous()


def test_pipeline_stages_are_refused(tmp_path):
    make_llama(tmp_path)
    model = load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), tmp_path)
    config = model.vllm_config.replace(optimization_level=1, pipeline_parallel_size=2)
    with pytest.raises(
        UnsupportedError,
        match=r"inductor: it compiles models of one pipeline stage only "
        r"\(pipeline_parallel_size=1\)",
    ):
        make_compiler(model, config, PLUGINS)
