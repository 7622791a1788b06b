"""select_backend: priority, refusals, names, and what its errors say."""

import sys
import types

import pytest
from toolkit_lm.attention import AttentionBackend, AttentionSpec, AttentionType, Candidate, select_backend
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo

MODULE = "backends_for_test_selector"
SPEC = AttentionSpec(
    layer="model.decoder.layers.0.encoder_attn",
    type=AttentionType.CROSS,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype="float32",
    device="cpu",
    block_size=16,
)


def backend_class(refusal: str | None) -> type[AttentionBackend]:
    return type("Backend", (AttentionBackend,), {"refuses": classmethod(lambda cls, spec: refusal)})


@pytest.fixture
def registry(monkeypatch):
    """Makes a registry of backends: name -> (priority, refusal)."""

    def make(**backends: tuple[int, str | None]) -> AttentionBackendRegistry:
        module = types.ModuleType(MODULE)
        monkeypatch.setitem(sys.modules, MODULE, module)
        registry = AttentionBackendRegistry(owner=PluginInfo("test"))
        for name, (priority, refusal) in backends.items():
            setattr(module, name, backend_class(refusal))
            registry.add(name, f"{MODULE}:{name}", priority=priority)
        return registry

    return make


def test_highest_priority_that_is_able_wins(registry) -> None:
    selection = select_backend(SPEC, registry(sdpa=(0, None), cpu=(10, None), flash_attn=(20, "no kernel for device cpu")))
    assert selection.name == "cpu"
    assert selection.backend is sys.modules[MODULE].cpu
    assert selection.candidates == [
        Candidate("flash_attn", "no kernel for device cpu"),
        Candidate("cpu", None),
        Candidate("sdpa", None),
    ]


def test_equal_priorities_go_by_name(registry) -> None:
    assert select_backend(SPEC, registry(b=(5, None), a=(5, None))).name == "a"


def test_a_wanted_backend_wins_over_priority(registry) -> None:
    selection = select_backend(SPEC, registry(sdpa=(0, None), cpu=(10, None)), wanted="sdpa")
    assert (selection.name, selection.backend) == ("sdpa", sys.modules[MODULE].sdpa)


def test_a_wanted_backend_that_refuses_is_an_error_that_names_the_able(registry) -> None:
    backends = registry(sdpa=(10, None), cpu=(5, None), xformers=(20, "no kernel for device cpu"))
    with pytest.raises(UnsupportedError) as error:
        select_backend(SPEC, backends, wanted="xformers")
    assert str(error.value) == (
        "attention backend 'xformers' cannot run cross layer 'model.decoder.layers.0.encoder_attn' on cpu: "
        "no kernel for device cpu. Able: sdpa, cpu."
    )


def test_a_wanted_backend_that_refuses_alone_says_none_is_able(registry) -> None:
    with pytest.raises(UnsupportedError, match=r"no kernel\. Able: none\.$"):
        select_backend(SPEC, registry(xformers=(0, "no kernel")), wanted="xformers")


def test_an_unknown_name_is_an_error_with_the_nearest(registry) -> None:
    with pytest.raises(ConfigError, match=r"no attention backend 'xformer' is registered\. Did you mean 'xformers'\?"):
        select_backend(SPEC, registry(sdpa=(0, None), xformers=(0, None)), wanted="xformer")


def test_all_refusing_is_an_error_with_each_reason(registry) -> None:
    with pytest.raises(UnsupportedError) as error:
        select_backend(SPEC, registry(sdpa=(0, "no arithmetic in fp8"), cpu=(1, "no cross attention")))
    assert str(error.value) == (
        "no attention backend can run cross layer 'model.decoder.layers.0.encoder_attn' on cpu: "
        "cpu: no cross attention; sdpa: no arithmetic in fp8."
    )


def test_no_backend_at_all_is_an_error(registry) -> None:
    with pytest.raises(UnsupportedError, match="on cpu: none is installed"):
        select_backend(SPEC, registry())
