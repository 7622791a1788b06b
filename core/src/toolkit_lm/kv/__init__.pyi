from .block_manager import BlockManager as BlockManager
from .block_pool import BlockPool as BlockPool
from .cache import KVCache as KVCache
from .group_blocks import TokenRange as TokenRange
from .layout import (
    KVCacheConfig as KVCacheConfig,
    KVGroup as KVGroup,
    KVPool as KVPool,
    plan_groups as plan_groups,
)
from .prefix import PrefixHashes as PrefixHashes
from .spec import (
    CrossSpec as CrossSpec,
    FullSpec as FullSpec,
    KVCacheSpec as KVCacheSpec,
    PageTensor as PageTensor,
    WindowSpec as WindowSpec,
    max_drafts as max_drafts,
)
