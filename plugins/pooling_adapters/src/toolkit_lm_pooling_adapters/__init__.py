"""Any language model as embedder, classifier or reranker. This entry module only registers; each
part is imported when it is used."""

from types import ModuleType

from toolkit_lm.plugin import ConverterRegistry, PoolingInputsRegistry, hookimpl

from toolkit_lm_pooling_adapters import hookspecs
from toolkit_lm_pooling_adapters.registry import PairRendererRegistry, ScoreTemplateRegistry


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_pooling(converters: ConverterRegistry) -> None:
    converters.add("embed", "toolkit_lm_pooling_adapters.embedding:as_embedding_model")
    converters.add("classify", "toolkit_lm_pooling_adapters.classification:as_seq_cls_model")


@hookimpl
def toolkit_register_pooling_inputs(inputs: PoolingInputsRegistry) -> None:
    inputs.add("texts", "toolkit_lm_pooling_adapters.inputs:PoolingInputProcessor")


@hookimpl
def toolkit_register_pair_renderers(renderers: PairRendererRegistry) -> None:
    renderers.add(
        "score_template", "toolkit_lm_pooling_adapters.template_renderer:make_template_renderer"
    )


@hookimpl
def toolkit_register_score_templates(templates: ScoreTemplateRegistry) -> None:
    home = "toolkit_lm_pooling_adapters.score_templates"
    templates.add("qwen3-reranker", f"{home}:QWEN3_RERANKER", architectures=("Qwen3ForCausalLM",))
    templates.add(
        "qwen3-vl-reranker",
        f"{home}:QWEN3_VL_RERANKER",
        architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    )
    templates.add("mxbai-rerank-v2", f"{home}:MXBAI_RERANK_V2", architectures=("Qwen2ForCausalLM",))
    templates.add(
        "bge-reranker-v2-gemma",
        f"{home}:BGE_RERANKER_V2_GEMMA",
        architectures=("GemmaForCausalLM",),
    )
    templates.add("pair", f"{home}:PAIR")
