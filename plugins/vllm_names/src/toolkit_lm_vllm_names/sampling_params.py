"""SamplingParams with vLLM's methods and older arguments."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

import toolkit_lm
from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import ParamsMeta

from toolkit_lm_vllm_names.arguments import LOGPROBS, WHOLE_VOCABULARY

_NO_EFFECT = ("skip_clone", "stream_interval", "watermarking", "use_tqdm")
"""Arguments that change no token."""
_OLDER_FORM = ("backend", "backend_was_auto", "disable_fallback", "_backend", "_backend_was_auto")
"""Fields of a GuidedDecodingParams that choose a library, which an engine's option does here."""


class _VllmMeta(ParamsMeta):
    """Translates vLLM's own arguments before the constructor runs."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **arguments: Any) -> Any:  # noqa: N805 (a metaclass)
            """Raises RequestError for what cannot be had."""
            arguments.update(zip(_POSITIONS, args, strict=False))
            guided = arguments.pop("guided_decoding", None)
            if guided is not None:
                if arguments.get("structured_outputs") is not None:
                    raise RequestError(
                        "give structured_outputs or guided_decoding, not both.", "guided_decoding"
                    )
                arguments["structured_outputs"] = guided
            if arguments.get("structured_outputs") is not None:
                arguments["structured_outputs"] = _form(arguments["structured_outputs"])
            for name in _NO_EFFECT:
                arguments.pop(name, None)
            if arguments.pop("logits_processors", None):
                raise RequestError(
                    "functions per request are not taken: give classes as the engine's option "
                    "logits_processors, and arguments as extra_args.",
                    "logits_processors",
                )
            for name in LOGPROBS:
                if arguments.get(name) == -1:
                    arguments[name] = WHOLE_VOCABULARY
            if start := arguments.pop(_EXPERTS, 0):
                extra_args = {**(arguments.get("extra_args") or {}), _EXPERTS: start}
                arguments["extra_args"] = extra_args
            if (trace := arguments.pop(_TRACE, None)) is not None:
                arguments = _replaying(trace, arguments)
            return super().__call__(**arguments)


_TRACE = "trace_decode_token_ids"
_EXPERTS = "routed_experts_prompt_start"
"""A parameter of the plugin `rl` here."""
_POSITIONS = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature")
"""Arguments in vLLM's order."""


class SamplingParams(toolkit_lm.SamplingParams, metaclass=_VllmMeta, kw_only=True):
    """toolkit_lm.SamplingParams with `clone`, `from_optional` and the older argument
    `guided_decoding`."""

    @classmethod
    def from_optional(cls, **arguments: Any) -> Self:
        """Parameters of arguments of which None stands for a default. Raises RequestError."""
        return cls(**{name: value for name, value in arguments.items() if value is not None})

    def clone(self) -> Self:
        """A copy that can be changed by itself."""
        return deepcopy(self)

    @property
    def sampling_type(self) -> str:
        """How tokens are drawn: "greedy", "random" or "random_seed"."""
        if self.temperature == 0:
            return "greedy"
        return "random" if self.seed is None else "random_seed"


def _replaying(trace: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a request whose output tokens are given. Raises RequestError."""
    if not isinstance(trace, list | tuple) or not trace:
        raise RequestError(f"{_TRACE} must be a list of token ids, at least one.", _TRACE)
    for name in ("structured_outputs", "bad_words"):
        if arguments.get(name):
            raise RequestError(f"{_TRACE} gives all tokens: leave {name} out.", name)
    if arguments.get("n") not in (None, 1):
        raise RequestError(f"{_TRACE} is of one sequence: n must be 1.", "n")
    extra_args = {**(arguments.get("extra_args") or {}), _TRACE: list(trace)}
    whole = {"max_tokens": len(trace), "ignore_eos": True, "extra_args": extra_args}
    return arguments | whole


def _form(value: Any) -> dict[str, Any]:
    """Form of an output as a mapping without the fields that ask for nothing."""
    fields = value if isinstance(value, Mapping) else vars(value)
    return {
        name: item
        for name, item in fields.items()
        if item is not None and item is not False and name not in _OLDER_FORM
    }
