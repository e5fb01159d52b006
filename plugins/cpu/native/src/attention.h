// Attention of tokens over the pages of their sequence: splits of kSplit keys from position 0, each on its own,
// then merged in order. A token's result so depends on its own sequence alone, however it is batched.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using chipmesh::Attention;
using chipmesh::kMaxQueries;
using chipmesh::kSplit;
using chipmesh::Partial;

constexpr int kLanes = 16;  // keys that are scored together

// 16 keys from `key` on, those behind the last being the last again, as [size][16]. A function of its own: pages that 16 does
// not divide are rare, and a copy of it in each size's kernel costs seconds to compile.
[[gnu::noinline]] void copy_keys(const Attention& at, std::int64_t key, std::int64_t last, float* copy) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const std::int64_t own = least(key + lane, last - 1);
        const float* p = at.keys + at.pages[own / at.page_size] * at.page_stride + own % at.page_size;
        for (int i = 0; i < at.size; ++i) copy[i * kLanes + lane] = p[i * at.page_size];
    }
}

// Where value 0 of 16 keys lies, value i being `step` floats further for each: in their page where 16 divides its
// size, else copied to `copy` [size][16].
struct KeyBlock {
    const float* first;
    const float* values;  // of the same keys, to be fetched in time
    std::int64_t step;

    KeyBlock(const Attention& at, std::int64_t key, std::int64_t last, float* copy) {
        const std::int64_t page = at.pages[key / at.page_size] * at.page_stride, offset = key % at.page_size;
        values = at.values + page + offset * at.size;
        const bool whole = at.page_size % kLanes == 0;
        first = whole ? at.keys + page + offset : copy;
        step = whole ? at.page_size : kLanes;
        if (!whole) copy_keys(at, key, last, copy);
    }
};

// scores [Queries][kSplit] of two blocks of keys for queries [Queries][Size]; each is one chain over the head's values.
template <int Queries, int Size>
void score_blocks(float scale, const float* query, bool fetch, const KeyBlock& a, const KeyBlock& b, const KeyBlock (&next)[2],
                  float* scores) {
    V16 sums[Queries][2];
#pragma GCC unroll 12
    for (int q = 0; q < Queries; ++q) sums[q][0] = sums[q][1] = splat(0.0f);
    const float *p = a.first, *r = b.first;
    for (int i = 0; i < Size; ++i, p += a.step, r += b.step) {
        const V16 ka = load(p), kb = load(r);
        if (fetch) {
            // A page is a place of its own in memory, which the processor does not foresee.
            __builtin_prefetch(next[0].first + i * next[0].step);
            __builtin_prefetch(next[1].first + i * next[1].step);
            __builtin_prefetch(a.values + i * kLanes, 0, 2);
            __builtin_prefetch(b.values + i * kLanes, 0, 2);
        }
#pragma GCC unroll 12
        for (int q = 0; q < Queries; ++q) {
            V16 x = splat(query[q * Size + i]);
            in_register(x);
            sums[q][0] = fma(x, ka, sums[q][0]), sums[q][1] = fma(x, kb, sums[q][1]);
        }
    }
#pragma GCC unroll 12
    for (int q = 0; q < Queries; ++q) {
        store(scores + q * kSplit, sums[q][0] * splat(scale));
        store(scores + q * kSplit + kLanes, sums[q][1] * splat(scale));
    }
}

template <int Queries, int Size>
void score_keys(const Attention& at, const float* query, bool fetch, std::int64_t first, std::int64_t last, float* scores) {
    float copies[4][kLanes * Size];
    // Behind the last key the last block stands in again: its lanes are not read.
    const auto block = [&](std::int64_t key, int copy) {
        return KeyBlock(at, least(key, (last - 1) / kLanes * kLanes), last, copies[copy]);
    };
    KeyBlock pair[2] = {block(first, 0), block(first + kLanes, 1)};
    int copy = 0;
    for (std::int64_t key = first; key < last; key += 2 * kLanes) {
        copy ^= 2;
        const KeyBlock next[2] = {block(key + 2 * kLanes, copy), block(key + 3 * kLanes, copy + 1)};
        score_blocks<Queries, Size>(at.scale, query, fetch, pair[0], pair[1], next, scores + key - first);
        pair[0] = next[0], pair[1] = next[1];
    }
}

// Scores -> weights e^(score - maximum) in place; those behind `count`, to a whole vector, become 0.
inline void weigh(float* scores, int count, float* maximum, float* weight) {
    const int padded = (count + 15) / 16 * 16;
    for (int i = count; i < padded; ++i) scores[i] = scores[0];
    V16 tops = load(scores);
    for (int i = 16; i < padded; i += 16) tops = max(tops, load(scores + i));
    const float top = largest(tops);
    V16 total = splat(0.0f);
    for (int i = 0; i < padded; i += 16) {
        store(scores + i, exponential(load(scores + i) - splat(top)));
        for (int j = count - i; j < 16; ++j) scores[i + j] = 0.0f;
        total = total + load(scores + i);
    }
    *maximum = top, *weight = sum(total);
}

