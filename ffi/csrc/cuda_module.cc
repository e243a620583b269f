// nosa_jax.ffi._cuda: pinning of host pools and the handlers of platform CUDA.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_handlers.h"
#include "cuda_pool.h"

namespace nb = nanobind;

namespace nosa {
namespace {

std::atomic<PoolTable*> table{nullptr};
std::atomic<uint64_t> devices_in_use{0};
std::mutex mutex;  // over changes of the table

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = device;
    status = cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(previous_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t status;

 private:
  int previous_;
};

// The error's text; the error itself is cleared, so that no later launch reports it as its own.
std::string TakeError(cudaError_t status) {
  cudaGetLastError();
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

void Require(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) throw std::runtime_error(what + ": " + TakeError(status));
}

std::string LockedMemoryLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur) + " bytes";
}

constexpr size_t kPieceBytes = size_t{8} << 30;
constexpr size_t kSystemPage = 4096;

// A slab's registration with CUDA. Throws std::runtime_error when it fails; nothing stays registered then.
class PinnedPool {
 public:
  PinnedPool(int device, int32_t slot, int32_t generation, uintptr_t address, int64_t n_pages, int64_t page_bytes)
      : slot_(slot), generation_(generation), device_(device) {
    const OnDevice current(device);
    Require(current.status, "CUDA device " + std::to_string(device));
    const std::lock_guard<std::mutex> lock(mutex);
    MakeTable();
    LoadAssignKernel();
    LoadTransferKernels();
    Register(reinterpret_cast<std::byte*>(address), n_pages, page_bytes);
    PoolEntry& entry = table.load()->entries[slot];
    entry = PoolEntry{};
    entry.base = device_base_;
    entry.n_pages = n_pages;
    entry.page_bytes = page_bytes;
    entry.last_generation = generation;
    std::atomic_thread_fence(std::memory_order_release);
    *static_cast<volatile int32_t*>(&entry.generation) = generation;
  }

