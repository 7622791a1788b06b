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
    BatchLimits,
    Binding,
    ForwardContext,
    GroupSetup,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.kv import FullSpec, WindowSpec

CONFIG = VllmConfig.default(block_size=32, dtype="bfloat16")


class Recorder(AttentionBackend):
    """Doubles the queries; records what it is given."""

    def __init__(self) -> None:
        super().__init__(
            GroupSetup(
                layers=[], kv_cache=None, limits=BatchLimits(8, 8, 8), device=torch.device("cpu")
            )
        )
        self.calls: list[tuple[Any, ...]] = []

    @classmethod
    def refuses(cls, spec) -> None:
        return None

    @classmethod
    def page_layout(cls, spec):
        return []

    def build(self, batch):
        return None

    def write_kv(self, call) -> None:
        self.calls.append(
            ("write", call.layer, call.k.shape, call.v.shape, call.kv_cache, call.metadata)
        )

    def forward(self, call) -> None:
        k_shape = None if call.k is None else call.k.shape
        self.calls.append(
            ("forward", call.layer, call.q.shape, k_shape, call.kv_cache, call.metadata)
        )
        call.out.copy_(call.q * 2)


def no_bias(q, k):
    return torch.zeros(4, len(q), len(k))


def make_layer(**options) -> Attention:
    return Attention(4, 80, vllm_config=CONFIG, prefix="layers.0.attn", **options)


def test_spec_of_a_plain_decoder_layer() -> None:
    layer = make_layer(num_kv_heads=2)
    assert layer.attention_spec(torch.device("cuda:1"), cached=True) == AttentionSpec(
        layer="layers.0.attn",
        type=AttentionType.DECODER,
        num_heads=4,
        num_kv_heads=2,
        head_size=80,
        dtype="bfloat16",
        device="cuda",
        kv_cache=layer.kv_cache_spec(),
    )
    assert layer.attention_spec(torch.device("cpu"), cached=False).kv_cache is None


def test_spec_names_each_feature() -> None:
    layer = make_layer(
        window=7, soft_cap=30.0, bias=no_bias, sinks=torch.zeros(4), type=AttentionType.ENCODER
    )
    spec = layer.attention_spec(torch.device("cpu"), cached=True)
    assert (spec.window, spec.soft_cap, spec.bias, spec.sinks) == (7, 30.0, True, True)
    assert spec.kv_cache is None


@pytest.mark.parametrize(("options", "kind"), [({}, FullSpec), ({"window": 7}, WindowSpec)])
def test_kv_cache_spec(options, kind) -> None:
    spec = make_layer(num_kv_heads=2, **options).kv_cache_spec()
    assert spec == kind(block_size=32, num_kv_heads=2, head_size=80, dtype="bfloat16", **options)
    assert spec.page_bytes == 2 * 32 * 2 * 80 * 2


def test_an_encoder_layer_keeps_nothing() -> None:
    assert make_layer(type=AttentionType.ENCODER).kv_cache_spec() is None


def test_defaults_are_multi_head_and_the_usual_scale() -> None:
    layer = make_layer()
    assert layer.params.num_kv_heads == 4
    assert layer.params.scale == 80**-0.5


def test_heads_must_divide() -> None:
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.attn.: 4 query heads cannot share 3 KV heads"
    ):
        make_layer(num_kv_heads=3)


def test_forward_writes_then_attends_with_its_groups_metadata() -> None:
    layer = make_layer(num_kv_heads=2)
    backend = Recorder()
    kv_cache = (torch.empty(2, 5),)
    q = torch.randn(3, 320)
    k = torch.randn(3, 160)
    v = torch.randn(3, 160)
    with forward_context(
        ForwardContext(
            {"layers.0.attn": Binding(backend, layer.params, kv_cache, 1)}, ["other", "mine"]
        )
    ):
        out = layer(q, k, v)
    assert torch.equal(out, q * 2)
    assert backend.calls == [
        ("write", layer.params, (3, 2, 80), (3, 2, 80), kv_cache, "mine"),
        ("forward", layer.params, (3, 4, 80), (3, 2, 80), kv_cache, "mine"),
    ]


def test_forward_without_a_cache_writes_nothing() -> None:
    layer = make_layer(type=AttentionType.ENCODER)
    backend = Recorder()
    with forward_context(
        ForwardContext({"layers.0.attn": Binding(backend, layer.params, None, 0)}, [None])
    ):
        layer(*torch.randn(3, 2, 320))
    assert [call[0] for call in backend.calls] == ["forward"]


def test_context_refuses_to_nest() -> None:
    nothing = ForwardContext({}, [])
    with (
        forward_context(nothing),
        pytest.raises(AssertionError, match="inside another one on the same thread"),
        forward_context(nothing),
    ):
        pass


def test_context_ends_with_an_error_inside() -> None:
    with pytest.raises(KeyError), forward_context(ForwardContext({}, [])):
        raise KeyError("a model failed")
    with forward_context(ForwardContext({}, [])):
        pass


def test_context_is_per_thread() -> None:
    failures: list[BaseException] = []

    def other_thread() -> None:
        try:
            with forward_context(ForwardContext({}, [])):
                pass
        except AssertionError as error:
            failures.append(error)

    with forward_context(ForwardContext({}, [])):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert not failures


def test_a_layer_outside_a_context_is_named() -> None:
    with pytest.raises(AssertionError, match=r"'layers\.0\.attn' runs outside a forward_context"):
        make_layer()(*torch.randn(3, 2, 320))


def test_a_step_without_keys_writes_nothing() -> None:
    """Cross attention, once the encoder's keys are cached."""
    layer = make_layer(type=AttentionType.CROSS)
    backend = Recorder()
    with forward_context(
        ForwardContext(
            {"layers.0.attn": Binding(backend, layer.params, (torch.empty(1),), 0)}, [None]
        )
    ):
        out = layer(torch.ones(3, 320))
    assert torch.equal(out, torch.full((3, 320), 2.0))
    assert [call[0] for call in backend.calls] == ["forward"]


def test_attention_is_one_op_of_a_compiled_graph() -> None:
    layer = make_layer()
    backend = Recorder()
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v: layer(q, k, v) + 1, fullgraph=True, backend=look)
    with forward_context(
        ForwardContext({"layers.0.attn": Binding(backend, layer.params, None, 0)}, [None])
    ):
        out = compiled(*torch.ones(3, 2, 320))
    assert torch.equal(out, torch.full((2, 320), 3.0))
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(graphs) == 1 and sum("toolkit_lm.attention" in target for target in targets) == 1
