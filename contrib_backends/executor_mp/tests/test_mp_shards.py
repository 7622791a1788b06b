"""A worker holds its shard of the weights, and not the checkpoint."""

from __future__ import annotations

import psutil
import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.executor import make_executor
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_devkit import write_checkpoint

SIZE = 1024
INNER = 2048
KV_SIZE = 256
VOCAB_SIZE = 4096
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder, and bytes of its weights: all but a few of them are in layers that shard."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    shapes = {
        "model.embed_tokens": (VOCAB_SIZE, SIZE),
        "model.norm": (SIZE,),
        "lm_head": (VOCAB_SIZE, SIZE),
    }
    layer = {
        "input_layernorm": (SIZE,),
        "self_attn.q_proj": (SIZE, SIZE),
        "self_attn.k_proj": (KV_SIZE, SIZE),
        "self_attn.v_proj": (KV_SIZE, SIZE),
        "self_attn.o_proj": (SIZE, SIZE),
        "post_attention_layernorm": (SIZE,),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
    }
    shapes |= {
        f"model.layers.{i}.{name}": shape
        for i in range(NUM_LAYERS)
        for name, shape in layer.items()
    }
    weights = {f"{name}.weight": 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    return write_checkpoint(tmp_path_factory.mktemp("shards"), config, weights), sum(
        one.nbytes for one in weights.values()
    )


def held(folder, tensor: int, pipeline: int) -> list[int]:
    """Bytes of anonymous memory of each worker, once it has loaded the model."""
    plugins = Plugins.load()
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    config = VllmConfig.make(
        model=str(folder),
        executor="mp",
        device="cpu",
        kernels="torch",
        num_kv_blocks=16,
        max_model_len=64,
        **sizes,
    )
    executor = make_executor(resolve(config, plugins), plugins)
    try:
        executor.load()
        memory = [psutil.Process(pid).memory_info() for pid in executor.pids]
    finally:
        executor.shutdown()
    return [one.rss - one.shared for one in memory]


@pytest.fixture(scope="module")
def whole(checkpoint):
    """What one worker holds that has no other beside it."""
    [found] = held(checkpoint[0], 1, 1)
    return found


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_a_worker_holds_its_shard(checkpoint, whole, tensor, pipeline):
    folder, num_bytes = checkpoint
    for half in held(folder, tensor, pipeline):
        assert whole - half == pytest.approx(num_bytes / 2, rel=0.15), (
            f"{num_bytes / 2**20:.0f} MiB of weights"
        )
