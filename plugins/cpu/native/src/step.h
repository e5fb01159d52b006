// One forward pass over the tokens of a step, all phases of it, by a team of threads.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "model.h"
#include "sampling.h"
#include "threads.h"

namespace chipmesh {

// Filled in by the caller; field for field as in plugins/cpu/native/library.py.
struct StepArguments {
    std::int64_t tokens;              // decode rows and the tokens of prefill rows
    const std::int32_t* token_ids;    // [tokens]
    const std::int32_t* positions;    // [tokens]
    const std::int32_t* sequences;    // [tokens]: row of `tables`
    const std::int32_t* tables;       // [sequences][table_width]: pages
    std::int64_t table_width;
    float* cache;                     // [layers][2][pages][kv heads][page_size x head size], see Attention
    std::int64_t page_count, page_size;
    std::int64_t sampled;             // rows that get logits
    const std::int32_t* sampled_rows; // [sampled]: index among the tokens
    float* logits;                    // [sampled][vocab]
    const std::int32_t* sampled_slots; // [sampled]: slot in `settings`, or nullptr: logits only
    SlotSettings settings;
    std::int32_t* chosen;             // [sampled]: token, or -1 where a logit is not finite
    const std::int32_t* allowed_rows; // [sampled]: row of `allowed`, or -1 where every token is; nullptr: it is everywhere
    const std::uint32_t* allowed;     // [rows][vocab / 32, rounded up]: bit i % 32 of word i / 32 for token i
};

// What a step's time goes to; the names are in library.py.
enum Phase { kEmbed, kNorm, kRound, kQkvProduct, kRotate, kAttend, kOutProduct, kGateUpProduct, kDownProduct, kGather, kHeadProduct, kSample, kPhases };

// One run of a phase, by the first thread's clock (nanoseconds of steady_clock); as in plugins/cpu/native/library.py.
struct PhaseRun {
    std::int64_t phase, begun, ended;
};

// What phases took, waiting for the team included, between start_timing and stop_timing.
struct Timing {
    std::array<std::int64_t, kPhases> calls{};
    std::array<double, kPhases> seconds{};
    std::vector<PhaseRun> runs;  // the first ones, as many as were wanted
    std::size_t most_runs = 0;
};

class Step {
  public:
    Step(const Model& model, const Kernels& kernels, Team& team)
        : model_(model), kernels_(kernels), team_(team), job_([this](Walk& walk) { work(walk); }) {}
    // A thread that was late for the end of the last step may still have a piece in hand, which it does in vain.
    ~Step() { team_.settle(); }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    // False, and nothing has happened, where an argument points outside the model or its cache.
    bool run(const StepArguments& arguments);
    // One product by itself: a as chipmesh_multiply has it -> out [rows][outputs].
    void multiply_alone(const Matrix& matrix, const float* a, std::int64_t rows, float* out);
    // From the next step on, without effect on what it computes. Not while a step runs.
    void start_timing(std::size_t most_runs);
    Timing stop_timing();

  private:
    struct Local {
        std::vector<float> normed, tiles, scratch, partials;
        std::vector<std::int32_t> rounded;
    };
    // What a product multiplies: rows in blocks, as float32 or as int8, as its matrix has it.
    struct Input {
        const float* values;
        const std::int32_t* rounded;
    };

    // Tokens of one sequence that attend together.
    struct Rows {
        std::int64_t first, count;
        std::int64_t last() const { return first + count - 1; }
    };

    bool is_sound() const;
    void find_rows();
    void make_room();
    void work(Walk& walk);
    bool is_timed(const Walk& walk) const { return timed_ && walk.thread() == 0; }
    void ended(const Walk& walk, Phase phase);
    void record(Phase phase, std::chrono::steady_clock::time_point until);
    void embed(Walk& walk);
    void gather_sampled(Walk& walk);
    Input normalise(Walk& walk, const std::vector<float>& weight, const float* rows, const Blocks& blocks, const Matrix& next);
    Input round(Walk& walk, const float* rows, const Blocks& blocks, const Matrix& next);
    void round_to(std::int32_t* to, const Blocks& blocks, const float* values, std::int64_t inner, std::int64_t row) const;
    template <class Finish>
    void multiply(Walk& walk, Phase phase, const Matrix& matrix, const Input& a, const Blocks& blocks, const Ahead& ahead,
                  const Finish& finish);
    void find_stretches();
    // What of a layer's keys and values the product of this phase fetches, which goes before that layer's attention.
    Ahead ahead_of(std::int64_t layer, Phase phase) const;
    void attend(Walk& walk, std::int64_t layer);
    void attend_rows(Local& own, std::int64_t layer, const Rows& rows, std::int64_t group);
    void attend_in_splits(Walk& walk, std::int64_t layer);
    void finish_attention(const Partial& total, std::int64_t layer, const Rows& rows, std::int64_t group);
    void rotate_and_write(std::int64_t layer, std::int64_t row, std::int64_t group);
    Attention attention_of(std::int64_t layer, const Rows& rows, std::int64_t group) const;
    Partial partial_at(float* memory, std::int64_t rows = 1) const;
    float* cache_of(std::int64_t layer, int part, std::int64_t group) const;
    std::int64_t page_stride() const;
    // The bits of the tokens that a sampled row may take; nullptr: all of them.
    const std::uint32_t* allowed_of(std::int64_t row) const;
    void sample(Walk& walk);

    const Model& model_;
    const Kernels& kernels_;
    Team& team_;
    const Team::Job job_;
    StepArguments at_{};
    Blocks blocks_{}, head_blocks_{};
    bool alone_ = false;   // every token is of a sequence of its own: it attends to no other token of this step
    bool spread_ = false;  // few tokens with long contexts: their splits are shared out
    std::int64_t longest_ = 0;
    bool timed_ = false;
    std::chrono::steady_clock::time_point phase_begun_;
    std::chrono::steady_clock::duration rotated_{};  // of the phase at hand, where positions are in it
    Timing timing_;
    std::vector<Local> locals_;
    // attended_, inner_: in blocks, or row by row where what is next wants them in int8.
    std::vector<float> residual_, normed_, qkv_, attended_, inner_, partials_, sampled_rows_;
    std::vector<std::int32_t> rounded_;  // of the product at hand
    std::vector<Rows> rows_;             // all tokens of the step
    std::vector<std::int64_t> stretches_;  // of a layer's keys and values that this step reads, from the layer's first byte
};

}  // namespace chipmesh
