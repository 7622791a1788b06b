from .backend import (
    AttentionBackend as AttentionBackend,
    AttentionBias as AttentionBias,
    BatchView as BatchView,
    GraphSupport as GraphSupport,
    LayerParams as LayerParams,
)
from .context import Binding as Binding, GroupMetadata as GroupMetadata, forward_context as forward_context
from .kv_cache import (
    KVCacheConfig as KVCacheConfig,
    KVGroup as KVGroup,
    Shape as Shape,
    block_bytes as block_bytes,
    group_layers as group_layers,
    tensors_per_shape as tensors_per_shape,
)
from .layer import Attention as Attention
from .selector import Candidate as Candidate, Selection as Selection, select_backend as select_backend
from .spec import AttentionSpec as AttentionSpec, AttentionType as AttentionType, KVCacheSpec as KVCacheSpec
