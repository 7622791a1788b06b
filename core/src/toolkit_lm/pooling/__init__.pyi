from .artifact_metadata import read_artifact_metadata as read_artifact_metadata
from .contract import Pooler as Pooler
from .contract import PoolingMetadata as PoolingMetadata
from .contract import PoolingRow as PoolingRow
from .factories import (
    classification_pooler as classification_pooler,
)
from .factories import (
    embedding_pooler as embedding_pooler,
)
from .factories import (
    num_labels_of as num_labels_of,
)
from .factories import (
    token_classification_pooler as token_classification_pooler,
)
from .finish import ClassifierHead as ClassifierHead
from .finish import EmbeddingHead as EmbeddingHead
from .finish import Head as Head
from .late_interaction import Side as Side
from .late_interaction import read_sides as read_sides
from .limits import check_params as check_params
from .limits import hidden_size as hidden_size
from .methods import METHODS as METHODS
from .methods import Concatenated as Concatenated
from .methods import PoolingMethod as PoolingMethod
from .methods import Segments as Segments
from .poolers import (
    AllPooler as AllPooler,
)
from .poolers import (
    ClassifierPooler as ClassifierPooler,
)
from .poolers import (
    DispatchPooler as DispatchPooler,
)
from .poolers import (
    SimplePooler as SimplePooler,
)
from .poolers import (
    StepPooler as StepPooler,
)
from .sentence_transformers import (
    SentenceTransformersConfig as SentenceTransformersConfig,
)
from .sentence_transformers import (
    read_sentence_transformers as read_sentence_transformers,
)
from .weight_names import stored_weights as stored_weights
