"""An engine with compiled passes, by Inductor: the same tokens, no compilation after the start, and
a second start without compilers."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import sympy
import torch
from compile_harness import PLUGINS, QUICKLY, Stage, check, compiled
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm_compile import compiler as compiler_module, parts as parts_module
from toolkit_lm_compile.options import Band
from toolkit_lm_compile.parts import ANY, NarrowError, _check_holds, compiles_bands
from toolkit_lm_devkit import hidden_states, load_checkpoint
from toolkit_lm_server.metrics import Metrics
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[5, 6, 7], [9], list(range(3, 30))]
# One prompt at a time makes steps of one token, all at once steps of three.
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
needs_bands = pytest.mark.skipif(
    not compiles_bands(), reason="torch before 2.13 is refused what has code of its own"
)


def options_of(folder, cache, **details):
    return {
        "model": str(folder),
        "renderer": "tokens",
        "dtype": "float32",
        "num_kv_blocks": 64,
        "optimization_level": 2,
        "compilation_config": json.dumps(
            {"cache_dir": str(cache), "compile_sizes": [3], **details}
        ),
    }


def tokens_of(llm):
    together = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    alone = [llm.generate([{"prompt_token_ids": prompt}], PARAMS)[0] for prompt in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in [*together, *alone]]


def compiler_of(llm):
    return llm.llm_engine.client.core.executor.runner.compiler


def make_llama(folder, depth):
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": depth,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(
        **shape, vocab_size=101, max_position_embeddings=128, initializer_range=0.3, dtype="float32"
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All of its parts: the first, one between layers, the last."""
    return make_llama(tmp_path_factory.mktemp("llama"), 3)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """One layer: the first part and the last."""
    return make_llama(tmp_path_factory.mktemp("shallow"), 1)


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    llm = LLM(**options_of(folder, tmp_path_factory.mktemp("none")) | {"optimization_level": 0})
    assert compiler_of(llm) is None
    return tokens_of(llm)


@pytest.fixture(scope="module")
def expected_of_shallow(shallow, tmp_path_factory):
    return tokens_of(
        LLM(**options_of(shallow, tmp_path_factory.mktemp("none")) | {"optimization_level": 0})
    )


def test_the_machinery_with_parts_as_they_were_traced(folder, expected, tmp_path):
    llm = LLM(**options_of(folder, tmp_path, backend="eager"))
    assert tokens_of(llm) == expected
    compiler = compiler_of(llm)
    assert (compiler.num_eager_steps, compiler.num_compiled, compiler.compiled_when_sealed) == (
        0,
        0,
        0,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_workers_give_the_same_tokens(shallow, expected_of_shallow, tmp_path, backend):
    """Each in a process of its own, with collectives within the compiled parts."""
    details = {"backend": backend, **(QUICKLY if backend == "inductor" else {})}
    llm = LLM(
        **options_of(shallow, tmp_path, **details)
        | {"optimization_level": 1, "tensor_parallel_size": 2, "executor": "mp"}
    )
    assert tokens_of(llm) == expected_of_shallow
    if backend == "inductor":
        assert sorted(path.name for path in tmp_path.glob("*/rank_*")) == ["rank_0_0", "rank_1_0"]
        assert len(list(tmp_path.iterdir())) == 1


def test_a_pass_that_was_not_foreseen_is_not_compiled(folder, tmp_path, caplog):
    model = load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder)
    compiler = compiled(model)
    compiler.seal()
    before = compiler.num_compiled
    check(compiler, batches=[[4]])
    embeds = model.embed_input_ids(torch.tensor([5, 6]))
    [ours] = hidden_states([Stage(compiler)], [torch.tensor([5, 6])], inputs_embeds=embeds.clone())
    [expected] = hidden_states([model], [torch.tensor([5, 6])], inputs_embeds=embeds.clone())
    assert torch.equal(ours, expected)
    assert (compiler.num_eager_steps, compiler.num_compiled) == (1, before)
    assert "inputs_embeds (2 tokens) are not compiled" in caplog.text


def test_a_step_of_more_tokens_than_code_is_checked_for_is_not_compiled(
    folder, monkeypatch, caplog
):
    monkeypatch.setattr(compiler_module, "ANY", Band(1, 8))
    compiler = compiled(load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder))
    check(compiler, batches=[[8], [5, 3]])
    hidden_states([Stage(compiler)], [torch.arange(5, 14)])
    assert compiler.num_eager_steps == 1 and "(9 tokens) are not compiled" in caplog.text


