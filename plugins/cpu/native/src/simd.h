// Sixteen float lanes on whatever the processor has. Every operation is exact per lane, and the order of a
// reduction is fixed, so that all instruction sets with a fused multiply-add give the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

inline float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    std::uint32_t bits;
    if (rest >= 0x7c00u) {
        bits = 0x7f800000u | (rest & 0x3ffu) << 13;
    } else {
        // Exponent and mantissa in place; the product by 2^112 mends the bias and makes subnormals normal.
        bits = rest << 13;
        float value;
        std::memcpy(&value, &bits, 4);
        value *= 5.192296858534828e33f;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#if defined(__AVX512F__)

constexpr int kMaxRows = 12;    // rows of a tile: 24 sums, the rest of the registers for decoding
constexpr int kWholeRows = 12;  // up to so many all 32 columns of a panel are summed at once
constexpr int kSumRegisters = 16, kScoreQueries = 12;  // of attention: vectors of values, queries that are scored at once
constexpr int kWholeWordRows = 12;  // the same for weights in words
constexpr int kDepth = 512;   // inner dimension of a tile at a time

struct V16 {
    __m512 v;
};
inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
inline V16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V16 round_even(V16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
inline V16 two_to(V16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline V16 load_half(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline V16 load_signed(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline V16 load_bfloat(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// 16 words of 8 nibbles. A permutation reads the lowest 4 bits of its indices only: shift, look up.
struct Nibbles {
    __m512i words;
    void load(const std::uint8_t* p) { words = _mm512_loadu_si512(p); }
    V16 get(int index) const {
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * index), table)};
    }
};
// The compiler makes `a` here, not earlier.
inline void in_order(V16& a) { asm volatile("" : "+v"(a.v)); }
// A value that several products share: else each of them reads it from memory, of which there is one read a cycle.
inline void in_register(V16& a) { in_order(a); }
inline __m256 lower(V16 a) { return _mm512_castps512_ps256(a.v); }
inline __m256 upper(V16 a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }

#elif defined(__AVX2__)

constexpr int kMaxRows = 6;
constexpr int kWholeRows = 3;
constexpr int kSumRegisters = 4, kScoreQueries = 2;
constexpr int kWholeWordRows = 2;
constexpr int kDepth = 192;  // 24 KiB of weights in L1

struct V16 {
    __m256 a, b;
};
inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline V16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V16 operator+(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V16 operator-(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V16 operator*(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V16 operator/(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V16 round_even(V16 x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 two_to_8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline V16 two_to(V16 n) { return {two_to_8(n.a), two_to_8(n.b)}; }
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline V16 load_half(const std::uint16_t* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}; }
inline __m256 signed_8(const std::int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p))); }
inline V16 load_signed(const std::int8_t* p) { return {signed_8(p), signed_8(p + 8)}; }
inline __m256 bfloat_8(const std::uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
inline V16 load_bfloat(const std::uint16_t* p) { return {bfloat_8(p), bfloat_8(p + 8)}; }
// Words stay in memory: sixteen registers are too few to keep them beside the sums.
struct Nibbles {
    const std::uint8_t* p;
    void load(const std::uint8_t* words) { p = words; }
    static __m256 part(const std::uint8_t* words, int index) {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
        return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(all, 4 * index), _mm256_set1_epi32(15)));
    }
    V16 get(int index) const { return {part(p, index), part(p + 32, index)}; }
};
inline void in_order(V16& x) { asm volatile("" : "+x"(x.a), "+x"(x.b) : : "memory"); }
inline void in_register(V16&) {}
inline __m256 lower(V16 x) { return x.a; }
inline __m256 upper(V16 x) { return x.b; }

#else  // NEON as four registers, or plain C++ that the compiler may vectorise

#if defined(__ARM_NEON)
constexpr int kMaxRows = 6;
constexpr int kWholeRows = 3;
constexpr int kSumRegisters = 4, kScoreQueries = 2;
constexpr int kWholeWordRows = 2;
#else
constexpr int kMaxRows = 2;
constexpr int kWholeRows = 2;
constexpr int kSumRegisters = 4, kScoreQueries = 1;
constexpr int kWholeWordRows = 2;
#endif
constexpr int kDepth = 192;

struct V16 {
    float v[16];
};
#define CHIPMESH_LANES(expression)          \
    V16 r;                                  \
    for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
    return r
#if defined(__ARM_NEON)
#define CHIPMESH_QUADS(expression)                                      \
    V16 r;                                                              \
    for (int i = 0; i < 16; i += 4) vst1q_f32(r.v + i, (expression));   \
    return r
inline float32x4_t quad(const V16& a, int i) { return vld1q_f32(a.v + i); }
inline V16 fma(V16 a, V16 b, V16 c) { CHIPMESH_QUADS(vfmaq_f32(quad(c, i), quad(a, i), quad(b, i))); }
#else
// Not fused: a processor that has no fused multiply-add has bits of its own.
inline V16 fma(V16 a, V16 b, V16 c) { CHIPMESH_LANES(a.v[i] * b.v[i] + c.v[i]); }
#endif
inline void in_order(V16&) {}
inline void in_register(V16&) {}
inline V16 load(const float* p) { CHIPMESH_LANES(p[i]); }
inline void store(float* p, V16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline V16 splat(float x) { CHIPMESH_LANES(x); }
inline V16 operator+(V16 a, V16 b) { CHIPMESH_LANES(a.v[i] + b.v[i]); }
inline V16 operator-(V16 a, V16 b) { CHIPMESH_LANES(a.v[i] - b.v[i]); }
inline V16 operator*(V16 a, V16 b) { CHIPMESH_LANES(a.v[i] * b.v[i]); }
inline V16 operator/(V16 a, V16 b) { CHIPMESH_LANES(a.v[i] / b.v[i]); }
// As x86 has them: the second operand where either is not a number.
inline V16 max(V16 a, V16 b) { CHIPMESH_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline V16 min(V16 a, V16 b) { CHIPMESH_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline V16 round_even(V16 a) {
    // Adding and taking away 1.5 * 2^23 leaves a whole number, halves to even; |a| < 2^22 here.
    CHIPMESH_LANES((a.v[i] + 12582912.0f) - 12582912.0f);
}
inline float power_of_two(float n) {
    const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline V16 two_to(V16 n) { CHIPMESH_LANES(power_of_two(n.v[i])); }
inline V16 load_half(const std::uint16_t* p) { CHIPMESH_LANES(half_to_float(p[i])); }
inline V16 load_signed(const std::int8_t* p) { CHIPMESH_LANES(static_cast<float>(p[i])); }
inline float bfloat_to_float(std::uint16_t half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline V16 load_bfloat(const std::uint16_t* p) { CHIPMESH_LANES(bfloat_to_float(p[i])); }
struct Nibbles {
    std::uint32_t words[16];
    void load(const std::uint8_t* p) { std::memcpy(words, p, sizeof words); }
    V16 get(int index) const { CHIPMESH_LANES(static_cast<float>(words[i] >> (4 * index) & 15)); }
};

#endif

#if defined(__AVX512F__) || defined(__AVX2__)
// Halves, then quarters: lane i with i + 8, i + 4, i + 2, i + 1.
inline float sum(V16 x) {
    const __m256 eight = _mm256_add_ps(lower(x), upper(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(V16 x) {
    const __m256 eight = _mm256_max_ps(lower(x), upper(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
#else
inline float sum(V16 x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}
inline float largest(V16 x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
#endif

// e^x within 2 ulp for x in [-87, 88], clamped beyond: Cody-Waite reduction by ln 2, then the polynomial of
// degree 6 that Cephes has for |r| <= ln 2 / 2.
inline V16 exponential(V16 x) {
    x = min(max(x, splat(-87.0f)), splat(88.0f));
    const V16 n = round_even(x * splat(1.44269504088896341f));
    V16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    V16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    return p * two_to(n);
}

#if defined(__FMA__) || defined(__ARM_NEON)
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
inline double fused(double a, double b, double c) { return a * b + c; }
#endif

// e^x within 1 ulp for x in [-708, 0], 0 below: reduction by ln 2 in two parts, then Taylor's polynomial of degree 13
// for |r| <= ln 2 / 2. Without branches, so that loops over it become vectors.
inline double exponential(double x) {
    const double bounded = x > -708.0 ? x : -708.0;
    // Adding 1.5 * 2^52 leaves the nearest whole number in the lowest bits.
    const double shifted = bounded * 1.44269504088896340736 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    double r = fused(n, -6.93147180369123816490e-01, bounded);
    r = fused(n, -1.90821492927058770002e-10, r);
    double p = 1.0 / 6227020800.0;
    p = fused(p, r, 1.0 / 479001600.0);
    p = fused(p, r, 1.0 / 39916800.0);
    p = fused(p, r, 1.0 / 3628800.0);
    p = fused(p, r, 1.0 / 362880.0);
    p = fused(p, r, 1.0 / 40320.0);
    p = fused(p, r, 1.0 / 5040.0);
    p = fused(p, r, 1.0 / 720.0);
    p = fused(p, r, 1.0 / 120.0);
    p = fused(p, r, 1.0 / 24.0);
    p = fused(p, r, 1.0 / 6.0);
    p = fused(p, r, 0.5);
    p = fused(p, r, 1.0);
    p = fused(p, r, 1.0);
    std::int64_t bits;
    std::memcpy(&bits, &shifted, 8);
    std::int64_t scale_bits = (bits + 1023) << 52;
    double scale;
    std::memcpy(&scale, &scale_bits, 8);
    return x >= -708.0 ? p * scale : 0.0;
}

}  // namespace
