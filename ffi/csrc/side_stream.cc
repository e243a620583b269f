#include "side_stream.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace nosa {
namespace {

struct Side {
  std::mutex mutex;  // over what follows, and over the order of the calls on one stream
  cudaStream_t stream = nullptr;
  cudaEvent_t begun = nullptr;            // recorded in XLA's stream
  cudaEvent_t done = nullptr;             // recorded in ours
  std::vector<const void*> started;       // caches that are being written to
};

struct Sides {
  std::mutex mutex;
  std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Side>> of;  // by device and XLA's stream
};

Sides& All() {
  static auto* const sides = new Sides;  // never destroyed
  return *sides;
}

Problem Describe(const char* what, cudaError_t status) {
  cudaGetLastError();  // so that no later launch reports it as its own
  return std::string(what) + ": " + cudaGetErrorString(status);
}

// The side of a stream of the current device; null if there is none, and it is not to be made.
Side* Find(cudaStream_t stream, bool make) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  Sides& sides = All();
  const std::lock_guard<std::mutex> lock(sides.mutex);
  const std::pair<int, cudaStream_t> key(device, stream);
  if (const auto found = sides.of.find(key); found != sides.of.end()) return found->second.get();
  if (!make) return nullptr;
  return sides.of.emplace(key, std::make_unique<Side>()).first->second.get();
}

// Makes what is not there yet.
Problem Prepare(Side& side) {
  if (side.done != nullptr) return {};
  int least = 0, greatest = 0;
  cudaError_t status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (status == cudaSuccess && side.stream == nullptr) {
    // The few thread blocks of a copy go first: others are waiting for them sooner.
    status = cudaStreamCreateWithPriority(&side.stream, cudaStreamNonBlocking, greatest);
  }
  if (status == cudaSuccess && side.begun == nullptr) {
    status = cudaEventCreateWithFlags(&side.begun, cudaEventDisableTiming);
  }
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&side.done, cudaEventDisableTiming);
  return status == cudaSuccess ? Problem{} : Describe("making a stream beside XLA's", status);
}

}  // namespace

Problem StartBeside(cudaStream_t stream, const void* cache, const std::function<Problem(cudaStream_t)>& launch) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaError_t status = cudaStreamIsCapturing(stream, &capture); status != cudaSuccess) {
    return Describe("asking for the state of XLA's stream", status);
  }
  if (capture != cudaStreamCaptureStatusNone) return "it cannot be part of a captured graph";
  Side* const side = Find(stream, true);
  if (side == nullptr) return "there is no current device";
  const std::lock_guard<std::mutex> lock(side->mutex);
  if (Problem problem = Prepare(*side); !problem.empty()) return problem;
  cudaError_t status = cudaEventRecord(side->begun, stream);
  if (status == cudaSuccess) status = cudaStreamWaitEvent(side->stream, side->begun, 0);
  if (status != cudaSuccess) return Describe("ordering the copies after XLA's stream", status);
  Problem problem = launch(side->stream);
  // Whatever was launched is there to be waited for.
  status = cudaEventRecord(side->done, side->stream);
  if (problem.empty() && status != cudaSuccess) problem = Describe("marking the end of the copies", status);
  if (std::find(side->started.begin(), side->started.end(), cache) == side->started.end()) {
    side->started.push_back(cache);
  }
  return problem;
}

Problem FinishBeside(cudaStream_t stream, const void* cache) {
  const char* const lost = "nothing was started for this cache on this stream; XLA has moved it in between";
  Side* const side = Find(stream, false);
  if (side == nullptr) return lost;
  const std::lock_guard<std::mutex> lock(side->mutex);
  if (side->done == nullptr) return lost;
  // The event's latest recording is that of this cache's copies or one that comes after them.
  const cudaError_t status = cudaStreamWaitEvent(stream, side->done, 0);
  if (status != cudaSuccess) return Describe("waiting for the copies", status);
  const auto found = std::find(side->started.begin(), side->started.end(), cache);
  if (found == side->started.end()) return lost;
  side->started.erase(found);
  return {};
}

Problem SettleBeside() {
  std::vector<Side*> sides;
  {
    Sides& all = All();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [key, side] : all.of) sides.push_back(side.get());
  }
  for (Side* side : sides) {
    cudaStream_t stream = nullptr;
    {
      const std::lock_guard<std::mutex> lock(side->mutex);
      if (!side->started.empty()) stream = side->stream;
    }
    if (stream == nullptr) continue;
    if (const cudaError_t status = cudaStreamSynchronize(stream); status != cudaSuccess) {
      return Describe("waiting for copies of host pages", status);
    }
  }
  return {};
}

}  // namespace nosa
