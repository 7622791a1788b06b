from .block_manager import BlockManager as BlockManager, TokenRange as TokenRange
from .block_pool import BlockPool as BlockPool
from .event_log import load_event as load_event
from .planner import Planner as Planner
from .prefix import PrefixHashes as PrefixHashes
from .request import Request as Request, Sequence as Sequence
from .roster import SchedulingPolicy as SchedulingPolicy, load_policy as load_policy
from .scheduler import Scheduler as Scheduler
