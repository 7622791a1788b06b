"""The prompts of rerankers made of language models, piece by piece as their authors tokenize
them."""

from __future__ import annotations

from toolkit_lm_pooling_adapters.score_template import ScoreTemplate

_JUDGE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)

QWEN3_RERANKER = ScoreTemplate(
    pieces=(
        _JUDGE,
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    classifier_method="from_2_way_softmax",
    classifier_tokens=("no", "yes"),
)
"""Qwen3-Reranker (Zhang et al. 2025), after the model card of Qwen/Qwen3-Reranker-0.6B."""

QWEN3_VL_RERANKER = ScoreTemplate(
    pieces=(
        f"{_JUDGE}<Instruct>: {{instruction}}<Query>:{{query}}\n<Document>:{{document}}",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    instruction="Given a search query, retrieve relevant candidates that answer the query.",
    classifier_method="from_2_way_softmax",
    classifier_tokens=("no", "yes"),
)
"""Qwen3-VL-Reranker (Li et al. 2026), after qwen3_vl_reranker.py of its authors' repository: the
whole is tokenized at once."""

MXBAI_RERANK_V2 = ScoreTemplate(
    pieces=(
        (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            "assistant.<|im_end|>\n<|im_start|>user\n"
        ),
        "{instruction}query: {query}",
        "\n",
        "document: {document}",
        "\n",
        "You are a search relevance expert who evaluates how well documents match search queries. "
        "For each query-document pair, carefully analyze the semantic relationship between them, "
        "then provide your binary relevance "
        "judgment (0 for not relevant, 1 for relevant).\nRelevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    instruction_text="instruction: {instruction}\n",
    classifier_method="from_2_way_softmax",
    classifier_tokens=("0", "1"),
)
"""mxbai-rerank-base-v2 and -large-v2, after the package mxbai-rerank of their authors
(mxbai_rerank_v2.py)."""

BGE_RERANKER_V2_GEMMA = ScoreTemplate(
    pieces=("A: {query}", "\n", "B: {document}", "\n", "{instruction}"),
    instruction=(
        "Given a query A and a passage B, determine whether the passage contains an answer to "
        "the query "
        "by providing a prediction of either 'Yes' or 'No'."
    ),
    add_special_tokens=True,
    classifier_method="no_post_processing",
    classifier_tokens=("Yes",),
)
"""bge-reranker-v2-gemma (Chen et al. 2024), after its model card: a request's instruction takes the
place of the question."""

PAIR = ScoreTemplate(pieces=("{query}{document}",), add_special_tokens=True)
"""The query and the document as one text: for callers that write the prompt themselves."""
