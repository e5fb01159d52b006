// Products of weights in blocks (Q8_0, Q4_0, Q4_1) with rows rounded to int8, block by block. A block's products are
// summed in int32, exactly; then, block after block in the order of the inner dimension,
//   sum = fma(weight scale * row scale, float(products), sum), and with minima
//   sum = fma(minimum, row scale * sum of the row's int8, sum):
// the same bits for any number of rows, any split of them and any instruction set.
#pragma once

#include <cmath>

#include "bytes.h"
#include "kernels.h"

namespace {

using chipmesh::kRoundedWords;

// Below it a block rounds to zeros: 127 / largest must be a number.
constexpr float kSmallest = 7.52316385e-37f;  // 2^-120

// x [size] -> row `row` of a block of `rows` rows, see Kernels.
void round_row(const float* x, std::int64_t size, std::int32_t* out, int rows, int row) {
    for (std::int64_t k = 0; k < size; k += kBlock, x += kBlock, out += kRoundedWords * rows) {
        const std::uint32_t bits = largest_magnitude(x);
        float largest;
        std::memcpy(&largest, &bits, 4);
        // The bits of what is not finite are above those of all numbers.
        const bool finite = bits < 0x7f800000u, rounds = finite && largest >= kSmallest;
        const int sum = round_values(x, rounds ? 127.0f / largest : 0.0f, finite, out + row, rows);
        const float scale = rounds ? largest / 127.0f : finite ? 0.0f : NAN, scaled = scale * static_cast<float>(sum);
        out[8 * rows + row] = -8 * sum;
        std::memcpy(out + 9 * rows + row, &scale, 4);
        std::memcpy(out + 10 * rows + row, &scaled, 4);
    }
}

// Weights of kColumns columns, four inner values at a time. kOffset: what stored bytes are above their values.
struct Q8Bytes {
    static constexpr Encoding kEncoding = chipmesh::kQ8_0;
    static constexpr bool kSmall = false, kMinimum = false;
    static constexpr int kOffsets = 4;  // -8 * sum, so often doubled, takes 128 off each byte
    static constexpr std::int64_t kHalf = 512;
    static Bytes get(const std::uint8_t* half, int step) { return load_bytes(half + 64 * step); }
};

template <Encoding Own, bool Minimum>
struct Q4Bytes {
    static constexpr Encoding kEncoding = Own;
    static constexpr bool kSmall = true, kMinimum = Minimum;
    static constexpr int kOffsets = Minimum ? -1 : 0;  // none, or 8 off each
    static constexpr std::int64_t kHalf = 256;
    static Bytes get(const std::uint8_t* half, int step) {
        const Bytes both = load_bytes(half + step / 2 * 64);
        return step % 2 ? high_nibbles(both) : low_nibbles(both);
    }
};

// c [Rows][32], columns [column, column + Groups * kColumns) of it, and one block of the inner dimension more.
template <int Rows, int Groups, class Weights>
inline void add_block(const std::int32_t* a, const std::uint8_t* block, int column, float* c) {
    constexpr std::int64_t kScales = Weights::kMinimum ? 128 : 64;
    Ints dots[Rows][Groups];
    const std::uint8_t* columns[Groups];
#pragma GCC unroll 2
    for (int g = 0; g < Groups; ++g) {
        const int at = column + g * kColumns;
        columns[g] = block + kScales + at / 16 * Weights::kHalf + at % 16 * 4;
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) dots[r][g] = no_products();
    }
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
        Bytes w[Groups];
#pragma GCC unroll 2
        for (int g = 0; g < Groups; ++g) w[g] = Weights::get(columns[g], step);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const Bytes x = splat_bytes(a + step * Rows + r);
#pragma GCC unroll 2
            for (int g = 0; g < Groups; ++g) dots[r][g] = add_products<Weights::kSmall>(dots[r][g], w[g], x);
        }
    }
    Floats scale[Groups], minimum[Groups];
#pragma GCC unroll 2
    for (int g = 0; g < Groups; ++g) {
        scale[g] = load_halves(halves(block) + column + g * kColumns);
        if constexpr (Weights::kMinimum) minimum[g] = load_halves(halves(block) + kPanel + column + g * kColumns);
    }
    const float *scales = reinterpret_cast<const float*>(a + 9 * Rows), *scaled = scales + Rows;
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int g = 0; g < Groups; ++g) {
            float* sums = c + r * kPanel + column + g * kColumns;
            Ints products = finished<Weights::kSmall>(dots[r][g]);
            if constexpr (Weights::kOffsets >= 0) products = add_shifted<Weights::kOffsets>(products, a + 8 * Rows + r);
            Floats sum = fused(scale[g] * splat_float(scales + r), to_floats(products), load_floats(sums));
            if constexpr (Weights::kMinimum) sum = fused(minimum[g], splat_float(scaled + r), sum);
            store_floats(sums, sum);
        }
}

