from .factories import (
    classification_pooler as classification_pooler,
    embedding_pooler as embedding_pooler,
    num_labels_of as num_labels_of,
    pools_splade as pools_splade,
    splade_pooler as splade_pooler,
    token_classification_pooler as token_classification_pooler,
)
from .heads import (
    ClassifierHead as ClassifierHead,
    EmbeddingHead as EmbeddingHead,
    Head as Head,
)
from .methods import (
    METHODS as METHODS,
    Concatenated as Concatenated,
    PoolingMethod as PoolingMethod,
    Segments as Segments,
)
from .poolers import (
    AllPooler as AllPooler,
    ClassifierPooler as ClassifierPooler,
    DispatchPooler as DispatchPooler,
    LexicalPooler as LexicalPooler,
    SimplePooler as SimplePooler,
    StepPooler as StepPooler,
)
from .rows import (
    PoolingMetadata as PoolingMetadata,
    PoolingRow as PoolingRow,
    RowPooler as RowPooler,
)
