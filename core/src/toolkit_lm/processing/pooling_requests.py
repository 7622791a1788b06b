"""Many prompts for a pooling model: as a list, with params for each; what is wrong with one of them
is said of that one."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit_lm.config.tasks import PoolingTask, Task
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.requests import PreparedRequest
from toolkit_lm.processing.validation import check_count

_OF_PROMPTS = ("prompt", "prompt_token_ids", "input")
"""What errors that know one prompt only call its parameter."""


def params_of_each(
    params: PoolingParams | Sequence[PoolingParams] | None,
    task: PoolingTask | None,
    count: int,
    tasks: Sequence[Task],
) -> list[PoolingParams]:
    """One for each prompt. `task` stands in for params that say nothing else; `tasks` are those
    that the model serves.

    Raises RequestError, also where nobody names a task.
    """
    if params is None:
        if task is None:
            raise RequestError(f"no task is given. This model serves: {', '.join(tasks)}.", "task")
        return [PoolingParams(task=task)] * count
    each = [params] * count if isinstance(params, PoolingParams) else params
    if (
        not isinstance(each, list | tuple)
        or len(each) != count
        or not all(isinstance(one, PoolingParams) for one in each)
    ):
        raise RequestError(
            f"give PoolingParams, or a list of {count} of them, one for each prompt.", "params"
        )
    if task is None:
        return list(each)
    # "embed" is what params say that name no task.
    if other := next((one.task for one in each if one.task not in (task, "embed")), None):
        raise RequestError(
            f"the task is {task!r}, but params are for {other!r}. Use encode() for that.", "task"
        )
    return [one.replace(task=task) for one in each]


def all_prepared(
    prepared: Sequence[PreparedRequest | RequestError], names: Sequence[str]
) -> list[PreparedRequest]:
    """Raises the first error there is, with the prompt's name; a single prompt needs none.

    `names`: a parameter of the caller's, with a number where it holds several prompts: "input[3]",
    "prompt 3".
    """
    check_count(names, "names", len(prepared))
    found = []
    for one, name in zip(prepared, names, strict=True):
        if isinstance(one, RequestError):
            if one.param in _OF_PROMPTS:
                one.param = name.partition("[")[0].partition(" ")[0]
            if len(prepared) > 1:
                one.args = (f"{name}: {one}",)
            raise one
        found.append(one)
    return found
