"""Reads the settings that sentence-transformers, PyLate and the ColBERT authors' library save with
a checkpoint. This entry module only registers."""

from toolkit_lm.plugin import PoolingProfileRegistry, hookimpl


@hookimpl
def toolkit_register_pooling_profiles(profiles: PoolingProfileRegistry) -> None:
    profiles.add(
        "sentence_transformers", "toolkit_lm_sentence_transformers.profile:read_pooling_profile"
    )
