// What an instruction set's object file offers, and how weights lie in memory for all of them.
#pragma once

#include <cstdint>

namespace chipmesh {

constexpr int kPanel = 32;  // output columns that are computed together
constexpr int kBlock = 32;  // values of a quantised block along the inner dimension, as in GGUF
constexpr int kMaxQueries = 16; // query heads of all rows that attend together
constexpr int kSplit = 256; // keys of one partial attention: fixed, so that results depend on nothing else

enum Encoding : std::int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5, kEncodings = 6 };

// Bytes of one panel of `inner` values for each of its 32 columns.
//   F32, BF16, F16: [inner][32]. Quantised, for each block of 32 along the inner dimension: scales [32] as F16
//   (Q4_1: then minima [32]), then Q8_0: [32][32] bytes, Q4_*: [4][32] words of 32 bits, each 8 inner values of a
//   column, the first in the lowest 4 bits.
// For rows in int8, of as many bytes: scales and minima as above, then for each half of the columns inner values in
//   fours, [8][16 columns][4]: Q8_0 as bytes, 128 above their values; Q4_*: the nibbles of two fours in a byte, the
//   first below.
constexpr std::int64_t panel_bytes(Encoding encoding, std::int64_t inner) {
    switch (encoding) {
        case kF32: return inner * kPanel * 4;
        case kBF16:
        case kF16: return inner * kPanel * 2;
        case kQ8_0: return inner / kBlock * (64 + 1024);
        case kQ4_0: return inner / kBlock * (64 + 512);
        case kQ4_1: return inner / kBlock * (128 + 512);
        default: return 0;
    }
}

// Rows that are multiplied: blocks of at most `max_rows`, evenly sized. Block i holds rows [first, first + n)
// as [inner][n], beginning at value first * inner.
struct Blocks {
    std::int64_t rows;
    std::int64_t count;
    static Blocks of(std::int64_t rows, int max_rows) { return {rows, (rows + max_rows - 1) / max_rows}; }
    std::int64_t first(std::int64_t block) const { return block * rows / count; }
    int size(std::int64_t block) const { return static_cast<int>(first(block + 1) - first(block)); }
    // The block that holds a row.
    std::int64_t holding(std::int64_t row) const {
        std::int64_t block = row * count / rows;
        while (first(block) > row) --block;
        while (first(block + 1) <= row) ++block;
        return block;
    }
};

// Memory that is wanted soon, as the keys and values of the next attention: stretches of kStretch bytes, each so far from
// `base`. A product fetches them while it computes, some with each block of its inner dimension, as it needs little of the
// memory's time itself.
constexpr std::int64_t kStretch = 1024;
struct Ahead {
    const std::uint8_t* base = nullptr;
    const std::int64_t *next = nullptr, *end = nullptr;
    // One of so many equal parts. Inlined, all of them: shared copies could carry one object's instructions into another.
    [[gnu::always_inline]] Ahead part(std::int64_t index, std::int64_t parts) const {
        const std::int64_t count = end - next;
        return {base, next + count * index / parts, next + count * (index + 1) / parts};
    }
    // How many to fetch with each of so many blocks.
    [[gnu::always_inline]] std::int64_t each(std::int64_t blocks) const { return (end - next + blocks - 1) / blocks; }
    [[gnu::always_inline]] void fetch(std::int64_t stretches) {
        for (; stretches > 0 && next < end; --stretches, ++next)
            for (std::int64_t i = 0; i < kStretch; i += 64) __builtin_prefetch(base + *next + i, 0, 2);
    }
};

