"""SamplingParams: the sampling parameters of a request. It crosses process boundaries, so it is a
msgspec struct."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import (
    ParamsMeta,
    check_fields,
    checks_of,
    is_number,
    is_token_id,
    param,
    params_of,
    require,
    spec_of,
)

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Reason for which a sequence ended: "abort" by its caller, "timeout" by its request's deadline,
"error" with a message."""


class RequestOutputKind(Enum):
    """Contents of a request's successive outputs."""

    CUMULATIVE = 0
    """The whole output so far."""
    DELTA = 1
    """The output since the last one."""
    FINAL_ONLY = 2
    """One output, at the end."""


class SamplingParams(Struct, metaclass=ParamsMeta, kw_only=True, omit_defaults=True):
    """How tokens are sampled and when a sequence ends. Names and meanings are vLLM's. None stands
    for a default.

    Raises RequestError (with `param` set) if a value is out of range, also when one is changed. A
    request has a copy of its own.
    """

    n: Annotated[
        int,
        param(
            "Sequences per prompt, at most max_n. The prompt is computed once.", ge=1, use="both"
        ),
    ] = 1
    best_of: Annotated[
        int | None,
        param(
            "Sequences computed per prompt, of which the n likeliest are returned.",
            none="n",
            ge=1,
            use="both",
        ),
    ] = None
    use_beam_search: Annotated[
        bool, param("Search for the n likeliest sequences instead of sampling tokens.", use="both")
    ] = False
    beam_width: Annotated[
        int | None,
        param(
            "Beams that a beam search keeps at each token, at least n.",
            none="best_of, else n",
            ge=2,
            use="beams",
        ),
    ] = None
    length_penalty: Annotated[
        float,
        param(
            "Exponent of the length in a beam's score. Above 0 favors long sequences, below 0 "
            "short ones.",
            ge=-10,
            le=10,
            use="beams",
        ),
    ] = 1.0
    """A beam is ranked by log probability / length ** length_penalty."""
    early_stopping: Annotated[
        bool | Literal["never"],
        param(
            "End of a beam search with beam_width finished sequences. true: at once. false: when "
            "the likeliest beam, finished now, would not be among the best. never: when no beam "
            "can still become one of the best.",
            use="beams",
        ),
    ] = False
    temperature: Annotated[
        float, param("Divisor of the logits: higher is more random. 0: greedy.", ge=0, le=1_000_000)
    ] = 1.0
    top_p: Annotated[
        float,
        param(
            "Nucleus sampling: keep the fewest likeliest tokens that together have this "
            "probability.",
            gt=0,
            le=1,
        ),
    ] = 1.0
    """Holtzman et al. 2019."""
    top_k: Annotated[int, param("Keep this many of the likeliest tokens. 0 or -1: all.", ge=-1)] = 0
    min_p: Annotated[
        float, param("Drop tokens that are less likely than min_p times the likeliest.", ge=0, le=1)
    ] = 0.0
    """Nguyen et al. 2024."""
    repetition_penalty: Annotated[
        float,
        param(
            "Tokens of prompt and output: positive logits are divided by it, negative ones "
            "multiplied.",
            ge=0.001,
            le=1000,
        ),
    ] = 1.0
    """Keskar et al. 2019."""
    presence_penalty: Annotated[
        float,
        param(
            "Subtracted from the logits of the tokens in the output, once per token.", ge=-2, le=2
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        param(
            "Subtracted from the logits of the tokens in the output, once per occurrence.",
            ge=-2,
            le=2,
        ),
    ] = 0.0
    bad_words: Annotated[
        list[str] | None,
        param("Texts that the output must not contain.", max_items=300, max_length=256, use="both"),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        param("Numbers added to logits, by token id.", ge=-100, le=100, max_items=300, flag=False),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        param("The only tokens that may be sampled.", max_items=2**18, use="both", flag=False),
    ] = None
    extra_args: Annotated[
        dict[str, Any] | None,
        param("Parameters of plugins' logits processors, by name.", max_items=64, flag=False),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        param(
            "Structure of the output: a JSON document of a schema, a choice, ...",
            max_items=64,
            flag=False,
            by_processor=True,
        ),
    ] = None
    seed: Annotated[
        int | None,
        param(
            "Seed of the random numbers, which makes a request's samples repeatable.",
            none="the engine's, else a fresh one",
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        param(
            "Stop texts: the output ends before the first that appears.",
            max_items=64,
            max_length=1024,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        param(
            "Stop tokens: they end a sequence, as the checkpoint's end-of-sequence tokens do.",
            max_items=64,
            use="both",
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool,
        param(
            "Keep the stop text, or the text of the token that ended the sequence.",
            use="both",
            flag=False,
        ),
    ] = False
    ignore_eos: Annotated[bool, param("Continue after an end-of-sequence token.", use="both")] = (
        False
    )
    max_tokens: Annotated[
        int | None,
        param(
            "Maximum output tokens. 0, with prompt_logprobs: the prompt is scored, and nothing "
            "generated.",
            none="as many as fit in max_model_len, the default of a chat",
            ge=0,
            use="both",
        ),
    ] = 16
    min_tokens: Annotated[
        int,
        param(
            "Minimum output tokens. Until then no end-of-sequence token, stop token or stop text "
            "ends a sequence.",
            ge=0,
            use="both",
        ),
    ] = 0
    logprobs: Annotated[
        int | None,
        param(
            "Number of likeliest tokens whose log probabilities are returned, per output token; at"
            " most max_logprobs.",
            none="no log probabilities",
            ge=0,
            flag=False,
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        param(
            "Tokens whose log probabilities are returned per output token, instead of the "
            "likeliest; at most max_logprobs.",
            none="the likeliest, as many as logprobs says",
            max_items=2**18,
            flag=False,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        param(
            "Number of likeliest tokens whose log probabilities are returned, per prompt token; at"
            " most max_logprobs.",
            none="no log probabilities",
            ge=0,
            flag=False,
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        param(
            "Keep only this many of the prompt's last tokens. -1: as many as leave room for "
            "max_tokens.",
            none="all",
            ge=-1,
            use="both",
        ),
    ] = None
    detokenize: Annotated[
        bool, param("Convert output tokens to text. Off: stop is refused.", use="both", flag=False)
    ] = True
    skip_special_tokens: Annotated[
        bool, param("Leave special tokens out of the text.", use="both", flag=False)
    ] = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Contents of each output of a streamed request. The caller chooses it, not a client: requests
    and the command line do not have it."""

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)
        self._check_together()

    def __setattr__(self, name: str, value: object) -> None:
        before = getattr(self, name)
        super().__setattr__(name, value)
        try:
            check_fields(self, [check for check in _CHECKS if check.name == name])
            self._check_together()
        except RequestError:
            super().__setattr__(name, before)
            raise

    def _check_together(self) -> None:
        """Checks fields that depend on each other."""
        require(
            isinstance(self.output_kind, RequestOutputKind),
            "output_kind",
            "a RequestOutputKind",
            self.output_kind,
        )
        self._check_lengths()
        self._check_words()
        self._check_mappings()
        require(
            self.best_of is None or self.best_of >= self.n,
            "best_of",
            f"at least n ({self.n})",
            self.best_of,
        )
        if self.use_beam_search:
            self._check_beam_search()
        else:
            self._refuse_beams()

    def _check_lengths(self) -> None:
        most = self.max_tokens if self.max_tokens is not None else self.min_tokens
        scores = self.prompt_logprobs is not None
        require(
            scores or self.max_tokens != 0, "max_tokens", "at least 1, or 0 with prompt_logprobs", 0
        )
        require(
            self.min_tokens <= most, "min_tokens", f"at most max_tokens ({most})", self.min_tokens
        )
        require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", "-1 or at least 1", 0)

    def _check_words(self) -> None:
        require(
            self.detokenize or not self.stop, "stop", "unset where detokenize is off", self.stop
        )
        require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids",
            "at least one token id",
            [],
        )
        allowed = self.allowed_token_ids or ()
        require(
            len(set(allowed)) == len(allowed),
            "allowed_token_ids",
            "token ids of which none comes twice",
            allowed,
        )
        asked = self.logprob_token_ids or ()
        require(
            self.logprob_token_ids is None or len(asked) > 0,
            "logprob_token_ids",
            "at least one token id",
            [],
        )
        require(
            len(set(asked)) == len(asked),
            "logprob_token_ids",
            "token ids of which none comes twice",
            asked,
        )
        blank = any(not word.strip(" ") for word in self.bad_words or ())
        require(not blank, "bad_words", "texts of which none is blank", self.bad_words)

    def _check_mappings(self) -> None:
        if bias := self.logit_bias:
            require(
                all(map(is_token_id, bias)), "logit_bias", "a mapping from token id to number", bias
            )
            ok = all(is_number(value) and _LOGIT_BIAS.admits(value) for value in bias.values())
            require(ok, "logit_bias", f"a mapping to numbers {_LOGIT_BIAS.range}", bias)
        require(
            all(isinstance(name, str) for name in self.extra_args or ()),
            "extra_args",
            "a mapping from names to values",
            self.extra_args,
        )

    def _refuse_beams(self) -> None:
        for name in _BEAMS_ONLY:
            if getattr(self, name) != SAMPLING_PARAMS[name].default:
                raise RequestError(
                    f"{name} has an effect only with use_beam_search: set both, or leave it out.",
                    name,
                )

    def _check_beam_search(self) -> None:
        name, width = self.widest
        require(
            width >= 2, "beam_width", "at least 2 (a search of width 1 is temperature 0)", width
        )
        require(width >= self.n, name, f"at least n ({self.n})", width)
        require(
            self.best_of in (None, width),
            "best_of",
            f"unset, or beam_width ({width})",
            self.best_of,
        )
        for name in _DRAWS_ONLY:
            value = getattr(self, name)
            default = SAMPLING_PARAMS[name].default
            if value not in (default, _OFF.get(name, default), [], {}):
                raise RequestError(
                    f"{name} has no effect with use_beam_search, which draws no tokens: leave "
                    "one of them out.",
                    name,
                )

    @property
    def widest(self) -> tuple[str, int]:
        """Number of sequences computed at a time, and the parameter that sets it."""
        if self.use_beam_search and self.beam_width is not None:
            return "beam_width", self.beam_width
        return (
            ("n", self.n)
            if self.best_of is None or self.best_of == self.n
            else ("best_of", self.best_of)
        )

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens whose log probabilities are returned per output token, in
        addition to its own; None: no log probabilities."""
        return 0 if self.logprob_token_ids else self.logprobs

    @property
    def of_processors(self) -> dict[str, Any]:
        """Parameters that plugins' logits processors read, by name."""
        own = {name: value for name in _BY_PROCESSOR if (value := getattr(self, name)) is not None}
        return {**(self.extra_args or {}), **own}

    @property
    def num_sequences(self) -> int:
        """Number of sequences computed at a time. n of them are returned."""
        return self.widest[1]

    @property
    def num_outputs(self) -> int:
        """Number of sequences that the engine returns: all of best_of, for the front to choose
        from; for a beam search, its n results."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def ranks(self) -> bool:
        """Whether the best of several sequences are wanted. There is then no output before all have
        ended."""
        return self.use_beam_search or self.num_sequences > self.n

    def replace(self, **changes: object) -> SamplingParams:
        return msgspec.structs.replace(self, **changes)


SAMPLING_PARAMS = params_of(SamplingParams)
"""The stated sampling parameters, by name."""
_CHECKS = checks_of(SamplingParams)
_BEAMS_ONLY = [name for name, o in SAMPLING_PARAMS.items() if spec_of(o).use == "beams"]
_DRAWS_ONLY = [name for name, o in SAMPLING_PARAMS.items() if spec_of(o).use == "draws"]
_BY_PROCESSOR = [name for name, o in SAMPLING_PARAMS.items() if spec_of(o).by_processor]
_OFF = {"temperature": 0, "top_k": -1}
"""Values, other than the defaults, that do not change a beam search."""
_LOGIT_BIAS = SAMPLING_PARAMS["logit_bias"].spec


OF_THE_REQUEST = "the request's sampling parameters"
"""Beginning of an error that the request's own parameters cause: they rule out every token, or ask
for too much."""


def leave_too_little(params: SamplingParams, left: str) -> str:
    """Error for parameters that leave too few tokens. It names the parameters that may be the
    cause."""
    changed = [
        name
        for name in ("use_beam_search", "allowed_token_ids", "bad_words", "min_tokens")
        if getattr(params, name)
    ]
    return f"{OF_THE_REQUEST} leave {left} ({', '.join([*changed, *params.of_processors])})"
