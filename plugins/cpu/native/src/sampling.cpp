#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace chipmesh {

namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

// The log-weights of a row's tokens, 0 for the largest, and the weights.
struct Row {
    std::vector<double> scores, weights;
};

// The `count` largest scores, descending.
void order(const std::vector<double>& scores, std::int64_t count, std::vector<double>& ordered) {
    ordered.resize(count);
    std::partial_sort_copy(scores.begin(), scores.end(), ordered.begin(), ordered.end(), std::greater<double>());
}

// Scores by how far they lie below the largest; the last bin takes all that lie further.
constexpr std::int64_t kBins = 1024;
constexpr double kBinsPerUnit = 16.0;

std::int64_t bin_of(double score) {
    const double place = -score * kBinsPerUnit;
    return place < static_cast<double>(kBins - 1) ? static_cast<std::int64_t>(place) : kBins - 1;
}

// The score at which the largest, of those at or above `by_k`, reach the share p of them. By bins, so that only the
// bin in which that happens is sorted, however flat the distribution.
double top_p_floor(const Row& row, double by_k, double p) {
    double masses[kBins] = {};
    const std::int64_t vocab = static_cast<std::int64_t>(row.scores.size());
    for (std::int64_t i = 0; i < vocab; ++i)
        if (row.scores[i] >= by_k) masses[bin_of(row.scores[i])] += row.weights[i];
    double total = 0.0;
    for (const double mass : masses) total += mass;
    const double goal = p * total;
    double sum = 0.0;
    std::int64_t bin = 0;
    while (bin < kBins - 1 && sum + masses[bin] < goal) sum += masses[bin++];
    static thread_local std::vector<std::pair<double, double>> members;
    members.clear();
    for (std::int64_t i = 0; i < vocab; ++i)
        if (row.scores[i] >= by_k && bin_of(row.scores[i]) == bin) members.emplace_back(row.scores[i], row.weights[i]);
    std::sort(members.begin(), members.end(), std::greater<std::pair<double, double>>());
    for (const auto& [score, weight] : members)
        if ((sum += weight) >= goal) return score;
    // Summed in another order, all of them may miss p by the last ulp: then the set is all of them.
    return members.empty() ? by_k : members.back().first;
}

double filter_floor(const Row& row, const SamplingRow& settings) {
    static thread_local std::vector<double> ordered;
    double by_k = kNone;
    if (settings.top_k > 0) {
        order(row.scores, std::min(settings.top_k, static_cast<std::int64_t>(row.scores.size())), ordered);
        by_k = ordered.back();
    }
    if (settings.top_p >= 1.0f) return by_k;
    return std::max(by_k, top_p_floor(row, by_k, static_cast<double>(settings.top_p)));
}

}  // namespace

double uniform(std::uint64_t seed, std::uint64_t choice, std::uint64_t output_index) {
    std::uint32_t c0 = static_cast<std::uint32_t>(output_index), c1 = static_cast<std::uint32_t>(output_index >> 32);
    std::uint32_t c2 = static_cast<std::uint32_t>(choice), c3 = 0;
    std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<std::uint32_t>(p1);
        c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<std::uint32_t>(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (static_cast<double>(c0 >> 5) * 67108864.0 + static_cast<double>(c1 >> 6)) / 9007199254740992.0;
}

std::int64_t largest_allowed(const float* logits, std::int64_t vocab, const std::uint32_t* allowed) {
    std::int64_t top = -1;
    for (std::int64_t word = 0; word * 32 < vocab; ++word)
        for (std::uint32_t left = allowed[word]; left != 0; left &= left - 1) {
            const std::int64_t token = word * 32 + __builtin_ctz(left);
            if (token < vocab && (top < 0 || logits[token] > logits[top])) top = token;
        }
    return top;
}

std::int64_t draw(const Kernels& kernels, const float* logits, std::int64_t vocab, std::int64_t top,
                  const SamplingRow& settings, const std::uint32_t* allowed) {
    static thread_local Row row;
    row.scores.resize(vocab), row.weights.resize(vocab);
    kernels.weigh_scores(logits, vocab, logits[top], settings.temperature, row.scores.data(), row.weights.data());
    if (allowed != nullptr)
        for (std::int64_t i = 0; i < vocab; ++i)
            if (!is_allowed(allowed, i)) row.scores[i] = kNone, row.weights[i] = 0.0;
    double floor = settings.min_p > 0.0f ? std::log(static_cast<double>(settings.min_p)) : kNone;
    floor = std::max(floor, filter_floor(row, settings));
    // Cumulative weights in place of the weights.
    double sum = 0.0;
    for (std::int64_t i = 0; i < vocab; ++i) row.weights[i] = sum += row.scores[i] >= floor ? row.weights[i] : 0.0;
    const double number = uniform(settings.seed, settings.choice, static_cast<std::uint64_t>(settings.output_index));
    const double target = std::min(number * sum, std::nextafter(sum, 0.0));
    return std::upper_bound(row.weights.begin(), row.weights.end(), target) - row.weights.begin();
}

}  // namespace chipmesh
