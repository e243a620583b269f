// assign_slots on a GPU: one CTA per (row, KV head), everything in shared memory, the same result on every run.
//
// A hash table over the wanted blocks gives each its first position in `wanted`; every slot looks its block up there.
// The wanted blocks that no slot claims take, in the order of `wanted`, the slots that a bitonic sort by
// (empty first, age, slot) puts first. Only the table's layout depends on timing, never what is read from it.
#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>
#include <cstdint>

#include "assign_kernel.h"
#include "cuda_handlers.h"

namespace nosa {
namespace {

constexpr int kThreads = 256;
constexpr int32_t kNone = -1;
constexpr int32_t kUnclaimed = INT32_MAX;

struct KernelArgs : AssignArgs {
  int32_t table_size;  // of the hash table: a power of two, at least twice the wanted blocks
  int32_t sort_size;   // a power of two, at least the slots
};

// Shared memory: order keys [sort_size], then hash keys, first positions and slots [table_size], then [wanted].
constexpr size_t SharedBytes(int64_t table_size, int64_t sort_size, int64_t wanted) {
  return sort_size * sizeof(int64_t) + (3 * table_size + wanted) * sizeof(int32_t);
}

__device__ uint32_t HashOf(int32_t id, int32_t table_size) {
  return (static_cast<uint32_t>(id) * 2654435769u) >> 7 & static_cast<uint32_t>(table_size - 1);
}

// Ascending, in shared memory, by the whole CTA.
__device__ void BitonicSort(int64_t* keys, int size) {
  for (int width = 2; width <= size; width *= 2) {
    for (int stride = width / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1));
        const int high = low + stride;
        const bool ascending = (low & width) == 0;
        if ((keys[low] > keys[high]) == ascending) {
          const int64_t swapped = keys[low];
          keys[low] = keys[high];
          keys[high] = swapped;
        }
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kThreads) AssignKernel(const KernelArgs args) {
  using Scan = cub::BlockScan<uint32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;  // the least latency
  __shared__ typename Scan::TempStorage scan_storage;
  extern __shared__ int64_t shared[];
  int64_t* const order = shared;
  int32_t* const key = reinterpret_cast<int32_t*>(order + args.sort_size);
  int32_t* const first = key + args.table_size;
  int32_t* const slot_of = first + args.table_size;
  int32_t* const place = slot_of + args.table_size;  // of each wanted entry in the hash table, kNone for padding

  const int n_wanted = static_cast<int>(args.sizes.wanted), n_slots = static_cast<int>(args.sizes.slots);
  const int64_t h = blockIdx.x;
  const int32_t* const wanted = args.wanted + h * n_wanted;
  int32_t* const slot_block = args.slot_block + h * n_slots;
  int32_t* const last_used = args.last_used + h * n_slots;
  const int32_t step = *args.step;
  const int32_t fresh_from = args.fresh_from[blockIdx.x / static_cast<uint32_t>(args.sizes.heads)];
  const auto is_block = [&](int32_t id) { return id >= 0 && id < args.sizes.n_blocks; };

  for (int i = threadIdx.x; i < args.table_size; i += kThreads) {
    key[i] = kNone;
    first[i] = slot_of[i] = kUnclaimed;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < n_wanted; j += kThreads) {
    const int32_t id = wanted[j];
    place[j] = kNone;
    if (!is_block(id)) continue;
    uint32_t at = HashOf(id, args.table_size);
    while (true) {  // ends: at most half of the table is taken
      const int32_t found = atomicCAS(&key[at], kNone, id);
      if (found == kNone || found == id) break;
      at = (at + 1) & (args.table_size - 1);
    }
    place[j] = static_cast<int32_t>(at);
    atomicMin(&first[at], j);
  }
  __syncthreads();
  for (int s = threadIdx.x; s < n_slots; s += kThreads) {
    const int32_t id = slot_block[s];
    int32_t at = kNone;
    if (is_block(id)) {
      uint32_t probe = HashOf(id, args.table_size);
      while (key[probe] != kNone && key[probe] != id) probe = (probe + 1) & (args.table_size - 1);
      if (key[probe] == id) at = static_cast<int32_t>(probe);
    }
    if (at != kNone) atomicMin(&slot_of[at], s);
    // Kept for the next pass: which hash entry this slot may have claimed.
    order[s] = at;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < args.sort_size; s += kThreads) {
    int64_t rank = INT64_MAX;
    if (s < n_slots) {
      const int64_t at = order[s];
      const bool is_wanted = at != kNone && slot_of[at] == s;
      // Empty slots come before every age; ages are shifted to be positive; the slot breaks ties.
      const int64_t age =
          slot_block[s] < 0 ? 0 : int64_t{last_used[s]} - INT32_MIN + 1;
      if (!is_wanted) rank = age * kMaxSlots + s;
    }
    order[s] = rank;
  }
  __syncthreads();

  // Positions of the missing blocks among all missing ones and among those to load, in the order of `wanted`:
  // two counts of at most 4096 in one word.
  const auto packed = [](bool missing, bool loads) { return uint32_t{missing} | uint32_t{loads} << 16; };
  int n_hits = 0;
  uint32_t before = 0;
  bool sorted = false;
  for (int tile = 0; tile < n_wanted; tile += kThreads) {
    const int j = tile + threadIdx.x;
    const int32_t id = j < n_wanted ? wanted[j] : kNone;
    const int32_t at = j < n_wanted ? place[j] : kNone;
    const bool leads = at != kNone && first[at] == j;
    const bool missing = leads && slot_of[at] == kUnclaimed;
    const bool loads = missing && id < fresh_from;
    n_hits += __syncthreads_count(leads && !missing);
    uint32_t rank = 0, total = 0;
    Scan(scan_storage).ExclusiveSum(packed(missing, loads), rank, total);
    if (total != 0 && !sorted) {  // the same for the whole CTA
      BitonicSort(order, args.sort_size);
      sorted = true;
    }
    rank += before;
    before += total;
    if (missing) {
      const int32_t slot = static_cast<int32_t>(order[rank & 0xffff] % kMaxSlots);
      slot_of[at] = slot;
      slot_block[slot] = id;
      if (loads) {
        args.load_block[h * n_wanted + (rank >> 16)] = id;
        args.load_slot[h * n_wanted + (rank >> 16)] = slot;
      }
    }
    __syncthreads();
  }
  const int n_loads = static_cast<int>(before >> 16);
  if (args.tail_slot != nullptr) {
    if (threadIdx.x == 0) args.tail_slot[h] = kNone;
    __syncthreads();
  }
  for (int j = threadIdx.x; j < n_wanted; j += kThreads) {
    const int32_t slot = place[j] == kNone ? kNone : slot_of[place[j]];
    args.slot_ids[h * n_wanted + j] = slot;
    if (slot != kNone) last_used[slot] = step;
    if (args.tail_slot != nullptr && slot != kNone && wanted[j] == fresh_from) args.tail_slot[h] = slot;
    if (j >= n_loads) args.load_block[h * n_wanted + j] = args.load_slot[h * n_wanted + j] = kNone;
  }
  if (threadIdx.x == 0) {
    args.load_count[h] = args.misses[h] = n_loads;
    args.hits[h] = n_hits;
  }
}

int32_t PowerOfTwoFrom(int64_t value) {
  int32_t power = 2;
  while (power < value) power *= 2;
  return power;
}

ffi::Error AssignSlots(cudaStream_t stream, Int32Buffer3 wanted, Int32Buffer3 slot_block, Int32Buffer3 last_used,
                       ffi::Buffer<ffi::S32, 0> step, Int32Buffer1 fresh_from, Int32Result3 slot_ids,
                       Int32Result3 new_slot_block, Int32Result3 new_last_used, Int32Result3 load_block,
                       Int32Result3 load_slot, Int32Result2 load_count, Int32Result2 hits, Int32Result2 misses,
                       int64_t n_blocks) {
  AssignSizes sizes{};
  if (auto error = ReadAssignSizes(wanted, slot_block, last_used, fresh_from, n_blocks, &sizes); error.failure()) {
    return error;
  }
  const auto copy_unless_aliased = [&](const Int32Buffer3& from, Int32Result3& to) {
    if (from.typed_data() == to->typed_data()) return;
    cudaMemcpyAsync(to->typed_data(), from.typed_data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
  };
  copy_unless_aliased(slot_block, new_slot_block);
  copy_unless_aliased(last_used, new_last_used);
  return LaunchAssign("assign_slots",
                      {wanted.typed_data(), step.typed_data(), fresh_from.typed_data(), slot_ids->typed_data(),
                       new_slot_block->typed_data(), new_last_used->typed_data(), load_block->typed_data(),
                       load_slot->typed_data(), load_count->typed_data(), hits->typed_data(), misses->typed_data(),
                       nullptr, sizes},
                      stream);
}

XLA_FFI_DEFINE_HANDLER(kHandler, AssignSlots,
                       BindAssign(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

ffi::Error LaunchAssign(const char* name, const AssignArgs& args, cudaStream_t stream) {
  const AssignSizes& sizes = args.sizes;
  if (sizes.slots > kMaxSlots) {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + std::to_string(sizes.slots) +
                                       " slots are more than the GPU kernel's " + std::to_string(kMaxSlots));
  }
  const int64_t n_heads = sizes.rows * sizes.heads;
  if (n_heads == 0) return ffi::Error::Success();
  const int32_t table_size = PowerOfTwoFrom(2 * sizes.wanted), sort_size = PowerOfTwoFrom(sizes.slots);
  const size_t shared_bytes = SharedBytes(table_size, sort_size, sizes.wanted);
  if (shared_bytes > 47 * 1024) {  // the static share, CUB's, comes on top
    cudaFuncSetAttribute(AssignKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  }
  AssignKernel<<<static_cast<unsigned>(n_heads), kThreads, shared_bytes, stream>>>({args, table_size, sort_size});
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    return ffi::Error::Internal(std::string(name) + ": launch failed: " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

void LoadAssignKernel() {
  cudaFuncAttributes unused;
  cudaFuncGetAttributes(&unused, AssignKernel);
}

XLA_FFI_Handler* const kAssignSlotsCuda = kHandler;

}  // namespace nosa
