from .attention import AttentionBackendConformance as AttentionBackendConformance
from .attention_step import AttentionStep as AttentionStep
from .checkpoints import (
    make_checkpoint as make_checkpoint,
    randomize as randomize,
    write_checkpoint as write_checkpoint,
    write_tokenizer as write_tokenizer,
)
from .equality import (
    assert_bf16_error as assert_bf16_error,
    assert_same_logits as assert_same_logits,
    assert_same_tokens as assert_same_tokens,
)
from .model import ModelConformance as ModelConformance, Reference as Reference
from .naive import naive_attention as naive_attention
from .pairs import all_pairs as all_pairs
from .pytest_plugin import Finished as Finished
from .renderer import RendererConformance as RendererConformance
from .transformers_model import TransformersConformance as TransformersConformance
