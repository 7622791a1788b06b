"""What models are made of: the contract, sharded layers, rotary embeddings, norms, and weight loading. Importing it imports torch."""

from toolkit_lm.model.activation import GatedActivation, SiluAndMul, get_activation
from toolkit_lm.model.contract import FallbackModel, IntermediateTensors, Model, check_constructor
from toolkit_lm.model.embedding import ParallelLMHead, VocabParallelEmbedding
from toolkit_lm.model.hf_config import HFConfig
from toolkit_lm.model.layers import Absent, Layers, is_first_stage, is_last_stage, join, layer_index, make_layers
from toolkit_lm.model.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from toolkit_lm.model.loader import load_model
from toolkit_lm.model.norm import RMSNorm, ShardedRMSNorm
from toolkit_lm.model.parameters import Part, ShardLoader, WeightLoader, new_parameter, torch_dtype
from toolkit_lm.model.projection import Projection
from toolkit_lm.model.rope_scaling import RopeParameters
from toolkit_lm.model.rotary import RotaryEmbedding, Rotation
from toolkit_lm.model.weights import CheckpointWeights

__all__ = [
    "Absent",
    "CheckpointWeights",
    "ColumnParallelLinear",
    "FallbackModel",
    "GatedActivation",
    "HFConfig",
    "IntermediateTensors",
    "Layers",
    "MergedColumnParallelLinear",
    "Model",
    "ParallelLMHead",
    "Part",
    "Projection",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RopeParameters",
    "RotaryEmbedding",
    "Rotation",
    "RowParallelLinear",
    "ShardLoader",
    "ShardedRMSNorm",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "WeightLoader",
    "check_constructor",
    "get_activation",
    "is_first_stage",
    "is_last_stage",
    "join",
    "layer_index",
    "load_model",
    "make_layers",
    "new_parameter",
    "torch_dtype",
]
