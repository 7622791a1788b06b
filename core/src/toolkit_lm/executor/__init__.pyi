from .calls import (
    WorkerAnswer as WorkerAnswer,
    call_worker as call_worker,
    values_of as values_of,
)
from .contract import Executor as Executor, make_executor as make_executor
from .failure import Failure as Failure
from .in_process import InProcessExecutor as InProcessExecutor
