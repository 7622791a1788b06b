from .backend import (
    AttentionBackend as AttentionBackend,
)
from .backend import (
    AttentionBias as AttentionBias,
)
from .backend import (
    BatchView as BatchView,
)
from .backend import (
    GraphSupport as GraphSupport,
)
from .context import Binding as Binding
from .context import GroupMetadata as GroupMetadata
from .context import forward_context as forward_context
from .kv_cache import (
    KVCacheConfig as KVCacheConfig,
)
from .kv_cache import (
    KVGroup as KVGroup,
)
from .kv_cache import (
    Shape as Shape,
)
from .kv_cache import (
    block_bytes as block_bytes,
)
from .kv_cache import (
    group_layers as group_layers,
)
from .kv_cache import (
    tensors_per_shape as tensors_per_shape,
)
from .layer import Attention as Attention
from .selector import Candidate as Candidate
from .selector import Selection as Selection
from .selector import select_backend as select_backend
from .spec import AttentionSpec as AttentionSpec
from .spec import AttentionType as AttentionType
from .spec import KVCacheSpec as KVCacheSpec
