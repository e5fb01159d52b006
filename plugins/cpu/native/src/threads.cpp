#include "threads.h"

#include <algorithm>

namespace chipmesh {

Team::Team(int size) : size_(size) {
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

void Team::complete(std::uint32_t phase, std::int64_t pieces, std::int64_t count) {
    if (done_.fetch_add(pieces, std::memory_order_acq_rel) + pieces < count) return;
    done_.store(0, std::memory_order_relaxed);
    state_.store(static_cast<std::uint64_t>(phase + 1) << 32);
    wake();
}

// Both counters are sequentially consistent: a sleeper either sees what has changed, or is counted here.
void Team::wake() {
    if (sleeping_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
}

}  // namespace chipmesh
