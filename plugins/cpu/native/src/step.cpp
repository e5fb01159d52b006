#include "step.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace chipmesh {

namespace {

constexpr std::int64_t kFewRows = 4;  // so many rows each thread normalises for itself: less than a wait costs
constexpr std::int64_t kPiecesPerThread = 8;
constexpr std::int64_t kRowsTogether = 4;  // tokens of a sequence that attend together, at most; divides kSplit
// Keys and values that are fetched for the next attention, in stretches: as many as caches hold, and as products hide, each
// behind so many multiply-adds of float32 (int8 does four in that time). Measured; more of them made products wait.
constexpr std::int64_t kMostAhead = (12 << 20) / kStretch, kWorkPerStretch = 1800;
constexpr std::int64_t kTiles = 16384;  // results of a product that a thread keeps before it passes them on: 64 KiB

template <class Value>
void grow(std::vector<Value>& memory, std::int64_t size) {
    if (static_cast<std::int64_t>(memory.size()) < size) memory.resize(size);
}

// Where value 0 of a row lies among rows in blocks; value i is i * step further.
struct Place {
    float* first;
    std::int64_t step;
};

Place place_of(float* rows, const Blocks& blocks, std::int64_t inner, std::int64_t row) {
    const std::int64_t block = blocks.holding(row), first = blocks.first(block);
    return {rows + first * inner + (row - first), blocks.size(block)};
}

// The same for rows that go into a product with `next`.
Place place_for(const Matrix& next, float* rows, const Blocks& blocks, std::int64_t row) {
    return next.int8 ? Place{rows + row * next.inner, 1} : place_of(rows, blocks, next.inner, row);
}

std::int64_t rounded_words(std::int64_t rows, std::int64_t inner) { return rows * (inner / kBlock) * kRoundedWords; }

void add_bias(float* sums, int rows, const float* bias, std::int64_t columns) {
    for (int r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < columns; ++i) sums[r * kPanel + i] += bias[i];
}

// A product's result for one block of rows and one panel of columns: sums [rows][32], `columns` of them real.
struct Tile {
    std::int64_t row;
    int rows;
    std::int64_t column, columns;
    const float* sums;
};

void copy_tile(const Tile& t, float* to, std::int64_t stride) {
    for (int r = 0; r < t.rows; ++r)
        std::memcpy(to + (t.row + r) * stride + t.column, t.sums + r * kPanel, t.columns * sizeof(float));
}

}  // namespace

bool Step::run(const StepArguments& arguments) {
    team_.settle();
    at_ = arguments;
    if (!is_sound()) return false;
    blocks_ = Blocks::of(at_.tokens, kernels_.max_rows);
    head_blocks_ = Blocks::of(at_.sampled, kernels_.max_rows);
    make_room();
    find_rows();
    find_stretches();
    if (timed_) phase_begun_ = std::chrono::steady_clock::now();
    team_.run(job_);
    return true;
}

// What the executor has checked already must not become a crash.
bool Step::is_sound() const {
    const Sizes& s = model_.sizes;
    const auto inside = [](std::int64_t value, std::int64_t size) { return value >= 0 && value < size; };
    for (std::int64_t i = 0; i < at_.sampled; ++i)
        if (!inside(at_.sampled_rows[i], at_.tokens)) return false;
    for (std::int64_t i = 0; i < at_.tokens; ++i) {
        const std::int64_t position = at_.positions[i], page = position / at_.page_size;
        if (!inside(at_.token_ids[i], s.vocab) || !inside(position, s.context) || !inside(page, at_.table_width)) return false;
        // The last token of a sequence's run reads the pages of all others of it.
        if (i + 1 < at_.tokens && at_.sequences[i + 1] == at_.sequences[i]) continue;
        for (std::int64_t p = 0; p <= page; ++p)
            if (!inside(at_.tables[at_.sequences[i] * at_.table_width + p], at_.page_count)) return false;
    }
    return true;
}