def test_a_step_takes_the_code_of_its_number_of_tokens(folder, tmp_path):
    """A size before a band, a band before any number; bands have both their ends."""
    model = load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder)
    compiler = compiled(
        model, level=2, details={"compile_sizes": [24], "compile_ranges": [[16, 37], [2, 4]]}
    )
    [program] = compiler._programs.values()
    names = {id(steps): str(band) for band, steps in program._of_bands}
    taken = {
        size: names.get(id(program.steps_of(size)), "any")
        for size in (1, 2, 4, 5, 15, 16, 24, 37, 38)
    }
    assert taken == {
        1: "any",
        2: "2-4",
        4: "2-4",
        5: "any",
        15: "any",
        16: "16-37",
        24: "24",
        37: "16-37",
        38: "any",
    }
    assert not compiled(model, level=1, details={"compile_ranges": [[2, 4]]})._bands
    check(compiler)


@pytest.mark.slow
@needs_bands
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("bands", "batches"),
    [
        ([[1, 4]], [[1], [4], [5], [16], [24]]),
        # Further ends of a band, and numbers between two.
        pytest.param(
            [[1, 4], [16, 37]], [[1], [4], [5], [16], [37], [38], [20]], marks=pytest.mark.nightly
        ),
    ],
)
def test_bands_give_what_the_model_gives(shallow, tmp_path, monkeypatch, bands, batches):
    """With the kernels `torch`. The test of a second start has a band with the kernels `cpu`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), shallow, kernels="torch")
    details = {"compile_ranges": bands}
    # A start must not change what it finds.
    for was_cached in (False, True, True):
        compiler = compiled(model, level=2, backend="inductor", kernels="torch", details=details)
        assert compiler.was_cached == was_cached
        check(compiler, batches=batches)
    for first, last in bands:
        assert len(list(tmp_path.glob(f"**/parts/*/{first}-{last}"))) == 2


def test_what_inductor_assumes_of_a_number_of_tokens_is_checked():
    """Nobody would check it in a step. That there are two tokens at least says nothing of what is
    computed."""
    size = sympy.Symbol("s0", integer=True, nonnegative=True)
    for guard in (sympy.Ne(size, 1), size >= 2, 4096 * size < 2**31):
        _check_holds([guard], ANY)
    for guard in (
        sympy.Ne(size, 16),
        sympy.Eq(size % 8, 0),
        2**17 * size < 2**31,
        size <= ANY.last - 1,
    ):
        with pytest.raises(NarrowError):
            _check_holds([guard], ANY)
    _check_holds([sympy.Ne(size, 16), size < 65], Band(17, 64))
    with pytest.raises(NarrowError):
        _check_holds([size < 64], Band(17, 64))


def test_code_that_holds_for_some_numbers_only_is_not_taken(folder, tmp_path, monkeypatch, caplog):
    def compile_part(graph, folder, band, patches):
        raise NarrowError("s0 < 8, which 8 tokens are not")

    monkeypatch.setattr(compiler_module, "compile_part", compile_part)
    model = load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder)
    details = {"cache_dir": str(tmp_path), "compile_ranges": [[2, 64]]}
    compiler = compiled(model, level=2, backend="inductor", details=details)
    assert "Inductor's code holds only where s0 < 8" in caplog.text
    assert compiler.num_compiled == 0 and not list(tmp_path.glob("*/rank_*"))
    check(compiler, whole=False)


def late(metrics):
    """The server's figure."""
    [figure] = re.findall(
        r"^toolkit_lm_compilations_after_ready_total{.*} (.*)$",
        metrics.text().decode(),
        re.MULTILINE,
    )
    return float(figure)


@pytest.mark.parametrize("level", [0, 2])
def test_nothing_is_compiled_after_ready(folder, tmp_path, level):
    metrics = Metrics()
    llm = LLM(
        **options_of(folder, tmp_path, backend="eager") | {"optimization_level": level},
        plugins=[metrics],
    )
    tokens_of(llm)
    assert late(metrics) == 0


