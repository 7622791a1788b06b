"""Kernels that compute a layer in one call: only where nobody has changed what it computes, or
waits to see it."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from types import CodeType, FunctionType, ModuleType

import pytest
import torch
import transformers
from toolkit_lm import LLM, SamplingParams, bypass
from toolkit_lm.attention import Attention
from toolkit_lm.bypass import Bypassable, module_alteration
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    FusibleLayer,
    Kernels,
    LayerParts,
    LinearBase,
    LinearMethod,
    ParallelLMHead,
    RMSNorm,
    Rotation,
    RowParallelLinear,
)
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm_cli.explanation import explain
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import refusal
from toolkit_lm_cpu.panels import PanelLinear
from toolkit_lm_decoder import MODELS
from toolkit_lm_decoder.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaParts
from toolkit_lm_devkit import load_checkpoint, make_checkpoint, randomize
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FIELDS = {
    "OPTForCausalLM": {"ffn_dim": 96},
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 272,
    },
    "Gemma4ForCausalLM": {
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 272,
        "layer_types": ["full_attention"] * 2,
    },
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": ROUTED,
}
UNFUSED = {"GPT2LMHeadModel", "Gemma3nForCausalLM", "OPTForCausalLM"}
"""Built-in families without a layer that kernels compute in one call."""
OTHER_ATTENTION = {
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "MiniCPM3ForCausalLM",
}
"""Relatives of Llama whose attention no kernel computes in one call with the layer."""
FAMILIES = sorted({*MODELS, "Gemma4ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"})
WALKED = (
    "Qwen3ForCausalLM",
    "GraniteForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma4ForCausalLM",
    "Olmo2ForCausalLM",
)
"""Families that together have every kind of layer, and every module that one is made of."""
PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i + length) % 260 for i in range(length)]} for length in (5, 12)
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
DRAWN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function: architecture -> the folder of a small random checkpoint."""
    made = {}

    def get(architecture):
        if architecture not in made:
            model_class = getattr(transformers, architecture)
            shape = {
                name: value
                for name, value in SHAPE.items()
                if not (architecture == "Olmo2ForCausalLM" and name == "head_dim")
            }
            torch.manual_seed(0)
            model = model_class(model_class.config_class(**shape | FIELDS.get(architecture, {})))
            randomize(model)
            made[architecture] = make_checkpoint(tmp_path_factory.mktemp(architecture), model)
        return made[architecture]

    return get


def class_of(architecture):
    return Plugins.load().models.load(architecture)


def run(folder, architecture, model_class, *, kernels="cpu", params=GREEDY, after=None, **options):
    """Tokens and their log probabilities, with `model_class` in the place of the family's own."""
    stands = ModuleType("toolkit_lm_test_fusing")
    stands.Model = model_class
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stands.__name__, stands)
        with LLM(
            str(folder),
            plugins=[Replaced(architecture, f"{stands.__name__}:Model")],
            kernels=kernels,
            device="cpu",
            dtype="float32",
            max_model_len=64,
            num_kv_blocks=32,
            **options,
        ) as llm:
            if after is not None:
                after(llm.engine.client.core.executor.runner.model)
            outputs = [
                output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)
            ]
    logprobs = [
        [entry[token].logprob for entry, token in zip(o.logprobs or (), o.token_ids, strict=False)]
        for o in outputs
    ]
    return [list(output.token_ids) for output in outputs], logprobs


class Replaced:
    name = "replaced"

    def __init__(self, architecture, target):
        self.architecture = architecture
        self.target = target

    @hookimpl
    def toolkit_register_models(self, models):
        models.add(self.architecture, self.target, override=True)


def fusible(model):
    return [module for module in model.modules() if isinstance(module, FusibleLayer)]