// c [Rows][32] of `blocks` blocks of the inner dimension. following: memory that is wanted next, of which some lines are
// fetched at each block.
// A function of its own, as the compiler else shares registers with its callers, and has too few.
template <int Rows, class Weights>
[[gnu::noinline]] void int8_tile(const std::int32_t* a, std::int64_t blocks, const std::uint8_t* panel, float* c, const std::uint8_t* following,
               std::int64_t lines, Ahead ahead) {
    constexpr std::int64_t kBytes = chipmesh::panel_bytes(Weights::kEncoding, kBlock);
    constexpr int kGroups = Rows <= kPairRows ? 2 : 1;
    const std::int64_t stretches = ahead.each(blocks);
    std::memset(c, 0, sizeof(float) * Rows * kPanel);
    for (std::int64_t b = 0; b < blocks; ++b, a += kRoundedWords * Rows, panel += kBytes) {
        for (std::int64_t line = 0; line < lines; ++line, following += 64) __builtin_prefetch(following, 0, 2);
        ahead.fetch(stretches);
#pragma GCC unroll 4
        for (int column = 0; column < kPanel; column += kGroups * kColumns)
            add_block<Rows, kGroups, Weights>(a, panel, column, c);
    }
}

template <class Weights, int Rows = kMaxRows>
void int8_tile_of(int rows, const std::int32_t* a, std::int64_t blocks, const std::uint8_t* panel, float* c,
                  const std::uint8_t* following, std::int64_t lines, const Ahead& ahead) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return int8_tile_of<Weights, Rows - 1>(rows, a, blocks, panel, c, following, lines, ahead);
    }
    int8_tile<Rows, Weights>(a, blocks, panel, c, following, lines, ahead);
}

template <class Weights>
void multiply_int8_by(const std::int32_t* a, const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t inner,
                      const std::uint8_t* panel, float* c, const Ahead& ahead) {
    // The next panel, in memory behind this one, is fetched meanwhile, some lines at each block.
    const std::int64_t bytes = chipmesh::panel_bytes(Weights::kEncoding, inner), depth = inner / kBlock;
    const std::int64_t steps = depth * (last - first), lines = (bytes / 64 + steps - 1) / steps;
    const std::int64_t first_row = blocks.first(first);
    for (std::int64_t block = first; block < last; ++block) {
        const std::int64_t row = blocks.first(block);
        const std::uint8_t* following = panel + bytes + (block - first) * depth * lines * 64;
        int8_tile_of<Weights>(blocks.size(block), a + row * depth * kRoundedWords, depth, panel,
                              c + (row - first_row) * kPanel, following, lines, ahead.part(block - first, last - first));
    }
}

void multiply_int8(const std::int32_t* a, const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t inner,
                   Encoding encoding, const std::uint8_t* panel, float* c, const Ahead& ahead) {
    switch (encoding) {
        case chipmesh::kQ8_0: return multiply_int8_by<Q8Bytes>(a, blocks, first, last, inner, panel, c, ahead);
        case chipmesh::kQ4_0: return multiply_int8_by<Q4Bytes<chipmesh::kQ4_0, false>>(a, blocks, first, last, inner, panel, c, ahead);
        case chipmesh::kQ4_1: return multiply_int8_by<Q4Bytes<chipmesh::kQ4_1, true>>(a, blocks, first, last, inner, panel, c, ahead);
        default: return;
    }
}

std::int64_t int8_limit(std::int64_t turns, float* sink) {
    constexpr int kChains = 12;
    Ints sums[kChains];
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = no_products();
    std::int32_t bits;
    std::memcpy(&bits, sink, 4);
    Bytes w = splat_bytes(&bits), a = splat_bytes(&bits);
    for (std::int64_t t = 0; t < turns; ++t) {
        in_registers(w.v);
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            sums[i] = add_products<true>(sums[i], w, a);
            in_registers(sums[i].v);
        }
    }
    float total[kColumns];
    *sink = 0.0f;
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
        store_floats(total, to_floats(finished<true>(sums[i])));
        *sink += total[0] * 0.0f;
    }
    return turns * kChains * kColumns * 4 * 2;
}

}  // namespace
