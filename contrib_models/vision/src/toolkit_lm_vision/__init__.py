"""Language models that see. This entry module only registers them; each is imported when it is
selected."""

from toolkit_lm.plugin import ModelRegistry, PoolingProfileRegistry, hookimpl

MODELS: dict[str, tuple[str, str]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3:Gemma3ForConditionalGeneration",
        "gemma3_rules:Gemma3Rules",
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4:Gemma4ForConditionalGeneration",
        "gemma4_rules:Gemma4Rules",
    ),
    "Glm46VForConditionalGeneration": (
        "glm4v:Glm46VForConditionalGeneration",
        "glm4v_rules:Glm46vRules",
    ),
    "Glm4vForConditionalGeneration": (
        "glm4v:Glm4vForConditionalGeneration",
        "glm4v_rules:Glm4vRules",
    ),
    "Glm4vMoeForConditionalGeneration": (
        "glm4v:Glm4vMoeForConditionalGeneration",
        "glm4v_rules:Glm4vRules",
    ),
    "GlmOcrForConditionalGeneration": (
        "glm4v:GlmOcrForConditionalGeneration",
        "glm4v_rules:GlmOcrRules",
    ),
    "Idefics3ForConditionalGeneration": (
        "idefics3:Idefics3ForConditionalGeneration",
        "idefics3_rules:Idefics3Rules",
    ),
    "InternVLForConditionalGeneration": (
        "internvl:InternVLForConditionalGeneration",
        "internvl_rules:InternVLRules",
    ),
    "LlavaForConditionalGeneration": (
        "llava:LlavaForConditionalGeneration",
        "llava_rules:LlavaRules",
    ),
    "LlavaNextForConditionalGeneration": (
        "anyres:LlavaNextForConditionalGeneration",
        "anyres_rules:AnyresRules",
    ),
    "LlavaOnevisionForConditionalGeneration": (
        "anyres:LlavaOnevisionForConditionalGeneration",
        "anyres_rules:OneVisionRules",
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral3:Mistral3ForConditionalGeneration",
        "pixtral_rules:PixtralRules",
    ),
    "PaliGemmaForConditionalGeneration": (
        "paligemma:PaliGemmaForConditionalGeneration",
        "paligemma_rules:PaliGemmaRules",
    ),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl:Qwen2VLForConditionalGeneration",
        "qwen2_vl_rules:Qwen2VLRules",
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_vl:Qwen2_5_VLForConditionalGeneration",
        "qwen2_vl_rules:Qwen25VLRules",
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3_vl:Qwen3VLForConditionalGeneration",
        "qwen2_vl_rules:Qwen3VLRules",
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl:Qwen3VLMoeForConditionalGeneration",
        "qwen2_vl_rules:Qwen3VLRules",
    ),
    "Qwen3_5ForConditionalGeneration": (
        "qwen3_vl:Qwen3_5ForConditionalGeneration",
        "qwen2_vl_rules:Qwen35Rules",
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "qwen3_vl:Qwen3_5MoeForConditionalGeneration",
        "qwen2_vl_rules:Qwen35Rules",
    ),
    "SmolVLMForConditionalGeneration": (
        "idefics3:SmolVLMForConditionalGeneration",
        "smolvlm_rules:SmolVLMRules",
    ),
}
"""Architectures; the module and class of each; and its rules for prompts."""
MODEL_TYPES = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm46VForConditionalGeneration": "glm46v",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision",
    "Mistral3ForConditionalGeneration": "mistral3",
    "PaliGemmaForConditionalGeneration": "paligemma",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "SmolVLMForConditionalGeneration": "smolvlm",
}
FLORENCE = "Florence2ForConditionalGeneration"
"""An encoder-decoder model, whose encoder sees."""
RETRIEVAL = {
    "ColModernVBertForRetrieval": ("colmodernvbert", "modernvbert_rules:ColModernVBertRules"),
    "ColPaliForRetrieval": ("colpali", "retrieval_rules:ColPaliRules"),
    "ColQwen2ForRetrieval": ("colqwen2", "retrieval_rules:ColQwen2Rules"),
}
"""Architectures of models for late interaction; the `model_type` and rules of each."""
LENGTH_KEYS = ("text_config.max_position_embeddings", "max_position_embeddings")
"""Older checkpoints have no `text_config`."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, (target, rules) in MODELS.items():
        target, rules = f"toolkit_lm_vision.{target}", f"toolkit_lm_vision.{rules}"
        models.add(
            architecture,
            target,
            model_type=MODEL_TYPES[architecture],
            length_keys=LENGTH_KEYS,
            multimodal=rules,
        )
    models.add(
        FLORENCE,
        f"toolkit_lm_vision.florence2:{FLORENCE}",
        model_type="florence2",
        length_keys=LENGTH_KEYS,
        multimodal="toolkit_lm_vision.florence2_rules:Florence2PictureRules",
        encoder_decoder="toolkit_lm_vision.florence2_rules:Florence2Rules",
    )
    for architecture, (model_type, rules) in RETRIEVAL.items():
        models.add(
            architecture,
            f"toolkit_lm_vision.retrieval:{architecture}",
            runner="pooling",
            model_type=model_type,
            length_keys=tuple(f"vlm_config.{key}" for key in LENGTH_KEYS),
            multimodal=f"toolkit_lm_vision.{rules}",
        )


@hookimpl
def toolkit_register_pooling_profiles(profiles: PoolingProfileRegistry) -> None:
    profiles.add("retrieval", "toolkit_lm_vision.retrieval_rules:read_profile")