  ~PinnedPool() { Release(); }
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Closes the pool for kernels to come, waits for those that run, and gives the registration back. Errors are
  // ignored: at the end of the process the driver may be gone already, and the registration with it.
  void Release() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (releasing_) return;
      releasing_ = true;
      *static_cast<volatile int32_t*>(&table.load()->entries[slot_].generation) = 0;
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Without the lock: a device may be waiting for a host callback that waits for the interpreter, whose thread may
    // be asking for this lock.
    const uint64_t devices = devices_in_use.load() | (uint64_t{1} << device_);
    for (int device = 0; device < 64; ++device) {
      if (devices >> device & 1) {
        const OnDevice current(device);
        if (current.status == cudaSuccess) cudaDeviceSynchronize();
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    final_ = table.load()->entries[slot_];
    released_ = true;
    Unregister();
  }

  nb::dict Counts() const {
    const std::lock_guard<std::mutex> lock(mutex);
    const PoolEntry& entry = released_ ? final_ : table.load()->entries[slot_];
    nb::dict counts;
    const auto read = [](const unsigned long long& value) {
      return *static_cast<const volatile unsigned long long*>(&value);
    };
    counts["pages_read"] = read(entry.pages_read);
    counts["pages_written"] = read(entry.pages_written);
    counts["read_calls"] = read(entry.read_calls);
    counts["write_calls"] = read(entry.write_calls);
    return counts;
  }

 private:
  static void MakeTable() {
    if (table.load() != nullptr) return;
    void* host = nullptr;
    void* device = nullptr;
    Require(cudaHostAlloc(&host, sizeof(PoolTable), cudaHostAllocPortable | cudaHostAllocMapped), "pool table");
    Require(cudaHostGetDevicePointer(&device, host, 0), "pool table");
    if (device != host) throw std::runtime_error("host pools need unified addressing, which this device lacks");
    std::memset(host, 0, sizeof(PoolTable));
    table.store(static_cast<PoolTable*>(host));
  }

  // In pieces that end where both a pool's page and a system page end.
  void Register(std::byte* base, int64_t n_pages, int64_t page_bytes) {
    const size_t total = static_cast<size_t>(n_pages) * page_bytes;
    const size_t unit = std::lcm(static_cast<size_t>(page_bytes), kSystemPage);
    const size_t piece = std::max(kPieceBytes / unit, size_t{1}) * unit;
    for (size_t offset = 0; offset < total; offset += piece) {
      const size_t bytes = std::min(piece, total - offset);
      void* device = nullptr;
      cudaError_t status = cudaHostRegister(base + offset, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (status == cudaSuccess) {
        pieces_.push_back(base + offset);
        status = cudaHostGetDevicePointer(&device, base + offset, 0);
      }
      if (status == cudaSuccess && offset == 0) device_base_ = static_cast<std::byte*>(device);
      if (status == cudaSuccess && device == device_base_ + offset) continue;
      const std::string reason = status == cudaSuccess ? "its pieces lie apart on the device" : TakeError(status);
      Unregister();
      throw std::runtime_error("pinning " + std::to_string(total) + " bytes of host memory failed after " +
                               std::to_string(offset) + " (" + reason + "); the limit on locked memory (ulimit -l) is " +
                               LockedMemoryLimit());
    }
  }

  void Unregister() {
    for (std::byte* piece : pieces_) cudaHostUnregister(piece);
    cudaGetLastError();
    pieces_.clear();
  }

  const int32_t slot_;
  const int32_t generation_;
  const int device_;
  std::byte* device_base_ = nullptr;
  std::vector<std::byte*> pieces_;
  bool releasing_ = false, released_ = false;
  PoolEntry final_{};  // what the entry was when the pool was closed
};

template <typename Concerns>
std::optional<Fault> Take(FaultRecord& record, Concerns concerns) {
  auto* state = static_cast<volatile int32_t*>(&record.state);
  if (*state != FaultRecord::kReady) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  const Fault fault = record.fault;
  if (!concerns(fault)) return std::nullopt;
  *state = FaultRecord::kNone;
  return fault;
}

// A recorded fault that concerns the pool of this handle, as (the handle it came with was refused, text), or None.
// It is taken only once. A pool that was not made for a GPU can have one too: its handle was used there all the same.
nb::object TakeFault(int32_t slot, int32_t generation) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (table.load() == nullptr) return nb::none();
  PoolEntry& entry = table.load()->entries[slot];
  const auto mine = [&](const Fault& fault) { return fault.generation == generation; };
  // A generation that no pinned pool had belongs to nobody: whoever looks first reports it.
  const auto mine_or_nobodys = [&](const Fault& fault) {
    return mine(fault) || fault.generation > entry.last_generation;
  };
  std::optional<Fault> fault = Take(entry.own, mine);
  if (!fault) fault = Take(entry.stale, mine_or_nobodys);
  if (!fault) fault = Take(table.load()->stray, [](const Fault&) { return true; });
  if (!fault) return nb::none();
  return nb::make_tuple(fault->kind == FaultKind::kHandle, Describe(*fault));
}

// Seconds of each of `repeats` rows of `copies` back to back of `bytes` from pinned host memory to the device: the
// rate that swap_in is measured against.
std::vector<double> TimeMemcpy(int device, uintptr_t from, uintptr_t to, size_t bytes, int copies, int repeats) {
  const OnDevice current(device);
  Require(current.status, "CUDA device " + std::to_string(device));
  cudaStream_t stream;
  cudaEvent_t begin, end;
  Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Require(cudaEventCreate(&begin), "event");
  Require(cudaEventCreate(&end), "event");
  std::vector<double> seconds;
  cudaError_t status = cudaSuccess;
  for (int i = 0; i < repeats && status == cudaSuccess; ++i) {
    float milliseconds = 0;
    cudaEventRecord(begin, stream);
    for (int copy = 0; copy < copies && status == cudaSuccess; ++copy) {
      status = cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
                               cudaMemcpyHostToDevice, stream);
    }
    cudaEventRecord(end, stream);
    if (status == cudaSuccess) status = cudaEventSynchronize(end);
    if (status == cudaSuccess) status = cudaEventElapsedTime(&milliseconds, begin, end);
    seconds.push_back(milliseconds / 1e3);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  Require(status, "copy");
  return seconds;
}

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

NB_MODULE(_cuda, m) {
  nb::class_<PinnedPool>(m, "PinnedPool")
      .def(nb::init<int, int32_t, int32_t, uintptr_t, int64_t, int64_t>(), nb::call_guard<nb::gil_scoped_release>())
      .def("release", &PinnedPool::Release, nb::call_guard<nb::gil_scoped_release>())
      .def("counts", &PinnedPool::Counts);
  m.def("take_fault", &TakeFault);
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["nosa_assign_slots"] = Capsule(kAssignSlotsCuda);
    handlers["nosa_swap_in"] = Capsule(kSwapInCuda);
    handlers["nosa_write_pages"] = Capsule(kWritePagesCuda);
    return handlers;
  });
  m.def("time_memcpy", &TimeMemcpy, nb::arg("device"), nb::arg("source"), nb::arg("destination"), nb::arg("bytes"),
        nb::arg("copies"), nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

PoolTable* Table() { return table.load(std::memory_order_acquire); }

void NoteDeviceInUse() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess && device < 64) {
    const uint64_t bit = uint64_t{1} << device;
    if (!(devices_in_use.load(std::memory_order_relaxed) & bit)) devices_in_use.fetch_or(bit);
  }
}

}  // namespace nosa
