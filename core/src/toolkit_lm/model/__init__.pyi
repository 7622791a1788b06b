from .activation import GATES as GATES, gate as gate, get_activation as get_activation
from .checkpoint_loader import CheckpointLoader as CheckpointLoader
from .compiler import (
    GraphShape as GraphShape,
    ModelCompiler as ModelCompiler,
    make_compiler as make_compiler,
)
from .contract import (
    FallbackModel as FallbackModel,
    IntermediateTensors as IntermediateTensors,
    Model as Model,
    check_constructor as check_constructor,
    logits_of as logits_of,
)
from .embedding import (
    ParallelLMHead as ParallelLMHead,
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from .fused import (
    FusibleLayer as FusibleLayer,
    LayerParts as LayerParts,
    fuse_refusal as fuse_refusal,
)
from .hf_config import HFConfig as HFConfig
from .kernels import (
    FusedLayer as FusedLayer,
    GroupedProduct as GroupedProduct,
    Kernels as Kernels,
    RoutedProduct as RoutedProduct,
    StateRows as StateRows,
    choose_kernels as choose_kernels,
    choose_method as choose_method,
    construction as construction,
)
from .layers import (
    Absent as Absent,
    Layers as Layers,
    is_first_stage as is_first_stage,
    is_last_stage as is_last_stage,
    join as join,
    layer_index as layer_index,
    make_layers as make_layers,
    named_layers as named_layers,
)
from .linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    GatedColumnParallelLinear as GatedColumnParallelLinear,
    HeadLinear as HeadLinear,
    LinearBase as LinearBase,
    MergedColumnParallelLinear as MergedColumnParallelLinear,
    QKVParallelLinear as QKVParallelLinear,
    ReplicatedLinear as ReplicatedLinear,
    RowParallelLinear as RowParallelLinear,
    see_encoder_tokens as see_encoder_tokens,
)
from .linear_method import (
    NO_EPILOGUE as NO_EPILOGUE,
    ChangingMethod as ChangingMethod,
    Epilogue as Epilogue,
    LayerKind as LayerKind,
    LinearMethod as LinearMethod,
    LinearSpec as LinearSpec,
    Quantization as Quantization,
    Rows as Rows,
    UnquantizedMethod as UnquantizedMethod,
    WrappingMethod as WrappingMethod,
)
from .loader import (
    construct as construct,
    load_model as load_model,
    make_part as make_part,
    select_kernels as select_kernels,
)
from .low_rank import AdaptedRows as AdaptedRows, LowRank as LowRank
from .norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from .parameters import (
    Shard as Shard,
    ShardLoader as ShardLoader,
    WeightLoader as WeightLoader,
    new_parameter as new_parameter,
    torch_dtype as torch_dtype,
)
from .quantized import (
    DequantizingMethod as DequantizingMethod,
    QuantizedWeight as QuantizedWeight,
)
from .quantized_reader import QuantizedReader as QuantizedReader
from .rotary import Rotation as Rotation
from .sources import Sources as Sources
from .tap import Taps as Taps, tappable as tappable
