"""`toolkit explain`, of adapters."""

from __future__ import annotations

from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli.explanation import explain


def rows(adapters, own, **options):
    given = {"lora": {"max_rank": 8, **own}}
    config = VllmConfig.make(
        model=str(adapters.checkpoint),
        dtype="float32",
        renderer="tokens",
        plugin_option=given,
        **options,
    )
    return explain(config, Plugins.load(PluginsConfig(plugin_option=given))).of_plugins


def test_explain_says_what_adapters_take(make_adapters):
    adapters = make_adapters("llama")
    modules = [f"{name}={adapters.paths[name]}" for name in ("all", "dora", "saved", "embedding")]
    found = rows(adapters, {"modules": modules, "device_gib": 0.5}, kernels="cpu")["adapters"]
    # q, k and v are one layer, gate and up another; A and B of rank 4 in float32.
    inputs = 64 * 6 + 96
    outputs = 64 + 2 * 32 + 64 + 2 * 96 + 64
    mib = 2 * 4 * 4 * (inputs + outputs) / 2**20
    assert found == [
        "8 slots and 0.5 GiB: adapters of one step; more take turns",
        "256 adapters and 4 GiB at most in each worker's memory, beside those of requests that run",
        f"all: rank 4, {mib:.1f} MiB; layers: 8 in the kernels' own products",
        f"dora: rank 4, {mib:.1f} MiB; layers: 8 beside them",
        "saved: rank 4, 0.1 MiB; layers: 2 in the kernels' own products, 2 beside them",
        "embedding: rank 4, 0.0 MiB; layers: 2 in the kernels' own products, 2 beside them",
    ]
    [all_beside] = [
        line
        for line in rows(adapters, {"modules": modules[:1]}, kernels="torch")["adapters"]
        if line.startswith("all")
    ]
    assert all_beside.endswith("layers: 8 beside them")


def test_explain_says_what_cannot_run(two_adapters, folder):
    two_adapters.save(folder / "wide", r=16, target_modules=["q_proj"])
    (folder / "rslora" / "adapter_model.safetensors").write_bytes(b"")
    found = rows(two_adapters, {"folder": str(folder)}, tensor_parallel_size=2)["adapters"]
    assert found[2].startswith("all: rank 4, 0.0 MiB on a rank; layers: ")
    assert found[3].startswith("rslora: cannot run: ") and "is cut off" in found[3]
    assert found[4] == "wide: cannot run: its rank is 16, and max_rank is 8"


def test_explain_says_nothing_without_adapters(two_adapters):
    assert "adapters" not in rows(two_adapters, {})
    [*_, last] = rows(two_adapters, {"enabled": True})["adapters"]
    assert last == "none at the start: requests or operators name them"
