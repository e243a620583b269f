// swap_in and write_pages on a GPU: one kernel that gathers or scatters pinned host pages through unified addressing.
//
// The bytes to move are cut into chunks (one load of every thread of a CTA), and the chunks shared evenly among the
// CTAs. A CTA resolves its next entries (list -> page table -> addresses) one per thread, then streams their chunks,
// kInFlight loads of every thread at a time. 16 CTAs of 256 threads with 16-byte loads keep 512 KiB in flight, several
// times what the link needs, and leave the rest of the GPU to other kernels.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>
#include <cub/block/block_scan.cuh>

#include "cuda_handlers.h"
#include "cuda_pool.h"
#include "handlers.h"

namespace nosa {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsPerThread = 4;
constexpr int kTileHeads = kThreads * kHeadsPerThread;  // lists whose offsets fit in shared memory at a time
constexpr int kInFlight = 8;

struct TransferArgs {
  PoolTable* table;
  const int32_t* handle;
  std::byte* cache;
  const int32_t* block;
  const int32_t* slot;
  const int32_t* count;
  const int32_t* page_table;
  TransferSizes sizes{};
};

// The part of a pool's entry that every CTA needs, fetched over the link by two loads that travel together.
struct PoolView {
  std::byte* base;
  int64_t n_pages;
  int64_t page_bytes;
  int32_t generation;
  int32_t last_generation;
};
static_assert(sizeof(PoolView) == 2 * sizeof(uint4) && offsetof(PoolEntry, generation) == 24,
              "PoolView is the beginning of PoolEntry");

struct Addresses {
  std::byte* page;  // null: an entry that is out of range, already reported
  std::byte* slot;
};

__device__ void Report(FaultRecord* record, const Fault& fault) {
  if (atomicCAS(&record->state, FaultRecord::kNone, FaultRecord::kBeingWritten) != FaultRecord::kNone) return;
  record->fault = fault;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&record->state) = FaultRecord::kReady;
}

// By one thread, and early: two loads over the link whose results are not waited for until they are checked.
__device__ PoolView FetchPool(const TransferArgs& args) {
  PoolView view{};
  const int32_t slot = args.handle[0];
  if (slot >= 0 && slot < kMaxPools) {
    const auto* const entry = reinterpret_cast<const uint4*>(&args.table->entries[slot]);
    const uint4 halves[2] = {__ldcv(entry), __ldcv(entry + 1)};
    memcpy(&view, halves, sizeof(PoolView));
  }
  return view;
}

// The pool's entry, or null after the fault was recorded. By the thread that fetched the view.
__device__ PoolEntry* CheckPool(const TransferArgs& args, const PoolView& view, bool writes) {
  const int32_t slot = args.handle[0], generation = args.handle[1];
  const bool named = slot >= 0 && slot < kMaxPools;
  PoolEntry* const entry = named ? &args.table->entries[slot] : nullptr;
  Fault fault{FaultKind::kHandle, writes, slot, generation, 0, 0, 0, 0, 0, 0};
  FaultRecord* record = nullptr;
  if (!named || generation < 1 || view.generation != generation) {
    record = named ? &entry->stale : &args.table->stray;
  } else if (view.page_bytes != args.sizes.page_bytes) {
    fault.kind = FaultKind::kPageSize;
    fault.value = args.sizes.page_bytes;
    fault.limit = view.page_bytes;
    record = &entry->own;
  }
  if (record != nullptr && blockIdx.x == 0) Report(record, fault);
  return record == nullptr ? entry : nullptr;
}

// One entry of a list, as it stands in memory.
struct Entry {
  int64_t h;  // row * K + head
  int32_t block;
  int32_t slot;
  int32_t place;  // the block's page table entry
};

__device__ Entry LoadEntry(const TransferArgs& args, int64_t h, int64_t j) {
  const TransferSizes& sizes = args.sizes;
  Entry entry{h, args.block[h * sizes.entries + j], args.slot[h * sizes.entries + j], -1};
  if (entry.block >= 0 && entry.block < sizes.blocks) {
    entry.place = args.page_table[h / sizes.heads * sizes.blocks + entry.block];
  }
  return entry;
}

