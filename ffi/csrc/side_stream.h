// Streams beside XLA's, on which blocks are copied while XLA's goes on (start_fetch, finish_fetch).
//
// Each of XLA's streams gets one of ours, on the same device, when it is first asked for. They are kept until the
// process ends, and left to the driver then: nothing is destroyed, so nothing touches a driver that is gone.
//
// A copy that was started and never waited for, since the program failed in between, may still be writing into a cache
// that XLA has freed by then. SettleBeside() waits for all that were started; it is called before a cache is made.
// It does not forget them, since another thread may be between its halves: after such a failure every new cache waits for
// this stream once more.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace nosa {

// What went wrong, or empty.
using Problem = std::string;

// Runs `launch` on the stream beside `stream`: after everything in `stream` so far, and beside what comes after it
// there. `cache` is what the launched work writes to.
Problem StartBeside(cudaStream_t stream, const void* cache, const std::function<Problem(cudaStream_t)>& launch);

// Lets `stream` wait for what was started beside it. A problem if nothing was started for `cache` since it was finished
// last: then the work has gone to another buffer.
Problem FinishBeside(cudaStream_t stream, const void* cache);

// Waits on the host for everything that was started beside any stream.
Problem SettleBeside();

}  // namespace nosa
