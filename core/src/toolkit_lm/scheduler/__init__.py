"""The scheduler, its policies, and the paged KV cache's bookkeeping."""

from toolkit_lm.scheduler.block_manager import BlockManager, TokenRange
from toolkit_lm.scheduler.block_pool import BlockPool
from toolkit_lm.scheduler.event_log import load_event
from toolkit_lm.scheduler.prefix import PrefixHashes
from toolkit_lm.scheduler.request import Request, Sequence
from toolkit_lm.scheduler.roster import SchedulingPolicy, load_policy
from toolkit_lm.scheduler.scheduler import Scheduler

__all__ = [
    "BlockManager",
    "BlockPool",
    "PrefixHashes",
    "Request",
    "Scheduler",
    "SchedulingPolicy",
    "Sequence",
    "TokenRange",
    "load_event",
    "load_policy",
]
