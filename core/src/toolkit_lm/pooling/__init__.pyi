from .contract import Pooler as Pooler, PoolingMetadata as PoolingMetadata, PoolingRow as PoolingRow
from .late_interaction import LateInteractionRole as LateInteractionRole, make_roles as make_roles
from .limits import check_params as check_params, hidden_size as hidden_size
from .options import PoolingKind as PoolingKind, check_pooler_options as check_pooler_options
