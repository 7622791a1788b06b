"""Whisper. This entry module only registers it; the rest is imported when it is selected."""

from __future__ import annotations

from toolkit_lm.param_spec import ProcessorParams
from toolkit_lm.plugin import LogitsProcessorRegistry, ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    target = "toolkit_lm_whisper.model:WhisperForConditionalGeneration"
    rules = "toolkit_lm_whisper.rules:WhisperRules"
    models.add(
        "WhisperForConditionalGeneration",
        target,
        model_type="whisper",
        length_keys=("max_target_positions",),
        encoder_decoder=rules,
    )


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    # Requests cannot ask for them: the model's rules do.
    processors.add(
        "whisper_suppress",
        "toolkit_lm_whisper.suppress:Suppress",
        params=ProcessorParams,
        priority=1,
    )
    processors.add(
        "whisper_timestamps", "toolkit_lm_whisper.timestamps:Timestamps", params=ProcessorParams
    )
