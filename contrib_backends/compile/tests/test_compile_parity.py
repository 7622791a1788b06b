"""Each kind of model is one graph, whose parts together give what the model gives. Their number
does not grow with the layers."""

import json

import decoder_families
import encdec_families
import encoder_families
import moe_families
import pytest
import sympy
import torch
import transformers
from compile_harness import PLUGINS, Stage, check, compiled
from qwen_harness import random_qwen
from toolkit_lm.attention import Attention
from toolkit_lm.errors import UnsupportedError
from toolkit_lm_compile import compiler as compiler_module
from toolkit_lm_compile.capture import _holds_for_equal_symbols
from toolkit_lm_devkit import load_checkpoint, randomize
from toolkit_lm_devkit.forward import encoder_decoder_logits
from toolkit_lm_moe.experts import RoutedExperts
from transformers import LlamaConfig, LlamaForCausalLM
from vision_families import random_model
from vision_harness import sequences

DECODERS = [
    (architecture, next(iter(variants)))
    for architecture, variants in decoder_families.VARIANTS.items()
]
SLOW = pytest.mark.slow
NIGHTLY = pytest.mark.nightly


def with_backends(cases, for_inductor, chosen):
    """(case, backend): each case with parts as they were traced; those of `for_inductor` compiled
    by Inductor.

    A wrong graph is found as it was traced. `for_inductor` have each value of what a graph depends
    on, and the `chosen` each kind of operation that Inductor compiles; the others are nightly.
    """
    assert set(chosen) <= set(for_inductor)
    traced = [
        pytest.param(case, "eager", marks=() if case in for_inductor else NIGHTLY) for case in cases
    ]
    compiled = [
        pytest.param(case, "inductor", marks=SLOW if case in chosen else NIGHTLY)
        for case in for_inductor
    ]
    return traced + compiled


def one_token_types(num_tokens):
    return torch.arange(num_tokens) % 2


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Layer norms with biases and learned positions. T5Gemma, in test_encoder_decoders, has the layers
# of Gemma 2, with norms on both sides; ModernBert, in test_encoders, has two rotary embeddings.
CHOSEN = [one for one in DECODERS if one[0] == "OPTForCausalLM"]


@pytest.mark.parametrize(("case", "backend"), with_backends(DECODERS, DECODERS, CHOSEN))
def test_decoders(tmp_path, case, backend):
    architecture, variant = case
    decoder_families.make_family(architecture, variant, tmp_path)
    model = load_checkpoint(decoder_families.our_class(architecture), tmp_path, max_model_len=96)
    compiler = compiled(model, backend=backend)
    check(compiler)
    [program] = compiler._programs.values()
    num_layers = sum(isinstance(module, Attention) for module in model.modules())
    assert len(program.plan.parts) == num_layers + 1
    # Layers are alike, but where some read the keys of others.
    is_alike = architecture != "Gemma3nForCausalLM"
    assert len(set(program.plan.parts)) == 3 or not is_alike


def mixture(family, folder, variant=None, **options):
    theirs = moe_families.make(family, variant or next(iter(moe_families.FAMILIES[family][1])))
    randomize(theirs)
    theirs.save_pretrained(folder)
    return load_checkpoint(moe_families.FAMILIES[family][0], folder, **options)


# Each family, and each value of what the compiled parts depend on: numbers of experts, how they are
# chosen, heads, windows, dense layers.
MIXTURES = [
    *(
        (family, next(iter(variants)))
        for family, (_, variants) in moe_families.FAMILIES.items()
        if family not in moe_families.SPLIT
    ),
    ("mixtral", "2 of 4"),
    ("mixtral", "1 of 4, tied"),
    ("mixtral", "4 of 8"),
    ("qwen3_moe", "unnormalized, biases"),
    ("qwen3_moe", "all of 4, some dense, window, tied"),
]


@pytest.mark.parametrize(
    ("case", "backend"), with_backends(moe_families.CASES, MIXTURES, [MIXTURES[-1]])
)
def test_mixtures_of_experts(tmp_path, case, backend):
    """On a CPU, experts are computed one by one, in an op of their own."""
    family, variant = case
    model = mixture(family, tmp_path, variant)
    compiler = compiled(model, backend=backend)
    check(compiler)
    [program] = compiler._programs.values()
    ops = [step.name for step in program.plan.steps if step.kind == "op"]
    routed = sum(isinstance(module, RoutedExperts) for module in model.modules())
    # Some variants of Gemma 4 have no experts.
    assert ops.count("toolkit_lm::experts") == routed
    assert routed > 0 or family == "gemma4"
    assert ops.count("toolkit_lm::attention") == len(model.model.layers)