void Step::make_room() {
    const Sizes& s = model_.sizes;
    longest_ = 0;
    alone_ = true;
    for (std::int64_t i = 0; i < at_.tokens; ++i) {
        longest_ = std::max<std::int64_t>(longest_, at_.positions[i] + 1);
        alone_ = alone_ && (i == 0 || at_.sequences[i] != at_.sequences[i - 1]);
    }
    const std::int64_t splits = (longest_ + kSplit - 1) / kSplit, group = s.heads / s.kv_heads;
    spread_ = splits > 1 && at_.tokens * s.kv_heads < kPiecesPerThread * team_.size();
    const std::int64_t partial = group * (2 + s.head_size);
    grow(residual_, at_.tokens * s.hidden);
    grow(normed_, at_.tokens * s.hidden);
    grow(qkv_, at_.tokens * s.qkv());
    grow(attended_, at_.tokens * s.query());
    grow(inner_, at_.tokens * s.inner);
    grow(sampled_rows_, at_.sampled * s.hidden);
    const std::int64_t widest = std::max({s.hidden, s.query(), s.inner});
    if (model_.int8) grow(rounded_, rounded_words(std::max(at_.tokens, at_.sampled), widest));
    if (spread_) grow(partials_, at_.tokens * s.kv_heads * splits * partial);
    locals_.resize(team_.size());
    for (Local& own : locals_) {
        grow(own.normed, kFewRows * s.hidden);
        grow(own.tiles, std::max((kGroupRows + kernels_.max_rows) * kPanel, kTiles));
        grow(own.scratch, kScratch);
        grow(own.partials, 2 * kRowsTogether * partial);
        if (model_.int8) grow(own.rounded, rounded_words(kFewRows, widest));
    }
}

// The first thread keeps the time.
void Step::ended(const Walk& walk, Phase phase) {
    if (!is_timed(walk)) return;
    if (rotated_.count() > 0) record(kRotate, phase_begun_ + rotated_);
    rotated_ = {};
    record(phase, std::chrono::steady_clock::now());
}

void Step::record(Phase phase, std::chrono::steady_clock::time_point until) {
    const auto nanoseconds = [](std::chrono::steady_clock::time_point at) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
    };
    ++timing_.calls[phase];
    timing_.seconds[phase] += std::chrono::duration<double>(until - phase_begun_).count();
    if (timing_.runs.size() < timing_.most_runs) timing_.runs.push_back({phase, nanoseconds(phase_begun_), nanoseconds(until)});
    phase_begun_ = until;
}

void Step::start_timing(std::size_t most_runs) {
    timing_ = {};
    timing_.most_runs = most_runs;
    timing_.runs.reserve(most_runs);
    timed_ = true;
}

Timing Step::stop_timing() {
    timed_ = false;
    Timing taken;
    std::swap(taken, timing_);
    return taken;
}

void Step::work(Walk& walk) {
    const Sizes& s = model_.sizes;
    const auto add = [&](const Tile& t) {
        for (int r = 0; r < t.rows; ++r) {
            float* sums = residual_.data() + (t.row + r) * s.hidden + t.column;
            for (std::int64_t i = 0; i < t.columns; ++i) sums[i] += t.sums[r * kPanel + i];
        }
    };
    embed(walk);
    for (std::int64_t l = 0; l < s.layers; ++l) {
        const Layer& layer = model_.layers[l];
        Input a = normalise(walk, layer.input_norm, residual_.data(), blocks_, layer.qkv);
        multiply(walk, kQkvProduct, layer.qkv, a, blocks_, ahead_of(l, kQkvProduct), [&](const Tile& t) { copy_tile(t, qkv_.data(), s.qkv()); });
        attend(walk, l);
        a = round(walk, attended_.data(), blocks_, layer.out);
        multiply(walk, kOutProduct, layer.out, a, blocks_, ahead_of(l + 1, kOutProduct), add);
        a = normalise(walk, layer.post_norm, residual_.data(), blocks_, layer.gate_up);
        multiply(walk, kGateUpProduct, layer.gate_up, a, blocks_, ahead_of(l + 1, kGateUpProduct), [&](const Tile& t) {
            // A tile is within one block of rows, and half of its columns are gates.
            const Place first = place_for(layer.down, inner_.data(), blocks_, t.row);
            const std::int64_t row_step = layer.down.int8 ? s.inner : 1;
            kernels_.silu_mul(t.sums, t.rows, first.first + t.column / 2 * first.step, row_step, first.step);
        });
        a = round(walk, inner_.data(), blocks_, layer.down);
        multiply(walk, kDownProduct, layer.down, a, blocks_, ahead_of(l + 1, kDownProduct), add);
    }
    if (at_.sampled == 0) return;
    gather_sampled(walk);
    const Input a = normalise(walk, model_.final_norm, sampled_rows_.data(), head_blocks_, model_.head);
    multiply(walk, kHeadProduct, model_.head, a, head_blocks_, {}, [&](const Tile& t) { copy_tile(t, at_.logits, s.vocab); });
    if (at_.sampled_slots != nullptr) sample(walk);
}

