"""The runner type that an architecture's name implies: the first suffix that fits."""

from __future__ import annotations

import pytest
from toolkit_lm.config.tasks import CONVERT_TASKS, POOLING_TASKS, default_runner

GENERATES = ("generate", "none")
EMBEDS = ("pooling", "embed")
CLASSIFIES = ("pooling", "classify")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", GENERATES),
        ("Qwen2VLForConditionalGeneration", GENERATES),
        ("BaichuanChatModel", GENERATES),
        ("GPT2LMHeadModel", GENERATES),
        ("T5ForTextEncoding", EMBEDS),
        ("Gemma3EmbeddingModel", EMBEDS),
        ("LlamaForSequenceClassification", CLASSIFIES),
        ("BertForTokenClassification", CLASSIFIES),
        ("ViTForImageClassification", CLASSIFIES),
        ("InternLM2ForRewardModeling", EMBEDS),
        ("InternLM2RewardModel", EMBEDS),
        ("BertModel", EMBEDS),
        ("LlamaModel", EMBEDS),
        # "Classification" alone, and what ends in nothing of the table.
        ("BertClassification", GENERATES),
        ("Qwen2ForRewardModel", EMBEDS),
        ("HF_ColBERT", GENERATES),
    ],
)
def test_default_runner(architecture, expected):
    assert default_runner(architecture) == expected


def test_each_convert_type_serves_tasks_of_its_own():
    served = [task for tasks in CONVERT_TASKS.values() for task in tasks]
    assert sorted(served) == sorted(POOLING_TASKS)
    assert set(CONVERT_TASKS["embed"]) == {"embed", "token_embed"}
