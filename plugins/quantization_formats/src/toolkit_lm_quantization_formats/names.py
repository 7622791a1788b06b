"""Names of formats, as checkpoints state them: `quant_method` in the `quantization_config`."""

READ = {
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "gptq": "gptq:Gptq",
    "awq": "awq:Awq",
    "auto-round": "auto_round:AutoRound",
    "intel/auto-round": "auto_round:AutoRound",
    "fp8": "fp8:Fp8",
    "fbgemm_fp8": "fp8:FbgemmFp8",
    "modelopt": "modelopt:ModelOpt",
    "mxfp4": "mxfp4:Mxfp4",
    "bitsandbytes": "bitsandbytes:BitsAndBytes",
    "torchao": "torchao:TorchAo",
}
"""Format -> module and class of its reader."""
_AGAIN = (
    "Quantize the original weights with llm-compressor, which writes compressed-tensors, or run "
    "them with quantization='int8'"
)
_BY_TRANSFORMERS = (
    "Load it with transformers, call model.dequantize() and save_pretrained, then quantize the "
    "result with llm-compressor or run it with quantization='int8'"
)
REFUSED = {
    "aqlm": _AGAIN,
    "bitnet": _AGAIN,
    "eetq": _AGAIN,
    "fouroversix": _AGAIN,
    "fp_quant": _AGAIN,
    "gemma": _AGAIN,
    "higgs": _BY_TRANSFORMERS,
    "hqq": _BY_TRANSFORMERS,
    "metal": _BY_TRANSFORMERS,
    "mxfp8": _AGAIN,
    "nvfp4": _AGAIN,
    "quanto": _BY_TRANSFORMERS,
    "quark": _AGAIN,
    "sinq": _AGAIN,
    "spqr": _AGAIN,
    "vptq": _AGAIN,
}
"""Format that is not read -> the tool that converts it, in a sentence without its full stop."""