void Step::embed(Walk& walk) {
    const std::int64_t hidden = model_.sizes.hidden, bytes = row_bytes(model_.embedding_encoding, hidden);
    walk.each(at_.tokens, [&](std::int64_t row) {
        kernels_.decode_row(model_.embedding_encoding, model_.embedding.data() + at_.token_ids[row] * bytes, hidden,
                            residual_.data() + row * hidden);
    });
    ended(walk, kEmbed);
}

void Step::gather_sampled(Walk& walk) {
    const std::int64_t hidden = model_.sizes.hidden;
    walk.each(at_.sampled, [&](std::int64_t row) {
        std::memcpy(sampled_rows_.data() + row * hidden, residual_.data() + at_.sampled_rows[row] * hidden,
                    hidden * sizeof(float));
    });
    ended(walk, kGather);
}

Step::Input Step::normalise(Walk& walk, const std::vector<float>& weight, const float* rows, const Blocks& blocks,
                            const Matrix& next) {
    const std::int64_t hidden = model_.sizes.hidden;
    Local& own = locals_[walk.thread()];
    const auto one = [&](float* to, std::int32_t* rounded, std::int64_t row) {
        const Place place = next.int8 ? Place{own.normed.data(), 1} : place_of(to, blocks, hidden, row);
        kernels_.rms_norm(rows + row * hidden, weight.data(), model_.sizes.eps, hidden, place.first, place.step);
        if (next.int8) round_to(rounded, blocks, place.first, hidden, row);
    };
    if (blocks.rows <= kFewRows) {
        // What a late thread made of rows that have changed would go into no product.
        for (std::int64_t row = 0; row < blocks.rows && !walk.late(); ++row) one(own.normed.data(), own.rounded.data(), row);
        ended(walk, kNorm);
        return {own.normed.data(), own.rounded.data()};
    }
    // By blocks: rows of one block share their cache lines.
    walk.each(blocks.count, [&](std::int64_t block) {
        for (std::int64_t row = blocks.first(block); row < blocks.first(block + 1); ++row)
            one(normed_.data(), rounded_.data(), row);
    });
    ended(walk, kNorm);
    return {normed_.data(), rounded_.data()};
}

void Step::round_to(std::int32_t* to, const Blocks& blocks, const float* values, std::int64_t inner, std::int64_t row) const {
    const std::int64_t block = blocks.holding(row), first = blocks.first(block);
    kernels_.round_row(values, inner, to + rounded_words(first, inner), blocks.size(block), static_cast<int>(row - first));
}

// rows: as place_for has them.
Step::Input Step::round(Walk& walk, const float* rows, const Blocks& blocks, const Matrix& next) {
    if (!next.int8) return {rows, nullptr};
    if (blocks.rows <= kFewRows) {
        std::int32_t* own = locals_[walk.thread()].rounded.data();
        for (std::int64_t row = 0; row < blocks.rows && !walk.late(); ++row)
            round_to(own, blocks, rows + row * next.inner, next.inner, row);
        ended(walk, kRound);
        return {nullptr, own};
    }
    walk.each(blocks.count, [&](std::int64_t block) {
        for (std::int64_t row = blocks.first(block); row < blocks.first(block + 1); ++row)
            round_to(rounded_.data(), blocks, rows + row * next.inner, next.inner, row);
    });
    ended(walk, kRound);
    return {nullptr, rounded_.data()};
}

