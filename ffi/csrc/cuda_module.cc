// nosa_jax.ffi._cuda: pinning of host pools and the handlers of platform CUDA.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>
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

std::atomic<FaultTable*> faults{nullptr};
int32_t last_generation[kMaxPools] = {};  // that a pinned pool had in each place
std::mutex mutex;                         // over both, on the host

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

// Maps as many bytes, pins them as a pool would be, and gives them back: what CUDA said to it, or None if it did.
nb::object WhyNotPinned(int device, size_t bytes) {
  const OnDevice current(device);
  Require(current.status, "CUDA device " + std::to_string(device));
  void* const start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nb::cast(std::string("mapping them failed"));
  const cudaError_t status = cudaHostRegister(start, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  nb::object reason = nb::none();
  if (status == cudaSuccess) {
    cudaHostUnregister(start);
  } else {
    reason = nb::cast(TakeError(status));
  }
  munmap(start, bytes);
  return reason;
}

constexpr size_t kPieceBytes = size_t{8} << 30;
constexpr size_t kSystemPage = 4096;

void MakeFaultTable() {
  if (faults.load() != nullptr) return;
  void* host = nullptr;
  void* device = nullptr;
  Require(cudaHostAlloc(&host, sizeof(FaultTable), cudaHostAllocPortable | cudaHostAllocMapped), "fault table");
  Require(cudaHostGetDevicePointer(&device, host, 0), "fault table");
  if (device != host) throw std::runtime_error("host pools need unified addressing, which this device lacks");
  std::memset(host, 0, sizeof(FaultTable));
  faults.store(static_cast<FaultTable*>(host));
}

// A slab's registration with CUDA, for one device. Throws std::runtime_error when it fails; nothing stays registered.
class PinnedPool {
 public:
  PinnedPool(int device, int32_t slot, int32_t generation, uintptr_t address, int64_t n_pages, int64_t page_bytes)
      : slot_(slot), device_(device) {
    const OnDevice current(device);
    Require(current.status, "CUDA device " + std::to_string(device));
    const std::lock_guard<std::mutex> lock(mutex);
    MakeFaultTable();
    LoadAssignKernel();
    LoadTransferKernels();
    Register(reinterpret_cast<std::byte*>(address), n_pages, page_bytes);
    // Its own stream, one that waits for no other: the table can be changed and read while steps run.
    cudaError_t status = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    if (status == cudaSuccess) status = StoreView(slot, {device_base_, n_pages, page_bytes, generation}, stream_);
    if (status != cudaSuccess) {
      const std::string reason = TakeError(status);
      Unregister();
      throw std::runtime_error("making the pool known to CUDA device " + std::to_string(device) + ": " + reason);
    }
    last_generation[slot] = generation;
    FaultTable::Place& place = faults.load()->places[slot];
    place.own.state = place.stale.state = FaultRecord::kNone;
  }

  ~PinnedPool() { Release(); }
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Closes the pool for kernels to come, waits for those that run, and gives the registration back. Errors are
  // ignored: at the end of the process the driver may be gone already, and the registration with it.
  void Release() {
    const OnDevice current(device_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (releasing_) return;
      releasing_ = true;
      StoreGeneration(slot_, 0, stream_);
    }
    // Without the lock: the device may be waiting for a host callback that waits for the interpreter, whose thread may
    // be asking for this lock.
    cudaDeviceSynchronize();
    const std::lock_guard<std::mutex> lock(mutex_);
    LoadCounts(slot_, &final_, stream_);
    released_ = true;
    Unregister();
  }

  // From now on kernels know the pool by another generation. What was launched before is let finish under the old
  // one; nothing that uses the old one is still running on return. Throws std::runtime_error.
  void Renew(int32_t generation) {
    const OnDevice current(device_);
    Require(current.status, "CUDA device " + std::to_string(device_));
    Require(cudaDeviceSynchronize(), "waiting for steps that use the host pool");
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (releasing_) throw std::runtime_error("the host pool was closed meanwhile");
      Require(StoreGeneration(slot_, generation, stream_), "giving the host pool a new handle");
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      last_generation[slot_] = generation;
    }
    Require(cudaDeviceSynchronize(), "waiting for steps that use the host pool");
  }

  // Of the steps that are done.
  DeviceCounts Counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (released_) return final_;
    const OnDevice current(device_);
    DeviceCounts counts{};
    Require(LoadCounts(slot_, &counts, stream_), "counters of the host pool");
    return counts;
  }

 private:
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
                               std::to_string(offset) + " (" + reason +
                               "); the limit on locked memory (ulimit -l) is " + LockedMemoryLimit());
    }
  }

  void Unregister() {
    for (std::byte* piece : pieces_) cudaHostUnregister(piece);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaGetLastError();
    pieces_.clear();
    stream_ = nullptr;
  }

  const int32_t slot_;
  const int device_;
  mutable std::mutex mutex_;  // over what follows and the device's entry
  cudaStream_t stream_ = nullptr;
  std::byte* device_base_ = nullptr;
  std::vector<std::byte*> pieces_;
  bool releasing_ = false, released_ = false;
  DeviceCounts final_{};  // when the pool was closed
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

