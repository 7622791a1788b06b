"""Encoder-decoder language models. This entry module only registers them; each is imported when it
is selected."""

from typing import Any

from toolkit_lm.plugin import ModelRegistry, hookimpl

RULES = "toolkit_lm_encdec.rules:UsualRules"
BART_RULES = "toolkit_lm_encdec.rules:MBartRules"
MODELS = {
    "BartForConditionalGeneration": ("bart:BartForConditionalGeneration", BART_RULES),
    # Published checkpoints bart-base and bart-large have this name.
    "BartModel": ("bart:BartForConditionalGeneration", BART_RULES),
    "MBartForConditionalGeneration": ("bart:MBartForConditionalGeneration", BART_RULES),
    "MT5ForConditionalGeneration": ("t5:MT5ForConditionalGeneration", RULES),
    "MarianMTModel": ("bart:MarianMTModel", RULES),
    "PegasusForConditionalGeneration": ("bart:PegasusForConditionalGeneration", RULES),
    "T5ForConditionalGeneration": ("t5:T5ForConditionalGeneration", RULES),
    "T5GemmaForConditionalGeneration": (
        "t5gemma:T5GemmaForConditionalGeneration",
        "toolkit_lm_encdec.rules:T5GemmaRules",
    ),
    # t5-3b and t5-11b have this name.
    "T5WithLMHeadModel": ("t5:T5ForConditionalGeneration", RULES),
}
"""Architectures; the module and class of each; and what makes its prompts."""
ARCHITECTURES = {
    "bart": "BartForConditionalGeneration",
    "marian": "MarianMTModel",
    "mbart": "MBartForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}
"""Architectures by `model_type`, for checkpoints that do not name one."""
ENCODERS = ("T5EncoderModel", "MT5EncoderModel")
"""Architectures of T5's encoder alone."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    model_types = {architecture: model_type for model_type, architecture in ARCHITECTURES.items()}
    for architecture, (target, rules) in MODELS.items():
        stated: dict[str, Any] = (
            {"length_keys": ("decoder.max_position_embeddings",)}
            if target.startswith("t5gemma:")
            else {}
        )
        # T5 and T5Gemma tell distances apart, and take sequences that are longer than those of
        # their training.
        bounded = not target.startswith("t5")
        models.add(
            architecture,
            f"toolkit_lm_encdec.{target}",
            model_type=model_types.get(architecture),
            bounded=bounded,
            encoder_decoder=rules,
            **stated,
        )
    for architecture in ENCODERS:
        models.add(
            architecture,
            "toolkit_lm_encdec.t5_encoder:T5EncoderModel",
            runner="pooling",
            bounded=False,
        )
