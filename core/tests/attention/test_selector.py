"""select_backend: priority, refusals, names, and what its errors say."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from toolkit_lm.attention import AttentionBackend, AttentionSpec, AttentionType, select_backend
from toolkit_lm.errors import ConfigError, PluginError, UnsupportedError
from toolkit_lm.kv import FullSpec
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo, PluginWarning

MODULE = "backends_for_test_selector"
SPEC = AttentionSpec(
    layer="model.decoder.layers.0.encoder_attn",
    type=AttentionType.CROSS,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype="float32",
    device="cpu",
    kv_cache=FullSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32"),
)


def backend_class(refuses: Callable[..., object]) -> type[AttentionBackend]:
    """A whole backend, as far as the selector can see."""
    members = dict.fromkeys(AttentionBackend.__abstractmethods__) | {
        "refuses": classmethod(lambda cls, spec: refuses())
    }
    return type("Backend", (AttentionBackend,), members)


@pytest.fixture
def registry(monkeypatch):
    """Makes a registry of backends: name -> (priority, refusal, or a function that gives one, or a
    class)."""

    def make(**backends: tuple[int, Any]) -> AttentionBackendRegistry:
        module = types.ModuleType(MODULE)
        monkeypatch.setitem(sys.modules, MODULE, module)
        registry = AttentionBackendRegistry(
            owner=PluginInfo("test", "toolkit-lm-test", "1.0", "/somewhere.py")
        )
        for name, (priority, refusal) in backends.items():
            refuses = (
                refusal
                if isinstance(refusal, types.FunctionType)
                else lambda refusal=refusal: refusal
            )
            setattr(module, name, refusal if isinstance(refusal, type) else backend_class(refuses))
            registry.add(name, f"{MODULE}:{name}", priority=priority)
        return registry

    return make


def test_highest_priority_that_is_able_wins(registry) -> None:
    selection = select_backend(
        SPEC, registry(sdpa=(0, None), cpu=(10, None), flash_attn=(20, "no kernel for device cpu"))
    )
    assert selection.name == "cpu"
    assert selection.backend is sys.modules[MODULE].cpu
    assert selection.candidates == [
        ("flash_attn", "no kernel for device cpu"),
        ("cpu", None),
        ("sdpa", None),
    ]


def test_of_equal_priorities_the_first_wins(registry) -> None:
    assert select_backend(SPEC, registry(b=(5, None), a=(5, None))).name == "b"


def test_a_wanted_backend_wins_over_priority(registry) -> None:
    selection = select_backend(SPEC, registry(sdpa=(0, None), cpu=(10, None)), wanted="sdpa")
    assert (selection.name, selection.backend) == ("sdpa", sys.modules[MODULE].sdpa)


def test_a_wanted_backend_that_refuses_is_an_error_that_names_the_able(registry) -> None:
    backends = registry(sdpa=(10, None), cpu=(5, None), xformers=(20, "no kernel for device cpu"))
    with pytest.raises(UnsupportedError) as error:
        select_backend(SPEC, backends, wanted="xformers")
    assert str(error.value) == (
        "attention backend 'xformers' cannot run cross layer "
        "'model.decoder.layers.0.encoder_attn' on cpu: "
        "no kernel for device cpu. Supported: sdpa, cpu."
    )


def test_a_wanted_backend_that_refuses_alone_says_none_is_able(registry) -> None:
    with pytest.raises(UnsupportedError, match=r"no kernel\. Supported: none\.$"):
        select_backend(SPEC, registry(xformers=(0, "no kernel")), wanted="xformers")


def test_an_unknown_name_is_an_error_with_the_nearest(registry) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no attention backend 'xformer' is registered\. Did you mean 'xformers'\?",
    ):
        select_backend(SPEC, registry(sdpa=(0, None), xformers=(0, None)), wanted="xformer")


def test_all_refusing_is_an_error_with_each_reason(registry) -> None:
    with pytest.raises(UnsupportedError) as error:
        select_backend(
            SPEC, registry(sdpa=(0, "no arithmetic in fp8"), cpu=(1, "no cross attention"))
        )
    assert str(error.value) == (
        "no attention backend can run cross layer 'model.decoder.layers.0.encoder_attn' on cpu: "
        "cpu: no cross attention; sdpa: no arithmetic in fp8."
    )


def test_no_backend_at_all_is_an_error(registry) -> None:
    with pytest.raises(UnsupportedError, match="on cpu: none is installed"):
        select_backend(SPEC, registry())


def boom() -> str | None:
    raise RuntimeError("boom")


def test_a_backend_that_raises_is_refused_with_that_reason(registry) -> None:
    failure = (
        r"plugin 'test' \(toolkit-lm-test 1.0, .*\) failed in refuses\(\) of attention backend "
        r"'bad': RuntimeError: boom"
    )
    with pytest.warns(PluginWarning, match=failure):
        selection = select_backend(SPEC, registry(sdpa=(0, None), bad=(20, boom)))
    assert selection.name == "sdpa"
    assert "RuntimeError: boom" in selection.candidates[0][1]
    with pytest.raises(PluginError, match=failure) as caught:
        select_backend(SPEC, registry(sdpa=(0, None), bad=(20, boom)), wanted="bad")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_error_names_the_line(registry, tmp_path, monkeypatch) -> None:
    """The named line is the plugin's own, whatever code it calls."""
    (tmp_path / "boom_backend.py").write_text(
        "import json\n\ndef refuses():\n    json.loads('{')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import boom_backend

    backends = registry(bad=(0, boom_backend.refuses))
    backends.get("bad").owner.add_package("boom_backend")
    with pytest.raises(
        PluginError,
        match=rf"\(toolkit-lm-test 1.0, {tmp_path}/boom_backend.py:4\) failed in .*JSONDecodeError",
    ):
        select_backend(SPEC, backends, wanted="bad")


@pytest.mark.parametrize("answer", [False, True, 0, ["no"]])
@pytest.mark.parametrize("wanted", ["auto", "bad"])
def test_an_answer_that_is_neither_text_nor_none_is_an_error(registry, answer, wanted) -> None:
    with pytest.raises(
        PluginError,
        match=r"plugin 'test' .*refuses\(\) of attention backend 'bad' must return a text or "
        r"None, not",
    ):
        select_backend(SPEC, registry(sdpa=(0, None), bad=(20, lambda: answer)), wanted=wanted)


class Unfinished(AttentionBackend):
    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        return None

    def build(self, batch: object) -> object:
        return None


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (
            Unfinished,
            (
                "does not define forward, page_layout, write_kv, which "
                "toolkit_lm.attention.AttentionBackend leaves to its subclasses"
            ),
        ),
        (int, "must be a subclass of toolkit_lm.attention.AttentionBackend"),
    ],
)
def test_a_class_that_is_no_whole_backend_is_refused(registry, kind, error) -> None:
    with pytest.warns(
        PluginWarning, match=rf"plugin 'test' .*attention backend 'bad': '.*:bad' {error}"
    ):
        assert select_backend(SPEC, registry(sdpa=(0, None), bad=(20, kind))).name == "sdpa"
    with pytest.raises(PluginError, match=error):
        select_backend(SPEC, registry(sdpa=(0, None), bad=(20, kind)), wanted="bad")
