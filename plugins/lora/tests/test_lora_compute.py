"""How adapters are computed: in the kernels' one call per layer, or beside it, alike."""

from __future__ import annotations

import pytest
from lora_adapters import given
from toolkit_lm_cpu import fused, library

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))


@pytest.fixture(scope="module")
def adapters(make_adapters):
    return make_adapters("llama")


def fused_calls(monkeypatch, *, on: bool = True) -> list[bool]:
    """Of each layer's call, whether adapters were in it. Off: layers are called one by one."""
    calls: list[bool] = []
    call = fused.FusedDecoderLayer.__call__

    def counted(self, x, residual, rotation):
        if not on:
            return None
        calls.append(any(linear.method.added is not None for linear in self._products))
        return call(self, x, residual, rotation)

    monkeypatch.setattr(fused.FusedDecoderLayer, "__call__", counted)
    return calls


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ids=["float32", "bfloat16", "int8"],
)
def test_layers_stay_one_call_with_the_same_bits(adapters, monkeypatch, options):
    names = (None, "all", "rslora", "layers", "regex", None)
    found = {}
    for on in (True, False):
        with monkeypatch.context() as patch:
            calls = fused_calls(patch, on=on)
            with adapters.llm(enable_prefix_caching=False, **options) as llm:
                found[on] = [given(one) for one in adapters.ask(llm, *names)]
                alone = [given(adapters.ask(llm, name)[0]) for name in names]
            assert found[on] == alone
            assert not on or any(calls)
    assert found[True] == found[False]
    assert len({str(one) for one in found[True]}) == 5


def test_beside_an_adapter_of_another_form(adapters):
    """DoRA's layers are called one by one in the same step: others get the same bits."""
    names = ("all", "dora", None, "bias", "rslora")
    with adapters.llm(enable_prefix_caching=False) as llm:
        alone = [given(adapters.ask(llm, name)[0]) for name in names]
        assert [given(one) for one in adapters.ask(llm, *names)] == alone


def test_layers_without_adapters_are_as_they_were(adapters, monkeypatch):
    calls = fused_calls(monkeypatch)
    with adapters.llm(enable_prefix_caching=False) as llm:
        adapters.ask(llm, "dora", "all")
        calls.clear()
        adapters.assert_is(adapters.ask(llm, None)[0], None)
    assert calls and not any(calls)
