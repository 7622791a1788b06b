"""Writers of quantized weights, from the formats' published layouts: what a checkpoint holds of a
module, and the weight that it stands for, in float32. Shares no code with the readers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import torch

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes, bits):
    """Codes [R, C] one after the other as a stream of bits, lowest first, in int32."""
    codes = codes.numpy().astype(np.uint32)
    stream = (codes[..., None] >> np.arange(bits)) & 1
    stream = stream.reshape(len(codes), -1).astype(np.uint8)
    stream = np.pad(stream, [(0, 0), (0, -stream.shape[1] % 32)])
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def integers(weight, bits, group, *, symmetric=True, groups=None):
    """Codes [N, K], scales [N, G] (float16 values), zeros [N, G], and the weight. `groups` [K]: the
    group of each input."""
    outputs, inputs = weight.shape
    size = group or inputs
    if groups is None:
        groups = torch.arange(inputs) // size
    top = 2**bits - 1
    scales = torch.zeros(outputs, inputs // size)
    zeros = torch.zeros(outputs, inputs // size)
    for g in range(inputs // size):
        part = weight[:, groups == g].float()
        low = part.amin(1)
        high = part.amax(1)
        if symmetric:
            scales[:, g] = part.abs().amax(1) / (top // 2)
            zeros[:, g] = (top + 1) // 2
        else:
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, top)
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    dense = (codes - zeros[:, groups]) * scales[:, groups]
    return codes.to(torch.uint8), scales, zeros.int(), dense


def shuffled(inputs, group):
    groups = torch.arange(inputs) // group
    return groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


def pack_quantized(weight, bits=4, group=32, symmetric=True, ordered=False, strategy="group"):
    group = None if strategy == "channel" else group
    groups = shuffled(weight.shape[1], group) if ordered else None
    codes, scales, zeros, dense = integers(weight, bits, group, symmetric=symmetric, groups=groups)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = groups.int()
    return tensors, dense


def gptq(weight, bits=4, group=32, ordered=False, version=1, symmetric=False):
    groups = shuffled(weight.shape[1], group) if ordered else None
    codes, scales, zeros, dense = integers(weight, bits, group, symmetric=symmetric, groups=groups)
    size = group or weight.shape[1]
    return {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros - int(version == 1)).T.contiguous(), bits),
        "scales": scales.T.half().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // size if groups is None else groups).int(),
    }, dense


def awq(weight, group=32, symmetric=False, stores_zeros=True):
    codes, scales, zeros, dense = integers(weight, 4, group, symmetric=symmetric)

    def packed(columns):
        found = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
        for i, place in enumerate(AWQ_ORDER):
            found |= columns[:, place::8].long() << (4 * i)
        return torch.where(found >= 2**31, found - 2**32, found).int()

    tensors = {"qweight": packed(codes.T), "scales": scales.T.half().contiguous()}
    return tensors | ({"qzeros": packed(zeros.T)} if stores_zeros else {}), dense


def int8(weight, strategy="channel", symmetric=True):
    codes, scales, zeros, dense = integers(
        weight.reshape(1, -1) if strategy == "tensor" else weight, 8, None, symmetric=symmetric
    )
    tensors = {
        "weight": (codes.int() - 128).to(torch.int8).view(weight.shape),
        "weight_scale": scales.flatten() if strategy == "tensor" else scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, dense.view(weight.shape)


def blocks(weight, rows, columns):
    """For each element its block's greatest value, and these values."""
    outputs, inputs = weight.shape
    found = torch.zeros(-(-outputs // rows), -(-inputs // columns))
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            block = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            found[i, j] = block.abs().max()
    of = found[torch.arange(outputs) // rows][:, torch.arange(inputs) // columns]
    return of, found


def fp8(weight, rows=None, columns=None, name="weight_scale", exponents=None, **extra):
    """`exponents`: dtype of scales that are powers of two."""
    outputs, inputs = weight.shape
    of, scales = (one / 448 for one in blocks(weight, rows or outputs, columns or inputs))
    stored = scales
    if exponents is not None:
        of, scales = (torch.exp2(one.log2().ceil()) for one in (of, scales))
        stored = (scales.log2() + 127).to(torch.uint8)
        stored = stored.view(exponents) if exponents.itemsize == 1 else scales
    codes = (weight / of).to(torch.float8_e4m3fn)
    shape = () if rows is None and columns is None else stored.shape
    return {"weight": codes, name: stored.reshape(shape), **extra}, codes.float() * of


def nearest(values, table):
    return (values[..., None] - torch.tensor(table).float()).abs().argmin(-1).to(torch.uint8)


def pairs(codes):
    return codes[:, ::2] | codes[:, 1::2] << 4


def nvfp4(weight, codes_name="weight_packed", whole="weight_global_scale", divides=True):
    outputs = len(weight)
    of = weight.view(outputs, -1, 16).abs().amax(-1)
    first = of.max() / (448 * 6)
    scales = (of / 6 / first).to(torch.float8_e4m3fn)
    factor = scales.float() / (1 / first) if divides else scales.float() * first
    factor = factor.repeat_interleave(16, 1)
    codes = nearest(weight / factor.clamp_min(1e-20), E2M1)
    return {
        codes_name: pairs(codes),
        "weight_scale": scales,
        whole: (1 / first if divides else first).reshape(1),
        "input_scale" if not divides else "input_global_scale": torch.ones(1),
    }, torch.tensor(E2M1)[codes.int()] * factor


def nvfp4_weights_alone(weight):
    tensors, dense = nvfp4(weight, "weight", "weight_scale_2", divides=False)
    del tensors["input_scale"]
    return tensors, dense


def blocks_of_modelopt(weight):
    tensors, dense = fp8(weight, rows=128, columns=128)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None]}, dense


def mxfp4(weight):
    outputs = len(weight)
    of = weight.view(outputs, -1, 32).abs().amax(-1)
    exponents = (of / 6).log2().ceil()
    factor = torch.exp2(exponents).repeat_interleave(32, 1)
    codes = nearest(weight / factor, E2M1)
    return {
        "weight_packed": pairs(codes),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, torch.tensor(E2M1)[codes.int()] * factor


NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)]