# Which built-in models are fused


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_layer_of_a_built_in_model_is_fused(folder, architecture):
    model = load_checkpoint(class_of(architecture), folder(architecture), kernels="cpu")
    layers = fusible(model)
    if architecture in UNFUSED:
        assert layers == []
        return
    assert [layer.fusible() for layer in layers if isinstance(layer.fusible(), str)] == []
    assert len(layers) == 2
    assert all(layer.fused is not None and layer.may_bypass() for layer in layers)


def test_every_installed_relative_of_llama_is_fused():
    """All classes are checked, also those of models, such as reward models, for which no test here
    makes a checkpoint."""
    models = Plugins.load().models
    relatives = {
        entry.key: loaded
        for entry in models.entries()
        if issubclass(loaded := models.load(entry.key), LlamaParts)
        # A function chooses among layers of other families, which are relatives themselves.
        and isinstance(loaded.layer, type)
        and issubclass(loaded.layer, FusibleLayer)
    }
    assert len(relatives) > len(FAMILIES) - len(UNFUSED)
    altered = set()
    for name, relative in relatives.items():
        for kind in (relative.layer, relative.attention, relative.norm):
            module = kind.__new__(kind)
            nn.Module.__init__(module)
            if module_alteration(module) is not None:
                altered.add(name)
    assert altered == OTHER_ATTENTION


# Overrides


def reachable(cls):
    """Names of functions of a module's class that its forward pass may call on the module, by the
    names in their code."""
    found = set()
    todo = ["forward"]
    while todo:
        name = todo.pop()
        function = inspect.getattr_static(cls, name, None)
        if name in found or not isinstance(function, FunctionType):
            continue
        if hasattr(nn.Module, name) and name != "forward":
            continue
        found.add(name)
        todo += names_of(function.__code__)
    return found


def names_of(code):
    """The names in a function's code, and in that of comprehensions and functions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*code.co_names, *(name for one in inner for name in names_of(one))]


def kind_of(cls):
    """The class that vouches for what a module computes."""
    return next(one for one in cls.__mro__ if "seams" in vars(one))


def part_classes(architecture, folder):
    """The classes of the modules of a model's layers, and of its head, by name."""
    model = load_checkpoint(class_of(architecture), folder(architecture), kernels="torch")
    found = {type(module) for layer in fusible(model) for module in layer.modules()} | {
        type(model.lm_head)
    }
    return sorted(found, key=lambda cls: cls.__name__)


def overriding(cls, name, calls):
    """A subclass whose method counts its calls, and halves what is computed."""
    original = getattr(cls, name)

    def halved(value):
        if isinstance(value, Tensor):
            return value * 0.5
        return tuple(map(halved, value)) if isinstance(value, tuple) else value

    def method(self, *args, **kwargs):
        calls[name] += 1
        return halved(original(self, *args, **kwargs))

    return type(f"My{cls.__name__}", (cls,), {name: method})


