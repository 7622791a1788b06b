"""The methods of each format pass the kit of linear methods."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from layouts import FORMATS
from toolkit_lm_devkit import LinearMethodConformance
from toolkit_lm_quantization_formats.names import READ

UNUSED = {"input_scale", "input_global_scale", "weight_shape"}
"""Tensors that a layer has only if the checkpoint does. The kit has no checkpoint."""
RANKS: dict[str, tuple[int, ...]] = {"gptq int3": (), "gptq int2": (2,)}
"""Format -> numbers of ranks, where they are not 2 and 4. Zeros of 3 bits are stored by 32 outputs,
and those of 2 bits by 16: a rank's share would cut them."""
NEEDS_TENSORS = "bitsandbytes"
"""The format whose parameters depend on the tensors that a checkpoint has."""
BY_DAY = {
    "ct int4 zero",
    "ct fp8 tensor",
    "ct nvfp4",
    "gptq v1",
    "awq symmetric",
    "fp8 block",
}
"""A format of each way to store a weight."""


class FormatConformance(LinearMethodConformance):
    def test_shards_make_up_the_whole(self, layer, ranks):
        """The weights, since formats cut stored elements by rules of their own."""
        whole = self.make(layer)
        spec = whole.spec
        parts = torch.split(whole.method.dequantized(), [part.full for part in spec.outputs])
        for rank in range(ranks):
            shard = self.make(layer, rank=rank, ranks=ranks)
            inputs = shard.spec.inputs
            rows = torch.cat(
                [
                    part.narrow(0, own.start, own.size)
                    for part, own in zip(parts, shard.spec.outputs, strict=True)
                ]
            )
            mine = shard.method.dequantized()
            assert torch.equal(mine, rows.narrow(1, inputs.start, inputs.size))


def kit_of(name):
    form = FORMATS[name]
    module, _, cls = READ[form.config["quant_method"]].partition(":")

    unused = UNUSED | (set() if form.config.get("desc_act") else {"g_idx"})
    if form.config.get("zero_point") is False:
        unused.add("qzeros")

    def stored(self, weight):
        tensors = form.write(weight)[0]
        return {key: tensor for key, tensor in tensors.items() if key not in unused}

    fields = {
        "quantization": getattr(import_module(f"toolkit_lm_quantization_formats.{module}"), cls),
        "quantization_config": form.config,
        "tensor_parallel_sizes": RANKS.get(name, (2, 4)),
        "stored": stored,
        "dequantized": lambda self, weight: form.write(weight)[1],
        "__doc__": name,
    }
    kit = type("Kit", (FormatConformance,), fields)
    return kit if name in BY_DAY else pytest.mark.nightly(kit)


for _name, _form in FORMATS.items():
    if _form.config["quant_method"] != NEEDS_TENSORS:
        globals()["Test" + _name.title().replace(" ", "").replace(",", "")] = kit_of(_name)
