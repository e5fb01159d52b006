// Compiled once for each instruction set, with its flags and CHIPMESH_KERNELS naming what it defines. All else in
// here is local to the file: an inline function shared with another object could carry instructions there that
// the processor lacks.
#include "kernels.h"
#include "simd.h"

#include "linear.h"

#include "int8.h"

#include "attention.h"
#include "rows.h"

namespace chipmesh {

#define CHIPMESH_TEXT_OF(x) #x
#define CHIPMESH_TEXT(x) CHIPMESH_TEXT_OF(x)
#define CHIPMESH_JOIN_OF(a, b) a##b
#define CHIPMESH_JOIN(a, b) CHIPMESH_JOIN_OF(a, b)

static const Kernels table = {
    CHIPMESH_TEXT(CHIPMESH_KERNELS), kMaxRows, multiply, multiply_int8, round_row, rms_norm,     silu_mul,  rotate,     attend,
    merge,                           decode_row, argmax, weigh_scores,  fma_limit, int8_limit,   read_limit,
};

const Kernels* CHIPMESH_JOIN(CHIPMESH_KERNELS, _kernels)() { return &table; }

}  // namespace chipmesh
