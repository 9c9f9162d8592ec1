// Who computes? A fixed team of threads that takes units of work from a shared counter.
//
// A waiting thread yields its core between looks and sleeps after WAIT_LOOKS of them, so two engines on the same
// cores don't spin each other to death. Which thread computes a unit never changes the unit's result.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "vec.h"

namespace splitserve {

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads), arenas_(new Arena[num_threads]) {
    team_ = new std::thread[num_threads];
    for (int i = 1; i < num_threads; i++) team_[i] = std::thread([this, i] { serve(i); });
  }

  ~Pool() {
    job_ = nullptr;
    announce();
    for (int i = 1; i < num_threads_; i++) team_[i].join();
    delete[] team_;
    delete[] arenas_;
  }

  int num_threads() const { return num_threads_; }

  // Memory for what the threads of a job tell each other; good until the next call.
  template <class T>
  T* shared(int64_t bytes) { return reinterpret_cast<T*>(shared_.reserve(bytes)); }

  // Units of one job that are still to do; each goes to one thread.
  class Units {
   public:
    bool take(int64_t* unit) { return (*unit = next_->fetch_add(1, std::memory_order_relaxed)) < count_; }

   private:
    friend class Pool;
    Units(std::atomic<int64_t>* next, int64_t count) : next_(next), count_(count) {}
    std::atomic<int64_t>* next_;
    int64_t count_;
  };

  // Calls body(units, scratch) on every thread and returns when all have returned; they share [0, num_units).
  // `scratch` is scratch_bytes of the thread's own memory, aligned to a page, with unspecified contents.
  template <class Body>
  void run(int64_t num_units, int64_t scratch_bytes, const Body& body) {
    std::lock_guard<std::mutex> one_at_a_time(entry_);
    next_unit_ = 0;
    num_units_ = num_units;
    scratch_bytes_ = scratch_bytes;
    body_ = &body;
    job_ = [](Pool& pool, int thread) {
      Units units(&pool.next_unit_, pool.num_units_);
      (*static_cast<const Body*>(pool.body_))(units, pool.arenas_[thread].reserve(pool.scratch_bytes_));
    };
    bool alone = num_threads_ == 1 || num_units <= 1;
    if (!alone) announce();
    job_(*this, 0);
    if (!alone) await([this] { return num_busy_.load(std::memory_order_acquire) == 0; }, -1);
  }

 private:
  static constexpr int LOOKS_PER_YIELD = 32;
  static constexpr int WAIT_LOOKS = 4096;

  struct Arena {
    char* bytes = nullptr;
    int64_t size = 0;
    ~Arena() { std::free(bytes); }
    char* reserve(int64_t wanted) {
      if (wanted > size) {
        std::free(bytes);
        size = ceil_div(wanted, 4096) * 4096;
        bytes = static_cast<char*>(std::aligned_alloc(4096, size));
        if (!bytes) throw std::bad_alloc();
      }
      return bytes;
    }
  };

  // Looks until `ready`, or until `max_looks` have passed (-1: no limit; the team is at work, so it ends).
  template <class Ready>
  static bool await(Ready ready, int max_looks) {
    for (int looks = 0; max_looks < 0 || looks < max_looks; looks++) {
      if (ready()) return true;
      if (looks % LOOKS_PER_YIELD == LOOKS_PER_YIELD - 1) std::this_thread::yield();
      else _mm_pause();
    }
    return false;
  }

  void announce() {
    num_busy_.store(num_threads_ - 1, std::memory_order_relaxed);
    epoch_.fetch_add(1);
    if (num_asleep_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
  }

  void serve(int thread) {
    for (uint64_t seen = 0;; seen++) {
      auto called = [&] { return epoch_.load() != seen; };
      if (!await(called, WAIT_LOOKS)) {
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, called);
        num_asleep_.fetch_sub(1);
      }
      if (!job_) return;
      job_(*this, thread);
      num_busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int num_threads_;
  std::thread* team_;
  Arena* arenas_;
  Arena shared_;
  std::mutex entry_, sleep_;
  std::condition_variable wake_;
  std::atomic<int> num_asleep_{0};
  void (*job_)(Pool&, int) = nullptr;
  const void* body_ = nullptr;
  int64_t num_units_ = 0, scratch_bytes_ = 0;
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<int64_t> next_unit_{0};
  alignas(64) std::atomic<int> num_busy_{0};
};

}  // namespace splitserve
