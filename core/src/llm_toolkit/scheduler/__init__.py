"""The scheduler, its policies, and the paged KV cache's bookkeeping."""

from llm_toolkit.scheduler.block_manager import BlockManager, Growth, Write
from llm_toolkit.scheduler.block_pool import BlockPool
from llm_toolkit.scheduler.limits import RequestLimits
from llm_toolkit.scheduler.policy import POLICIES, SchedulingPolicy
from llm_toolkit.scheduler.request import Request, Sequence
from llm_toolkit.scheduler.scheduler import Scheduler

__all__ = [
    "POLICIES",
    "BlockManager",
    "BlockPool",
    "Growth",
    "Request",
    "RequestLimits",
    "Scheduler",
    "SchedulingPolicy",
    "Sequence",
    "Write",
]
