"""Encoder models: embeddings, classifiers, rerankers. This entry module only registers them; each
is imported when it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification")
FAMILIES = {
    "Bert": ("bert", "Bert"),
    "Camembert": ("roberta", "Roberta"),
    "DistilBert": ("distilbert", "DistilBert"),
    "Gte": ("rotary_bert", "Gte"),
    "JinaEmbeddingsV3": ("rotary_bert", "JinaEmbeddingsV3"),
    "MPNet": ("mpnet", "MPNet"),
    "ModernBert": ("modernbert", "ModernBert"),
    "NomicBert": ("rotary_bert", "NomicBert"),
    "Roberta": ("roberta", "Roberta"),
    "XLMRoberta": ("roberta", "Roberta"),
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
    "BertForPreTraining": "bert:BertModel",
    "HF_ColBERT": "colbert:HF_ColBERT",
}
"""Architectures, and the module and class of each."""
MODEL_TYPES = {
    "Bert": "bert",
    "Camembert": "camembert",
    "DistilBert": "distilbert",
    "Gte": "gte",
    "JinaEmbeddingsV3": "jina_embeddings_v3",
    "MPNet": "mpnet",
    "ModernBert": "modernbert",
    "NomicBert": "nomic_bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
}
"""`model_type` by prefix of the architecture's name."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, target in MODELS.items():
        # Their positions begin after that of padding, which is 1 in all of them.
        reserved = 2 if target.startswith(("roberta:", "mpnet:")) else 0
        model_type = next(
            (MODEL_TYPES[family] for family in FAMILIES if architecture.startswith(family)), None
        )
        models.add(
            architecture,
            f"toolkit_lm_encoder.{target}",
            runner="pooling",
            model_type=model_type,
            reserved_positions=reserved,
        )
