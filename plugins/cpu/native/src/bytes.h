// Sums of products of unsigned and signed bytes, on whatever the processor has: kColumns columns at once, four inner
// values of each at a time. All of it is exact; what becomes float is one fused multiply-add, as everywhere else.
#pragma once

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace {

using chipmesh::kBlock;

#if defined(__AVX512F__)

// kPairRows: up to so many rows are multiplied with two groups of columns at once.
constexpr int kColumns = 16, kPairRows = 12;

struct Bytes {
    __m512i v;
};
struct Ints {
    __m512i v;
};
struct Floats {
    __m512 v;
};

inline Bytes load_bytes(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
inline Bytes splat_bytes(const std::int32_t* p) { return {_mm512_set1_epi32(*p)}; }
inline Ints no_products() { return {_mm512_setzero_si512()}; }
// The compiler knows nothing of `x` from here on.
inline void in_registers(__m512i& x) { asm volatile("" : "+v"(x)); }

#if defined(__AVX512VNNI__)
template <bool Small>
inline Ints add_products(Ints sums, Bytes w, Bytes a) {
    return {_mm512_dpbusd_epi32(sums.v, w.v, a.v)};
}
template <bool Small>
inline Ints finished(Ints sums) {
    return sums;
}
#else
// Small weights (at most 15): all of a block's products fit into 16 bits, 8 * 2 * 15 * 127. Others are widened first.
template <bool Small>
inline Ints add_products(Ints sums, Bytes w, Bytes a) {
    if constexpr (Small) return {_mm512_add_epi16(sums.v, _mm512_maddubs_epi16(w.v, a.v))};
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(a.v, 8));
    return {_mm512_add_epi32(sums.v, _mm512_add_epi32(even, odd))};
}
template <bool Small>
inline Ints finished(Ints sums) {
    if constexpr (Small) return {_mm512_madd_epi16(sums.v, _mm512_set1_epi16(1))};
    return sums;
}
#endif

template <int Doubled>
inline Ints add_shifted(Ints sums, const std::int32_t* p) {
    return {_mm512_add_epi32(sums.v, _mm512_slli_epi32(_mm512_set1_epi32(*p), Doubled))};
}
inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats splat_float(const float* p) { return {_mm512_set1_ps(*p)}; }
inline Floats load_halves(const std::uint16_t* p) { return {load_half(p).v}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fused(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline std::uint32_t largest_magnitude(const float* x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x), mask),
                                                    _mm512_and_si512(_mm512_loadu_si512(x + 16), mask)));
}

// 32 values times `factor`, halves to even, as 8 words of 4 bytes, `step` words apart; returns their sum.
inline int round_values(const float* x, float factor, bool finite, std::int32_t* out, int step) {
    __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
    __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), _mm512_set1_ps(factor)));
    if (!finite) a = b = _mm512_setzero_si512();
    alignas(32) std::int32_t words[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm512_cvtepi32_epi8(a));
    _mm_store_si128(reinterpret_cast<__m128i*>(words + 4), _mm512_cvtepi32_epi8(b));
    for (int i = 0; i < 8; ++i) out[i * step] = words[i];
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

#elif defined(__AVX2__)

constexpr int kColumns = 8, kPairRows = 4;

struct Bytes {
    __m256i v;
};
struct Ints {
    __m256i v;
};
struct Floats {
    __m256 v;
};

inline Bytes load_bytes(const std::uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Bytes low_nibbles(Bytes x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(15))}; }
inline Bytes splat_bytes(const std::int32_t* p) { return {_mm256_set1_epi32(*p)}; }
inline Ints no_products() { return {_mm256_setzero_si256()}; }
// The compiler knows nothing of `x` from here on.
inline void in_registers(__m256i& x) { asm volatile("" : "+x"(x)); }

// Small weights (at most 15): all of a block's products fit into 16 bits, 8 * 2 * 15 * 127. Others are widened first.
template <bool Small>
inline Ints add_products(Ints sums, Bytes w, Bytes a) {
    if constexpr (Small) return {_mm256_add_epi16(sums.v, _mm256_maddubs_epi16(w.v, a.v))};
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w.v, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w.v, 8), _mm256_srai_epi16(a.v, 8));
    return {_mm256_add_epi32(sums.v, _mm256_add_epi32(even, odd))};
}
template <bool Small>
inline Ints finished(Ints sums) {
    if constexpr (Small) return {_mm256_madd_epi16(sums.v, _mm256_set1_epi16(1))};
    return sums;
}
template <int Doubled>
inline Ints add_shifted(Ints sums, const std::int32_t* p) {
    return {_mm256_add_epi32(sums.v, _mm256_slli_epi32(_mm256_set1_epi32(*p), Doubled))};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store_floats(float* p, Floats x) { _mm256_storeu_ps(p, x.v); }
inline Floats splat_float(const float* p) { return {_mm256_set1_ps(*p)}; }
inline Floats load_halves(const std::uint16_t* p) { return {_mm256_cvtph_ps(load_128(p))}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats fused(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

inline __m256i magnitudes(const float* x) {
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), _mm256_set1_epi32(0x7fffffff));
}
inline std::uint32_t largest_magnitude(const float* x) {
    const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(magnitudes(x), magnitudes(x + 8)),
                                           _mm256_max_epi32(magnitudes(x + 16), magnitudes(x + 24)));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}

