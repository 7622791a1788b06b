"""The routes POST /v1/embeddings, /pooling and /classify, and Cohere's /v1/embed and /v2/embed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from toolkit_lm.config import POOLING_TASKS
from toolkit_lm.errors import RequestError
from toolkit_lm.frontend import side_by_side
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Conversation, Prompt, TokensPrompt

from toolkit_lm_server.answers import answer
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.pooled import (
    encoded,
    head,
    in_bytes,
    pool,
    quantized,
    sparse,
    usage,
)
from toolkit_lm_server.pooling_protocol import (
    AnyPoolingBody,
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingBody,
    InputBody,
    Inputs,
    encodings,
    read_inputs,
    read_texts,
)
from toolkit_lm_server.route import request_context
from toolkit_lm_server.threads import aside

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_PROMPT_NAMES = {
    "search_query": "query",
    "search_document": "document",
    "classification": "classification",
    "clustering": "clustering",
}
"""Cohere's input types, with the names that sentence-transformers' checkpoints give their
prompts."""

_TASK_PROMPTS = {
    "retrieval.query": ("query",),
    "retrieval.passage": ("document", "passage"),
    "classification": (),
    "separation": ("clustering",),
    "text-matching": ("STS", "similarity"),
}
"""Jina's tasks, with the names that other checkpoints give their prompts."""

_OTHER_TOKENIZER = (
    " They are another tokenizer's: some clients tokenize texts themselves (LangChain's "
    "OpenAIEmbeddings, unless it is given "
    "check_embedding_ctx_length=False). Send texts."
)


