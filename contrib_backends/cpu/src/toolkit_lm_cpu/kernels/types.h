/* The types that need no instructions but those of lanes.h; included once for each of them. */

#define NAME(x) ISA(x##_f32)
#define FLOATS floats_f32
#define TARGET BASE
#define ELEMENT float
#define LANE float
#define PAIR 1
#define WEIGHT float
#define LOAD load_32
#define DOT dot_f32
#define STORE store_f32
#define STORE_WEIGHTS store_f32
#define TERMS 7
#define ROWS BASE_ROWS
#define SUMS BASE_SUMS
#include "layer_ops.h"
#include "linear.h"
#include "attention.h"

#define NAME(x) ISA(x##_f16)
#define TARGET BASE
#define ELEMENT uint16_t
#define LANE uint16_t
#define PAIR 1
#define WEIGHT float
#define LOAD load_f16
#define DOT dot_f32
#define STORE store_f16
#define STORE_WEIGHTS store_f32
#define TERMS 7
#define ROWS BASE_ROWS
#define SUMS BASE_SUMS
#define CONVERT floats_f16
#define FLOATS floats_f16
#include "layer_ops.h"
#include "linear.h"
#include "attention.h"

/* bfloat16 without instructions for it: the halves of a pair, one after the other, as floats. */
#define NAME(x) ISA(x##_split)
#define FLOATS floats_bf16
#define TARGET BASE
#define ELEMENT uint16_t
#define LANE uint32_t
#define PAIR 2
#define WEIGHT uint16_t
#define LOAD load_32
#define DOT dot_split
#define STORE store_split
#define STORE_WEIGHTS store_split
#define TERMS 5
#define ROWS BASE_ROWS
#define SUMS BASE_SUMS
#include "layer_ops.h"
#include "linear.h"
#include "attention.h"
