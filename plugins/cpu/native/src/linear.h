// Products with packed weights. Each result is one chain of fused multiply-adds over the inner dimension, from
// the first to the last: the same bits for any number of rows, any split of them and any encoding of a weight,
// since every encoding here decodes exactly as its definition does in float32.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using chipmesh::Ahead;
using chipmesh::Blocks;
using chipmesh::Encoding;
using chipmesh::kBlock;
using chipmesh::kPanel;

// So far ahead weights are fetched that are read while they are decoded; a panel's neighbour follows it in memory.
constexpr int kAhead = 4096;
// Inner dimension of a tile at a time where weights are read as they are stored: the first block of rows brings them from
// memory, and L1 still has them for the next one.
constexpr std::int64_t kStoredDepth = 64;

inline void fetch(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + kAhead); }
inline const std::uint16_t* halves(const std::uint8_t* p) { return reinterpret_cast<const std::uint16_t*>(p); }

// Readers give a panel's weights, 16 columns (the half `j`) of a step of the inner dimension at a time:
// `begin_block` at every 32 steps, `begin_group` for each half at every kGroup of them, then `read`, then `end_group`.

template <class Value, V16 (*Load)(const Value*), Encoding Own>
struct ValueReader {
    static constexpr int kGroup = 1;
    static constexpr Encoding kEncoding = Own;
    const Value* p;
    explicit ValueReader(const std::uint8_t* panel) : p(reinterpret_cast<const Value*>(panel)) {}
    void begin_block() {}
    void begin_group(int) {}
    V16 read(int, int j) const { return Load(p + 16 * j); }
    void end_group() { p += kPanel; }
};
using PlainReader = ValueReader<float, load, chipmesh::kF32>;
using BfloatReader = ValueReader<std::uint16_t, load_bfloat, chipmesh::kBF16>;
using HalfReader = ValueReader<std::uint16_t, load_half, chipmesh::kF16>;

// scale * q: 11 bits times 8 bits, exact in float32.
struct Q8Reader {
    static constexpr Encoding kEncoding = chipmesh::kQ8_0;
    static constexpr int kGroup = 1;
    const std::uint8_t* p;
    V16 scale[2];
    explicit Q8Reader(const std::uint8_t* panel) : p(panel) {}
    void begin_block() { scale[0] = load_half(halves(p)), scale[1] = load_half(halves(p) + 16), p += 64; }
    void begin_group(int) {}
    V16 read(int, int j) const { return load_signed(reinterpret_cast<const std::int8_t*>(p) + 16 * j) * scale[j]; }
    void end_group() { fetch(p), p += kPanel; }
};

// scale * (q - 8), exact.
struct Q40Reader {
    static constexpr Encoding kEncoding = chipmesh::kQ4_0;
    static constexpr int kGroup = 8;
    const std::uint8_t* p;
    V16 scale[2];
    Nibbles words;
    explicit Q40Reader(const std::uint8_t* panel) : p(panel) {}
    void begin_block() { scale[0] = load_half(halves(p)), scale[1] = load_half(halves(p) + 16), p += 64; }
    void begin_group(int j) { words.load(p + 64 * j); }
    V16 read(int step, int j) const { return (words.get(step) - splat(8.0f)) * scale[j]; }
    void end_group() { fetch(p), fetch(p + 64), p += 4 * kPanel; }
};

// scale * q + minimum: the product is exact, so that fusing it with the sum changes nothing.
struct Q41Reader {
    static constexpr Encoding kEncoding = chipmesh::kQ4_1;
    static constexpr int kGroup = 8;
    const std::uint8_t* p;
    V16 scale[2], minimum[2];
    Nibbles words;
    explicit Q41Reader(const std::uint8_t* panel) : p(panel) {}
    void begin_block() {
        for (int j = 0; j < 2; ++j)
            scale[j] = load_half(halves(p) + 16 * j), minimum[j] = load_half(halves(p) + 32 + 16 * j);
        p += 128;
    }
    void begin_group(int j) { words.load(p + 64 * j); }
    V16 read(int step, int j) const { return fma(words.get(step), scale[j], minimum[j]); }
    void end_group() { fetch(p), fetch(p + 64), p += 4 * kPanel; }
};

