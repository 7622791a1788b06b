from .contract import Pooler as Pooler, PoolingMetadata as PoolingMetadata, PoolingRow as PoolingRow
from .factories import (
    classification_pooler as classification_pooler,
    embedding_pooler as embedding_pooler,
    num_labels_of as num_labels_of,
    token_classification_pooler as token_classification_pooler,
)
from .heads import ClassifierHead as ClassifierHead, EmbeddingHead as EmbeddingHead, Head as Head
from .late_interaction import LateInteractionRole as LateInteractionRole, make_roles as make_roles
from .limits import check_params as check_params, hidden_size as hidden_size
from .methods import METHODS as METHODS, Concatenated as Concatenated, PoolingMethod as PoolingMethod, Segments as Segments
from .poolers import (
    AllPooler as AllPooler,
    ClassifierPooler as ClassifierPooler,
    DispatchPooler as DispatchPooler,
    SimplePooler as SimplePooler,
    StepPooler as StepPooler,
)