template <class Finish>
void Step::multiply(Walk& walk, Phase phase, const Matrix& matrix, const Input& a, const Blocks& blocks, const Ahead& ahead,
                    const Finish& finish) {
    const std::int64_t per_group = std::max<std::int64_t>(kGroupRows / kernels_.max_rows, 1);
    const std::int64_t groups = (blocks.count + per_group - 1) / per_group, pieces = matrix.panels * groups;
    const std::int64_t rows = std::min<std::int64_t>(per_group * kernels_.max_rows, blocks.rows), tile = rows * kPanel;
    Local& own = locals_[walk.thread()];
    const auto blocks_of = [&](std::int64_t piece) {
        const std::int64_t from = piece % groups * per_group;
        return std::pair{from, std::min(from + per_group, blocks.count)};
    };
    const auto compute = [&](std::int64_t first, std::int64_t last) {
        float* sums = own.tiles.data();
        for (std::int64_t piece = first; piece < last; ++piece, sums += tile) {
            const auto [from, to] = blocks_of(piece);
            const std::uint8_t* panel = matrix.panel(piece / groups);
            const Ahead part = ahead.part(piece, pieces);
            if (matrix.int8)
                kernels_.multiply_int8(a.rounded, blocks, from, to, matrix.inner, matrix.encoding, panel, sums, part);
            else
                kernels_.multiply(a.values, blocks, from, to, matrix.inner, matrix.encoding, panel, sums, own.scratch.data(), part);
        }
    };
    const auto pass_on = [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t piece = first; piece < last; ++piece) {
            const std::int64_t column = piece / groups * kPanel;
            const std::int64_t columns = std::min<std::int64_t>(kPanel, matrix.outputs - column);
            float* sums = own.tiles.data() + (piece - first) * tile;
            const auto [from, to] = blocks_of(piece);
            for (std::int64_t block = from; block < to; sums += blocks.size(block) * kPanel, ++block) {
                if (!matrix.bias.empty()) add_bias(sums, blocks.size(block), matrix.bias.data() + column, columns);
                finish(Tile{blocks.first(block), blocks.size(block), column, columns, sums});
            }
        }
    };
    const std::int64_t most = std::max<std::int64_t>(kTiles / tile, 1), work = rows * matrix.inner * kPanel;
    walk.each(pieces, most, work, compute, pass_on);
    ended(walk, phase);
}

void Step::multiply_alone(const Matrix& matrix, const float* a, std::int64_t rows, float* out) {
    team_.settle();
    const Blocks blocks = Blocks::of(rows, kernels_.max_rows);
    locals_.resize(team_.size());
    for (Local& own : locals_) {
        grow(own.tiles, std::max((kGroupRows + kernels_.max_rows) * kPanel, kTiles));
        grow(own.scratch, kScratch);
        grow(own.rounded, rounded_words(kFewRows, matrix.inner));
    }
    grow(rounded_, rounded_words(rows, matrix.inner));
    const Team::Job job = [&](Walk& walk) {
        const Input input = round(walk, a, blocks, matrix);
        multiply(walk, kEmbed, matrix, input, blocks, {}, [&](const Tile& t) { copy_tile(t, out, matrix.outputs); });
    };
    team_.run(job);
    team_.settle();
}

// Consecutive tokens of a sequence are together within each `most` positions: none of them is in another split then.
void Step::find_rows() {
    const std::int64_t heads = model_.sizes.heads / model_.sizes.kv_heads;
    std::int64_t most = kRowsTogether;
    while (most > 1 && most * heads > kMaxQueries) most /= 2;
    rows_.clear();
    for (std::int64_t row = 0; row < at_.tokens; ++row) {
        const bool follows = row > 0 && at_.sequences[row] == at_.sequences[row - 1] && at_.positions[row] == at_.positions[row - 1] + 1;
        if (follows && at_.positions[row] % most != 0)
            ++rows_.back().count;
        else
            rows_.push_back({row, 1});
    }
}