// 32 values times `factor`, halves to even, as 8 words of 4 bytes, `step` words apart; returns their sum.
inline int round_values(const float* x, float factor, bool finite, std::int32_t* out, int step) {
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        __m256i eight = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(factor)));
        if (!finite) eight = _mm256_setzero_si256();
        total = _mm256_add_epi32(total, eight);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        const __m128i bytes = _mm_packs_epi16(words, words);
        out[2 * i * step] = _mm_cvtsi128_si32(bytes), out[(2 * i + 1) * step] = _mm_extract_epi32(bytes, 1);
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

#else  // plain C++; NEON has it too

constexpr int kColumns = 16, kPairRows = 0;

struct Bytes {
    std::uint8_t v[64];
};
// Four sums for each column until they are finished: lane by lane the compiler makes vectors of it.
struct Ints {
    std::int32_t v[64];
};
struct Floats {
    float v[16];
};

inline Bytes load_bytes(const std::uint8_t* p) {
    Bytes r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline Bytes low_nibbles(Bytes x) {
    for (auto& each : x.v) each &= 15;
    return x;
}
inline Bytes high_nibbles(Bytes x) {
    for (auto& each : x.v) each >>= 4;
    return x;
}
inline Bytes splat_bytes(const std::int32_t* p) {
    Bytes r;
    for (int i = 0; i < 16; ++i) std::memcpy(r.v + 4 * i, p, 4);
    return r;
}
inline Ints no_products() { return {}; }
template <class Array>
inline void in_registers(Array& x) {
    asm volatile("" : "+m"(x));
}
template <bool Small>
inline Ints add_products(Ints sums, Bytes w, Bytes a) {
    for (int i = 0; i < 64; ++i) sums.v[i] += static_cast<std::int16_t>(w.v[i] * static_cast<std::int8_t>(a.v[i]));
    return sums;
}
template <bool Small>
inline Ints finished(Ints sums) {
    for (int i = 0; i < 16; ++i) sums.v[i] = sums.v[4 * i] + sums.v[4 * i + 1] + (sums.v[4 * i + 2] + sums.v[4 * i + 3]);
    return sums;
}
template <int Doubled>
inline Ints add_shifted(Ints sums, const std::int32_t* p) {
    for (int i = 0; i < 16; ++i) sums.v[i] += *p * (1 << Doubled);
    return sums;
}
inline Floats load_floats(const float* p) {
    Floats r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void store_floats(float* p, Floats x) { std::memcpy(p, x.v, sizeof x.v); }
#define CHIPMESH_COLUMNS(expression)                    \
    Floats r;                                           \
    for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
    return r
inline Floats to_floats(const Ints& x) { CHIPMESH_COLUMNS(static_cast<float>(x.v[i])); }
inline Floats splat_float(const float* p) { CHIPMESH_COLUMNS(*p); }
inline Floats load_halves(const std::uint16_t* p) { CHIPMESH_COLUMNS(half_to_float(p[i])); }
inline Floats operator*(const Floats& a, const Floats& b) { CHIPMESH_COLUMNS(a.v[i] * b.v[i]); }
// Fused by the library where the processor cannot: few are needed, and the bits are those of everybody else.
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { CHIPMESH_COLUMNS(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }

inline std::uint32_t largest_magnitude(const float* x) {
    std::uint32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// 32 values times `factor`, halves to even, as 8 words of 4 bytes, `step` words apart; returns their sum.
inline int round_values(const float* x, float factor, bool finite, std::int32_t* out, int step) {
    int sum = 0;
    for (int word = 0; word < 8; ++word) {
        std::int8_t bytes[4];
        for (int i = 0; i < 4; ++i) {
            // Adding and taking away 1.5 * 2^23 leaves a whole number, halves to even.
            const float whole = (x[4 * word + i] * factor + 12582912.0f) - 12582912.0f;
            bytes[i] = static_cast<std::int8_t>(finite ? whole : 0.0f);
            sum += bytes[i];
        }
        std::memcpy(out + word * step, bytes, 4);
    }
    return sum;
}

#endif

}  // namespace