// Where an entry lies on both sides, or null addresses after the fault was recorded.
__device__ Addresses Resolve(const TransferArgs& args, const PoolView& pool, FaultRecord* record, const Entry& entry,
                             bool writes) {
  const TransferSizes& sizes = args.sizes;
  const int64_t row = entry.h / sizes.heads, head = entry.h % sizes.heads;
  const auto fail = [&](FaultKind kind, int64_t value, int64_t limit, int64_t page) {
    Report(record, Fault{kind, writes, args.handle[0], args.handle[1], row, head, value, limit, entry.block, page});
    return Addresses{nullptr, nullptr};
  };
  if (entry.block < 0 || entry.block >= sizes.blocks) return fail(FaultKind::kBlock, entry.block, sizes.blocks, 0);
  if (entry.slot < 0 || entry.slot >= sizes.slots) return fail(FaultKind::kSlot, entry.slot, sizes.slots, 0);
  const int64_t page = (entry.place * sizes.n_layers + sizes.layer) * sizes.heads + head;
  if (entry.place < 0 || page >= pool.n_pages) return fail(FaultKind::kPage, entry.place, pool.n_pages, page);
  return {pool.base + page * sizes.page_bytes, args.cache + (entry.h * sizes.slots + entry.slot) * sizes.page_bytes};
}

// `Unit` is the widest type that divides a page.
template <bool writes, typename Unit>
__global__ void __launch_bounds__(kThreads) TransferKernel(const TransferArgs args) {
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int32_t first_entry[kTileHeads + 1];  // of each list of the tile, in the tile's numbering of entries
  __shared__ Addresses addresses[kThreads];
  __shared__ PoolEntry* shared_entry;
  __shared__ PoolView pool;

  const TransferSizes& sizes = args.sizes;
  PoolView fetched{};
  if (threadIdx.x == 0) fetched = FetchPool(args);
  bool pool_ready = false;
  // By the whole CTA; false when there is no pool to use. The link's latency passes behind the reading of the lists.
  const auto ready_pool = [&] {
    if (!pool_ready) {
      if (threadIdx.x == 0) {
        pool = fetched;
        shared_entry = CheckPool(args, fetched, writes);
        if (shared_entry != nullptr && blockIdx.x == 0) {
          atomicAdd(writes ? &shared_entry->write_calls : &shared_entry->read_calls, 1ull);
        }
      }
      __syncthreads();
      pool_ready = true;
    }
    return shared_entry != nullptr;
  };

  const int64_t n_heads = sizes.rows * sizes.heads;
  const uint32_t page_units = static_cast<uint32_t>(sizes.page_bytes / sizeof(Unit));
  const uint32_t page_chunks = (page_units + kThreads - 1) / kThreads;
  for (int64_t tile = 0; tile < n_heads; tile += kTileHeads) {
    int32_t counts[kHeadsPerThread], offsets[kHeadsPerThread];
    int64_t wrong_head = -1;
    int32_t wrong_count = 0;
    for (int i = 0; i < kHeadsPerThread; ++i) {
      const int64_t h = tile + threadIdx.x * kHeadsPerThread + i;
      counts[i] = h < n_heads ? args.count[h] : 0;
      if (counts[i] < 0 || counts[i] > sizes.entries) {
        wrong_head = h;
        wrong_count = counts[i];
        counts[i] = 0;
      }
    }
    int32_t n_entries = 0;
    Scan(scan_storage).ExclusiveSum(counts, offsets, n_entries);
    for (int i = 0; i < kHeadsPerThread; ++i) first_entry[threadIdx.x * kHeadsPerThread + i] = offsets[i];
    if (threadIdx.x == 0) first_entry[kTileHeads] = n_entries;
    __syncthreads();

    const int64_t n_chunks = int64_t{n_entries} * page_chunks;
    const int64_t begin = n_chunks * blockIdx.x / gridDim.x;
    const int64_t end = n_chunks * (blockIdx.x + 1) / gridDim.x;
    for (int64_t batch = begin / page_chunks; batch * page_chunks < end; batch += kThreads) {
      const int64_t mine = batch + threadIdx.x;
      const bool has_entry = mine * page_chunks < end;
      Entry entry{};
      if (has_entry) {
        int low = 0, high = kTileHeads;  // first_entry[low] <= mine < first_entry[high]
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          (first_entry[middle] <= mine ? low : high) = middle;
        }
        entry = LoadEntry(args, tile + low, mine - first_entry[low]);
      }
      if (!ready_pool()) return;
      if (has_entry) addresses[threadIdx.x] = Resolve(args, pool, &shared_entry->own, entry, writes);
      __syncthreads();

      // Chunks counted from the batch's first entry, so that they fit in 32 bits.
      const int64_t origin = batch * page_chunks;
      const uint32_t last = static_cast<uint32_t>(min(end - origin, int64_t{kThreads} * page_chunks));
      for (uint32_t chunk = static_cast<uint32_t>(max(begin - origin, int64_t{0})); chunk < last; chunk += kInFlight) {
        Unit values[kInFlight];
        Unit* targets[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          targets[i] = nullptr;
          if (chunk + i >= last) continue;
          const uint32_t which = (chunk + i) / page_chunks;
          const uint32_t unit = (chunk + i - which * page_chunks) * kThreads + threadIdx.x;
          const Addresses& place = addresses[which];
          if (place.page == nullptr || unit >= page_units) continue;
          const std::byte* const from = writes ? place.slot : place.page;
          targets[i] = reinterpret_cast<Unit*>(writes ? place.page : place.slot) + unit;
          values[i] = __ldcs(reinterpret_cast<const Unit*>(from) + unit);  // read once: keep it out of the caches
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (targets[i] != nullptr) *targets[i] = values[i];
        }
      }
      __syncthreads();  // the addresses are about to be replaced
    }
    __syncthreads();  // ... and the offsets
    if (blockIdx.x == 0) {
      if (!ready_pool()) return;
      if (threadIdx.x == 0) atomicAdd(writes ? &shared_entry->pages_written : &shared_entry->pages_read,
                                      static_cast<unsigned long long>(n_entries));
      if (wrong_head >= 0) {
        Report(&shared_entry->own, Fault{FaultKind::kCount, writes, args.handle[0], args.handle[1],
                                         wrong_head / sizes.heads, wrong_head % sizes.heads, wrong_count,
                                         sizes.entries, 0, 0});
      }
    }
  }
}

