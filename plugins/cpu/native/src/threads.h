// A team of threads that carries out one job together: a sequence of phases, each a number of pieces of work. A phase
// ends when its pieces are done, not when all threads have come: a thread that the system does not run at the moment,
// since another process wants the processor, holds nobody up unless it has a piece in hand. Waiting threads spin for
// some tens of microseconds and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace chipmesh {

class Team;

// One thread's way through a job. All threads go through the same phases in order; one that is late finds their
// pieces taken and catches up.
class Walk {
  public:
    int thread() const { return thread_; }
    // Whether the others have ended this phase already: nothing in it is worth doing any more.
    bool late() const;
    // Work(i) for the pieces of this phase that come to this thread: at first a good part of what is left, later ever
    // less, never more than `most` at a time. Returns when all `count` (at least 1) are done.
    template <class Work>
    void each(std::int64_t count, std::int64_t most, const Work& work);
    template <class Work>
    void each(std::int64_t count, const Work& work) {
        each(count, count, work);
    }

  private:
    friend class Team;
    Walk(Team& team, int thread, std::uint32_t phase) : team_(team), thread_(thread), phase_(phase) {}
    Team& team_;
    int thread_;
    std::uint32_t phase_;
};

class Team {
  public:
    using Job = std::function<void(Walk&)>;

    explicit Team(int size);  // the caller of run() is one of them
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    // Returns when no thread is in the last job any more: from then on, what it reads may change.
    void settle();
    // Returns when the job's phases are done. `job` must live until settle() has returned.
    void run(const Job& job);

  private:
    friend class Walk;
    void serve(int thread);
    void end();
    struct Range {
        std::int64_t first, last;
    };
    // The next pieces of a phase; none where first == last.
    Range take(std::uint32_t phase, std::int64_t count, std::int64_t most);
    void complete(std::uint32_t phase, std::int64_t pieces, std::int64_t count);
    std::uint32_t phase() const { return static_cast<std::uint32_t>(state_.load(std::memory_order_acquire) >> 32); }
    template <class Done>
    void await(const Done& done);
    void wake();

    const int size_;
    const Job* job_ = nullptr;
    std::uint32_t first_phase_ = 0;
    alignas(64) std::atomic<std::uint64_t> state_{0};  // phase, and in the lower half the next piece of it
    alignas(64) std::atomic<std::int64_t> done_{0};    // pieces of the phase
    alignas(64) std::atomic<std::uint32_t> started_{0};  // jobs
    std::atomic<std::uint32_t> open_{0};                 // the job that threads may enter, 0 for none
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int> inside_{0};  // threads in a job, but for the caller of run()
    alignas(64) std::atomic<int> sleeping_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> threads_;
};

template <class Work>
void Walk::each(std::int64_t count, std::int64_t most, const Work& work) {
    std::int64_t done = 0;
    for (;;) {
        const Team::Range own = team_.take(phase_, count, most);
        if (own.first == own.last) break;
        for (std::int64_t piece = own.first; piece < own.last; ++piece) work(piece);
        done += own.last - own.first;
    }
    if (done > 0) team_.complete(phase_, done, count);
    const std::uint32_t own = phase_++;
    team_.await([this, own] { return team_.phase() != own; });
}

inline bool Walk::late() const { return team_.phase() != phase_; }

namespace detail {
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
}  // namespace detail

template <class Done>
void Team::await(const Done& done) {
    constexpr int kSpins = 2000;
    for (int spin = 0; spin < kSpins; ++spin) {
        if (done()) return;
        detail::relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    changed_.wait(lock, done);
    sleeping_.fetch_sub(1);
}

}  // namespace chipmesh
