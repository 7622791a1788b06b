from .attention import AttentionBackendConformance as AttentionBackendConformance
from .attention_step import AttentionStep as AttentionStep
from .checkpoint_loader import CheckpointLoaderConformance as CheckpointLoaderConformance
from .checkpoints import (
    make_checkpoint as make_checkpoint,
    randomize as randomize,
    save_random as save_random,
    write_checkpoint as write_checkpoint,
    write_tokenizer as write_tokenizer,
)
from .draft_model import DraftModelConformance as DraftModelConformance
from .drafter import DrafterConformance as DrafterConformance
from .encoder_decoder import (
    EncoderDecoderConformance as EncoderDecoderConformance,
    EncoderDecoderReference as EncoderDecoderReference,
)
from .equality import (
    assert_bf16_error as assert_bf16_error,
    assert_same_logits as assert_same_logits,
    assert_same_tokens as assert_same_tokens,
)
from .executor import (
    ExecutorConformance as ExecutorConformance,
    WorkersConformance as WorkersConformance,
)
from .forward import (
    checkpoint_config as checkpoint_config,
    hidden_states as hidden_states,
    load_checkpoint as load_checkpoint,
    logits_of as logits_of,
    pooled as pooled,
)
from .kernels import KernelsConformance as KernelsConformance
from .kv_kind import KVKindConformance as KVKindConformance
from .kv_tier import KVTierConformance as KVTierConformance
from .linear_method import LinearMethodConformance as LinearMethodConformance
from .logits_processor import LogitsProcessorConformance as LogitsProcessorConformance
from .model import ModelConformance as ModelConformance, Reference as Reference
from .multimodal import (
    MultimodalConformance as MultimodalConformance,
    MultimodalReference as MultimodalReference,
)
from .naive import naive_attention as naive_attention
from .pairs import all_pairs as all_pairs
from .part import PartConformance as PartConformance
from .pytest_plugin import Finished as Finished
from .ranks import (
    Computed as Computed,
    hidden_states_of_ranks as hidden_states_of_ranks,
    logits_of_ranks as logits_of_ranks,
)
from .renderer import RendererConformance as RendererConformance
from .sampling import sampling_rows as sampling_rows
from .scheduling_policy import SchedulingPolicyConformance as SchedulingPolicyConformance
from .structured_output import (
    StructuredOutputConformance as StructuredOutputConformance,
    generate_structured as generate_structured,
)
from .thread_ranks import ThreadGroup as ThreadGroup, run_ranks as run_ranks
from .transformers_model import TransformersConformance as TransformersConformance