template <bool writes>
ffi::Error Transfer(cudaStream_t stream, Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 block,
                    Int32Buffer3 slot, Int32Buffer2 count, Int32Buffer2 page_table,
                    ffi::Result<ffi::AnyBuffer> result, int64_t layer, int64_t n_layers, int64_t n_ctas) {
  const char* const name = writes ? "write_pages" : "swap_in";
  TransferSizes sizes{};
  if (auto error =
          ReadTransferSizes(name, handle, cache, block, slot, count, page_table, layer, n_layers, &sizes);
      error.failure()) {
    return error;
  }
  if (n_ctas < 1 || n_ctas > 65535) {
    return ffi::Error::InvalidArgument(std::string(name) + ": n_ctas=" + std::to_string(n_ctas) +
                                       " is outside 1..65535");
  }
  PoolTable* const table = Table();
  if (table == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      std::string(name) + ": no host pool was ever made for a CUDA device");
  }
  NoteDeviceInUse();
  if (result->untyped_data() != cache.untyped_data()) {
    cudaMemcpyAsync(result->untyped_data(), cache.untyped_data(), cache.size_bytes(), cudaMemcpyDeviceToDevice,
                    stream);
  }
  const TransferArgs args{table,
                          handle.typed_data(),
                          static_cast<std::byte*>(result->untyped_data()),
                          block.typed_data(),
                          slot.typed_data(),
                          count.typed_data(),
                          page_table.typed_data(),
                          sizes};
  const auto grid = static_cast<unsigned>(n_ctas);
  if (sizes.page_bytes % sizeof(uint4) == 0) {
    TransferKernel<writes, uint4><<<grid, kThreads, 0, stream>>>(args);
  } else if (sizes.page_bytes % sizeof(uint32_t) == 0) {
    TransferKernel<writes, unsigned int><<<grid, kThreads, 0, stream>>>(args);
  } else {
    TransferKernel<writes, unsigned char><<<grid, kThreads, 0, stream>>>(args);
  }
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    return ffi::Error::Internal(std::string(name) + ": launch failed: " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kSwapIn, Transfer<false>,
                       BindTransfer(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kWritePages, Transfer<true>,
                       BindTransfer(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void LoadTransferKernels() {
  cudaFuncAttributes unused;
  cudaFuncGetAttributes(&unused, TransferKernel<false, uint4>);
  cudaFuncGetAttributes(&unused, TransferKernel<true, uint4>);
  cudaFuncGetAttributes(&unused, TransferKernel<false, unsigned int>);
  cudaFuncGetAttributes(&unused, TransferKernel<true, unsigned int>);
  cudaFuncGetAttributes(&unused, TransferKernel<false, unsigned char>);
  cudaFuncGetAttributes(&unused, TransferKernel<true, unsigned char>);
}

XLA_FFI_Handler* const kSwapInCuda = kSwapIn;
XLA_FFI_Handler* const kWritePagesCuda = kWritePages;

}  // namespace nosa
