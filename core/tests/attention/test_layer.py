"""The Attention layer: what it declares, how it is bound, and the context that refuses to nest."""

import threading
from typing import Any

import pytest
import torch
from toolkit_lm.attention import (
    Attention,
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    Binding,
    GroupMetadata,
    KVCacheSpec,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError

CONFIG = VllmConfig.default(block_size=32, dtype="bfloat16")


class Recorder(AttentionBackend):
    """Doubles the queries; records what it is given."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[tuple[Any, ...]] = []

    @classmethod
    def refuses(cls, spec) -> None:
        return None

    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        return (2, num_blocks)

    def build(self, batch):
        return None

    def write_kv(self, layer, k, v, kv_cache, slot_mapping) -> None:
        self.calls.append(("write", layer, k.shape, v.shape, kv_cache, slot_mapping))

    def forward(self, layer, q, k, v, kv_cache, meta, out) -> None:
        self.calls.append(("forward", layer, q.shape, k.shape, kv_cache, meta))
        out.copy_(q * 2)


def no_bias(q, k):
    return torch.zeros(4, len(q), len(k))


def make_layer(**options) -> Attention:
    return Attention(4, 80, vllm_config=CONFIG, prefix="layers.0.attn", **options)


def test_spec_of_a_plain_decoder_layer() -> None:
    assert make_layer(num_kv_heads=2).spec(torch.device("cuda:1")) == AttentionSpec(
        layer="layers.0.attn",
        type=AttentionType.DECODER,
        num_heads=4,
        num_kv_heads=2,
        head_size=80,
        dtype="bfloat16",
        device="cuda",
        block_size=32,
    )


def test_spec_names_each_feature() -> None:
    layer = make_layer(window=7, soft_cap=30.0, bias=no_bias, sinks=torch.zeros(4), spans=True, type=AttentionType.ENCODER)
    spec = layer.spec(torch.device("cpu"))
    assert (spec.window, spec.soft_cap, spec.bias, spec.sinks, spec.spans) == (7, 30.0, True, True, True)
    assert spec.block_size is None


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "full"), ({"window": 7}, "window"), ({"type": AttentionType.CROSS}, "cross")],
)
def test_kv_cache_spec(options, kind) -> None:
    spec = make_layer(num_kv_heads=2, **options).kv_cache_spec()
    assert spec == KVCacheSpec(kind=kind, block_size=32, num_kv_heads=2, head_size=80, dtype="bfloat16", window=options.get("window"))
    assert spec.block_bytes == 2 * 32 * 2 * 80 * 2


def test_an_encoder_layer_keeps_nothing() -> None:
    assert make_layer(type=AttentionType.ENCODER).kv_cache_spec() is None


def test_defaults_are_multi_head_and_the_usual_scale() -> None:
    layer = make_layer()
    assert layer.params.num_kv_heads == 4
    assert layer.params.scale == 80**-0.5


def test_heads_must_divide() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn.: 4 query heads cannot share 3 KV heads"):
        make_layer(num_kv_heads=3)


def test_forward_writes_then_attends_with_its_groups_metadata() -> None:
    layer, backend = make_layer(num_kv_heads=2), Recorder()
    kv_cache, slots = torch.empty(2, 5), torch.tensor([3, 9, 1])
    q, k, v = torch.randn(3, 320), torch.randn(3, 160), torch.randn(3, 160)
    with forward_context({"layers.0.attn": Binding(backend, kv_cache, 1)}, [GroupMetadata("other", None), GroupMetadata("mine", slots)]):
        out = layer(q, k, v)
    assert torch.equal(out, q * 2)
    assert backend.calls == [
        ("write", layer.params, (3, 2, 80), (3, 2, 80), kv_cache, slots),
        ("forward", layer.params, (3, 4, 80), (3, 2, 80), kv_cache, "mine"),
    ]


def test_forward_without_a_cache_writes_nothing() -> None:
    layer, backend = make_layer(type=AttentionType.ENCODER), Recorder()
    with forward_context({"layers.0.attn": Binding(backend, None, 0)}, [GroupMetadata(None, None)]):
        layer(*torch.randn(3, 2, 320))
    assert [call[0] for call in backend.calls] == ["forward"]


def test_context_refuses_to_nest() -> None:
    with forward_context({}, []), pytest.raises(AssertionError, match="inside another one on the same thread"), forward_context({}, []):
        pass


def test_context_ends_with_an_error_inside() -> None:
    with pytest.raises(KeyError), forward_context({}, []):
        raise KeyError("a model failed")
    with forward_context({}, []):
        pass


def test_context_is_per_thread() -> None:
    failures: list[BaseException] = []

    def other_thread() -> None:
        try:
            with forward_context({}, []):
                pass
        except AssertionError as error:
            failures.append(error)

    with forward_context({}, []):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert not failures


def test_a_layer_outside_a_context_is_named() -> None:
    with pytest.raises(AssertionError, match=r"'layers\.0\.attn' runs outside a forward_context"):
        make_layer()(*torch.randn(3, 2, 320))