// Halves [First, Last) of c [Rows][32]; a [inner][Rows]; inner is whole blocks. more: go on with the sums in c.
// Keep: decoded weights go to kept [inner][32] as well. A function of its own: where it is part of its caller, the compiler spills
// registers at few rows.
template <class Reader, int Rows, int First, int Last, bool Keep>
[[gnu::noinline]] void tile(const float* a, std::int64_t inner, const std::uint8_t* panel, float* c, bool more, float* kept,
                            Ahead ahead) {
    Reader reader(panel);
    const std::int64_t stretches = ahead.each(inner / kBlock);
    V16 sums[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int j = First; j < Last; ++j) sums[r][j] = more ? load(c + r * kPanel + 16 * j) : splat(0.0f);
    for (std::int64_t k = 0; k < inner; k += kBlock) {
        ahead.fetch(stretches);
        reader.begin_block();
        for (int i = 0; i < kBlock; i += Reader::kGroup, a += Rows * Reader::kGroup, kept += Keep ? Reader::kGroup * kPanel : 0) {
            if constexpr (Reader::kGroup == 1) {
                V16 w[2];
#pragma GCC unroll 2
                for (int j = First; j < Last; ++j) {
                    w[j] = reader.read(0, j);
                    if constexpr (Keep) store(kept + 16 * j, w[j]);
                }
#pragma GCC unroll 12
                for (int r = 0; r < Rows; ++r) {
                    V16 x = splat(a[r]);
                    in_register(x);
#pragma GCC unroll 2
                    for (int j = First; j < Last; ++j) sums[r][j] = fma(x, w[j], sums[r][j]);
                }
            } else {
#pragma GCC unroll 2
                for (int j = First; j < Last; ++j) {
                    reader.begin_group(j);
                    const float* x = a;
                    // Else the compiler keeps a group's values of `a` for the second half, and has no registers left.
                    asm volatile("" : "+r"(x));
#pragma GCC unroll 8
                    for (int s = 0; s < Reader::kGroup; ++s) {
                        V16 w = reader.read(s, j);
                        in_order(w);
                        if constexpr (Keep) store(kept + s * kPanel + 16 * j, w);
#pragma GCC unroll 12
                        for (int r = 0; r < Rows; ++r) sums[r][j] = fma(splat(x[s * Rows + r]), w, sums[r][j]);
                    }
                }
            }
            reader.end_group();
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int j = First; j < Last; ++j) store(c + r * kPanel + 16 * j, sums[r][j]);
}

template <class Reader, bool Keep, int Rows = kMaxRows>
void tile_of(int rows, const float* a, std::int64_t inner, const std::uint8_t* panel, float* c, bool more, float* kept,
             const Ahead& ahead) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return tile_of<Reader, Keep, Rows - 1>(rows, a, inner, panel, c, more, kept, ahead);
    }
    if constexpr (Rows <= (Reader::kGroup > 1 ? kWholeWordRows : kWholeRows))
        return tile<Reader, Rows, 0, 2, Keep>(a, inner, panel, c, more, kept, ahead);
    // Too many sums for the registers: half of the columns after the other.
    tile<Reader, Rows, 0, 1, Keep>(a, inner, panel, c, more, kept, ahead);
    tile<Reader, Rows, 1, 2, Keep>(a, inner, panel, c, more, kept, {});
}

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// The first block of rows decodes as it multiplies, and keeps what it decoded for the others, a stretch of the panel at a
// time.
template <class Reader>
void multiply_by(const float* a, const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t inner,
                 const std::uint8_t* panel, float* c, float* scratch, const Ahead& ahead) {
    constexpr bool kDecodes = !std::is_same_v<Reader, PlainReader>;
    constexpr std::int64_t kSlice = kDecodes ? kDepth : kStoredDepth;
    const std::int64_t first_row = blocks.first(first);
    if (kDecodes && last - first == 1)
        return tile_of<Reader, false>(blocks.size(first), a + first_row * inner, inner, panel, c, false, nullptr, ahead);
    // The next panel, in memory behind this one, is fetched while this one is multiplied.
    const std::int64_t bytes = chipmesh::panel_bytes(Reader::kEncoding, inner);
    const std::int64_t tiles = (inner + kSlice - 1) / kSlice * (last - first), slice = bytes / tiles / 64 * 64 + 64;
    const std::uint8_t* following = panel + bytes;
    std::int64_t done = 0;
    for (std::int64_t k = 0; k < inner; k += kSlice) {
        const std::int64_t depth = least(kSlice, inner - k);
        const std::uint8_t* stored = panel + chipmesh::panel_bytes(Reader::kEncoding, k);
        const std::uint8_t* weights = kDecodes ? reinterpret_cast<const std::uint8_t*>(scratch) : stored;
        for (std::int64_t block = first; block < last; ++block) {
            const int rows = blocks.size(block);
            const float* own = a + blocks.first(block) * inner + k * rows;
            float* sums = c + (blocks.first(block) - first_row) * kPanel;
            for (const std::uint8_t* end = following + slice; following < end; following += 64)
                __builtin_prefetch(following, 0, 2);
            const Ahead own_ahead = ahead.part(done++, tiles);
            if (kDecodes && block == first)
                tile_of<Reader, kDecodes>(rows, own, depth, stored, sums, k > 0, scratch, own_ahead);
            else
                tile_of<PlainReader, false>(rows, own, depth, weights, sums, k > 0, nullptr, own_ahead);
        }
    }
}

void multiply(const float* a, const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t inner,
              Encoding encoding, const std::uint8_t* panel, float* c, float* scratch, const Ahead& ahead) {
    switch (encoding) {
        case chipmesh::kF32: return multiply_by<PlainReader>(a, blocks, first, last, inner, panel, c, scratch, ahead);
        case chipmesh::kBF16: return multiply_by<BfloatReader>(a, blocks, first, last, inner, panel, c, scratch, ahead);
        case chipmesh::kF16: return multiply_by<HalfReader>(a, blocks, first, last, inner, panel, c, scratch, ahead);
        case chipmesh::kQ8_0: return multiply_by<Q8Reader>(a, blocks, first, last, inner, panel, c, scratch, ahead);
        case chipmesh::kQ4_0: return multiply_by<Q40Reader>(a, blocks, first, last, inner, panel, c, scratch, ahead);
        case chipmesh::kQ4_1: return multiply_by<Q41Reader>(a, blocks, first, last, inner, panel, c, scratch, ahead);
        default: return;
    }
}

}  // namespace
