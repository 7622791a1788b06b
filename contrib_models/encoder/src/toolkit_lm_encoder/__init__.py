"""Encoder models: embeddings, classifiers, rerankers. This entry module only registers them; each
is imported when it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification")
FAMILIES = {
    "Albert": ("albert", "Albert"),
    "Bert": ("bert", "Bert"),
    "Camembert": ("roberta", "Roberta"),
    "DebertaV2": ("deberta_v2", "DebertaV2"),
    "DistilBert": ("distilbert", "DistilBert"),
    "Electra": ("electra", "Electra"),
    "Gte": ("rotary_bert", "Gte"),
    "JinaBert": ("jina_bert", "JinaBert"),
    "JinaEmbeddingsV3": ("rotary_bert", "JinaEmbeddingsV3"),
    "MPNet": ("mpnet", "MPNet"),
    "ModernBert": ("modernbert", "ModernBert"),
    "NomicBert": ("rotary_bert", "NomicBert"),
    "Roberta": ("roberta", "Roberta"),
    "XLMRoberta": ("roberta", "Roberta"),
    "XLMRobertaXL": ("roberta_xl", "RobertaXL"),
}
"""Module and prefix of the classes' names, by prefix of the architecture's name."""
MODELS = {
    **{
        f"{family}{kind}": f"{module}:{classes}{kind}"
        for family, (module, classes) in FAMILIES.items()
        for kind in KINDS
    },
    # Embedding models are published with the heads of their training, too: these are passed over.
    **{
        f"{family}ForMaskedLM": f"{module}:{classes}Model"
        for family, (module, classes) in FAMILIES.items()
    },
    # These use the heads where a checkpoint's files ask for it.
    **{
        f"{family}ForMaskedLM": f"masked_lm:{classes}ForMaskedLM"
        for family, (_, classes) in FAMILIES.items()
        if classes in ("Bert", "DistilBert", "Roberta")
    },
    "BertForPreTraining": "masked_lm:BertForMaskedLM",
    "HF_ColBERT": "colbert:HF_ColBERT",
}
"""Architectures, and the module and class of each."""
MODEL_TYPES = {
    "Albert": "albert",
    "Bert": "bert",
    "Camembert": "camembert",
    "DebertaV2": "deberta-v2",
    "DistilBert": "distilbert",
    "Electra": "electra",
    "Gte": "gte",
    "JinaEmbeddingsV3": "jina_embeddings_v3",
    "MPNet": "mpnet",
    "ModernBert": "modernbert",
    "NomicBert": "nomic_bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
    "XLMRobertaXL": "xlm-roberta-xl",
}
"""`model_type` by family. Jina embeddings 2 have BERT's, so that their architecture decides."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, target in MODELS.items():
        # Their positions begin after that of padding, which is 1 in all of them.
        reserved = 2 if any(name in target for name in ("Roberta", "MPNet")) else 0
        named = [family for family in MODEL_TYPES if architecture.startswith(family)]
        models.add(
            architecture,
            f"toolkit_lm_encoder.{target}",
            runner="pooling",
            model_type=MODEL_TYPES[max(named, key=len)] if named else None,
            reserved_positions=reserved,
            # ALiBi has no last position.
            bounded=not target.startswith("jina_bert:"),
        )
