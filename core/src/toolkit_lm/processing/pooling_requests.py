"""Many prompts for a pooling model, prepared together: what is wrong with one of them is said of that one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.errors import RequestError
from toolkit_lm.frontend.llm_engine import LLMEngine, PreparedRequest, RequestOptions
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.validation import check_options
from toolkit_lm.prompts import Prompt, TextPair
from toolkit_lm.renderer import RenderedText

_OF_PROMPTS = ("prompt", "prompt_token_ids", "input")
"""What errors that know one prompt only call its parameter."""


def listed(prompts: Prompt | TextPair | Sequence[Prompt | TextPair]) -> list[Prompt | TextPair]:
    """One prompt, or a list of them, as a list. Raises RequestError for what is neither."""
    if not isinstance(prompts, str | Mapping | Sequence):
        raise RequestError(f"prompts must be a text, a dict, a pair of texts or a list of these, not a {type(prompts).__name__}.", "prompt")
    return [cast(Prompt, prompts)] if isinstance(prompts, str | Mapping | tuple) else list(prompts)


def params_of_each(
    engine: LLMEngine, params: PoolingParams | Sequence[PoolingParams] | None, task: PoolingTask | None, count: int
) -> list[PoolingParams]:
    """One for each prompt. `task` stands in for params that say nothing else. Raises RequestError, also where nobody names a task."""
    if params is None:
        if task is None:
            raise RequestError(f"which task? This model serves: {', '.join(engine.tasks)}.", "task")
        return [PoolingParams(task=task)] * count
    each = [params] * count if isinstance(params, PoolingParams) else params
    if not isinstance(each, list | tuple) or len(each) != count or not all(isinstance(one, PoolingParams) for one in each):
        raise RequestError(f"give PoolingParams, or a list of {count} of them, one for each prompt.", "params")
    if task is None:
        return list(each)
    # "embed" is what params say that name no task.
    if other := next((one.task for one in each if one.task not in (task, "embed")), None):
        raise RequestError(f"the task is {task!r}, but params are for {other!r}. To have that: encode.", "task")
    return [one.replace(task=task) for one in each]


def prepare_each(
    engine: LLMEngine,
    request_ids: Sequence[str],
    prompts: Sequence[Prompt | TextPair],
    params: Sequence[PoolingParams],
    *,
    prompt_name: str | Sequence[str | None] | None = None,
    truncate_prompt_tokens: int | None = None,
    instruction: str | None = None,
    options: RequestOptions | None = None,
) -> list[PreparedRequest | RequestError]:
    """Each prompt as a prepared request, or why it cannot be one. The arguments are those of `LLMEngine.prepare_pooling`, one for each.

    Raises RequestError for what is wrong with all of them. May be called from any thread.
    """
    check_options(options or {})
    check_count(request_ids, "request_ids", len(prompts))
    for distinct in {id(one): one for one in params}.values():
        engine.check_pooling(distinct)
    rendered = engine.texts.render_each(
        prompts, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens, instruction=instruction
    )
    prepared: list[PreparedRequest | RequestError] = []
    for request_id, text, prompt, its in zip(request_ids, rendered, prompts, params, strict=True):
        prepared.append(text if isinstance(text, RequestError) else _prepare(engine, request_id, text, prompt, its, options or {}))
    messages = [one.message for one in prepared if isinstance(one, PreparedRequest)]
    for message in messages:
        # They arrive together, and so are served in the order in which they are submitted.
        message.arrival_time = messages[0].arrival_time
    return prepared


def _prepare(
    engine: LLMEngine,
    request_id: str,
    text: RenderedText,
    prompt: Prompt | TextPair,
    params: PoolingParams,
    options: RequestOptions,
) -> PreparedRequest | RequestError:
    try:
        return engine.prepare_rendered(request_id, text, prompt if isinstance(prompt, str) else None, params, options)
    except RequestError as error:
        return error


def check_count(given: Sequence[str], param: str, count: int) -> None:
    """Raises RequestError where there is not one for each prompt."""
    if len(given) != count:
        raise RequestError(f"{param} has {len(given)} entries for {count} prompts: give one for each.", param)


def all_prepared(prepared: Sequence[PreparedRequest | RequestError], names: Sequence[str]) -> list[PreparedRequest]:
    """Raises the first error there is, with the prompt's name; a single prompt needs none.

    `names`: a parameter of the caller's, with a number where it holds several prompts: "input[3]", "prompt 3".
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
