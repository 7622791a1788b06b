"""Which tiers an engine has, and how many bytes they may hold. Needs no torch."""

from __future__ import annotations

from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_kv_tiers.limits import given_options, num_bytes
from toolkit_lm_kv_tiers.sealing import check_key


def disk_bytes(options: Any) -> int:
    """Most bytes in the folder."""
    return num_bytes("disk", options.disk or "20GiB")


def is_enabled(config: VllmConfig) -> bool:
    """Whether an option of the plugin asks for a tier."""
    options = given_options(config, "kv_disk")
    return options.get("dir") is not None or options.get("host") is not None


def check_sizes(options: Any) -> None:
    """Raises ValueError for sizes that are none, and for that of no folder."""
    disk_bytes(options)
    num_bytes("host", options.host)
    if options.disk is not None and options.dir is None:
        raise ValueError("disk: it is the size of a folder, and dir names none.")


def check(config: VllmConfig, options: Any) -> None:
    """Raises ConfigError where there are no cached prefixes to keep."""
    has_tier = options.dir is not None or options.host is not None
    if has_tier and config.cache.enable_prefix_caching is False:
        raise ConfigError(
            "kv_disk.dir and kv_disk.host keep cached prefixes, and enable_prefix_caching is False."
        )
    if options.key_file is not None:
        check_key(options.key_file)
