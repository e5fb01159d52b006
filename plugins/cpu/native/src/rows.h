// What is done to one row at a time: normalisation, the gate, positions, decoding, the largest logit.
#pragma once

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace {

inline void store_apart(float* out, std::int64_t step, V16 x) {
    if (step == 1) return store(out, x);
    float lanes[16];
    store(lanes, x);
    for (int j = 0; j < 16; ++j) out[j * step] = lanes[j];
}

void rms_norm(const float* x, const float* weight, float eps, std::int64_t size, float* out, std::int64_t step) {
    V16 squares = splat(0.0f);
    for (std::int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
    const V16 scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for (std::int64_t i = 0; i < size; i += 16) store_apart(out + i * step, step, load(x + i) * scale * load(weight + i));
}

void silu_mul(const float* gate_up, int rows, float* out, std::int64_t row_step, std::int64_t step) {
    for (int r = 0; r < rows; ++r, out += row_step) {
        const V16 gate = load(gate_up + r * kPanel), up = load(gate_up + r * kPanel + 16);
        store_apart(out, step, gate / (splat(1.0f) + exponential(splat(0.0f) - gate)) * up);
    }
}

void rotate(float* head, const float* cos_sin, int size) {
    const int half = size / 2;
    const float *cos = cos_sin, *sin = cos_sin + half;
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[i] + first * sin[i];
    }
}

void decode_row(Encoding encoding, const std::uint8_t* row, std::int64_t size, float* out) {
    const auto half_at = [](const std::uint8_t* p) {
        std::uint16_t half;
        std::memcpy(&half, p, 2);
        return half_to_float(half);
    };
    switch (encoding) {
        case chipmesh::kF32: std::memcpy(out, row, size * 4); return;
        case chipmesh::kBF16:
            for (std::int64_t i = 0; i < size; ++i) {
                const std::uint32_t bits = static_cast<std::uint32_t>(row[2 * i] | row[2 * i + 1] << 8) << 16;
                std::memcpy(out + i, &bits, 4);
            }
            return;
        case chipmesh::kF16:
            for (std::int64_t i = 0; i < size; ++i) out[i] = half_at(row + 2 * i);
            return;
        case chipmesh::kQ8_0:
            for (std::int64_t b = 0; b < size / kBlock; ++b, row += 34)
                for (int i = 0; i < kBlock; ++i)
                    out[b * kBlock + i] = half_at(row) * static_cast<float>(static_cast<std::int8_t>(row[2 + i]));
            return;
        case chipmesh::kQ4_0:
            for (std::int64_t b = 0; b < size / kBlock; ++b, row += 18)
                for (int i = 0; i < kBlock; ++i) {
                    const int q = i < 16 ? row[2 + i] & 15 : row[2 + i - 16] >> 4;
                    out[b * kBlock + i] = half_at(row) * static_cast<float>(q - 8);
                }
            return;
        case chipmesh::kQ4_1:
            for (std::int64_t b = 0; b < size / kBlock; ++b, row += 20)
                for (int i = 0; i < kBlock; ++i) {
                    const int q = i < 16 ? row[4 + i] & 15 : row[4 + i - 16] >> 4;
                    out[b * kBlock + i] = half_at(row) * static_cast<float>(q) + half_at(row + 2);
                }
            return;
        default: return;
    }
}

std::int64_t argmax(const float* logits, std::int64_t size) {
    const std::int64_t whole = size / 16 * 16;
    V16 tops = splat(-INFINITY), differences = splat(0.0f);
    for (std::int64_t i = 0; i < whole; i += 16) {
        const V16 x = load(logits + i);
        tops = max(tops, x);
        // x - x is 0, or not a number where x is not finite.
        differences = differences + (x - x);
    }
    float top = largest(tops), check = sum(differences);
    for (std::int64_t i = whole; i < size; ++i) top = logits[i] > top ? logits[i] : top, check += logits[i] - logits[i];
    if (!(check == 0.0f)) return -1;
    for (std::int64_t i = 0; i < size; ++i)
        if (logits[i] == top) return i;
    return -1;
}

void weigh_scores(const float* logits, std::int64_t size, double largest, double temperature, double* scores,
                  double* weights) {
    for (std::int64_t i = 0; i < size; ++i) scores[i] = (static_cast<double>(logits[i]) - largest) / temperature;
    for (std::int64_t i = 0; i < size; ++i) weights[i] = exponential(scores[i]);
}

std::int64_t fma_limit(std::int64_t turns, float* sink) {
    constexpr int kChains = kMaxRows >= 12 ? 12 : 5;
    V16 sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = splat(static_cast<float>(i) + *sink);
    const V16 a = splat(0.999f), b = splat(1e-3f + *sink);
    for (std::int64_t t = 0; t < turns; ++t)
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], a, b);
    V16 total = sums[0];
    for (int i = 1; i < kChains; ++i) total = total + sums[i];
    *sink = sum(total) * 0.0f;
    return turns * kChains * 16 * 2;
}

float read_limit(const float* values, std::int64_t count) {
    V16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (std::int64_t i = 0; i + 64 <= count; i += 64)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] = sums[j] + load(values + i + 16 * j);
    return sum(sums[0] + sums[1] + (sums[2] + sums[3]));
}

}  // namespace