// The last sequences first, as attention goes where there are many.
void Step::find_stretches() {
    const Layer& layer = model_.layers[0];
    std::int64_t work = 0;
    for (const Matrix* matrix : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
        work += at_.tokens * matrix->panels * kPanel * matrix->inner / (matrix->int8 ? 4 : 1);
    const std::int64_t most = std::min(kMostAhead, work / kWorkPerStretch);
    const std::int64_t page_bytes = page_stride() * sizeof(float), part_bytes = at_.page_count * page_bytes;
    stretches_.clear();
    for (std::int64_t row = at_.tokens; row-- > 0;) {
        if (row + 1 < at_.tokens && at_.sequences[row + 1] == at_.sequences[row]) continue;
        const std::int32_t* pages = at_.tables + at_.sequences[row] * at_.table_width;
        const std::int64_t count = at_.positions[row] / at_.page_size + 1;
        for (std::int64_t page = 0; page < count; ++page) {
            if (static_cast<std::int64_t>(stretches_.size()) >= most) return;
            for (std::int64_t part = 0; part < 2; ++part)
                for (std::int64_t i = 0; i < page_bytes; i += kStretch)
                    stretches_.push_back(part * part_bytes + pages[page] * page_bytes + i);
        }
    }
}

Ahead Step::ahead_of(std::int64_t layer, Phase phase) const {
    if (layer == model_.sizes.layers || stretches_.empty()) return {};
    // In shares of their work.
    const Layer& own = model_.layers[layer];
    const std::array<std::pair<Phase, const Matrix*>, 4> products{{
        {kOutProduct, &own.out}, {kGateUpProduct, &own.gate_up}, {kDownProduct, &own.down}, {kQkvProduct, &own.qkv}}};
    std::int64_t before = 0, work = 0, total = 0;
    for (const auto& [name, matrix] : products) {
        if (name == phase) before = total, work = matrix->panels * matrix->inner;
        total += matrix->panels * matrix->inner;
    }
    const std::int64_t count = stretches_.size(), *all = stretches_.data();
    return {reinterpret_cast<const std::uint8_t*>(cache_of(layer, 0, 0)), all + count * before / total,
            all + count * (before + work) / total};
}

// Part 0 (keys) or 1 (values) of a layer: head `group` of page 0.
float* Step::cache_of(std::int64_t layer, int part, std::int64_t group) const {
    const std::int64_t head = at_.page_size * model_.sizes.head_size;
    return at_.cache + (2 * layer + part) * at_.page_count * page_stride() + group * head;
}

std::int64_t Step::page_stride() const { return at_.page_size * model_.sizes.kv_heads * model_.sizes.head_size; }

void Step::rotate_and_write(std::int64_t layer, std::int64_t row, std::int64_t group) {
    const Sizes& s = model_.sizes;
    const std::int64_t per_group = s.heads / s.kv_heads, size = s.head_size;
    const float* angles = model_.cos_sin.data() + at_.positions[row] * size;
    float* heads = qkv_.data() + row * s.qkv();
    for (std::int64_t h = 0; h < per_group; ++h)
        kernels_.rotate(heads + (group * per_group + h) * size, angles, static_cast<int>(size));
    float* key = heads + (s.heads + group) * size;
    kernels_.rotate(key, angles, static_cast<int>(size));
    const std::int64_t position = at_.positions[row], offset = position % at_.page_size;
    const std::int64_t page = at_.tables[at_.sequences[row] * at_.table_width + position / at_.page_size] * page_stride();
    float* keys = cache_of(layer, 0, group) + page + offset;
    for (std::int64_t i = 0; i < size; ++i) keys[i * at_.page_size] = key[i];
    std::memcpy(cache_of(layer, 1, group) + page + offset * size, key + s.kv_heads * size, size * sizeof(float));
}

Attention Step::attention_of(std::int64_t layer, const Rows& rows, std::int64_t group) const {
    const Sizes& s = model_.sizes;
    const std::int64_t per_group = s.heads / s.kv_heads, size = s.head_size;
    Attention made{};
    made.query = qkv_.data() + rows.first * s.qkv() + group * per_group * size;
    made.query_stride = s.qkv();
    made.rows = static_cast<int>(rows.count);
    made.length = at_.positions[rows.first] + 1;
    made.keys = cache_of(layer, 0, group);
    made.values = cache_of(layer, 1, group);
    made.pages = at_.tables + at_.sequences[rows.first] * at_.table_width;
    made.page_size = at_.page_size;
    made.page_stride = page_stride();
    made.heads = static_cast<int>(per_group);
    made.size = static_cast<int>(size);
    made.scale = s.scale;
    made.fetch = alone_;
    return made;
}

Partial Step::partial_at(float* memory, std::int64_t rows) const {
    const std::int64_t queries = rows * model_.sizes.heads / model_.sizes.kv_heads;
    return {memory, memory + queries, memory + 2 * queries};
}

void Step::finish_attention(const Partial& total, std::int64_t layer, const Rows& rows, std::int64_t group) {
    const Sizes& s = model_.sizes;
    const std::int64_t per_group = s.heads / s.kv_heads;
    for (std::int64_t query = 0; query < rows.count * per_group; ++query) {
        const Place to = place_for(model_.layers[layer].out, attended_.data(), blocks_, rows.first + query / per_group);
        const float share = 1.0f / total.weight[query];
        float* out = to.first + (group * per_group + query % per_group) * s.head_size * to.step;
        for (std::int64_t i = 0; i < s.head_size; ++i) out[i * to.step] = total.values[query * s.head_size + i] * share;
    }
}

void Step::attend(Walk& walk, std::int64_t layer) {
    const std::int64_t groups = model_.sizes.kv_heads, tokens = at_.tokens, parts = rows_.size();
    // Where no token attends to another of this step, positions, writing and attention are one phase.
    const bool together = alone_ && !spread_;
    if (!together) {
        walk.each(tokens * groups, [&](std::int64_t piece) { rotate_and_write(layer, piece / groups, piece % groups); });
        ended(walk, kRotate);
    }
    const auto rotate_first = [&](std::int64_t row, std::int64_t group) {
        if (!is_timed(walk)) return rotate_and_write(layer, row, group);
        const auto begun = std::chrono::steady_clock::now();
        rotate_and_write(layer, row, group);
        rotated_ += std::chrono::steady_clock::now() - begun;
    };
    const auto attend_to = [&](const Rows& rows, std::int64_t group) {
        if (together) rotate_first(rows.first, group);
        attend_rows(locals_[walk.thread()], layer, rows, group);
    };
    if (spread_) {
        attend_in_splits(walk, layer);
    } else if (parts < kPiecesPerThread * team_.size()) {
        walk.each(parts * groups, 1, [&](std::int64_t piece) { attend_to(rows_[piece / groups], piece % groups); });
    } else {
        // The longest first: a chunk's last tokens have most to read. Several at a time: rows of one block share
        // their cache lines.
        walk.each(parts, std::max<std::int64_t>(kernels_.max_rows * parts / tokens, 1), [&](std::int64_t piece) {
            for (std::int64_t group = 0; group < groups; ++group) attend_to(rows_[parts - 1 - piece], group);
        });
    }
    ended(walk, kAttend);
}

void Step::attend_rows(Local& own, std::int64_t layer, const Rows& rows, std::int64_t group) {
    const Attention attention = attention_of(layer, rows, group);
    const int queries = attention.rows * attention.heads;
    const std::int64_t length = at_.positions[rows.last()] + 1;
    const Partial total = partial_at(own.partials.data(), rows.count);
    const Partial next = partial_at(own.partials.data() + queries * (2 + attention.size), rows.count);
    kernels_.attend(attention, 0, std::min<std::int64_t>(kSplit, length), total);
    for (std::int64_t first = kSplit; first < length; first += kSplit) {
        kernels_.attend(attention, first, std::min(first + kSplit, length), next);
        kernels_.merge(total, next, queries, attention.size);
    }
    finish_attention(total, layer, rows, group);
}

void Step::attend_in_splits(Walk& walk, std::int64_t layer) {
    const Sizes& s = model_.sizes;
    const std::int64_t splits = (longest_ + kSplit - 1) / kSplit, per_group = s.heads / s.kv_heads;
    const std::int64_t partial = per_group * (2 + s.head_size), pieces = at_.tokens * s.kv_heads;
    walk.each(pieces * splits, [&](std::int64_t piece) {
        const std::int64_t row = piece / splits / s.kv_heads, group = piece / splits % s.kv_heads;
        const std::int64_t first = piece % splits * kSplit, length = at_.positions[row] + 1;
        if (first < length)
            kernels_.attend(attention_of(layer, {row, 1}, group), first, std::min(first + kSplit, length),
                            partial_at(partials_.data() + piece * partial));
    });
    walk.each(pieces, [&](std::int64_t piece) {
        const std::int64_t row = piece / s.kv_heads, length = at_.positions[row] + 1;
        float* memory = partials_.data() + piece * splits * partial;
        for (std::int64_t split = 1; split * kSplit < length; ++split)
            kernels_.merge(partial_at(memory), partial_at(memory + split * partial), static_cast<int>(per_group),
                           static_cast<int>(s.head_size));
        finish_attention(partial_at(memory), layer, {row, 1}, piece % s.kv_heads);
    });
}

const std::uint32_t* Step::allowed_of(std::int64_t row) const {
    if (at_.allowed_rows == nullptr || at_.allowed_rows[row] < 0) return nullptr;
    return at_.allowed + at_.allowed_rows[row] * ((model_.sizes.vocab + 31) / 32);
}

void Step::sample(Walk& walk) {
    const std::int64_t vocab = model_.sizes.vocab;
    walk.each(at_.sampled, 1, [&](std::int64_t row) {
        const float* logits = at_.logits + row * vocab;
        std::int64_t top = kernels_.argmax(logits, vocab);
        const std::uint32_t* allowed = allowed_of(row);
        if (top >= 0 && allowed != nullptr) top = largest_allowed(logits, vocab, allowed);
        const SamplingRow settings = at_.settings.of(at_.sampled_slots[row]);
        const bool greedy = top < 0 || settings.temperature == 0.0f;
        at_.chosen[row] = static_cast<std::int32_t>(greedy ? top : draw(kernels_, logits, vocab, top, settings, allowed));
    });
    ended(walk, kSample);
}

}  // namespace chipmesh
