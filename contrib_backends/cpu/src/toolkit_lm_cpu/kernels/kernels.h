/* The kernels of one kind of element: the column of types.h that TYPE names. */

/* What has no products is the same with and without AMX. */
#if !AMX
#include "layer_ops.h"
#endif
#include "linear.h"
#include "quantized_cache.h"
#include "attention.h"

enum { NAME(pair) = PAIR };

#undef TYPE
