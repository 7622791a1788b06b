"""Many prompts for a pooling model, prepared together: what is wrong with one of them is said of that one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llm_toolkit.engine.llm_engine import LLMEngine, PreparedRequest, RequestOptions
from llm_toolkit.engine.parameters import check_options
from llm_toolkit.errors import RequestError
from llm_toolkit.pooling_params import PoolingParams
from llm_toolkit.prompts import Prompt, TextPair
from llm_toolkit.renderer import RenderedText


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


def all_prepared(prepared: Sequence[PreparedRequest | RequestError], names: Iterable[str]) -> list[PreparedRequest]:
    """Raises the first error there is, with the prompt's name; a single prompt needs none."""
    found = []
    for one, name in zip(prepared, names, strict=True):
        if isinstance(one, RequestError):
            if len(prepared) > 1:
                one.args = (f"{name}: {one}",)
            raise one
        found.append(one)
    return found
