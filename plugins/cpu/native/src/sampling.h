// Random sampling of one row as plugins/sdk/reference/sampling.py and philox.py define it.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace chipmesh {

struct SamplingRow {
    float temperature;   // 0: the largest logit
    std::int64_t top_k;  // 0: all
    float top_p;         // (0, 1]
    float min_p;         // [0, 1]
    std::uint64_t seed, choice;
    std::int64_t output_index;
};

// The settings of all slots, an array for each; field for field as in plugins/cpu/native/library.py.
struct SlotSettings {
    const float* temperature;
    const std::int64_t* top_k;
    const float *top_p, *min_p;
    const std::uint64_t *seed, *choice;
    const std::int64_t* output_index;

    SamplingRow of(std::int32_t slot) const {
        return {temperature[slot], top_k[slot], top_p[slot], min_p[slot], seed[slot], choice[slot], output_index[slot]};
    }
};

// In [0, 1), with 53 random bits: Philox4x32-10 of the row's key and counter.
double uniform(std::uint64_t seed, std::uint64_t choice, std::uint64_t output_index);

// top: index of the largest logit of those allowed; all are finite. allowed: a bit for each token, or nullptr for all of them.
std::int64_t draw(const Kernels& kernels, const float* logits, std::int64_t vocab, std::int64_t top, const SamplingRow& row,
                  const std::uint32_t* allowed);

inline bool is_allowed(const std::uint32_t* allowed, std::int64_t token) { return allowed[token / 32] >> token % 32 & 1u; }

// Index of the largest allowed logit, the lowest among equals; -1 where none is allowed.
std::int64_t largest_allowed(const float* logits, std::int64_t vocab, const std::uint32_t* allowed);

}  // namespace chipmesh
