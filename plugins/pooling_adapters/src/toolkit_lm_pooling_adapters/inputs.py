"""Prepares users' texts for a pooling model: with the checkpoint's prompts, as pairs, or with a
reranker's template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Unpack

from toolkit_lm.config import Task, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import PoolingInputs, TextOptions
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, Scored, TextPair, parse_prompt
from toolkit_lm.renderer import RenderedText, Renderer
from toolkit_lm_poolers.details import PoolingDetails, details_of
from toolkit_lm_poolers.limits import check_params, matryoshka_dimensions

from toolkit_lm_pooling_adapters.late_interaction import LateInteractionRole, make_roles
from toolkit_lm_pooling_adapters.media import check_length, has_media, render_media
from toolkit_lm_pooling_adapters.pair_renderer import PairRenderer
from toolkit_lm_pooling_adapters.registry import PairRendererRegistry
from toolkit_lm_pooling_adapters.scoring import TextScoring

_NO_ROLE = LateInteractionRole()


class PromptPrefix(NamedTuple):
    """Prompt that a prompt name stands for."""

    text: str
    """Goes before the prompt."""
    role: LateInteractionRole
    is_asked_for: bool
    """False: it is the checkpoint's default."""


class PoolingInputProcessor(PoolingInputs):
    """Renders texts for pooling. Thread-safe."""

    def __init__(self, config: VllmConfig, renderer: Renderer, plugins: Plugins) -> None:
        assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        self.renderer = renderer
        self._boundary = plugins.boundary
        self.max_tokens = config.max_model_len
        self._matryoshka = matryoshka_dimensions(
            config.checkpoint.hf_config, config.pooler.matryoshka
        )
        self.prompts: dict[str, str] = {}
        """Prompts of the checkpoint by name: texts that go before the input."""
        self.default_prompt_name: str | None = None
        self.lower_case = False
        self._left_out: dict[str, int] = {}
        """Prompts whose tokens have no part in an embedding, and how many tokens they have."""
        self.similarity = "cosine"
        """Similarity of embeddings: cosine, dot, euclidean or manhattan."""
        self.scored_normalized: bool | None = None
        """Whether embeddings that are compared have length 1. None: as those of other requests."""
        self.roles: dict[str, LateInteractionRole] = {}
        """Late interaction: by prompt name ("query", "document"), how such texts are read and
        compared."""
        self._picture: str | None = None
        """Text in which a picture without text of its own is read."""
        self._num_opening = 0
        """Special tokens with which each text begins, where a role has a marker."""
        self.averages = False
        """Late interaction: the best products of a query's tokens are averaged instead of
        summed."""
        self.pair_renderer: PairRenderer | None = None
        """Renders pairs for rerankers that are language models. None: the renderer joins query and
        document as a pair of texts."""
        if config.model.runner == "pooling":
            # mypy: an abstract class stands for those that are made.
            kind: Any = PairRenderer
            self.pair_renderer = plugins.brought_registry(PairRendererRegistry).first_result(
                kind, config, renderer, plugins
            )
        elif not config.model.extra_tasks:
            return
        if found := details_of(config.checkpoint.pooling_profile):
            self._apply_details(found, config)

    def _apply_details(self, found: PoolingDetails, config: VllmConfig) -> None:
        """Takes over settings from the checkpoint's files. Raises CheckpointError for unsupported
        ones."""
        if found.refusal is not None:
            raise CheckpointError(found.refusal)
        self.prompts = found.prompts
        self.default_prompt_name = found.default_prompt_name
        self.lower_case = found.lower_case
        if (
            found.truncate_dim is not None
            and self._matryoshka is None
            and config.pooler.matryoshka is None
        ):
            # Whoever cuts them by default knows that they can be cut.
            self._matryoshka = ()
        self.averages = found.similarity == "meanmaxsim"
        if found.similarity in ("dot", "euclidean", "manhattan"):
            self.similarity = found.similarity
            # These depend on the length, which is then what the checkpoint's modules give,
            # unless an option says otherwise.
            self.scored_normalized = (
                found.ends_normalized if config.pooler.normalize is None else None
            )
        # The option pooling_type takes the place of the checkpoint's Pooling module.
        if (
            found.pooling is not None
            and not found.pooling.include_prompt
            and config.pooler.pooling_type == "auto"
        ):
            self._left_out = {
                text: self._num_tokens(self._lowered(text))
                for text in found.prompts.values()
                if text
            }
        self._picture = found.picture
        self._set_roles(found, config)
        if self.default_prompt_name is not None:
            # Queries and documents without a prompt of their own have none, as in
            # sentence-transformers, and not the default.
            self.prompts = {"query": "", "document": ""} | self.prompts

    @property
    def takes_media_pairs(self) -> bool:
        """Whether a query or document that is read as a pair may have media."""
        return self.pair_renderer is not None and self.pair_renderer.takes_media

    def check(self, params: PoolingParams, size: int) -> None:
        check_params(params, size, self._matryoshka)

    def render(
        self, prompts: Sequence[Prompt | TextPair], **options: Unpack[TextOptions]
    ) -> list[RenderedText | RequestError]:
        most = self._most(options.get("truncate_prompt_tokens"))
        instruction = options.get("instruction")
        self._check(instruction)
        with self._boundary:
            return self._render_each(
                list(prompts),
                self._prefixes(options.get("prompt_name"), len(prompts)),
                most,
                instruction,
            )

    def scoring(
        self,
        queries: Scored | Sequence[Scored],
        documents: Scored | Sequence[Scored],
        tasks: Collection[Task],
        fields: tuple[str, str],
    ) -> TextScoring:
        return TextScoring(queries, documents, tasks, self, fields=fields)

    def _render_each(
        self,
        prompts: list[Any],
        prefixes: list[PromptPrefix],
        most: int | None,
        instruction: str | None,
    ) -> list[RenderedText | RequestError]:
        try:
            return list(self._render(prompts, prefixes, most, instruction))
        except RequestError as error:
            if len(prompts) == 1:
                return [error]
        # Errors are rare: halves without one are rendered at once.
        half = len(prompts) // 2
        parts = (slice(None, half), slice(half, None))
        return [
            text
            for part in parts
            for text in self._render_each(prompts[part], prefixes[part], most, instruction)
        ]

    def _render(
        self,
        prompts: list[Any],
        prefixes: list[PromptPrefix],
        most: int | None,
        instruction: str | None,
    ) -> list[RenderedText]:
        rendered: list[RenderedText | None] = []
        texts: list[str | tuple[str, str]] = []
        starts: list[int] = []
        roles: list[LateInteractionRole] = []
        for prompt, prefix in zip(prompts, prefixes, strict=True):
            item = self._item(prompt, prefix, most, instruction)
            if isinstance(item, RenderedText):
                rendered.append(item)
            elif not isinstance(item, str) and self.pair_renderer is not None:
                query, document = item
                rendered.append(
                    RenderedText(
                        self.pair_renderer.render_pair(
                            query, document, instruction, max_tokens=most
                        )
                    )
                )
            else:
                rendered.append(None)
                texts.append(item)
                starts.append(self._left_out.get(prefix.text, 0) if isinstance(item, str) else 0)
                roles.append(prefix.role if isinstance(item, str) else _NO_ROLE)
        others = iter(self._tokens(texts, roles, most))
        if self._left_out:
            others = (
                pair._replace(pooling_start=start)
                for pair, start in zip(others, starts, strict=True)
            )
        return [next(others) if pair is None else pair for pair in rendered]

    def _tokens(
        self, texts: list[str | TextPair], roles: list[LateInteractionRole], most: int | None
    ) -> list[RenderedText]:
        """Tokens of each text or pair, in the form of its role."""
        rendered = dict[int, RenderedText]()
        for role in dict.fromkeys(roles):
            places = [place for place, known in enumerate(roles) if known == role]
            limit = role.text_tokens(most, self.max_tokens)
            several = [texts[i] for i in places]
            if role.profile.suffix:
                found = self._ended(several, role.profile.suffix, limit)
            else:
                found = self.renderer.render_texts(several, max_tokens=limit)
            for place, text in zip(places, found, strict=True):
                rendered[place] = role.complete(text, self._num_opening)
        return [rendered[place] for place in range(len(texts))]

    def _ended(self, texts: list[Any], suffix: str, max_tokens: int | None) -> list[RenderedText]:
        """Tokens of texts, each with `suffix` and without special tokens of the tokenizer's own. A
        text that is too long is cut, and its suffix is not."""

        def tokens(text: str) -> list[int]:
            return self.renderer.render_prompt(text, add_special_tokens=False).token_ids

        found = []
        for text in texts:
            token_ids = tokens(text + suffix) if text else []
            if max_tokens is not None and len(token_ids) > max_tokens:
                end = tokens(suffix)
                if len(end) >= max_tokens:
                    raise RequestError(
                        f"{max_tokens} tokens leave no room for a text before the {len(end)} that "
                        "end each: ask for more.",
                        "truncate_prompt_tokens",
                    )
                token_ids = tokens(text)[: max_tokens - len(end)] + end
            if not token_ids:
                raise RequestError("the prompt is empty: give at least one token.", "input")
            found.append(RenderedText(token_ids))
        return found

    def _item(
        self, prompt: Any, prefix: PromptPrefix, most: int | None, instruction: str | None
    ) -> str | TextPair | RenderedText:
        if has_media(prompt):
            text = self._lowered(prefix.text)
            return render_media(prompt, self.renderer, text, self._picture, most)
        if isinstance(prompt, tuple):
            if self.takes_media_pairs and len(prompt) == 2 and any(map(has_media, prompt)):
                assert self.pair_renderer is not None
                sides = [self._lowered(side) if isinstance(side, str) else side for side in prompt]
                return check_length(
                    self.pair_renderer.render_media_pair(sides[0], sides[1], instruction), most
                )
            if len(prompt) != 2 or not all(isinstance(text, str) for text in prompt):
                raise RequestError("a pair must be two texts.", "input")
            return (self._lowered(prompt[0]), self._lowered(prompt[1]))
        parsed = parse_prompt(prompt)
        if parsed.get("prompt_token_ids") is not None:
            if prefix.is_asked_for:
                raise RequestError(
                    "prompt_name names what goes before a text, and token ids are read as they "
                    "are: give a text, or no prompt_name.",
                    "prompt_name",
                )
            return RenderedText(self.renderer.render_prompt(parsed).token_ids[:most])
        # An empty text is refused even where a prompt goes before it.
        return self._lowered(prefix.text + parsed["prompt"]) if parsed["prompt"] else ""

    def _num_tokens(self, prompt: str) -> int:
        """Number of tokens of a prompt with the special tokens around it, except one at the end,
        the same as in sentence-transformers."""
        (rendered,) = self.renderer.render_texts([prompt], max_tokens=self.max_tokens)
        last = rendered.token_ids[-1:]
        is_special = self.renderer.decode(last, skip_special_tokens=True) != self.renderer.decode(
            last
        )
        return len(rendered.token_ids) - is_special

    def _lowered(self, text: str) -> str:
        return text.lower() if self.lower_case else text

    def _most(self, truncate_prompt_tokens: int | None) -> int | None:
        if truncate_prompt_tokens is None:
            return None
        if type(truncate_prompt_tokens) is not int or not (
            truncate_prompt_tokens == -1 or 1 <= truncate_prompt_tokens <= self.max_tokens
        ):
            smaller = (
                isinstance(truncate_prompt_tokens, int) and truncate_prompt_tokens > self.max_tokens
            )
            hint = " Please request a smaller truncation size." if smaller else ""
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or an integer from 1 to {self.max_tokens}, "
                f"not {truncate_prompt_tokens!r}.{hint}",
                "truncate_prompt_tokens",
            )
        return self.max_tokens if truncate_prompt_tokens == -1 else truncate_prompt_tokens

    def _check(self, instruction: str | None) -> None:
        if instruction is not None and self.pair_renderer is None:
            raise RequestError(
                "this model takes no instruction: it has no score template.", "instruction"
            )
        if (
            instruction is not None
            and self.pair_renderer is not None
            and not self.pair_renderer.takes_instruction
        ):
            raise RequestError(
                "this model takes no instruction: its score template has no place {instruction}.",
                "instruction",
            )

    def _prefixes(self, names: str | Sequence[str | None] | None, count: int) -> list[PromptPrefix]:
        """Prefix of each prompt."""
        if names is None or isinstance(names, str):
            return [self._prefix(names)] * count
        if not isinstance(names, list | tuple) or len(names) != count:
            raise RequestError(
                f"prompt_name must be a name, or a list of {count}, one for each prompt.",
                "prompt_name",
            )
        return [self._prefix(name) for name in names]

    def _prefix(self, name: str | None) -> PromptPrefix:
        # The default prompt is text only: whoever wants a role names it.
        role = _NO_ROLE if name is None else self.roles.get(str(name), _NO_ROLE)
        is_asked_for = name is not None
        name = name if name is not None else self.default_prompt_name
        if name is None:
            return PromptPrefix("", role, is_asked_for)
        if not isinstance(name, str) or name not in self.prompts:
            raise RequestError(
                f"the checkpoint has no prompt {name!r}. {nearest(str(name), self.prompts)}",
                "prompt_name",
            )
        return PromptPrefix(
            self.prompts[name] if role is _NO_ROLE else role.prompt, role, is_asked_for
        )

    def _set_roles(self, found: PoolingDetails, config: VllmConfig) -> None:
        self.roles = make_roles(
            found,
            lambda text: self.renderer.render_prompt(text, add_special_tokens=False).token_ids,
        )
        self.prompts = {name: role.prompt for name, role in self.roles.items()} | self.prompts
        if config.model.convert != "none" and not all(
            role.profile.attend for role in self.roles.values()
        ):
            raise CheckpointError(
                f"{found.folder!r} pads queries with tokens that attention does not see. Only "
                "encoders can do that, "
                "and this is a language model."
            )
        if (
            longest := max((role.profile.filled for role in self.roles.values()), default=0)
        ) > self.max_tokens:
            raise ConfigError(
                f"max_model_len is {self.max_tokens}, but the checkpoint pads its queries to "
                f"{longest} tokens."
            )
        if any(role.marker is not None for role in self.roles.values()):
            plain, whole = (
                self.renderer.render_prompt("a", add_special_tokens=added).token_ids
                for added in (False, True)
            )
            self._num_opening = next(
                (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0
            )
