#include "threads.h"

#include <algorithm>

namespace chipmesh {

Team::Team(int size) : size_(size), hands_(new Hand[size]) {
    try {
        for (int thread = 1; thread < size; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
    } catch (...) {
        end();  // Those that did start: no destructor follows.
        throw;
    }
}

Team::~Team() { end(); }

void Team::end() {
    stopping_.store(true);
    started_.fetch_add(1);
    wake();
    for (auto& thread : threads_) thread.join();
}

void Team::settle() {
    while (inside_.load() != 0) std::this_thread::yield();
}

void Team::run(const Job& job) {
    settle();
    job_ = &job;
    first_phase_ = phase();
    open_.store(started_.load() + 1);
    started_.fetch_add(1);
    wake();
    Walk walk(*this, 0, first_phase_);
    job(walk);
    open_.store(0);
}

void Team::serve(int thread) {
    for (std::uint32_t seen = 0;;) {
        await([this, seen] { return started_.load() != seen; });
        if (stopping_.load()) return;
        seen = started_.load();
        // Counted before it looks: either settle() waits for this thread, or the thread sees that the job is over.
        inside_.fetch_add(1);
        if (open_.load() == seen) {
            Walk walk(*this, thread, first_phase_);
            (*job_)(walk);
        }
        inside_.fetch_sub(1);
    }
}

Team::Range Team::take(std::uint32_t phase, std::int64_t count, std::int64_t most) {
    std::uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
        const std::int64_t next = static_cast<std::uint32_t>(state);
        if (state >> 32 != phase || next >= count) return {0, 0};
        const std::int64_t share = std::max<std::int64_t>(std::min((count - next) / (2 * size_), most), 1);
        if (state_.compare_exchange_weak(state, state + share, std::memory_order_acq_rel)) return {next, next + share};
    }
}

bool Team::advance(std::uint32_t phase, std::int64_t count) {
    std::uint64_t state = state_.load(std::memory_order_acquire);
    if (state >> 32 != phase) return true;
    if (static_cast<std::uint32_t>(state) < count) return false;
    // Whoever took a piece had begun before, so its hand shows it, or it has ended. Twice, since what one thread takes
    // over from another moves from hand to hand, once: from one that is still to be looked at to one that was.
    for (int look = 0; look < 2; ++look)
        for (int thread = 0; thread < size_; ++thread)
            if (hands_[thread].holds(phase)) return false;
    if (state_.compare_exchange_strong(state, static_cast<std::uint64_t>(phase + 1) << 32)) wake();
    return true;
}

bool Team::spin(std::uint32_t phase, std::int64_t count, std::int64_t turns) {
    for (; turns > 0; --turns) {
        if (advance(phase, count)) return true;
        detail::relax();
    }
    return false;
}

// Who is the last to empty its hand sees that all are empty, and wakes those that sleep.
void Team::meet(std::uint32_t phase, std::int64_t count) {
    if (!spin(phase, count, kTurns)) await([this, phase] { return this->phase() != phase; });
}

// Both counters are sequentially consistent: a sleeper either sees what has changed, or is counted here.
void Team::wake() {
    if (sleeping_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
}

}  // namespace chipmesh