// out [Queries][Size]: sums of values of keys [from, last), `scores` being those from `first` on; more: go on with those in out.
template <int Queries, int Size>
void add_values(const Attention& at, std::int64_t first, std::int64_t from, std::int64_t last, const float* scores, bool more,
                float* out) {
    constexpr int kVectors = Size / 16;
    V16 sums[Queries][kVectors];
#pragma GCC unroll 12
    for (int q = 0; q < Queries; ++q)
        for (int j = 0; j < kVectors; ++j) sums[q][j] = more ? load(out + q * Size + 16 * j) : splat(0.0f);
    for (std::int64_t key = from; key < last;) {
        const std::int64_t page = key / at.page_size, offset = key % at.page_size;
        const std::int64_t until = least(last, key + at.page_size - offset);
        const float* p = at.values + at.pages[page] * at.page_stride + offset * Size;
        for (const float* w = scores + key - first; key < until; ++key, ++w, p += Size) {
            V16 values[kVectors];
#pragma GCC unroll 16
            for (int j = 0; j < kVectors; ++j) values[j] = load(p + 16 * j);
#pragma GCC unroll 12
            for (int q = 0; q < Queries; ++q) {
                V16 x = splat(w[q * kSplit]);
                in_register(x);
#pragma GCC unroll 16
                for (int j = 0; j < kVectors; ++j) sums[q][j] = fma(x, values[j], sums[q][j]);
            }
        }
    }
#pragma GCC unroll 12
    for (int q = 0; q < Queries; ++q)
        for (int j = 0; j < kVectors; ++j) store(out + q * Size + 16 * j, sums[q][j]);
}

// Calls work<n>(query) for queries in runs of at most Most, a number of those below.
template <int Most, class Work>
void by_queries(int queries, const Work& work, int from = 0) {
    for (; queries - from >= Most; from += Most) work(std::integral_constant<int, Most>(), from);
    if constexpr (Most > 1) {
        if (from < queries) by_queries<(Most > 4 ? 4 : Most - 1)>(queries, work, from);
    }
}

template <int Size>
void attend_sized(const Attention& at, std::int64_t first, std::int64_t last, Partial out) {
    constexpr int kFit = kSumRegisters * 16 / Size, kTogether = kFit < 1 ? 1 : kFit > 4 ? 4 : kFit;
    const int queries = at.rows * at.heads;
    alignas(64) float scores[kMaxQueries * kSplit + kLanes], copy[kMaxQueries * Size];
    const float* query = at.query;
    if (at.rows > 1) {
        for (int row = 0; row < at.rows; ++row)
            std::memcpy(copy + row * at.heads * Size, at.query + row * at.query_stride, at.heads * Size * sizeof(float));
        query = copy;
    }
    by_queries<kScoreQueries>(queries, [&](auto n, int q) {
        score_keys<n.value, Size>(at, query + q * Size, at.fetch && q == 0, first, last, scores + q * kSplit);
    });
    const auto seen = [&](int q) { return least(last, at.length + q / at.heads); };
    for (int q = 0; q < queries; ++q)
        weigh(scores + q * kSplit, static_cast<int>(seen(q) - first), out.maximum + q, out.weight + q);
    // What the first row sees all see.
    by_queries<kTogether>(queries, [&](auto n, int q) {
        add_values<n.value, Size>(at, first, first, seen(0), scores + q * kSplit, false, out.values + q * Size);
    });
    for (int q = at.heads; q < queries; ++q)
        if (seen(q) > seen(0)) add_values<1, Size>(at, first, seen(0), seen(q), scores + q * kSplit, true, out.values + q * Size);
}

void attend(const Attention& at, std::int64_t first, std::int64_t last, Partial out) {
    switch (at.size / 16) {
        case 1: return attend_sized<16>(at, first, last, out);
        case 2: return attend_sized<32>(at, first, last, out);
        case 3: return attend_sized<48>(at, first, last, out);
        case 4: return attend_sized<64>(at, first, last, out);
        case 5: return attend_sized<80>(at, first, last, out);
        case 6: return attend_sized<96>(at, first, last, out);
        case 8: return attend_sized<128>(at, first, last, out);
        case 16: return attend_sized<256>(at, first, last, out);
        default: return;
    }
}

inline float exp_of(float x) {
    float lanes[16];
    store(lanes, exponential(splat(x)));
    return lanes[0];
}

void merge(Partial total, Partial next, int queries, int size) {
    for (int h = 0; h < queries; ++h) {
        const float top = total.maximum[h] > next.maximum[h] ? total.maximum[h] : next.maximum[h];
        const float a = exp_of(total.maximum[h] - top), b = exp_of(next.maximum[h] - top);
        total.maximum[h] = top;
        total.weight[h] = total.weight[h] * a + next.weight[h] * b;
        for (int i = 0; i < size; i += 16) {
            float* p = total.values + h * size + i;
            store(p, fma(load(next.values + h * size + i), splat(b), load(p) * splat(a)));
        }
    }
}

}  // namespace
