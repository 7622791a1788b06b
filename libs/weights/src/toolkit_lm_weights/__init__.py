"""Tensors of checkpoint folders: `toolkit_lm_weights.safetensors.CheckpointWeights`."""
