"""ModelConfig and LoadConfig: the model, its length and precision, and the source of its
weights."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct, field

from toolkit_lm.config.options import option


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The model, its length and its precision."""

    model: Annotated[
        str,
        option(
            "Model folder in Hugging Face layout, hub id, or file or name that a plugin knows "
            "('tiny')."
        ),
    ] = "tiny"
    revision: Annotated[str | None, option("Branch, tag or commit of a hub id.")] = None
    served_model_name: Annotated[
        list[str] | None,
        option(
            "Model name in the HTTP API. If several names are given, responses use the first.",
            none="MODEL as given, or the stem of a file's name",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of weights and activations. auto: the checkpoint's."),
    ] = "auto"
    max_model_len: Annotated[
        int | None, option("Maximum tokens of prompt plus output.", none="the checkpoint's", ge=1)
    ] = None
    max_encoder_len: Annotated[
        int | None, option("Maximum tokens of an encoder prompt.", none="the checkpoint's", ge=1)
    ] = None
    generation_config: Annotated[
        str, option("Sampling defaults: checkpoint, none, or a folder of generation_config.json.")
    ] = "checkpoint"
    override_generation_config: Annotated[
        str, option("Sampling defaults to put over these: a JSON object.", is_json=True)
    ] = "{}"
    hf_overrides: Annotated[
        str, option("Fields to merge into config.json: a JSON object.", is_json=True)
    ] = "{}"
    seed: Annotated[
        int | None,
        option(
            "Default seed of requests.",
            none="a fresh one for each request",
            ge=0,
            le=2**63 - 1,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, option("Run Python code that comes with the checkpoint.")
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        option("Runner type: generate text or pool. auto: by the checkpoint's architecture."),
    ] = "auto"
    convert: Annotated[
        str,
        option(
            "Pooling adapter that converts the model: none, embed, classify or a plugin's. auto: "
            "the one that the runner type needs."
        ),
    ] = "auto"
    extra_tasks: Annotated[
        list[str], option("Pooling tasks that a generating engine serves: embed.")
    ] = field(default_factory=list)
    model_impl: Annotated[
        str,
        option(
            "Model implementation: auto, or a fallback by name, such as 'transformers'. auto: "
            "the class registered for the "
            "architecture, else a fallback."
        ),
    ] = "auto"
    verify_fallback: Annotated[
        bool,
        option(
            "Compare a fallback's first logits with those of its model alone, and refuse it if "
            "they differ."
        ),
    ] = True


class LoadConfig(Struct, frozen=True, kw_only=True):
    """The source of the weights, and their form in memory."""

    load_format: Annotated[
        str,
        option(
            "Load format of the weights, by name. dummy: random numbers, for measurements. auto: "
            "the first that reads MODEL."
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "Quantization of the weights, by name: the checkpoint's, or one applied at load. auto:"
            " the checkpoint's, or none."
        ),
    ] = "auto"
    quantization_skip: Annotated[
        list[str],
        option(
            "Layers that stay as they are where weights are quantized at load: the name in the "
            "model or the checkpoint ('lm_head'), with * and ? ('*.down_proj'), or 're:' and a "
            "regular expression."
        ),
    ] = field(default_factory=list)
    quantization_override: Annotated[
        list[str],
        option(
            "Layers that are quantized otherwise at load: PATTERN=NAME ('*.down_proj=int8'), with "
            "patterns like those of quantization_skip."
        ),
    ] = field(default_factory=list)
    quantization_group_size: Annotated[
        int | None,
        option(
            "Inputs that share a scale where weights are quantized at load in groups, as int4's "
            "are.",
            ge=1,
            none="the quantization's own",
        ),
    ] = None
