"""Amounts of memory as users write them."""

from __future__ import annotations

import pytest
from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1073741824", 2**30),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("2Gi", 2**31),
        ("500MB", 500 * 10**6),
        ("1.5k", 1500),
        ("4tb", 4 * 10**12),
        (" 7b ", 7),
        ("9007199254740993", 9007199254740993),
        ("0.5", 0.5),
        ("50%", 0.5),
        ("12.5%", 0.125),
        ("1.0", 1.0),
        ("1e-05", 1e-5),
        ("2.5e-3", 0.0025),
        ("100%", 1.0),
    ],
)
def test_an_amount(text, amount):
    parsed = parse_memory(text)
    assert parsed == amount
    assert type(parsed) is type(amount)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lots",
        "-1",
        "1e9",
        "0",
        "0GiB",
        "0.0",
        "0%",
        "101%",
        "1.5",
        "GiB",
        "5xb",
        "1..2",
        "nan",
        "²",
    ],
)
def test_no_amount(text):
    with pytest.raises(ConfigError, match=r"memory"):
        parse_memory(text)


def test_the_config_checks_it():
    assert VllmConfig.make(kv_cache_memory="1GiB").cache.kv_cache_memory == "1GiB"
    with pytest.raises(ConfigError, match=r"'much' is not an amount of memory"):
        VllmConfig.make(kv_cache_memory="much")


def test_the_feature_cache_takes_bytes_or_nothing():
    assert VllmConfig.make().cache.feature_cache_bytes == 2**30
    assert VllmConfig.make(feature_cache_memory="0").cache.feature_cache_bytes == 0
    assert VllmConfig.make(feature_cache_memory="2MiB").cache.feature_cache_bytes == 2**21
    for text in ("much", "0.5", "50%", ""):
        with pytest.raises(ConfigError, match="feature_cache_memory"):
            VllmConfig.make(feature_cache_memory=text)
