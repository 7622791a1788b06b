"""Many prompts for a pooling model, as a list, with params for each. An error of one prompt names
that prompt."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit_lm.config.tasks import PoolingTask, Task
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.requests import PreparedRequest
from toolkit_lm.prompts import check_count

_OF_PROMPTS = ("prompt", "prompt_token_ids", "input")
"""Names of the prompt parameter in errors that know only one prompt."""


def params_of_each(
    params: PoolingParams | Sequence[PoolingParams] | None,
    task: PoolingTask | None,
    count: int,
    tasks: Sequence[Task],
) -> list[PoolingParams]:
    """Returns params for each prompt. `task` applies to params that name none; `tasks` are the
    model's.

    Raises RequestError, also if no task is named.
    """
    if params is None:
        if task is None:
            raise RequestError(f"no task is given. This model serves: {', '.join(tasks)}.", "task")
        return [PoolingParams(task=task)] * count
    each = [params] * count if isinstance(params, PoolingParams) else params
    if (
        not isinstance(each, list | tuple)
        or len(each) != count
        or not all(isinstance(request_params, PoolingParams) for request_params in each)
    ):
        raise RequestError(
            f"give PoolingParams, or a list of {count} of them, one for each prompt.", "params"
        )
    if task is None:
        return list(each)
    # "embed" is the task of params that name none.
    if other := next(
        (
            request_params.task
            for request_params in each
            if request_params.task not in (task, "embed")
        ),
        None,
    ):
        raise RequestError(
            f"the task is {task!r}, but params are for {other!r}. Use encode() for that.", "task"
        )
    return [request_params.replace(task=task) for request_params in each]


def all_prepared(
    prepared: Sequence[PreparedRequest | RequestError], names: Sequence[str]
) -> list[PreparedRequest]:
    """Raises the first error there is, with the prompt's name; a single prompt needs none.

    `names`: the caller's parameter for each prompt, with a number if it holds several: "input[3]",
    "prompt 3".
    """
    check_count(names, "names", len(prepared))
    found = []
    for entry, name in zip(prepared, names, strict=True):
        if isinstance(entry, RequestError):
            if entry.param in _OF_PROMPTS:
                entry.param = name.partition("[")[0].partition(" ")[0]
            if len(prepared) > 1:
                entry.args = (f"{name}: {entry}",)
            raise entry
        found.append(entry)
    return found
