// Attention of one token over the pages of its sequence: splits of kSplit keys from position 0, each on its own,
// then merged in order. A token's result so depends on its own sequence alone, however it is batched.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using chipmesh::Attention;
using chipmesh::kSplit;
using chipmesh::Partial;

constexpr int kMaxGroup = 16;  // query heads of a key/value head
constexpr int kLanes = 16;     // keys that are scored together

// Where value 0 of 16 keys lies, value i being `step` floats further for each: in their page where 16 divides its
// size, else copied to `copy` [size][16].
struct KeyBlock {
    const float* first;
    const float* values;  // of the same keys, to be fetched in time
    std::int64_t step;

    KeyBlock(const Attention& at, std::int64_t key, std::int64_t last, float* copy) {
        const std::int64_t page = at.pages[key / at.page_size] * at.page_stride, offset = key % at.page_size;
        values = at.values + page + offset * at.size;
        if (at.page_size % kLanes == 0) {
            first = at.keys + page + offset;
            step = at.page_size;
            return;
        }
        first = copy, step = kLanes;
        for (int lane = 0; lane < kLanes; ++lane) {
            const std::int64_t own = least(key + lane, last - 1);
            const float* p = at.keys + at.pages[own / at.page_size] * at.page_stride + own % at.page_size;
            for (int i = 0; i < at.size; ++i) copy[i * kLanes + lane] = p[i * at.page_size];
        }
    }
};

// scores [Heads][kSplit] of two blocks of keys; each is one chain over the head's values.
template <int Heads, bool Fetch>
void score_blocks(const Attention& at, const float* query, const KeyBlock& a, const KeyBlock& b,
                  const KeyBlock (&next)[2], float* scores) {
    V16 sums[Heads][2];
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) sums[h][0] = sums[h][1] = splat(0.0f);
    const float *p = a.first, *q = b.first;
    for (int i = 0; i < at.size; ++i, p += a.step, q += b.step) {
        const V16 ka = load(p), kb = load(q);
        if constexpr (Fetch) {
            // A page is a place of its own in memory, which the processor does not foresee.
            __builtin_prefetch(next[0].first + i * next[0].step);
            __builtin_prefetch(next[1].first + i * next[1].step);
            __builtin_prefetch(a.values + i * kLanes, 0, 2);
            __builtin_prefetch(b.values + i * kLanes, 0, 2);
        }
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) {
            const V16 x = splat(query[h * at.size + i]);
            sums[h][0] = fma(x, ka, sums[h][0]), sums[h][1] = fma(x, kb, sums[h][1]);
        }
    }
    const V16 scale = splat(at.scale);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
        store(scores + h * kSplit, sums[h][0] * scale);
        store(scores + h * kSplit + kLanes, sums[h][1] * scale);
    }
}

template <int Heads>
void score_keys(const Attention& at, int head, std::int64_t first, std::int64_t last, float* scores) {
    float copies[4][kLanes * 256];
    // Behind the last key the last block stands in again: its lanes are not read.
    const auto block = [&](std::int64_t key, int copy) {
        return KeyBlock(at, least(key, (last - 1) / kLanes * kLanes), last, copies[copy]);
    };
    KeyBlock pair[2] = {block(first, 0), block(first + kLanes, 1)};
    int copy = 0;
    for (std::int64_t key = first; key < last; key += 2 * kLanes) {
        copy ^= 2;
        const KeyBlock next[2] = {block(key + 2 * kLanes, copy), block(key + 3 * kLanes, copy + 1)};
        float* own = scores + head * kSplit + key - first;
        const float* query = at.query + head * at.size;
        if (at.fetch && head == 0)
            score_blocks<Heads, true>(at, query, pair[0], pair[1], next, own);
        else
            score_blocks<Heads, false>(at, query, pair[0], pair[1], next, own);
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

template <int Vectors, int Heads>
void add_values(const Attention& at, int head, std::int64_t first, std::int64_t last, const float* weights, float* out) {
    V16 sums[Heads][Vectors];
    for (int h = 0; h < Heads; ++h)
        for (int j = 0; j < Vectors; ++j) sums[h][j] = splat(0.0f);
    for (std::int64_t key = first; key < last;) {
        const std::int64_t page = key / at.page_size, offset = key % at.page_size;
        const std::int64_t until = least(last, key + at.page_size - offset);
        const float* p = at.values + at.pages[page] * at.page_stride + offset * at.size;
        for (const float* w = weights + head * kSplit + key - first; key < until; ++key, ++w, p += at.size) {
#pragma GCC unroll 16
            for (int j = 0; j < Vectors; ++j) {
                const V16 v = load(p + 16 * j);
#pragma GCC unroll 4
                for (int h = 0; h < Heads; ++h) sums[h][j] = fma(splat(w[h * kSplit]), v, sums[h][j]);
            }
        }
    }
    for (int h = 0; h < Heads; ++h)
        for (int j = 0; j < Vectors; ++j) store(out + (head + h) * at.size + 16 * j, sums[h][j]);
}

// Calls work<n>(head) for heads in runs of at most Most.
template <int Most, class Work>
void by_heads(int heads, const Work& work) {
    int head = 0;
    for (; head + Most <= heads; head += Most) work(std::integral_constant<int, Most>(), head);
    if constexpr (Most > 1) {
        if (heads - head >= 3 && Most > 3) work(std::integral_constant<int, 3>(), head), head += 3;
        if (heads - head >= 2 && Most > 2) work(std::integral_constant<int, 2>(), head), head += 2;
        if (heads - head >= 1) work(std::integral_constant<int, 1>(), head);
    }
}

template <int Vectors>
void attend_sized(const Attention& at, std::int64_t first, std::int64_t last, Partial out) {
    constexpr int kTogether = kSumRegisters / Vectors < 1 ? 1 : kSumRegisters / Vectors > 4 ? 4 : kSumRegisters / Vectors;
    alignas(64) float scores[kMaxGroup * kSplit + kLanes];
    by_heads<kScoreHeads>(at.heads, [&](auto n, int head) { score_keys<n.value>(at, head, first, last, scores); });
    for (int h = 0; h < at.heads; ++h)
        weigh(scores + h * kSplit, static_cast<int>(last - first), out.maximum + h, out.weight + h);
    by_heads<kTogether>(at.heads, [&](auto n, int head) {
        add_values<Vectors, n.value>(at, head, first, last, scores, out.values);
    });
}

void attend(const Attention& at, std::int64_t first, std::int64_t last, Partial out) {
    switch (at.size / 16) {
        case 1: return attend_sized<1>(at, first, last, out);
        case 2: return attend_sized<2>(at, first, last, out);
        case 3: return attend_sized<3>(at, first, last, out);
        case 4: return attend_sized<4>(at, first, last, out);
        case 5: return attend_sized<5>(at, first, last, out);
        case 6: return attend_sized<6>(at, first, last, out);
        case 8: return attend_sized<8>(at, first, last, out);
        case 16: return attend_sized<16>(at, first, last, out);
        default: return;
    }
}

inline float exp_of(float x) {
    float lanes[16];
    store(lanes, exponential(splat(x)));
    return lanes[0];
}

void merge(Partial total, Partial next, int heads, int size) {
    for (int h = 0; h < heads; ++h) {
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