// A page of a layer's cache holds, for each key/value head, its keys as [head size][page size] and its values as
// [page size][head size]: keys are scored 16 at a time, and a head's part of a page is one stretch of memory.
// Consecutive tokens of a sequence, the rows, are attended to together: what they read is read once.
struct Attention {
    const float* query;         // of the first row: [heads][size], rotated
    std::int64_t query_stride;  // to the next row's
    int rows;                   // rows x heads: kMaxQueries at most
    std::int64_t length;        // keys that the first row sees; each row sees one more than the one before
    const float* keys;          // of this key/value head in page 0
    const float* values;
    const std::int32_t* pages;  // of the sequence
    std::int64_t page_size, page_stride;
    int heads, size;            // query heads of this key/value head; head size
    float scale;
    bool fetch;                 // the pages are in no cache yet: nobody has attended to them in this phase
};

// One [rows x heads] x (maximum, sum of weights, weighted values [size]) of a split.
struct Partial {
    float* maximum;
    float* weight;
    float* values;
};

// Rows rounded to int8 lie in Blocks too. A block of n rows has for each 32 inner values: int8 [8][n][4], then [n] each of
// int32 -8 * their sum, float scale, float scale * sum: so many words for a row.
constexpr std::int64_t kRoundedWords = 11;

struct Kernels {
    const char* name;
    int max_rows;
    // c [rows of the group of blocks][32] = a x panel; a: Blocks `first_block` to `last_block` of `blocks`.
    // scratch: kScratch floats.
    void (*multiply)(const float* a, const Blocks& blocks, std::int64_t first_block, std::int64_t last_block,
                     std::int64_t inner, Encoding encoding, const std::uint8_t* panel, float* c, float* scratch,
                     const Ahead& ahead);
    // The same with rows in int8, for weights in blocks that are packed for it.
    void (*multiply_int8)(const std::int32_t* a, const Blocks& blocks, std::int64_t first_block, std::int64_t last_block,
                          std::int64_t inner, Encoding encoding, const std::uint8_t* panel, float* c, const Ahead& ahead);
    // x [size] -> row `row` of a block of `rows` rows in int8: each 32 values by a scale of their own, largest / 127, halves to
    // even. Values below 2^-120 are 0; among others that are not finite, the scale is not a number.
    void (*round_row)(const float* x, std::int64_t size, std::int32_t* out, int rows, int row);
    // out[i * step] = x[i] / rms(x) * weight[i]
    void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t size, float* out, std::int64_t step);
    // gate_up [rows][32], 16 gates and their ups -> out[r * row_step + i * step] = silu(gate) * up
    void (*silu_mul)(const float* gate_up, int rows, float* out, std::int64_t row_step, std::int64_t step);
    // Halves of each head turned by the position's angles, in place.
    void (*rotate)(float* head, const float* cos_sin, int size);
    // Keys [first, last) of one split, as far as the last row sees.
    void (*attend)(const Attention& attention, std::int64_t first, std::int64_t last, Partial out);
    // total: what the splits before gave; becomes what they and `next` give.
    void (*merge)(Partial total, Partial next, int queries, int size);
    void (*decode_row)(Encoding encoding, const std::uint8_t* row, std::int64_t size, float* out);
    // Index of the largest logit, the lowest among equals; -1 where one is not finite.
    std::int64_t (*argmax)(const float* logits, std::int64_t size);
    // scores = (logits - largest) / temperature; weights = e^scores.
    void (*weigh_scores)(const float* logits, std::int64_t size, double largest, double temperature, double* scores,
                         double* weights);
    // A chain of fused multiply-adds on registers alone, for measuring the limit; returns operations.
    std::int64_t (*fma_limit)(std::int64_t turns, float* sink);
    // The same of bytes, as products in int8 have them.
    std::int64_t (*int8_limit)(std::int64_t turns, float* sink);
    // Reads `count` (whole cache lines of) floats, likewise.
    float (*read_limit)(const float* values, std::int64_t count);
};

constexpr std::int64_t kScratch = 512 * kPanel;
constexpr std::int64_t kGroupRows = 96;  // rows that one decoded panel serves before it is decoded anew

// nullptr where the compiler had no such instruction set.
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* baseline_kernels();

}  // namespace chipmesh