@pytest.mark.parametrize("level", [0, 2])
def test_what_is_compiled_after_ready_is_counted(folder, tmp_path, monkeypatch, level):
    metrics = Metrics()
    llm = LLM(
        **options_of(folder, tmp_path, backend="eager") | {"optimization_level": level},
        plugins=[metrics],
    )
    runner = llm.llm_engine.client.core.executor.runner
    forward = runner._forward
    sizes = []
    # It remembers the code of the other level's test.
    torch.compiler.reset()

    @torch.compile(backend="eager", dynamic=False)
    def double(x):
        return x * 2

    def compiling(inputs):
        # Code of its own for each number of tokens.
        sizes.append(len(inputs.token_index))
        double(torch.ones(sizes[-1] + 1))
        return forward(inputs)

    monkeypatch.setattr(runner, "_forward", compiling)
    tokens_of(llm)
    assert late(metrics) == len(set(sizes)) > 1


WARM = """
import logging
logging.basicConfig(level=logging.INFO)
import json, sys
import torch

def refuse(*args, **kwargs):
    raise AssertionError("a compiler runs")

import torch._inductor.compile_fx
inductor = torch._inductor.compile_fx
torch.compile = inductor.compile_fx = inductor.compile_fx_inner = refuse
import torch._inductor.cpp_builder
torch._inductor.cpp_builder.CppBuilder.build = refuse
sys.path.insert(0, sys.argv[1])
from test_compile_engine import LLM, compiler_of, options_of, tokens_of
llm = LLM(**options_of(sys.argv[2], sys.argv[3]))
compiler = compiler_of(llm)
counts = [compiler.was_cached, compiler.num_compiled, compiler.num_eager_steps]
print(json.dumps([tokens_of(llm), *counts]))
"""


def standalone_compile_of_2_11(
    gm, example_inputs, *, dynamic_shapes="from_graph", options=None, aot=False
):
    """Its signature: it cannot be told the bounds of a band."""


@pytest.mark.parametrize("bands", [{"compile_sizes": [3]}, {"compile_ranges": [[2, 4]]}])
def test_bands_are_refused_where_torch_cannot_be_told_them(monkeypatch, bands):
    monkeypatch.setattr(parts_module, "standalone_compile", standalone_compile_of_2_11)
    for level, backend, is_refused in [
        (2, "inductor", True),
        (1, "inductor", False),
        (2, "eager", False),
    ]:
        details = json.dumps({**bands, "backend": backend})
        config = VllmConfig.make(model="tiny", optimization_level=level, compilation_config=details)
        reason = (
            f"compile_sizes and compile_ranges need torch 2.13, and this is {torch.__version__}: "
            "level 1 does without"
        )
        assert compiler_module.InductorCompiler.refuses(config) == (reason if is_refused else None)


@pytest.mark.slow
@needs_bands
def test_no_request_compiles_and_a_second_start_runs_no_compiler(
    shallow, expected_of_shallow, tmp_path, monkeypatch, request
):
    llm = LLM(**options_of(shallow, tmp_path / "cache"))
    compiler = compiler_of(llm)
    assert (compiler.was_cached, compiler.num_compiled) == (False, 4), (
        "two parts, each for any number of tokens and for three"
    )

    def refuse(*args, **kwargs):
        raise AssertionError("a request compiles")

    monkeypatch.setattr(compiler_module, "compile_part", refuse)
    monkeypatch.setattr(torch, "compile", refuse)
    assert tokens_of(llm) == expected_of_shallow
    assert (
        compiler.num_compiled == compiler.compiled_when_sealed == 4
        and compiler.num_eager_steps == 0
    )
    # Elsewhere, in another process.
    (tmp_path / "cache").rename(tmp_path / "moved")
    script = [
        sys.executable,
        "-c",
        WARM,
        str(request.path.parent),
        str(shallow),
        str(tmp_path / "moved"),
    ]
    warm = subprocess.run(script, capture_output=True, text=True, timeout=250)
    assert warm.returncode == 0, warm.stderr
    assert json.loads(warm.stdout.splitlines()[-1]) == [expected_of_shallow, True, 0, 0]


# test_bands_give_what_the_model_gives does, too, with `torch`, and the test of a second start with
# `cpu`.
@pytest.mark.nightly
@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_inductor_gives_what_the_model_gives(folder, tmp_path, monkeypatch, kernels):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder, kernels=kernels)
    asked = {"level": 2, "details": {"compile_sizes": [24]}} if compiles_bands() else {"level": 1}
    compiler = compiled(model, backend="inductor", kernels=kernels, **asked)
    check(compiler)

    def refuse(*args, **kwargs):
        raise AssertionError("a compiler runs")

    monkeypatch.setattr(torch._inductor.cpp_builder.CppBuilder, "build", refuse)
    assert compiled(model, backend="inductor", kernels=kernels, **asked).was_cached
