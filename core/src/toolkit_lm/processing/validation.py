"""Checks of sampling parameters against the renderer, the plugins and the vocabulary, before a
request is queued."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolkit_lm.config import LimitsConfig
from toolkit_lm.errors import RequestError, nearest
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import LogitsProcessorRegistry
from toolkit_lm.renderer import Renderer

MAX_TIMEOUT = 10**9
MAX_SALT_LENGTH = 1024
MAX_CONTEXT_LENGTH = 16384


def check_options(options: Mapping[str, Any]) -> None:
    """Raises RequestError, which names the option, for request options of a wrong type or size. An
    unknown one must be None."""
    priority = options.get("priority", 0)
    timeout = options.get("timeout")
    if type(priority) is not int or abs(priority) >= 2**63:
        raise RequestError("priority must be an integer of at most 64 bits.", "priority")
    if timeout is not None and (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float)
        or not 0 < timeout <= MAX_TIMEOUT
    ):
        raise RequestError(
            f"timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT}.", "timeout"
        )
    salt = options.get("cache_salt")
    context = options.get("context", {})
    if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT_LENGTH):
        raise RequestError(
            f"cache_salt must be a text of 1 to {MAX_SALT_LENGTH} characters.", "cache_salt"
        )
    if not isinstance(context, dict) or not all(
        isinstance(text, str) for item in context.items() for text in item
    ):
        raise RequestError("context must be a mapping from texts to texts.", "context")
    if sum(len(key) + len(value) for key, value in context.items()) > MAX_CONTEXT_LENGTH:
        raise RequestError(f"context must have at most {MAX_CONTEXT_LENGTH} characters.", "context")
    for name, texts in (("cache_salt", [salt or ""]), ("context", [*context, *context.values()])):
        if not all(map(_is_unicode, texts)):
            raise RequestError(f"{name} is not a valid text: it has a lone surrogate.", name)
    if (scope := options.get("stop_scope")) is not None and not callable(scope):
        raise RequestError(
            "stop_scope must be a function of the prompt's last characters that makes a StopScope.",
            "stop_scope",
        )
    known = ("priority", "timeout", "cache_salt", "context", "stop_scope")
    for name in options:
        if name not in known and options[name] is not None:
            raise RequestError(f"unknown request option {name!r}. {nearest(name, known)}", name)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_bounds(params: SamplingParams, limits: LimitsConfig) -> None:
    """Raises RequestError, which names the parameter, for values beyond the operator's limits."""
    param, width = params.widest
    if width > limits.max_n:
        raise RequestError(
            f"{param} is {width}; this engine allows at most {limits.max_n} (max_n).", param
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.max_logprobs:
            raise RequestError(
                f"{name} is {getattr(params, name)}; this engine allows at most "
                f"{limits.max_logprobs} (max_logprobs).",
                name,
            )
    if (asked := len(params.logprob_token_ids or ())) > limits.max_logprobs:
        allowed = f"this engine allows at most {limits.max_logprobs} (max_logprobs)"
        raise RequestError(
            f"logprob_token_ids names {asked} tokens; {allowed}.", "logprob_token_ids"
        )


def cut_prompt(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt: those that the output follows."""
    most = params.truncate_prompt_tokens
    assert most is not None, "nothing asks to cut the prompt"
    if most == -1:
        most = max(1, max_model_len - (1 if params.max_tokens is None else params.max_tokens))
    return token_ids[-most:]


def prepare_processors(
    extra_args: Mapping[str, Any], registry: LogitsProcessorRegistry, renderer: Renderer
) -> dict[str, dict[str, Any]]:
    """Arguments of the logits processors that a request uses, by name. Raises RequestError, which
    names the parameter."""
    prepared = {}
    for name, params in registry.parse(extra_args).items():
        extra = next(name for name in params.__struct_fields__ if name in extra_args)
        try:
            arguments = params.prepare(renderer)
        except ValueError as error:
            raise RequestError(str(error), getattr(error, "param", None) or extra) from error
        except Exception as error:
            raise RequestError(
                registry.get(name).owner.failure(error, f"prepare() of logits processor {name!r}"),
                extra,
            ) from error
        if arguments is not None:
            prepared[name] = dict(arguments)
    return prepared


def check_token_ids(
    token_ids: Collection[int], vocab_size: int, param: str = "prompt_token_ids"
) -> None:
    """Raises RequestError, which names the parameter, for token ids that are not in the
    vocabulary."""
    for token in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token < vocab_size:
            known = (
                f"which has the ids from 0 to {vocab_size - 1} (greater than or equal to 0, less "
                f"than {vocab_size}): out of vocabulary"
            )
            raise RequestError(f"token id {token} is not in the vocabulary, {known}.", param)


def check_tokens_of_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for token ids in sampling parameters that are not in the vocabulary."""
    for name in ("allowed_token_ids", "logit_bias", "logprob_token_ids", "stop_token_ids"):
        check_token_ids(getattr(params, name) or (), vocab_size, name)