def test_the_parts_of_a_mixture_do_not_grow_with_its_depth(tmp_path):
    keys = []
    for depth in (2, 4):
        theirs = moe_families.make_mixtral(num_hidden_layers=depth)
        theirs.save_pretrained(tmp_path / str(depth))
        [program] = compiled(
            load_checkpoint(moe_families.FAMILIES["mixtral"][0], tmp_path / str(depth))
        )._programs.values()
        assert len(program.plan.parts) == 2 * depth + 1
        keys.append(set(program.plan.parts))
    assert keys[0] == keys[1] and len(keys[0]) == 4


def test_experts_in_one_product(tmp_path, monkeypatch):
    """Experts are stacked in one product, which they otherwise are on a GPU."""
    stacked = []

    class Stacked(RoutedExperts):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.stacked = self.stack()
            stacked.append(self.stacked is not None)

    monkeypatch.setattr("toolkit_lm_moe.routed.RoutedExperts", Stacked)
    check(compiled(mixture("mixtral", tmp_path, kernels="torch"), kernels="torch"))
    assert stacked == [True, True]


def test_a_loop_over_data_is_refused_with_its_line(tmp_path, monkeypatch):
    def forward(self, x, experts, weights):
        return self.compute(x, experts, weights)

    monkeypatch.setattr(RoutedExperts, "forward", forward)
    with pytest.raises(UnsupportedError, match=r"is not one graph: .* At .*experts\.py:\d+\."):
        compiled(mixture("mixtral", tmp_path, kernels="torch"), kernels="torch")


def test_an_op_outside_of_a_compiled_pass_names_its_layer():
    x = torch.zeros(1, 4)
    with pytest.raises(AssertionError, match=r"layer 'a\.experts' is computed as an op outside"):
        torch.ops.toolkit_lm.experts(
            x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), x.clone(), "a.experts"
        )


# The others are Roberta by another name.
ENCODERS = [
    family for family in encoder_families.VARIANTS if family not in ("Camembert", "XLMRoberta")
]


@pytest.mark.parametrize(
    ("family", "backend"),
    # Bert's operations are among those of OPT and ModernBert.
    with_backends(encoder_families.VARIANTS, ENCODERS, ["ModernBert"]),
)
def test_encoders(tmp_path, family, backend):
    if not hasattr(transformers, f"{family}Model"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}Model to compare with")
    variant = next(iter(encoder_families.VARIANTS[family]))
    encoder_families.make_checkpoint(
        f"{family}Model", encoder_families.VARIANTS[family][variant], tmp_path
    )
    model = encoder_families.load(encoder_families.our_class(f"{family}Model"), tmp_path)
    check(
        compiled(model, backend=backend),
        **({"token_type_ids": one_token_types} if model.takes_token_types else {}),
    )


@pytest.mark.parametrize(
    ("architecture", "backend"),
    with_backends(
        encdec_families.VARIANTS,
        encdec_families.VARIANTS,
        ["T5GemmaForConditionalGeneration"],
    ),
)
def test_encoder_decoders(tmp_path, architecture, backend):
    variant = next(iter(encdec_families.VARIANTS[architecture]))
    encdec_families.make_checkpoint(
        architecture, encdec_families.VARIANTS[architecture][variant], tmp_path
    )
    model = load_checkpoint(encdec_families.our_class(architecture), tmp_path, max_model_len=64)
    compiler = compiled(model, backend=backend)
    assert len(compiler._programs) == 2

    class Both:
        """The compiled decoder, and the model for the rest."""

        encode = model.encode
        compute_logits = model.compute_logits
        modules = model.modules
        __call__ = Stage.__call__

        def __init__(self):
            self.compiler = compiler

    for num_encoded, num_tokens in ((7, 9), (1, 1), (33, 2), (2, 24)):
        ids = torch.randint(5, 90, (num_encoded,)), torch.randint(5, 90, (num_tokens,))
        torch.testing.assert_close(
            encoder_decoder_logits(Both(), *ids),
            encoder_decoder_logits(model, *ids),
            atol=1e-4,
            rtol=1e-5,
        )
    assert compiler.num_eager_steps == 0


# Inductor compiles embeddings as inputs in test_three_axes_by_inductor, and two rotary embeddings
# in test_encoders.
@pytest.mark.parametrize(
    ("family", "backend"), with_backends(["llava", "gemma3"], ["llava", "gemma3"], [])
)
def test_vision_models(tmp_path, family, backend):
    random_model(family).save_pretrained(tmp_path)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    model = load_checkpoint(PLUGINS.models.load(architecture), tmp_path, plugins=PLUGINS)
    compiler = compiled(model, backend=backend)
    check(compiler)
    check(
        compiler,
        inputs_embeds=lambda num_tokens: torch.randn(
            num_tokens, 64, generator=torch.Generator().manual_seed(num_tokens)
        ),
    )
    first, second = compiler._programs.values()
    assert first.plan.parts[-1] == second.plan.parts[-1], "what comes after is the same code"


