"""Each form of PEFT's LoRA, in each family, beside the others in one batch."""

from __future__ import annotations

import pytest
from lora_adapters import FORMS, given


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.nightly if name == "qwen3" else ()) for name in FORMS],
)
def test_forms_are_pefts_alone_and_together(make_adapters, family):
    adapters = make_adapters(family)
    names = [None, *FORMS[family]]
    distinct = {tuple(one.logprobs[0].tolist()) for one in adapters.expected.values()}
    assert len(distinct) == len(names), "an adapter changes nothing"
    with adapters.llm({"max_adapters": len(names)}, enable_prefix_caching=False) as llm:
        alone = [adapters.ask(llm, name)[0] for name in names]
        for name, found in zip(names, alone, strict=True):
            adapters.assert_is(found, name)
        together = adapters.ask(llm, *names, *reversed(names))
        for name, one, two in zip(
            names, together[: len(names)], reversed(together[len(names) :]), strict=True
        ):
            adapters.assert_is(one, name)
            assert given(one) == given(two)
        if family != "mixtral":
            # Experts' products of few rows are torch's.
            assert list(map(given, alone)) == list(map(given, together[: len(names)]))
