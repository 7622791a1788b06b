from .backend import (
    AttentionBackend as AttentionBackend,
    AttentionBias as AttentionBias,
    AttentionCall as AttentionCall,
    BatchLimits as BatchLimits,
    BatchView as BatchView,
    CacheBackend as CacheBackend,
    GraphSupport as GraphSupport,
    GroupSetup as GroupSetup,
    LayerParams as LayerParams,
    OffsetBias as OffsetBias,
)
from .context import (
    Binding as Binding,
    ForwardContext as ForwardContext,
    current as current,
    forward_context as forward_context,
    head_tokens as head_tokens,
    logits_of_tokens as logits_of_tokens,
    op_layer as op_layer,
    slots as slots,
)
from .layer import Attention as Attention, CacheLayer as CacheLayer
from .selector import Selection as Selection, select_backend as select_backend
from .spec import (
    AttentionSpec as AttentionSpec,
    AttentionType as AttentionType,
    common_refusal as common_refusal,
)
