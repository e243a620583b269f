// How a handler finds a pool.
#pragma once

#include <cstdint>

namespace nosa {

constexpr int32_t kMaxPools = 1024;  // open at a time

// A place in the table of pools and how often that place was taken before. It travels as int32[2] data, so a compiled
// step serves every pool, and a closed pool is noticed by its generation, which is at least 1.
struct Handle {
  int32_t slot;
  int32_t generation;
};

}  // namespace nosa
