// Products with packed weights. Each result is one chain of fused multiply-adds over the inner dimension, from
// the first to the last: the same bits for any number of rows, any split of them and any encoding of a weight,
// since every encoding here decodes exactly as its definition does in float32.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using chipmesh::Blocks;
using chipmesh::Encoding;
using chipmesh::kBlock;
using chipmesh::kPanel;

// So far ahead weights are fetched that are read while they are decoded; a panel's neighbour follows it in memory.
constexpr int kAhead = 4096;

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
template <int Rows, int First, int Last, class Reader>
void tile(const float* a, std::int64_t inner, Reader reader, float* c, bool more) {
    V16 sums[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int j = First; j < Last; ++j) sums[r][j] = more ? load(c + r * kPanel + 16 * j) : splat(0.0f);
    for (std::int64_t k = 0; k < inner; k += kBlock) {
        reader.begin_block();
        for (int i = 0; i < kBlock; i += Reader::kGroup, a += Rows * Reader::kGroup) {
#pragma GCC unroll 2
            for (int j = First; j < Last; ++j) {
                reader.begin_group(j);
                const float* x = a;
                // Else the compiler keeps a group's values of `a` for the second half, and has no registers left.
                if constexpr (Reader::kGroup > 1) asm volatile("" : "+r"(x));
#pragma GCC unroll 8
                for (int s = 0; s < Reader::kGroup; ++s) {
                    V16 w = reader.read(s, j);
                    if constexpr (Reader::kGroup > 1) in_order(w);
#pragma GCC unroll 12
                    for (int r = 0; r < Rows; ++r) sums[r][j] = fma(splat(x[s * Rows + r]), w, sums[r][j]);
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

template <class Reader, int Rows = kMaxRows>
void tile_of(int rows, const float* a, std::int64_t inner, const Reader& reader, float* c, bool more) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return tile_of<Reader, Rows - 1>(rows, a, inner, reader, c, more);
    }
    if constexpr (Rows <= (Reader::kGroup > 1 ? kWholeWordRows : kWholeRows)) return tile<Rows, 0, 2>(a, inner, reader, c, more);
    // Too many sums for the registers: half of the columns after the other.
    tile<Rows, 0, 1>(a, inner, reader, c, more);
    tile<Rows, 1, 2>(a, inner, reader, c, more);
}

template <class Reader>
void decode_panel(Reader& reader, std::int64_t inner, float* out) {
    for (std::int64_t k = 0; k < inner; k += kBlock) {
        reader.begin_block();
        for (int i = 0; i < kBlock; i += Reader::kGroup, out += Reader::kGroup * kPanel) {
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                reader.begin_group(j);
#pragma GCC unroll 8
                for (int s = 0; s < Reader::kGroup; ++s) store(out + s * kPanel + 16 * j, reader.read(s, j));
            }
            reader.end_group();
        }
    }
}

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Few rows decode as they multiply; more of them share each stretch of the panel, decoded once.
template <class Reader>
void multiply_by(const float* a, const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t inner,
                 const std::uint8_t* panel, float* c, float* scratch) {
    constexpr bool kDecodes = !std::is_same_v<Reader, PlainReader>;
    const std::int64_t first_row = blocks.first(first);
    Reader reader(panel);
    constexpr int kDirectRows = Reader::kGroup > 1 ? kDirectWordRows : kMaxRows;
    if (kDecodes && last - first == 1 && blocks.size(first) <= kDirectRows)
        return tile_of(blocks.size(first), a + first_row * inner, inner, reader, c, false);
    // The next panel, in memory behind this one, is fetched while this one is multiplied.
    const std::int64_t bytes = chipmesh::panel_bytes(Reader::kEncoding, inner);
    const std::int64_t slice = bytes / ((inner + kDepth - 1) / kDepth * (last - first)) / 64 * 64 + 64;
    const std::uint8_t* ahead = panel + bytes;
    for (std::int64_t k = 0; k < inner; k += kDepth) {
        const std::int64_t depth = least(kDepth, inner - k);
        if constexpr (kDecodes) decode_panel(reader, depth, scratch);
        const PlainReader weights(kDecodes ? reinterpret_cast<const std::uint8_t*>(scratch) : panel + k * kPanel * 4);
        for (std::int64_t block = first; block < last; ++block) {
            const std::int64_t row = blocks.first(block);
            const int rows = blocks.size(block);
            for (const std::uint8_t* end = ahead + slice; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
            tile_of(rows, a + row * inner + k * rows, depth, weights, c + (row - first_row) * kPanel, k > 0);
        }
    }
}

void multiply(const float* a, const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t inner,
              Encoding encoding, const std::uint8_t* panel, float* c, float* scratch) {
    switch (encoding) {
        case chipmesh::kF32: return multiply_by<PlainReader>(a, blocks, first, last, inner, panel, c, scratch);
        case chipmesh::kBF16: return multiply_by<BfloatReader>(a, blocks, first, last, inner, panel, c, scratch);
        case chipmesh::kF16: return multiply_by<HalfReader>(a, blocks, first, last, inner, panel, c, scratch);
        case chipmesh::kQ8_0: return multiply_by<Q8Reader>(a, blocks, first, last, inner, panel, c, scratch);
        case chipmesh::kQ4_0: return multiply_by<Q40Reader>(a, blocks, first, last, inner, panel, c, scratch);
        case chipmesh::kQ4_1: return multiply_by<Q41Reader>(a, blocks, first, last, inner, panel, c, scratch);
        default: return;
    }
}

}  // namespace
