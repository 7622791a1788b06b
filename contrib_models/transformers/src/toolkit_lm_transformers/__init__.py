"""Models of transformers, for architectures without a class of their own. This entry module only
registers the fallback."""

from toolkit_lm.plugin import KVKindRegistry, ModelRegistry, RendererRegistry, hookimpl

CTC = (
    *("Data2VecAudioForCTC", "GraniteSpeech5ForCTC", "HubertForCTC", "LasrForCTC"),
    *("ParakeetForCTC", "SEWDForCTC", "SEWForCTC", "UniSpeechForCTC", "UniSpeechSatForCTC"),
    *("Wav2Vec2BertForCTC", "Wav2Vec2ConformerForCTC", "Wav2Vec2ForCTC", "WavLMForCTC"),
)
"""Classes of transformers that label the frames of a recording."""
LENGTH_KEYS = ("max_position_embeddings", "n_positions")
"""Keys of config.json, and of its `text_config`, that state the longest sequence."""
DECODER_LENGTH_KEYS = (
    "max_decoder_position_embeddings",
    "max_target_positions",
    *LENGTH_KEYS,
    "decoder.max_position_embeddings",
    "decoder.n_positions",
)
SPEECH_LENGTH_KEYS = (
    *("max_target_positions", "max_text_positions", "decoder_config.max_position_embeddings"),
    *DECODER_LENGTH_KEYS,
)
"""Keys of config.json that state the longest sequence of an encoder-decoder model's decoder."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add_fallback(
        "transformers_image_text",
        "toolkit_lm_transformers.image_text:TransformersForImageText",
        renderer="transformers_processor",
        multimodal="toolkit_lm_transformers.image_text_rules:ImageTextRules",
        length_keys=(*LENGTH_KEYS, *(f"text_config.{key}" for key in LENGTH_KEYS)),
    )
    models.add_fallback(
        "transformers_audio_text",
        "toolkit_lm_transformers.image_text:TransformersForAudioText",
        renderer="transformers_processor",
        multimodal="toolkit_lm_transformers.image_text_rules:AudioTextRules",
        length_keys=(*LENGTH_KEYS, *(f"text_config.{key}" for key in LENGTH_KEYS)),
    )
    models.add_fallback("transformers", "toolkit_lm_transformers.model:TransformersForCausalLM")
    models.add_fallback(
        "transformers_encoder_decoder",
        "toolkit_lm_transformers.encoder_decoder:TransformersForEncoderDecoder",
        length_keys=DECODER_LENGTH_KEYS,
        encoder_decoder="toolkit_lm_transformers.encoder_decoder_rules:FallbackRules",
    )
    models.add_fallback(
        "transformers_speech",
        "toolkit_lm_transformers.speech:TransformersForSpeech",
        length_keys=SPEECH_LENGTH_KEYS,
        encoder_decoder="toolkit_lm_transformers.speech_rules:SpeechRules",
    )
    for name in CTC:
        # No class of these has a decoder whose length it could state.
        models.add(
            name,
            "toolkit_lm_transformers.speech:TransformersForCTC",
            renderer="transformers_ctc",
            length_keys=(),
            bounded=False,
            encoder_decoder="toolkit_lm_transformers.speech_rules:CtcRules",
        )
    models.add_fallback(
        "transformers_pooling",
        "toolkit_lm_transformers.pooling:TransformersForPooling",
        runner="pooling",
    )


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add(
        "transformers_processor",
        "toolkit_lm_transformers.processor_renderer:ProcessorRenderer",
        reads=(),
    )
    renderers.add("transformers_ctc", "toolkit_lm_transformers.ctc_renderer:CtcRenderer", reads=())


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("transformers_encoded", "toolkit_lm_transformers.spec:EncodedSpec")
    kv_kinds.add("transformers_tokens", "toolkit_lm_transformers.spec:TokensSpec")
    kv_kinds.add("transformers_pictured", "toolkit_lm_transformers.spec:PicturedSpec")
    kv_kinds.add("transformers_states", "toolkit_lm_transformers.spec:StatesSpec")
