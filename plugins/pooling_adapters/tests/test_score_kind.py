"""How a model scores, by the tasks that it serves."""

from __future__ import annotations

import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_pooling_adapters.scoring import ScoreKind, score_kind


@pytest.mark.parametrize(
    ("tasks", "kind"),
    [
        (("classify", "score", "token_classify"), ScoreKind.CROSS_ENCODER),
        (("generate", "embed", "token_embed"), ScoreKind.BI_ENCODER),
        (("token_embed",), ScoreKind.LATE_INTERACTION),
    ],
)
def test_the_tasks_decide(tasks, kind):
    assert score_kind(tasks) is kind


@pytest.mark.parametrize(
    ("tasks", "error"),
    [
        (
            ("classify", "token_classify"),
            (
                r"texts: its classifier has several labels, and a score needs one\. Supported: "
                r"classify, token_classify\.$"
            ),
        ),
        (("token_classify",), r"texts\. Supported: token_classify\.$"),
        (
            ("generate",),
            (
                r"texts\. Supported: generate\. Start the engine with convert='embed'.* "
                r"Rerankers: convert='classify'\.$"
            ),
        ),
    ],
)
def test_what_does_not_score_is_told_why(tasks, error):
    with pytest.raises(RequestError, match=error):
        score_kind(tasks)