def qwen(family, folder):
    random_qwen(family).save_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return load_checkpoint(
        PLUGINS.models.load(architecture), folder, plugins=PLUGINS, max_model_len=128
    )


@pytest.mark.parametrize(
    ("family", "backend"),
    with_backends(["qwen2_vl", "qwen2_5_vl"], ["qwen2_vl", "qwen2_5_vl"], []),
)
def test_positions_of_three_axes(tmp_path, family, backend):
    """Multimodal rotary positions [3, T], and [T] of text alone; each with and without
    embeddings."""
    model = qwen(family, tmp_path)
    compiler = compiled(model, backend=backend)
    forms = [
        (len(form), ndim)
        for form in compiler._programs
        for name, _, ndim in form
        if name == "positions"
    ]
    assert sorted(forms) == [(2, 1), (2, 2), (3, 1), (3, 2)]
    for lengths in ([1], [5, 9, 2], [24], [16]):
        total = sum(lengths)
        generator = torch.Generator().manual_seed(sum(lengths))
        ids = torch.randint(10, 290, (total,), generator=generator)
        axes = torch.randint(0, 100, (3, total), generator=generator)
        embeds = torch.randn(total, 64, generator=generator)
        seen = []
        for positions in (axes, axes[0], axes[:1].expand(3, -1).contiguous()):
            for more in ({}, {"inputs_embeds": embeds}):
                with torch.inference_mode(), sequences(model, lengths):
                    ours, expected = (
                        one(ids, positions=positions, **more) for one in (compiler, model)
                    )
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
                seen.append(expected)
        # Three axes count, and equal ones are as one.
        assert total == 1 or (seen[0] - seen[2]).abs().max() > 1e-3
        torch.testing.assert_close(seen[2], seen[4], atol=1e-5, rtol=1e-5)
    assert compiler.num_eager_steps == 0


@pytest.mark.slow
def test_three_axes_by_inductor(tmp_path, monkeypatch):
    """With embeddings alone: what is compiled for the other forms differs in its first part only,
    and is traced above."""
    examples = compiler_module._examples
    form = {"input_ids": 0, "positions": 1, "inputs_embeds": 0}
    monkeypatch.setattr(
        compiler_module,
        "_examples",
        lambda *given: [one for one in examples(*given) if one[1] == form],
    )
    model = qwen("qwen2_5_vl", tmp_path)
    compiler = compiled(model, backend="inductor")
    assert len(compiler._programs) == 1
    for lengths in ([1], [5, 9, 2], [24], [37]):
        total = sum(lengths)
        generator = torch.Generator().manual_seed(total)
        given = {
            "positions": torch.randint(0, 100, (3, total), generator=generator),
            "inputs_embeds": torch.randn(total, 64, generator=generator),
        }
        ids = torch.zeros(total, dtype=torch.int64)
        with torch.inference_mode(), sequences(model, lengths):
            ours, expected = (one(ids, **given) for one in (compiler, model))
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
    assert compiler.num_eager_steps == 0


def test_the_number_of_parts_does_not_depend_on_the_depth(tmp_path):
    keys = []
    for depth in (2, 5):
        folder = tmp_path / str(depth)
        LlamaForCausalLM(
            LlamaConfig(**decoder_families.LLAMA_LIKE | {"num_hidden_layers": depth})
        ).save_pretrained(folder)
        compiler = compiled(load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder))
        [program] = compiler._programs.values()
        assert len(program.plan.parts) == depth + 1
        keys.append(list(dict.fromkeys(program.plan.parts)))
    assert keys[0] == keys[1] and len(keys[0]) == 3


def test_guards_that_equal_numbers_of_tokens_keep():
    tokens, others = sympy.symbols("s0 s1", positive=True, integer=True)
    kept = (sympy.Eq(tokens, others), sympy.Eq(192 * tokens, 192 * others))
    broken = (
        sympy.Eq(tokens, 2 * others),
        sympy.Eq(tokens, 8),
        sympy.Ne(tokens, others),
        sympy.Lt(tokens, 8),
    )
    assert all(_holds_for_equal_symbols(guard) for guard in kept)
    assert not any(_holds_for_equal_symbols(guard) for guard in broken)