class Embeddings:
    """Results of a pooling model for texts, one by one."""

    def __init__(self, engines: Engines, options: ServerOptions) -> None:
        self._engines = engines
        self._options = options

    async def embed(self, body: EmbeddingBody, request: Request) -> Response:
        """Embeds each input as one vector."""
        engine = self._engines[body.model]
        if body.task not in (None, "embed"):
            engine = self._for_task(engine, body, str(body.task))
        outputs = await self._pool(engine, body, request, body.params())
        if body.encoding_format in ("bytes", "bytes_only"):
            return await asyncio.to_thread(in_bytes, outputs, body, head(engine, "embd"))

        def make() -> dict[str, Any]:
            data = (
                {"object": "embedding", "index": index, "embedding": _encoded(output, body)}
                for index, output in enumerate(outputs)
            )
            return {**head(engine, "embd"), "data": data, "usage": usage(outputs)}

        return await answer(make)

    async def pooling(self, body: AnyPoolingBody, request: Request) -> Response:
        """Pools inputs by any task of the model, without further processing."""
        engine = self._engines[body.model]
        served = [task for task in engine.tasks if task in POOLING_TASKS]
        if body.task is None:
            if len(served) > 1:
                raise RequestError(f"Set 'task'. Supported: {', '.join(served)}.", "task")
            # An engine that serves none says itself what is to be done.
            body.task = served[0] if served else "embed"
        if body.task not in POOLING_TASKS:
            plugin = "No IOProcessor plugin installed. " if body.task == "plugin" else ""
            raise RequestError(
                f"{plugin}Unsupported task: {body.task!r}. Supported: "
                f"{', '.join(served) or 'generate'}.",
                "task",
            )
        outputs = await self._pool(engine, body, request, body.params())
        if body.encoding_format in ("bytes", "bytes_only"):
            return await asyncio.to_thread(in_bytes, outputs, body, head(engine, "pool"))

        def item(index: int, output: PoolingRequestOutput) -> dict[str, Any]:
            shape = (
                {"shape": output.outputs.data.shape}
                if body.encoding_format == "base64" and output.outputs.data is not None
                else {}
            )
            return {"object": "pooling", "index": index, "data": _encoded(output, body), **shape}

        def make() -> dict[str, Any]:
            return {
                **head(engine, "pool"),
                "data": starmap(item, enumerate(outputs)),
                "usage": usage(outputs),
            }

        return await answer(make)

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        """The probabilities of the model's labels, for each input."""
        engine = self._engines[body.model]
        outputs = await self._pool(engine, body, request, body.params())
        labels = engine.config.hf_config.get("id2label") or {}

        def make() -> dict[str, Any]:
            data = []
            for index, output in enumerate(outputs):
                assert output.outputs.data is not None
                best = int(output.outputs.data.argmax())
                label = labels.get(str(best), f"LABEL_{best}")
                data.append(
                    {
                        "index": index,
                        "label": label,
                        "probs": output.outputs.data.tolist(),
                        "num_classes": output.outputs.data.size,
                    }
                )
            return {**head(engine, "classify"), "data": data, "usage": usage(outputs)}

        return await answer(make)

    async def cohere_embed(self, body: CohereEmbedBody, request: Request) -> Response:
        """Embeds each text as one vector, in the form of Cohere's API."""
        texts, outputs = await self._cohere(body, request)
        return await answer(lambda: self._by_type(body, texts, outputs, "2"))

    async def old_cohere_embed(self, body: CohereEmbedBody, request: Request) -> Response:
        """Embeds each text as one vector, in the form of Cohere's first API."""
        texts, outputs = await self._cohere(body, request)

        def make() -> dict[str, Any]:
            made = self._by_type(body, texts, outputs, "1")
            if body.embedding_types is None:
                made |= {
                    "response_type": "embeddings_floats",
                    "embeddings": made["embeddings"]["float"],
                }
            return made

        return await answer(make)

    async def _cohere(
        self, body: CohereEmbedBody, request: Request
    ) -> tuple[list[str], list[PoolingRequestOutput]]:
        engine = self._engines[body.model]
        texts = read_texts(body.texts, "texts", self._options.max_inputs)
        names = [f"texts[{index}]" for index in range(len(texts))]
        prompt_name = None if body.input_type is None else _PROMPT_NAMES[body.input_type]
        outputs = await pool(
            engine,
            body,
            request,
            texts,
            body.params(),
            names=names,
            fields={
                "truncate_prompt_tokens": "truncate" if body.truncate == "NONE" else "max_tokens",
                "dimensions": "output_dimension",
            },
            prompt_name=prompt_name
            if prompt_name in engine.processor.pooling.texts.prompts
            else None,
            truncate_prompt_tokens=body.most_tokens(engine.config.max_model_len),
        )
        body.check_lengths(names, outputs)
        return texts, outputs

    def _by_type(
        self,
        body: CohereEmbedBody,
        texts: list[str],
        outputs: list[PoolingRequestOutput],
        version: str,
    ) -> dict[str, Any]:
        embeddings = {
            form: [quantized(output.outputs.data, form) for output in outputs]
            for form in encodings(body.embedding_types)
        }
        meta = {
            "api_version": {"version": version},
            "billed_units": {"input_tokens": usage(outputs)["total_tokens"]},
        }
        start = head(self._engines[body.model], "embd")
        return {
            "id": start["id"],
            "response_type": "embeddings_by_type",
            "embeddings": embeddings,
            "texts": texts,
            "meta": meta,
        }

    def _for_task(self, engine: ServingEngine, body: EmbeddingBody, task: str) -> ServingEngine:
        """The engine with the adapter of one of Jina's tasks, where there is one. The checkpoint's
        prompt of the task becomes the body's.

        Raises RequestError where the model has neither.
        """
        prompts = engine.processor.pooling.texts.prompts
        names = (task, *_TASK_PROMPTS.get(task, ()))
        prompt = next((name for name in names if name in prompts), None)
        adapters = dict.fromkeys((task, task.replace(".", "_").replace("-", "_")))
        # A model that the body names by an adapter keeps it.
        is_plain = engine is self._engines[None]
        alias = next((name for name in adapters if self._engines.aliases.find(name)), None)
        if prompt is None and alias is None:
            known = ", ".join(map(repr, prompts)) or "none"
            raise RequestError(
                f"the model has no prompt and no adapter for the task {task!r}. Its prompts: "
                f"{known}.",
                "task",
            )
        if body.prompt_name is None:
            body.prompt_name = prompt
        return self._engines[alias] if alias is not None and is_plain else engine

    async def _pool(
        self, engine: ServingEngine, body: InputBody, request: Request, params: PoolingParams
    ) -> list[PoolingRequestOutput]:
        body.check_input()
        conversations = await aside(body.conversations, self._options.max_inputs)
        if not conversations:
            prompts, names = await aside(read_inputs, body.input, self._options.max_inputs)
            if body.add_special_tokens is False:
                prompts = await self._bare(engine, body, prompts, request)
            return await self._pooled(engine, body, request, params, Inputs(prompts, names))
        options = body.render_options()
        context = {"context": request_context(request)}
        # Images and other media take memory until they are computed.
        held = [(messages, options) for messages in conversations.values()]
        with engine.hold_rendering(held, context):
            rendered = await side_by_side(
                _rendered(engine, messages, name, options)
                for name, messages in conversations.items()
            )
            inputs = Inputs(rendered, [*conversations])
            return await self._pooled(engine, body, request, params, inputs)

    async def _pooled(
        self,
        engine: ServingEngine,
        body: InputBody,
        request: Request,
        params: PoolingParams,
        inputs: Inputs,
    ) -> list[PoolingRequestOutput]:
        try:
            return await pool(
                engine,
                body,
                request,
                inputs.prompts,
                params,
                names=inputs.names,
                prompt_name=body.prompt_name,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
            )
        except RequestError as error:
            if "is not in the vocabulary" in str(error) and body.messages is None:
                raise RequestError(f"{error}{_OTHER_TOKENIZER}", "input") from None
            raise

    async def _bare(
        self, engine: ServingEngine, body: InputBody, prompts: list[Prompt], request: Request
    ) -> list[Prompt]:
        """Tokens of texts, without those that the tokenizer adds."""
        if body.prompt_name is not None:
            raise RequestError(
                "add_special_tokens false is not supported with prompt_name.", "add_special_tokens"
            )
        render = engine.renderer.render_prompt_async
        texts = {index: text for index, text in enumerate(prompts) if isinstance(text, str)}
        with engine.hold_rendering([*texts.values()], {"context": request_context(request)}):
            rendered = await side_by_side(
                render(text, add_special_tokens=False) for text in texts.values()
            )
        bare = {
            index: TokensPrompt(prompt_token_ids=rendered_text.token_ids)
            for index, rendered_text in zip(texts, rendered, strict=True)
        }
        return [bare.get(index, prompt) for index, prompt in enumerate(prompts)]


async def _rendered(
    engine: ServingEngine, messages: Conversation, name: str, options: Mapping[str, Any]
) -> Prompt:
    """The tokens of a conversation. Raises RequestError that begins with `name`, the conversation's
    among several."""
    try:
        rendered = await engine.renderer.render_conversation_async(messages, **options)
    except RequestError as error:
        if error.param == "messages" and name != "messages":
            error.args = (f"{name}: {error}",)
            error.param = name.partition("[")[0]
        raise
    prompt = TokensPrompt(prompt_token_ids=rendered.token_ids)
    if rendered.features:
        prompt["features"] = rendered.features
    return prompt


def _encoded(output: PoolingRequestOutput, body: EmbeddingBody) -> Any:
    assert body.encoding_format in ("float", "base64"), "the others are no JSON"
    if body.sparse:
        return sparse(output)
    return encoded(output.outputs.data, body.encoding_format, body.embed_dtype, body.endianness)
