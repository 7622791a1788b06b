"""mteb: a task of similarities through `OpenAIAPIEncodeWrapper`, at `/v1/embeddings`, with texts
and with conversations."""

from __future__ import annotations

from typing import Any

import datasets
import httpx
import mteb
import numpy as np
import pytest
from mteb.abstasks import AbsTaskSTS
from mteb.models import OpenAIAPIEncodeWrapper
from scipy.stats import spearmanr

from conftest import serving

PAIRS = {
    "sentence1": ["Paris is in France.", "The sky is blue.", "I like tea.", "Two and two is four."],
    "sentence2": ["Paris is a city.", "Grass is green.", "I like tea.", "The train is late."],
    "score": [3.0, 1.0, 5.0, 0.0],
}


class Similarity(AbsTaskSTS):
    """A task whose data are here, and not in a hub."""

    metadata = mteb.TaskMetadata(
        name="Pairs",
        description="Pairs of sentences.",
        dataset={"path": "here", "revision": "1"},
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
        reference=None,
        date=None,
        domains=None,
        task_subtypes=None,
        license=None,
        annotations_creators=None,
        dialect=None,
        sample_creation=None,
        bibtex_citation=None,
    )

    def load_data(self, *args, **kwargs) -> None:
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(PAIRS)})
        self.data_loaded = True


@pytest.fixture(scope="module")
def open_url():
    """URL of a server without a key: mteb looks at `/v1/models` without the one that it has."""
    with serving("--convert", "embed", key=None) as found:
        yield found


def body_of(texts: list[str], chats: bool) -> dict[str, Any]:
    if chats:
        return {"messages": [[{"role": "user", "content": text}] for text in texts]}
    return {"input": texts}


@pytest.mark.parametrize("chats", [True, False])
def test_similarities(open_url, chats):
    """The task's score is that of the vectors, asked for without mteb. It sends conversations,
    where it is not told to send texts."""
    model = OpenAIAPIEncodeWrapper(open_url, "tiny", modalities=["text"], use_chat_template=chats)
    [result] = mteb.evaluate(model, [Similarity()], cache=None, raise_error=True).task_results
    [scores] = result.scores["test"]
    texts = PAIRS["sentence1"] + PAIRS["sentence2"]
    reply = httpx.post(f"{open_url}/v1/embeddings", json=body_of(texts, chats), timeout=60)
    vectors = np.array([item["embedding"] for item in reply.json()["data"]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (vectors[:4] * vectors[4:]).sum(1)
    expected = spearmanr(cosines, PAIRS["score"]).statistic
    assert scores["cosine_spearman"] == scores["main_score"] == pytest.approx(expected, abs=1e-6)
    assert cosines[2] == pytest.approx(1, abs=1e-5), "the same text twice"