def with_parts(model_class, cls, own):
    """A model whose modules of class `cls` are of class `own`."""

    class Mine(model_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for module in self.modules():
                if type(module) is cls:
                    module.__class__ = own

    return Mine


FIRST, *OTHERS = WALKED


@pytest.mark.parametrize(
    "architecture", [FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_an_override_of_any_method_that_forward_reaches_is_run(folder, architecture):
    """Every class that layers are made of gives the same tokens with fusing kernels and with plain
    torch."""
    done = set() if architecture == FIRST else {kind_of(cls) for cls in part_classes(FIRST, folder)}
    base = class_of(architecture)
    seen = set()
    plain = run(folder(architecture), architecture, base, params=DRAWN)
    for cls in part_classes(architecture, folder):
        kind = kind_of(cls)
        for name in sorted(reachable(cls) - kind.seams) if kind not in done else ():
            if (kind, name) in seen:
                continue
            seen.add((kind, name))
            found = []
            counts = []
            for kernels in ("cpu", "torch"):
                calls = Counter()
                mine = with_parts(base, cls, overriding(cls, name, calls))
                found.append(
                    run(folder(architecture), architecture, mine, kernels=kernels, params=DRAWN)
                )
                counts.append(calls[name])
            where = f"{cls.__name__}.{name}"
            assert counts[0] == counts[1] > 0, where
            assert found[0][0] == found[1][0], where
            for ours, theirs in zip(found[0][1], found[1][1], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4), where
            assert found[0][1] != plain[1], f"{where} is run, and changes nothing"
    if architecture == FIRST:
        assert {LlamaAttention, LlamaMLP, LlamaDecoderLayer, Attention, RMSNorm, ParallelLMHead} < {
            kind for kind, _ in seen
        }
        assert {
            (LlamaDecoderLayer, "enter"),
            (LlamaAttention, "_normed"),
            (LlamaAttention, "project"),
        } < seen
    else:
        assert any(issubclass(kind, FusibleLayer) and name == "forward" for kind, name in seen)


def test_a_head_that_computes_in_its_own_way_is_called(folder):
    """Also where all that is asked of it is the likeliest token."""

    class Upside(ParallelLMHead):
        def forward(self, hidden_states):
            return -super().forward(hidden_states)

    architecture = "LlamaForCausalLM"
    base = class_of(architecture)
    mine = with_parts(base, ParallelLMHead, Upside)
    ours, theirs = (
        run(folder(architecture), architecture, mine, kernels=kernels)[0]
        for kernels in ("cpu", "torch")
    )
    assert ours == theirs != run(folder(architecture), architecture, base)[0]


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma4ForCausalLM"])
def test_the_likeliest_token_takes_no_logits_where_nothing_caps_them(
    folder, monkeypatch, architecture
):
    """Nor where a subclass computes them in its own way."""
    model = load_checkpoint(class_of(architecture), folder(architecture), kernels="cpu")
    calls = Counter()
    hidden = torch.randn(3, SHAPE["hidden_size"])
    monkeypatch.setattr(
        type(model.lm_head.method),
        "apply",
        lambda *given, apply=type(model.lm_head.method).apply, **named: (
            calls.update(["logits"]) or apply(*given, **named)
        ),
    )
    for found, expected in zip(
        model.likeliest(hidden), model.kernels.likeliest(model.compute_logits(hidden)), strict=True
    ):
        assert torch.equal(found, expected)
    assert calls["logits"] == (1 if model.soft_cap is None else 2)

    class Backwards(type(model)):
        def compute_logits(self, hidden_states):
            return -super().compute_logits(hidden_states)

    model.__class__ = Backwards
    assert torch.equal(model.likeliest(hidden)[1], model.compute_logits(hidden).argmax(-1))


@pytest.mark.parametrize("architecture", WALKED)
def test_any_override_but_of_a_seam_unfuses_and_no_seam_does(folder, architecture):
    """Whether or not forward reaches it today."""
    model = load_checkpoint(class_of(architecture), folder(architecture), kernels="cpu")
    layer = fusible(model)[0]
    checked = 0
    for module in layer.modules():
        cls = type(module)
        kind = kind_of(cls)
        for name in dir(kind):
            if name.startswith("__") and name not in ("__call__", "__getattr__", "__setattr__"):
                continue
            value = inspect.getattr_static(cls, name)
            if name in ("seams", "extra_repr", "_abc_impl"):
                continue
            module.__class__ = type("Mine", (cls,), {name: value})
            found = layer.fusible()
            is_gated = (
                isinstance(module, LlamaMLP)
                and isinstance(found, LayerParts)
                and found.feed_forward is module
            )
            assert (name in kind.seams) == isinstance(found, LayerParts) or is_gated, (
                f"{cls.__name__}.{name}: {found}"
            )
            module.__class__ = cls
            checked += 1
    assert checked > 100
    assert isinstance(layer.fusible(), LayerParts)


@pytest.mark.parametrize("architecture", WALKED)
def test_seams_are_no_part_of_the_forward_pass_unless_the_parts_state_them(folder, architecture):
    for cls in part_classes(architecture, folder):
        kind = kind_of(cls)
        assert reachable(cls) & kind.seams <= {"head_norms"}, cls


def test_new_names_do_not_unfuse_but_those_that_hide_a_part_do(folder):
    class Helped(LlamaAttention):
        limit = 3

        def helper(self):
            return 1

    class Hiding(LlamaAttention):
        @property
        def o_proj(self):
            return lambda x: x

    layer = fusible(
        load_checkpoint(class_of("LlamaForCausalLM"), folder("LlamaForCausalLM"), kernels="cpu")
    )[0]
    layer.self_attn.__class__ = Helped
    assert isinstance(layer.fusible(), LayerParts)
    layer.self_attn.__class__ = Hiding
    assert layer.fusible() == "Hiding overrides o_proj of LlamaAttention"


def test_a_mixin_before_the_layer_unfuses(folder):
    class Mixin:
        def enter(self, x, residual):
            raise NotImplementedError

    layer = fusible(
        load_checkpoint(class_of("LlamaForCausalLM"), folder("LlamaForCausalLM"), kernels="cpu")
    )[0]
    layer.__class__ = type("Mine", (Mixin, LlamaDecoderLayer), {})
    assert layer.fusible() == "Mixin overrides enter of LlamaDecoderLayer"


@pytest.mark.parametrize("when", ["before loading", "after loading"])
@pytest.mark.parametrize("place", ["self_attn.attn", "mlp"])
def test_a_forward_that_is_put_on_a_module_is_run(folder, place, when):
    """The module's `forward` is replaced, like accelerate and others do."""
    calls = Counter()

    def put(model):
        module = model.model.layers.owned[0].get_submodule(place)
        forward = module.forward
        module.forward = lambda *given: calls.update(["forward"]) or forward(*given)

    class Mine(class_of(FIRST)):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            if when == "before loading":
                put(self)

    after = put if when == "after loading" else None
    run(folder(FIRST), FIRST, Mine, after=after)
    counted = calls.pop("forward")
    run(folder(FIRST), FIRST, Mine, after=after, kernels="torch")
    assert counted == calls["forward"]


def test_no_layer_is_bypassed_while_a_method_of_a_part_of_it_is_replaced(folder):
    model = load_checkpoint(class_of(FIRST), folder(FIRST), kernels="cpu")
    layer, other = fusible(model)
    for module in [*layer.modules(), model.lm_head]:
        bypassed = model.lm_head if module is model.lm_head else layer
        assert bypassed.may_bypass()
        forward = module.forward
        module.forward = lambda *given, forward=forward: forward(*given)
        assert not bypassed.may_bypass(), type(module)
        assert other.may_bypass()
        del module.forward
        assert bypassed.may_bypass(), type(module)


@pytest.mark.parametrize(
    "cls",
    [
        LlamaDecoderLayer,
        LlamaAttention,
        LlamaMLP,
        RMSNorm,
        RowParallelLinear,
        LinearBase,
        Attention,
    ],
)
def test_a_function_that_is_put_on_a_class_is_run(folder, monkeypatch, cls):
    layer = fusible(
        load_checkpoint(class_of("LlamaForCausalLM"), folder("LlamaForCausalLM"), kernels="cpu")
    )[0]
    assert isinstance(layer.fusible(), LayerParts)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda *given: forward(*given))
    found = layer.fusible()
    assert found == f"forward of {cls.__name__} has been replaced" or (
        cls is LlamaMLP and found.feed_forward is layer.mlp
    )


def test_a_rotation_of_another_kind_is_used(folder):
    calls = Counter()

    class Backwards(Rotation):
        def rotate(self, x):
            calls["rotate"] += 1
            return Rotation(self.cos, -self.sin, self.interleaved, self.kernels).rotate(x)

    base = class_of("LlamaForCausalLM")

    class Decoder(base.decoder):
        def rotations(self, positions):
            return [
                Backwards(r.cos, r.sin, r.interleaved, r.kernels)
                for r in super().rotations(positions)
            ]

    class Mine(base):
        decoder = Decoder

    ours = run(folder("LlamaForCausalLM"), "LlamaForCausalLM", Mine, params=DRAWN)
    assert calls["rotate"]
    assert (
        ours[0]
        == run(folder("LlamaForCausalLM"), "LlamaForCausalLM", Mine, params=DRAWN, kernels="torch")[
            0
        ]
    )


OPERATIONS = {
    name
    for name, value in vars(Kernels).items()
    if isinstance(value, FunctionType) and name[0] != "_"
} - {"fuse"}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_kernels_that_override_an_operation_of_a_layer_do_not_inherit_its_fusing(folder, name):
    own = type("Mine", (CpuKernels,), {name: getattr(CpuKernels, name)})
    layer = fusible(
        load_checkpoint(class_of("LlamaForCausalLM"), folder("LlamaForCausalLM"), kernels="cpu")
    )[0]
    layer.fuse(own())
    assert (layer.fused is not None) == (name in Kernels.seams)
    layer.fuse(type("Fusing", (own,), {"fuse": CpuKernels.fuse})())
    assert layer.fused is not None


@pytest.mark.parametrize(
    "part", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
)
def test_a_linear_method_of_a_class_of_its_own_is_called(folder, part):
    class Counting(PanelLinear):
        pass

    layer = fusible(
        load_checkpoint(class_of("LlamaForCausalLM"), folder("LlamaForCausalLM"), kernels="cpu")
    )[0]
    method: LinearMethod = layer.get_submodule(part).method
    method.__class__ = Counting
    layer.fuse(CpuKernels())
    assert layer.fused is None


# Hooks


def registrations():
    """Every way to hang a hook on a module's calls, or on those of all modules."""
    own = [name for name in dir(nn.Module) if name.startswith("register_")]
    every = [name for name in dir(torch_module) if name.startswith("register_")]
    return [name for name in (*own, *every) if "forward" in name or "backward" in name]


def test_the_ways_to_hang_hooks_are_those_that_are_known():
    assert sorted(registrations()) == [
        "register_backward_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_module_backward_hook",
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ]


@pytest.mark.parametrize("register", registrations())
def test_no_layer_is_bypassed_while_a_hook_hangs_on_a_part_of_it(folder, monkeypatch, register):
    # Which of two kinds of global backward hooks there has been.
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)
    model = load_checkpoint(class_of("Qwen3ForCausalLM"), folder("Qwen3ForCausalLM"), kernels="cpu")
    hooked, other = fusible(model)
    for module in [*hooked.modules(), model.lm_head]:
        bypassed = model.lm_head if module is model.lm_head else hooked
        assert bypassed.may_bypass()
        is_global = register.startswith("register_module_")
        add = getattr(torch_module, register) if is_global else getattr(module, register)
        handle = add(lambda *given: None)
        assert not bypassed.may_bypass()
        assert other.may_bypass() != is_global
        handle.remove()
        assert bypassed.may_bypass() and other.may_bypass()


@pytest.mark.parametrize("when", ["before loading", "after loading"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(
    "architecture", [FIRST, pytest.param("MixtralForCausalLM", marks=pytest.mark.slow)]
)
def test_hooks_on_every_module_fire(folder, architecture, register, when):
    """Hooks run as often with fusing kernels as with plain torch, and they may change the
    results."""
    base = class_of(architecture)

    def hang(model, calls):
        for name, module in model.named_modules():
            if name:
                getattr(module, register)(lambda *given, name=name: calls.update([name]))
        last = model.model.layers.owned[-1].self_attn.o_proj
        last.register_forward_hook(lambda module, given, out: out * 0.5)

    found = []
    counts = []
    for kernels in ("cpu", "torch"):
        calls = Counter()

        class Hooked(base):
            def __init__(self, *, vllm_config, prefix="", calls=calls):
                super().__init__(vllm_config=vllm_config, prefix=prefix)
                if when == "before loading":
                    hang(self, calls)

        def after(model, calls=calls):
            if when == "after loading":
                hang(model, calls)
            calls.clear()

        found.append(run(folder(architecture), architecture, Hooked, kernels=kernels, after=after))
        counts.append(dict(calls))
    assert found[0][0] == found[1][0] != run(folder(architecture), architecture, base)[0]
    assert counts[0] == counts[1]
    some = {
        "lm_head",
        "model.layers.0",
        "model.layers.1.self_attn.attn",
        "model.layers.0.self_attn.qkv_proj",
        "model.norm",
    }
    assert some < counts[0].keys()
    if architecture == "MixtralForCausalLM":
        assert any(name.endswith("gate_up_proj") for name in counts[0])


def test_a_hook_that_comes_and_goes(folder):
    """The layer is fused again once no hook is left."""
    calls = Counter()
    handles = []
    model = load_checkpoint(class_of("LlamaForCausalLM"), folder("LlamaForCausalLM"), kernels="cpu")
    layer = fusible(model)[0]
    layer.fused = lambda *given: given[:2]
    given = (
        torch.zeros(1, 64),
        torch.zeros(1, 64),
        Rotation(torch.ones(1, 1, 16), torch.zeros(1, 1, 16), False, Kernels()),
    )
    layer(*given)
    handles.append(layer.self_attn.register_forward_pre_hook(lambda *given: calls.update(["hook"])))
    with pytest.raises(AssertionError, match="outside a forward_context"):
        layer(*given)
    assert calls["hook"] == 1
    handles.pop().remove()
    layer(*given)
    assert calls["hook"] == 1


def test_steps_look_for_hooks_only_after_a_registration(folder, monkeypatch):
    looked = Counter()
    look = bypass.has_hook
    monkeypatch.setattr(
        bypass, "has_hook", lambda modules: looked.update(["look"]) or look(modules)
    )
    model = []

    def after(made):
        model.append(made)
        looked.clear()

    run(folder("LlamaForCausalLM"), "LlamaForCausalLM", class_of("LlamaForCausalLM"), after=after)
    # The warm-up has looked already.
    assert looked["look"] == 0
    assert all(layer.fused is not None for layer in fusible(model[0]))


def test_every_seam_exists():
    todo = [Bypassable]
    found = set()
    while todo:
        cls = todo.pop()
        found.add(cls)
        todo += cls.__subclasses__()
    ours = {cls for cls in found if cls.__module__.startswith("toolkit_lm")} - {
        Bypassable,
        FusibleLayer,
    }
    assert {ParallelLMHead, LlamaDecoderLayer} < ours
    for cls in ours:
        assert vars(cls).get("seams", frozenset()) <= {*dir(cls)}, (
            f"{cls.__name__}: a seam that does not exist"
        )


# Output of `toolkit explain`


def test_explain_says_which_layers_are_not_fused_and_why(folder, monkeypatch):
    base = class_of("LlamaForCausalLM")

    class Entering(LlamaDecoderLayer):
        def enter(self, x, residual):
            return super().enter(x, residual)

    stands = ModuleType("toolkit_lm_test_explained")
    stands.Model = type("Mine", (base,), {"layer": Entering})
    monkeypatch.setitem(sys.modules, stands.__name__, stands)
    config = VllmConfig.make(model=str(folder("LlamaForCausalLM")), device="cpu", kernels="cpu")
    assert len(explain(config).computed) == 2
    found = explain(config, [Replaced("LlamaForCausalLM", f"{stands.__name__}:Model")])
    assert found.computed[1:] == [
        "each layer by itself, with kernels 'cpu'",
        "2 decoder layers module by module: Entering overrides enter of LlamaDecoderLayer",
    ]
