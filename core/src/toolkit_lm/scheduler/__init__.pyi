from .event_log import load_event as load_event
from .planner import Planner as Planner, Planners as Planners
from .request import Request as Request, Sequence as Sequence
from .roster import SchedulingPolicy as SchedulingPolicy, load_policy as load_policy
from .scheduler import Scheduler as Scheduler
