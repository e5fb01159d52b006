// A team of threads that carries out one job together: a sequence of phases, each a number of pieces of work. A phase
// ends when its pieces are done, not when all threads have come: a thread that the system does not run at the moment,
// since another process wants the processor, holds nobody up. What it has in hand is done once more by one that waits,
// and only who is first passes its results on. Waiting threads spin for some tens of microseconds and then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
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
    // The pieces of this phase that come to this thread, in runs: at first a good part of what is left, later ever
    // less, never more than `most`. Returns when all `count` (at least 1) are done.
    // compute(first, last) writes to memory of this thread's own alone, and may be in vain: where another thread was
    // faster, and what it reads has changed meanwhile. pass_on(first, last) follows, once for every piece, and makes
    // the results everybody's. work: of a piece, in multiplications, as a rough idea.
    template <class Compute, class PassOn>
    void each(std::int64_t count, std::int64_t most, std::int64_t work, const Compute& compute, const PassOn& pass_on);
    // The same for pieces that cannot be done twice: whoever has one in hand is waited for.
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
    struct Range {
        std::int64_t first, last;
    };
    // What a thread has in hand: nothing, something that only it can end, or a run of pieces that others may do again.
    class Hand {
      public:
        void begin(std::uint32_t phase) { held_.store(packed(phase, 0, kAlone), std::memory_order_relaxed); }
        void show(std::uint32_t phase, const Range& run) {
            if (run.first <= kLargestFirst) held_.store(packed(phase, run.first, run.last - run.first), std::memory_order_release);
        }
        // Its owner's: whether nobody else was faster, so that the run is to be passed on.
        bool keep(std::uint32_t phase, const Range& run) {
            return run.first > kLargestFirst || replace(phase, run, packed(phase, 0, kAlone));
        }
        // Another's, whose own hand has begun: whether the owner is not done with the run yet. It is then not its any more.
        bool take_over(std::uint32_t phase, const Range& run) { return replace(phase, run, 0); }
        void end() { held_.store(0, std::memory_order_release); }
        bool holds(std::uint32_t phase) const {
            const std::uint64_t held = held_.load(std::memory_order_acquire);
            return held != 0 && held >> 32 == phase;
        }
        // The run of this phase that it shows; empty where it shows none.
        Range shown(std::uint32_t phase) const {
            const std::uint64_t held = held_.load(std::memory_order_acquire);
            const std::int64_t count = held & kAlone, first = held >> kCountBits & kLargestFirst;
            if (held == 0 || held >> 32 != phase || count == kAlone) return {0, 0};
            return {first, first + count};
        }

      private:
        bool replace(std::uint32_t phase, const Range& run, std::uint64_t by) {
            std::uint64_t shown = packed(phase, run.first, run.last - run.first);
            return held_.compare_exchange_strong(shown, by, std::memory_order_acq_rel);
        }
        static std::uint64_t packed(std::uint32_t phase, std::int64_t first, std::int64_t count) {
            return static_cast<std::uint64_t>(phase) << 32 | static_cast<std::uint64_t>(first) << kCountBits | count;
        }
        alignas(64) std::atomic<std::uint64_t> held_{0};
    };
    static constexpr int kTurns = 2000;  // of waiting, before a thread sleeps
    static constexpr int kCountBits = 12;
    static constexpr std::int64_t kAlone = (1 << kCountBits) - 1;  // in place of a count, which is never 0
    static constexpr std::int64_t kLargestFirst = (1 << (32 - kCountBits)) - 1;

    void serve(int thread);
    void end();
    // The next pieces of a phase; none where first == last.
    Range take(std::uint32_t phase, std::int64_t count, std::int64_t most);
    // Begins the next phase where all pieces of this one are taken and nobody has any in hand. True: it is over.
    bool advance(std::uint32_t phase, std::int64_t count);
    std::uint32_t phase() const { return static_cast<std::uint32_t>(state_.load(std::memory_order_acquire) >> 32); }
    // The same, tried so many times.
    bool spin(std::uint32_t phase, std::int64_t count, std::int64_t turns);
    // Returns when the phase is over; until then the hand of the thread that calls is empty.
    void meet(std::uint32_t phase, std::int64_t count);
    template <class Done>
    void await(const Done& done);
    void wake();

    const int size_;
    const Job* job_ = nullptr;
    std::uint32_t first_phase_ = 0;
    std::unique_ptr<Hand[]> hands_;
    alignas(64) std::atomic<std::uint64_t> state_{0};  // phase, and in the lower half the next piece of it
    alignas(64) std::atomic<std::uint32_t> started_{0};  // jobs
    std::atomic<std::uint32_t> open_{0};                 // the job that threads may enter, 0 for none
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int> inside_{0};  // threads in a job, but for the caller of run()
    alignas(64) std::atomic<int> sleeping_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> threads_;
};

template <class Compute, class PassOn>
void Walk::each(std::int64_t count, std::int64_t most, std::int64_t work, const Compute& compute, const PassOn& pass_on) {
    // About twice what a piece takes: who is merely slower is not worth the doubled work.
    constexpr std::int64_t kLeastTurns = 200, kWorkPerTurn = 320;
    Team::Hand& own = team_.hands_[thread_];
    for (;;) {
        own.begin(phase_);
        const Team::Range run = team_.take(phase_, count, std::min(most, Team::kAlone - 1));
        if (run.first == run.last) break;
        own.show(phase_, run);
        compute(run.first, run.last);
        if (own.keep(phase_, run)) pass_on(run.first, run.last);
    }
    own.end();
    if (!team_.spin(phase_, count, kLeastTurns + work / kWorkPerTurn)) {
        for (int other = 0; other < team_.size() && !late(); ++other) {
            const Team::Range run = team_.hands_[other].shown(phase_);
            if (run.first == run.last) continue;
            compute(run.first, run.last);
            own.begin(phase_);
            if (team_.hands_[other].take_over(phase_, run)) pass_on(run.first, run.last);
            own.end();
        }
    }
    team_.meet(phase_++, count);
}

template <class Work>
void Walk::each(std::int64_t count, std::int64_t most, const Work& work) {
    Team::Hand& own = team_.hands_[thread_];
    own.begin(phase_);
    for (;;) {
        const Team::Range run = team_.take(phase_, count, most);
        if (run.first == run.last) break;
        for (std::int64_t piece = run.first; piece < run.last; ++piece) work(piece);
    }
    own.end();
    team_.meet(phase_++, count);
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
    for (int turn = 0; turn < kTurns; ++turn) {
        if (done()) return;
        detail::relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    changed_.wait(lock, done);
    sleeping_.fetch_sub(1);
}

}  // namespace chipmesh
