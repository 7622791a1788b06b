"""Front half of records: rows of a request's computed tokens, hidden states or routed experts.
Importing it needs no torch."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Raw, Struct, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, CacheKey, EngineRequest
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.processing import RequestHalf

HIDDEN_STATES = "hidden_states"
ROUTED_EXPERTS = "routed_experts"
LAST = "last"
"""Name of the hidden states after the model's last norm."""
MIB = 2**20
NUMBERS_OF_CHOICES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "num_selected_experts",
)
"""Keys of config.json that state to how many experts a token goes."""


class Wanted(Struct, frozen=True, array_like=True):
    """Positions of a request whose rows are recorded: [start, end)."""

    start: int
    end: int


class Rows(Struct, frozen=True, array_like=True):
    """Rows of one step."""

    places: list[tuple[int, int, int]]
    """(seq_id, first position, number of rows), in the order of `values`."""
    values: Array
    """[rows, layers, width]."""


class Facts(Struct, frozen=True):
    """Shape and dtype of a row."""

    shape: tuple[int, int]
    """Layers, and width."""
    dtype: str


def option(config: VllmConfig, name: str) -> Any:
    """An option of the plugin as it was given, or None."""
    options: dict[str, Any] = {}
    for plugin in ("rl", "toolkit_lm_rl"):
        options |= config.plugins.plugin_option.get(plugin, {})
    return options.get(name)


def layer_names(stated: str | Sequence[Any] | None) -> list[str]:
    """The layers that an option names: a list, or a text with commas."""
    items = stated.strip("[] ").split(",") if isinstance(stated, str) else stated or ()
    return [name for item in items if (name := str(item).strip(" '\""))]


def records_hidden_states(config: VllmConfig) -> bool:
    """Whether an option names layers."""
    return config.model.runner != "pooling" and bool(layer_names(option(config, HIDDEN_STATES)))


def records_routed_experts(config: VllmConfig) -> bool:
    """Whether an option asks for routed experts."""
    return config.model.runner != "pooling" and option(config, ROUTED_EXPERTS) in (
        "asked",
        "always",
    )


class HiddenStatesParams(ProcessorParams):
    """Request parameters of hidden states."""

    changes_forward = False
    return_hidden_states: Annotated[
        bool, param("The answer has the hidden states of its tokens.", flag=False)
    ] = False
    hidden_states_of: Annotated[
        Literal["all", "prompt", "output"],
        param("Tokens whose hidden states are returned: all, prompt or output.", flag=False),
    ] = "all"

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        if self.return_hidden_states and not records_hidden_states(renderer.config):
            raise RequestError(
                "this engine records no hidden states. Start it with the option "
                "rl.hidden_states=LAYER,LAYER.",
                "return_hidden_states",
            )
        return super().prepare(renderer)


class RoutedExpertsParams(ProcessorParams):
    """Request parameters of routed experts."""

    changes_forward = False
    return_routed_experts: Annotated[
        bool, param("The answer has the experts that its tokens went to.", flag=False)
    ] = False
    routed_experts_prompt_start: Annotated[
        int, param("The first token whose experts are returned.", ge=0, flag=False)
    ] = 0

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        if self.return_routed_experts and not records_routed_experts(renderer.config):
            raise RequestError(
                "this engine records no routed experts. Start it with the option "
                "rl.routed_experts=asked.",
                "return_routed_experts",
            )
        return super().prepare(renderer)


class _Records(RequestHalf):
    """Says which rows of a request are recorded, and holds requests to the memory that these may
    have."""

    name: ClassVar[str]

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        super().__init__(config, options=options)
        self.config = config
        self.options = options
        self._row_bytes = self.row_bytes(config.hf_config.get("text_config") or config.hf_config)

    @abstractmethod
    def row_bytes(self, hf_config: Mapping[str, Any]) -> int:
        """Most bytes of a row."""

    @abstractmethod
    def wanted(self, arguments: Mapping[str, Any], num_prompt: int) -> Wanted | None:
        """The rows that a request's arguments ask for."""

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        num_prompt = len(request.prompt_token_ids)
        wanted = self.wanted(arguments, num_prompt)
        if wanted is None:
            return None, []
        params = request.params
        if params.use_beam_search:
            raise RequestError(f"a beam search returns no {self._words}.", "use_beam_search")
        if params.stop:
            raise RequestError(
                f"an answer with {self._words} ends by tokens: use stop_token_ids.", "stop"
            )
        most = self.options.recorded_mib
        num_outputs = params.num_outputs * request.max_output_tokens
        rows = max(min(wanted.end, num_prompt) - wanted.start, 0)
        rows += num_outputs if wanted.end > num_prompt else 0
        if (need := rows * self._row_bytes) > most * MIB:
            raise RequestError(
                f"{self._words} of {rows} tokens may need {need / MIB:.0f} MiB, and the option "
                f"rl.recorded_mib allows {most}: lower max_tokens, or ask for fewer tokens.",
                next(iter(arguments), None),
            )
        # Rows of cached tokens are not known: tokens from the first on are computed.
        keys = (
            [CacheKey(wanted.start, wanted.start + 1, f"{self.name} {secrets.token_hex(16)}")]
            if wanted.start < num_prompt
            else []
        )
        return Raw(msgpack.encode(wanted)), keys

    @property
    def _words(self) -> str:
        return self.name.replace("_", " ")


_END = 2**62


class HiddenStates(_Records):
    """Hidden states of the layers that the option names."""

    name = HIDDEN_STATES

    def row_bytes(self, hf_config: Mapping[str, Any]) -> int:
        sizes = (hf_config[key] for key in ("hidden_size", "d_model", "n_embd") if key in hf_config)
        return 4 * len(layer_names(self.options.hidden_states)) * int(next(sizes, 0))

    def wanted(self, arguments: Mapping[str, Any], num_prompt: int) -> Wanted | None:
        if not arguments.get("return_hidden_states"):
            return None
        of = arguments["hidden_states_of"]
        return Wanted(num_prompt if of == "output" else 0, num_prompt if of == "prompt" else _END)


class RoutedExperts(_Records):
    """Experts that routers have chosen."""

    name = ROUTED_EXPERTS

    def row_bytes(self, hf_config: Mapping[str, Any]) -> int:
        choices = (int(hf_config[key]) for key in NUMBERS_OF_CHOICES if hf_config.get(key))
        return 2 * int(hf_config.get("num_hidden_layers") or 1) * next(choices, 1)

    def wanted(self, arguments: Mapping[str, Any], num_prompt: int) -> Wanted | None:
        if not arguments.get("return_routed_experts") and self.options.routed_experts != "always":
            return None
        start = arguments.get("routed_experts_prompt_start", 0)
        if start >= num_prompt:
            raise RequestError(
                f"routed_experts_prompt_start must be below {num_prompt}, the tokens of the "
                f"prompt, not {start}.",
                "routed_experts_prompt_start",
            )
        return Wanted(start, _END)