// A recorded fault that concerns the pool which had these generations in this place, first to last, as (the handle it
// came with was refused, text), or None. It is taken only once. A pool that was not made for a GPU can have one too:
// its handle was used there all the same.
nb::object TakeFault(int32_t slot, int32_t first, int32_t last) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (faults.load() == nullptr) return nb::none();
  FaultTable::Place& place = faults.load()->places[slot];
  const auto mine = [&](const Fault& fault) { return fault.generation >= first && fault.generation <= last; };
  // A generation that no pinned pool had belongs to nobody: whoever looks first reports it.
  const auto mine_or_nobodys = [&](const Fault& fault) {
    return mine(fault) || fault.generation > last_generation[slot];
  };
  std::optional<Fault> fault = Take(place.own, mine);
  if (!fault) fault = Take(place.stale, mine_or_nobodys);
  if (!fault) fault = Take(faults.load()->stray, [](const Fault&) { return true; });
  if (!fault) return nb::none();
  return nb::make_tuple(fault->kind == FaultKind::kHandle, Describe(*fault));
}

nb::dict CountsOf(const PinnedPool& pool) {
  DeviceCounts counts{};
  {
    const nb::gil_scoped_release released;
    counts = pool.Counts();
  }
  nb::dict result;
  result["pages_read"] = counts.pages_read;
  result["pages_written"] = counts.pages_written;
  result["read_calls"] = counts.read_calls;
  result["write_calls"] = counts.write_calls;
  return result;
}

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

NB_MODULE(_cuda, m) {
  nb::class_<PinnedPool>(m, "PinnedPool")
      .def(nb::init<int, int32_t, int32_t, uintptr_t, int64_t, int64_t>(), nb::call_guard<nb::gil_scoped_release>())
      .def("release", &PinnedPool::Release, nb::call_guard<nb::gil_scoped_release>())
      .def("renew", &PinnedPool::Renew, nb::call_guard<nb::gil_scoped_release>())
      .def("counts", &CountsOf);
  m.def("why_not_pinned", &WhyNotPinned);
  m.def("take_fault", &TakeFault);
  m.def("load_append_kernels", [](int device) {
    const OnDevice current(device);
    Require(current.status, "CUDA device " + std::to_string(device));
    LoadAppendKernels();
  });
  m.def("handlers", [] {
    nb::dict handlers;
    handlers["nosa_append_token"] = Capsule(kAppendTokenCuda);
    handlers["nosa_assign_slots"] = Capsule(kAssignSlotsCuda);
    handlers["nosa_swap_in"] = Capsule(kSwapInCuda);
    handlers["nosa_write_pages"] = Capsule(kWritePagesCuda);
    handlers["nosa_fetch_blocks"] = Capsule(kFetchBlocksCuda);
    handlers["nosa_store_blocks"] = Capsule(kStoreBlocksCuda);
    handlers["nosa_list_blocks"] = Capsule(kListBlocksCuda);
    return handlers;
  });
}

}  // namespace

FaultTable* Faults() { return faults.load(std::memory_order_acquire); }

}  // namespace nosa
