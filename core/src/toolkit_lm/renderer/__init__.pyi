from .answer import (
    AnswerDelta as AnswerDelta,
    AnswerFormat as AnswerFormat,
    AnswerParser as AnswerParser,
    ContentScope as ContentScope,
    ReasoningCounter as ReasoningCounter,
    StopScope as StopScope,
    ToolCallDelta as ToolCallDelta,
    prompt_end as prompt_end,
)
from .contract import (
    ConversationOptions as ConversationOptions,
    DecodeStream as DecodeStream,
    Rendered as Rendered,
    RenderedText as RenderedText,
    Renderer as Renderer,
)
from .encoder_decoder import (
    EncoderDecoderRules as EncoderDecoderRules,
    RenderedPair as RenderedPair,
)
from .feature_lookup import (
    MEDIA_OWNER as MEDIA_OWNER,
    FeatureLookup as FeatureLookup,
    HeldFeature as HeldFeature,
)
from .making import make_renderer as make_renderer
from .multimodal import MultiModalRules as MultiModalRules, Replacement as Replacement
