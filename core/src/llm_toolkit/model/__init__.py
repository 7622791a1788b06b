"""What models are made of: the contract, sharded layers, rotary embeddings, norms, and weight loading. Importing it imports torch."""

from llm_toolkit.model.activation import GatedActivation, SiluAndMul, get_activation
from llm_toolkit.model.contract import FallbackModel, IntermediateTensors, Model, check_constructor
from llm_toolkit.model.embedding import ParallelLMHead, VocabParallelEmbedding
from llm_toolkit.model.hf_config import HFConfig
from llm_toolkit.model.layers import Absent, Layers, is_first_stage, is_last_stage, join, layer_index, make_layers
from llm_toolkit.model.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from llm_toolkit.model.loader import load_model
from llm_toolkit.model.norm import RMSNorm, ShardedRMSNorm
from llm_toolkit.model.parameters import Part, ShardLoader, WeightLoader, new_parameter, torch_dtype
from llm_toolkit.model.projection import Projection
from llm_toolkit.model.rope_scaling import RopeParameters
from llm_toolkit.model.rotary import RotaryEmbedding, Rotation
from llm_toolkit.model.weights import CheckpointWeights

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
