// Writing a new token's key and value into a slot, by one warp for each (row, KV head).
#pragma once

#include "transfer_kernel.cuh"

namespace nosa {

// Arrays of all rows and KV heads; `k` is null where there is no token.
struct TokenArgs {
  const std::byte* k = nullptr;       // [B, K, H]
  const std::byte* v = nullptr;       // [B, K, H]
  const int32_t* position = nullptr;  // [B]
  std::byte* cache = nullptr;         // [B, K, S, 2, P, H]
  int64_t slots = 0;
  int64_t page_bytes = 0;
  int32_t block_size = 0;
  int32_t row_bytes = 0;  // of a key or a value
  bool wide = false;      // 16 bytes divide these, and the addresses
};

inline TokenArgs MakeTokenArgs(const Token& token, const TokenSizes& token_sizes, const TransferSizes& sizes,
                               std::byte* cache) {
  if (token_sizes.row_bytes == 0) return {};
  const auto* const k = static_cast<const std::byte*>(token.k->untyped_data());
  const auto* const v = static_cast<const std::byte*>(token.v->untyped_data());
  const auto addresses = reinterpret_cast<uintptr_t>(k) | reinterpret_cast<uintptr_t>(v) |
                         reinterpret_cast<uintptr_t>(cache) | static_cast<uintptr_t>(token_sizes.row_bytes);
  return {k,
          v,
          token.position->typed_data(),
          cache,
          sizes.slots,
          sizes.page_bytes,
          static_cast<int32_t>(token_sizes.block_size),
          static_cast<int32_t>(token_sizes.row_bytes),
          addresses % sizeof(uint4) == 0};
}

// The token of one (row, KV head). What each lane moves first is asked for at once; its slot is named later.
class PairToken {
 public:
  __device__ PairToken(const TokenArgs& args, int64_t pair, int64_t row) : args_(args), pair_(pair) {
    if (args.k == nullptr) return;
    position_ = args.position[row];
    const int32_t lane = static_cast<int32_t>(threadIdx.x % kLanes);
    if (args.wide && lane < 2 * args.row_bytes / static_cast<int32_t>(sizeof(uint4))) first_ = Load<uint4>(lane);
  }

  // Nothing is written to a negative slot.
  __device__ void Write(int32_t slot) const {
    if (args_.k == nullptr || slot < 0 || position_ < 0) return;
    if (args_.wide) {
      WriteUnits<uint4>(slot);
    } else {
      WriteUnits<unsigned char>(slot);
    }
  }

 private:
  // Units of the key, then of the value.
  template <typename Unit>
  __device__ Unit Load(int32_t unit) const {
    const int32_t row_units = args_.row_bytes / static_cast<int32_t>(sizeof(Unit));
    const std::byte* const from = unit < row_units ? args_.k : args_.v;
    return reinterpret_cast<const Unit*>(from)[pair_ * row_units + unit % row_units];
  }

  template <typename Unit>
  __device__ void WriteUnits(int32_t slot) const {
    const int32_t row_units = args_.row_bytes / static_cast<int32_t>(sizeof(Unit));
    auto* const page = reinterpret_cast<Unit*>(args_.cache + (pair_ * args_.slots + slot) * args_.page_bytes);
    const int32_t row = position_ % args_.block_size;
    for (int32_t unit = static_cast<int32_t>(threadIdx.x % kLanes); unit < 2 * row_units; unit += kLanes) {
      Unit value;
      if (sizeof(Unit) == sizeof(uint4) && unit < kLanes) {
        memcpy(&value, &first_, sizeof(Unit));
      } else {
        value = Load<Unit>(unit);
      }
      page[(row + (unit < row_units ? 0 : args_.block_size)) * row_units + unit % row_units] = value;
    }
  }

  const TokenArgs& args_;
  int64_t pair_;
  int32_t position_ = -1;
  uint4 first_{};
};

// For tables that one warp cannot hold, after their assignment: the token into slot tail_slot[pair].
static __global__ void __launch_bounds__(kLanes) TokenKernel(const __grid_constant__ TokenArgs args,
                                                             const int32_t* tail_slot, int32_t heads) {
  const int64_t pair = blockIdx.x;
  PairToken(args, pair, static_cast<uint32_t>(pair) / static_cast<uint32_t>(heads)).Write(tail_slot[pair]);
}

}  // namespace nosa
