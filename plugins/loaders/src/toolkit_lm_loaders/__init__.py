"""Checkpoint loaders. This entry module only registers them; each is imported when it is used."""

from toolkit_lm.plugin import LoaderRegistry, hookimpl


@hookimpl
def toolkit_register_loaders(loaders: LoaderRegistry) -> None:
    files = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
    loaders.add("safetensors", "toolkit_lm_weights.safetensors:CheckpointWeights", reads=files)
    own = ("consolidated*.safetensors",)
    loaders.add("mistral", "toolkit_lm_loaders.mistral:MistralLoader", reads=own)
    state = ("sharded_state.json",)
    loaders.add("sharded_state", "toolkit_lm_loaders.sharded:ShardedStateLoader", reads=state)
    loaders.add("dummy", "toolkit_lm_loaders.dummy:DummyLoader")
