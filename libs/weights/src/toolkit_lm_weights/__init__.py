"""Tensors of checkpoint folders, by `toolkit_lm_weights.safetensors.CheckpointWeights`, and the
contract of what writes checkpoints, `toolkit_lm_weights.writer.CheckpointWriter`."""