def bnb4(weight, kind="nf4", nested=False, block=64):
    table = {"nf4": NF4, "fp4": FP4}[kind]
    flat = weight.reshape(-1, block)
    absmax = flat.abs().amax(1)
    state = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {}
    if nested:
        offset = absmax.mean()
        map8 = torch.linspace(-1, 1, 256)
        every = 256
        padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % every))
        greatest = padded.view(-1, every).abs().amax(1)
        codes = nearest((padded.view(-1, every) / greatest[:, None]).flatten(), map8.tolist())
        codes = codes[: len(absmax)]
        absmax = map8[codes.int()] * greatest.repeat_interleave(every)[: len(codes)] + offset
        state |= {
            "nested_blocksize": every,
            "nested_offset": offset.item(),
            "nested_dtype": "float32",
        }
        tensors = {"nested_absmax": greatest, "nested_quant_map": map8, "absmax": codes}
    else:
        tensors["absmax"] = absmax
    codes = nearest(flat / absmax[:, None], table)
    dense = torch.tensor(table)[codes.int()] * absmax[:, None]
    tensors["quant_map"] = torch.tensor(table)
    text = json.dumps(state).encode()
    tensors[f"quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    codes = codes.flatten()
    stored = {"weight": (codes[::2] << 4 | codes[1::2])[:, None]}
    return stored | {f"weight.{k}": v for k, v in tensors.items()}, dense.view(weight.shape)


def bnb8(weight):
    greatest = weight.abs().amax(1)
    codes = (weight / greatest[:, None] * 127).round().to(torch.int8)
    return {
        "weight": codes,
        "SCB": greatest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, codes.float() * greatest[:, None] / 127


def torchao(weight, bits=8, group=None, symmetric=True, whole=False):
    codes, scales, zeros, dense = integers(
        weight.reshape(1, -1) if whole else weight, bits, group, symmetric=symmetric
    )
    half = 2 ** (bits - 1)
    return {
        "_weight_qdata": (codes.int() - half).to(torch.int8).view(weight.shape),
        "_weight_scale": scales,
        "_weight_zero_point": (zeros - half).to(torch.int8),
    }, dense.view(weight.shape)


def torchao_fp8(weight, rows=None, columns=None):
    tensors, dense = fp8(weight, rows, columns)
    scales = tensors["weight_scale"]
    return {
        "_weight_qdata": tensors["weight"],
        "_weight_scale": scales.view(1, 1) if scales.ndim == 0 else scales,
    }, dense


@dataclass(frozen=True)
class Format:
    config: dict
    write: object
    """Weight [N, K] -> (tensors by name, the weight that they stand for)."""
    head: bool = True
    """Whether the head is quantized too."""
    options: dict = field(default_factory=dict)


def ct(form, weights, ignore=()):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def ct_ints(**fields):
    stated = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    return stated | {"group_size": 32} | fields


CT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def modelopt(algorithm, **fields):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": [], **fields}


def writer(function, **fields):
    return lambda weight: function(weight, **fields)


def ao(kind, version=2, **fields):
    return {
        "quant_method": "torchao",
        "quant_type": {"default": ao_object(kind, version=version, **fields)},
    }


def ao_object(kind, version=1, **fields):
    """As torchao writes an object with fields to config.json."""
    return {"_type": kind, "_data": fields, "_version": version}


def ao_dtype(name):
    return {"_type": "torch.dtype", "_data": name}


AO_ROW = ao_object("PerRow", dim=-1)
AO_GROUP = ao_object("PerGroup", group_size=32)
AO_INT8 = ao_object("Int8WeightOnlyConfig", version=2, granularity=AO_ROW)

FORMATS = {
    "ct int4 g32": Format(ct("pack-quantized", ct_ints()), pack_quantized),
    "ct int4 zero": Format(
        ct("pack-quantized", ct_ints(symmetric=False)), writer(pack_quantized, symmetric=False)
    ),
    "ct int4 actorder": Format(
        ct("pack-quantized", ct_ints(actorder="group")), writer(pack_quantized, ordered=True)
    ),
    "ct int3": Format(ct("pack-quantized", ct_ints(num_bits=3)), writer(pack_quantized, bits=3)),
    "ct int8 channel": Format(
        ct("pack-quantized", ct_ints(num_bits=8, strategy="channel", group_size=None)),
        writer(pack_quantized, bits=8, strategy="channel"),
    ),
    "ct W8A8": Format(ct("int-quantized", ct_ints(num_bits=8, strategy="channel")), int8),
    "ct W8 tensor": Format(
        ct("int-quantized", ct_ints(num_bits=8, strategy="tensor")),
        writer(int8, strategy="tensor"),
    ),
    "ct W8 zero": Format(
        ct("int-quantized", ct_ints(num_bits=8, strategy="channel", symmetric=False)),
        writer(int8, symmetric=False),
    ),
    "ct fp8 tensor": Format(
        ct("float-quantized", CT8 | {"strategy": "tensor"}),
        writer(fp8, input_scale=torch.tensor(0.5)),
    ),
    "ct fp8 channel": Format(
        ct("float-quantized", CT8 | {"strategy": "channel"}), writer(fp8, rows=1)
    ),
    "ct fp8 block": Format(
        ct("float-quantized", CT8 | {"strategy": "block", "block_structure": [16, 32]}),
        writer(fp8, rows=16, columns=32),
    ),
    "ct nvfp4": Format(
        ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), nvfp4
    ),
    "ct mxfp4": Format(
        ct("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}), mxfp4
    ),
    "ct mxfp8": Format(
        ct("mxfp8-quantized", CT8 | {"strategy": "group", "group_size": 32}),
        writer(fp8, rows=1, columns=32, exponents=torch.uint8),
    ),
    "gptq v1": Format({"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}, gptq),
    "gptq v2": Format(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "checkpoint_format": "gptq_v2",
        },
        writer(gptq, version=2),
    ),
    "gptq desc_act": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        writer(gptq, ordered=True),
    ),
    "gptq int2": Format(
        {"quant_method": "gptq", "bits": 2, "group_size": 32}, writer(gptq, bits=2)
    ),
    "gptq int3": Format(
        {"quant_method": "gptq", "bits": 3, "group_size": 32}, writer(gptq, bits=3)
    ),
    "gptq int8 column": Format(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True},
        writer(gptq, bits=8, group=None, symmetric=True),
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "awq symmetric": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False},
        writer(awq, symmetric=True),
    ),
    "awq symmetric, no zeros": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False},
        writer(awq, symmetric=True, stores_zeros=False),
    ),
    "auto-round gptq": Format(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "packing_format": "auto_round:auto_gptq",
        },
        gptq,
    ),
    "auto-round awq": Format(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "packing_format": "auto_round:auto_awq",
        },
        awq,
    ),
    "fp8 block": Format(
        {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"},
        writer(fp8, rows=16, columns=32, name="weight_scale_inv"),
    ),
    "fp8 block ue8m0": Format(
        {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"},
        writer(fp8, rows=16, columns=32, name="weight_scale_inv", exponents=torch.float8_e8m0fnu),
    ),
    "fp8 static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        writer(fp8, input_scale=torch.tensor(0.5)),
    ),
    "fbgemm fp8": Format({"quant_method": "fbgemm_fp8"}, writer(fp8, rows=1)),
    "modelopt fp8": Format(modelopt("FP8"), writer(fp8, input_scale=torch.tensor(0.5))),
    "modelopt fp8 channel": Format(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), writer(fp8, rows=1)),
    "modelopt nvfp4": Format(
        modelopt("NVFP4", group_size=16),
        writer(nvfp4, codes_name="weight", whole="weight_scale_2", divides=False),
    ),
    # The algorithm may be in small letters, and scales have axes of one element.
    "modelopt fp8 block": Format(modelopt("fp8_pb_wo"), blocks_of_modelopt),
    "modelopt mxfp8": Format(
        modelopt("MXFP8", group_size=32), writer(fp8, rows=1, columns=32, exponents=torch.uint8)
    ),
    "modelopt w4a16 nvfp4": Format(modelopt("W4A16_NVFP4", group_size=16), nvfp4_weights_alone),
    "bnb nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb4
    ),
    "bnb nf4 nested": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        writer(bnb4, nested=True),
    ),
    "bnb fp4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        writer(bnb4, kind="fp4"),
    ),
    "bnb int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
    "torchao int8": Format(ao("Int8WeightOnlyConfig", granularity=AO_ROW), torchao),
    "torchao W8A8 tensor": Format(
        ao("Int8DynamicActivationInt8WeightConfig", granularity=ao_object("PerTensor")),
        writer(torchao, whole=True),
    ),
    "torchao int4": Format(
        ao("IntxWeightOnlyConfig", 1, weight_dtype=ao_dtype("int4"), granularity=AO_GROUP),
        writer(torchao, bits=4, group=32),
    ),
    "torchao int3 zero": Format(
        ao(
            "Int8DynamicActivationIntxWeightConfig",
            weight_dtype=ao_dtype("int3"),
            weight_granularity=AO_GROUP,
        ),
        writer(torchao, bits=3, group=32, symmetric=False),
    ),
    "torchao fp8": Format(
        ao("Float8WeightOnlyConfig", granularity=AO_ROW), writer(torchao_fp8, rows=1)
    ),
    "torchao W8A8 fp8 block": Format(
        ao(
            "Float8DynamicActivationFloat8WeightConfig",
            granularity=[
                ao_object("PerBlock", block_size=[1, 32]),
                ao_object("PerBlock", block_size=[16, 32]),
            ],
        ),
        writer(torchao_fp8, rows=16, columns=32),
    ),
    "torchao by name": Format(
        ao("FqnToConfig", fqn_to_config={"re:.*_proj": AO_INT8, "lm_head": AO_INT8}), torchao
    ),
}
"""Format -> its config and its writer. MXFP4 of gpt-oss is for experts alone."""
