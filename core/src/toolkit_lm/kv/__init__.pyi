from .block_manager import BlockManager as BlockManager
from .cache import KVCache as KVCache
from .group_blocks import (
    BlockHashes as BlockHashes,
    BlockPool as BlockPool,
    FreeBlocks as FreeBlocks,
    TokenRange as TokenRange,
)
from .host import HostStore as HostStore
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
from .tier import (
    BlockBytes as BlockBytes,
    Data as Data,
    KVTier as KVTier,
    KVTierStore as KVTierStore,
    Outcome as Outcome,
)
from .tiers import Tiers as Tiers
from .transfers import Transfers as Transfers
