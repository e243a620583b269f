// append_token: one new token per row between a layer's projections and its selection, in one launch: rotary embedding
// of its queries and key, its eviction score, and what it adds to the pooled statistics of the layer's cache.
//
// One CTA per row and KV head, and one per row and a few query heads; one thread per element of a head. The sums are
// added in the order in which pooling a whole sequence adds them, without fused multiply-adds, so a window that
// completes here has the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_handlers.h"
#include "handlers.h"

namespace nosa {
namespace {

using FloatBuffer1 = ffi::Buffer<ffi::F32, 1>;
using FloatBuffer2 = ffi::Buffer<ffi::F32, 2>;
using FloatBuffer3 = ffi::Buffer<ffi::F32, 3>;
using FloatBuffer4 = ffi::Buffer<ffi::F32, 4>;

constexpr int kMaxHeadDim = 1024;  // threads of a CTA
constexpr int kWarp = 32;
constexpr int kQueryHeads = 4;  // of a CTA

template <typename Key>
struct AppendArgs {
  const Key* projected;    // [B, N + K + K, H]: queries, keys, values, not rotated
  const float* cos;        // [B, H / 2]
  const float* sin;        // [B, H / 2]
  const float* delta;      // [K, K, H]
  const float* a;          // [K]
  const int32_t* lengths;  // [B]
  const bool* active;      // [B]
  Key* rotated_q;          // [B, N, H]
  Key* rotated_k;          // [B, K, H]
  Key* values;             // [B, K, H]
  float* key_sums;         // [B, K, R, H]
  float* rank_sums;        // [B, K, R]
  Key* pooled_k;           // [B, K, W, H]
  float* block_rank;       // [B, K, M]
  float* cis_cache;        // [B, K, M, P]
  int32_t query_heads, heads, head_dim, strides, windows, blocks, block_size, stride;
  bool scored, exponential;
};

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__half x) { return __half2float(x); }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void Store(float* to, float x) { *to = x; }
__device__ void Store(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void Store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// As jnp.maximum: NaN wins.
__device__ float Maximum(float a, float b) { return isnan(a) || a > b ? a : b; }

// The sums of the strides that the window of a token spans, for one element; `sums` is its place in the first stride of
// the ring, `step` the distance to its place in the next. Loads first, so that nothing waits for them in turn.
class WindowSums {
 public:
  __device__ WindowSums(float* sums, int64_t step, int32_t stride_index, int32_t strides)
      : newest_(sums + stride_index % strides * step), previous_(*newest_), strides_(strides) {
    for (int32_t i = 1; i < strides; ++i) {  // the oldest stride first
      const float part = sums[(stride_index + i) % strides * step];
      older_ = i == 1 ? part : __fadd_rn(older_, part);
    }
  }

  // Adds x to the sum of the newest stride; the mean of the window if this completes one (else undefined).
  __device__ float Grow(float x, bool first, float per_window) {
    const float sum = first ? x : __fadd_rn(previous_, x);
    *newest_ = sum;
    return __fmul_rn(strides_ == 1 ? sum : __fadd_rn(older_, sum), per_window);  // as XLA divides by a constant
  }

 private:
  float* newest_;
  float previous_, older_ = 0;
  int32_t strides_;
};

// Element h of a head of `head_dim` elements at `x`, rotated: h and its partner half a head away are one pair.
template <typename Key>
__device__ float Rotated(const Key* x, int32_t h, int32_t head_dim, const float* cos, const float* sin) {
  const int32_t half = head_dim / 2, pair = h % half;
  const float own = ToFloat(x[h]), partner = ToFloat(x[h < half ? h + half : h - half]);
  const float turned = __fmul_rn(partner, sin[pair]);
  return __fmaf_rn(own, cos[pair], h < half ? -turned : turned);
}

// The sum of one number of each thread, in thread 0; the same order whatever the grid. All threads must call it.
__device__ float SumOfThreads(float x) {
  __shared__ float of_warp[kMaxHeadDim / kWarp];
  for (int32_t step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  float total = 0;
  for (int32_t warp = 0; warp < static_cast<int32_t>(blockDim.x) / kWarp; ++warp) total += of_warp[warp];
  return total;
}

// log(1 + exp(x)), finite for every finite x.
__device__ float Softplus(float x) { return isnan(x) ? x : fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <typename Key>
__global__ void AppendKernel(const __grid_constant__ AppendArgs<Key> args) {
  const auto row = static_cast<int64_t>(blockIdx.x);
  const auto part = static_cast<int32_t>(blockIdx.y);  // a KV head, or after those a few query heads
  const int32_t head_dim = args.head_dim, h = static_cast<int32_t>(threadIdx.x);
  const float* cos = args.cos + row * (head_dim / 2);
  const float* sin = args.sin + row * (head_dim / 2);
  const bool exists = h < head_dim;
  const Key* q = args.projected + row * (args.query_heads + 2 * args.heads) * head_dim;
  const Key* k = q + args.query_heads * head_dim;
  const Key* v = k + args.heads * head_dim;
  if (part >= args.heads) {
    if (!exists) return;
    const int32_t first = (part - args.heads) * kQueryHeads;
#pragma unroll
    for (int32_t i = 0; i < kQueryHeads; ++i) {
      if (first + i >= args.query_heads) return;
      Key* to = args.rotated_q + (row * args.query_heads + first + i) * head_dim;
      Store(to + h, Rotated(q + (first + i) * head_dim, h, head_dim, cos, sin));
    }
    return;
  }

  const int64_t pair = row * args.heads + part;
  const int32_t length = args.lengths[row];
  const bool active = args.active[row];
  const int32_t stride_index = length / args.stride, offset = length % args.stride;
  const int32_t window = stride_index - (args.strides - 1);
  const bool complete = offset == args.stride - 1 && window >= 0 && window < args.windows;
  const float per_window = __frcp_rn(static_cast<float>(args.strides * args.stride));
  const int32_t per_block = args.block_size / args.stride, element = exists ? h : 0;
  WindowSums keys(args.key_sums + pair * args.strides * head_dim + element, head_dim, stride_index, args.strides);
  WindowSums ranks(args.rank_sums + pair * args.strides, 1, stride_index, args.strides);
  // The last window of a block reaches into the next one.
  float* bests[2];
  float best[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t touched = (window + i) / per_block;
    const bool counts = complete && touched < args.blocks && (i == 0 || touched != window / per_block);
    bests[i] = counts ? args.block_rank + pair * args.blocks + touched : nullptr;
    best[i] = counts ? *bests[i] : 0.0f;
  }
  const float a = args.a[part];

  float score = 0, key = 0;
  if (exists) {
    Key rounded;
    Store(&rounded, Rotated(k + part * head_dim, h, head_dim, cos, sin));
    key = ToFloat(rounded);
    args.rotated_k[pair * head_dim + h] = rounded;
    args.values[pair * head_dim + h] = v[part * head_dim + h];
    if (args.scored) {
      for (int32_t head = 0; head < args.heads; ++head) {
        score = fmaf(ToFloat(v[head * head_dim + h]), args.delta[(part * args.heads + head) * head_dim + h], score);
      }
    }
  }
  if (!active) return;
  const float cis = args.scored ? a * Softplus(SumOfThreads(score)) : 0.0f;  // of use in thread 0
  if (!exists) return;
  const float mean = keys.Grow(key, offset == 0, per_window);
  if (complete) Store(args.pooled_k + (pair * args.windows + window) * head_dim + h, mean);
  if (h != 0) return;
  const float rank = ranks.Grow(args.exponential ? expf(cis) : cis, offset == 0, per_window);
  const int32_t block = length / args.block_size;
  if (block < args.blocks) {
    args.cis_cache[(pair * args.blocks + block) * args.block_size + length % args.block_size] = cis;
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    if (bests[i] != nullptr) *bests[i] = Maximum(rank, best[i]);
  }
}

template <typename From, typename To>
void CopyUnlessAliased(const From& from, To& to, cudaStream_t stream) {
  if (from.untyped_data() == to.untyped_data()) return;
  cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

ffi::Error AppendToken(cudaStream_t stream, ffi::AnyBuffer projected, FloatBuffer2 cos, FloatBuffer2 sin,
                       FloatBuffer3 delta, FloatBuffer1 a, Int32Buffer1 lengths, PredBuffer1 active,
                       FloatBuffer4 key_sums, FloatBuffer3 rank_sums, ffi::AnyBuffer pooled_k, FloatBuffer3 block_rank,
                       FloatBuffer4 cis_cache, ffi::Result<ffi::AnyBuffer> rotated_q,
                       ffi::Result<ffi::AnyBuffer> rotated_k, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<FloatBuffer4> new_key_sums,
                       ffi::Result<FloatBuffer3> new_rank_sums, ffi::Result<ffi::AnyBuffer> new_pooled_k,
                       ffi::Result<FloatBuffer3> new_block_rank, ffi::Result<FloatBuffer4> new_cis_cache,
                       int64_t stride, int64_t scored, int64_t exponential) {
  const auto fail = [](const std::string& what) { return ffi::Error::InvalidArgument("append_token: " + what); };
  const auto query = rotated_q->dimensions(), key = rotated_k->dimensions(), sums = key_sums.dimensions(),
             pooled = pooled_k.dimensions(), by_token = cis_cache.dimensions(), side_by_side = projected.dimensions();
  if (query.size() != 3 || key.size() != 3 || pooled.size() != 4 || side_by_side.size() != 2) {
    return fail("queries must be [B, N, H], keys [B, K, H], pooled keys [B, K, W, H] and projections [B, (N + 2 K) H]");
  }
  const int64_t rows = key[0], heads = key[1], head_dim = key[2];
  if (query[0] != rows || query[2] != head_dim || side_by_side[0] != rows ||
      side_by_side[1] != (query[1] + 2 * heads) * head_dim || cos.dimensions()[0] != rows ||
      sin.dimensions()[0] != rows || 2 * cos.dimensions()[1] != head_dim || 2 * sin.dimensions()[1] != head_dim ||
      delta.dimensions()[0] != heads || delta.dimensions()[1] != heads || delta.dimensions()[2] != head_dim ||
      a.dimensions()[0] != heads || sums[0] != rows || sums[1] != heads || sums[3] != head_dim || pooled[0] != rows ||
      pooled[1] != heads || pooled[3] != head_dim || by_token[0] != rows || by_token[1] != heads ||
      block_rank.dimensions()[2] != by_token[2] || rank_sums.dimensions()[2] != sums[2] ||
      lengths.dimensions()[0] != rows || active.dimensions()[0] != rows) {
    return fail("the arrays' shapes do not fit together");
  }
  if (pooled_k.element_type() != projected.element_type()) return fail("projections and pooled keys must have one type");
  if (head_dim > kMaxHeadDim || stride < 1) {
    return fail("head dimension " + std::to_string(head_dim) + " or stride " + std::to_string(stride) +
                " out of range: at most " + std::to_string(kMaxHeadDim) + ", at least 1");
  }
  CopyUnlessAliased(key_sums, *new_key_sums, stream);
  CopyUnlessAliased(rank_sums, *new_rank_sums, stream);
  CopyUnlessAliased(pooled_k, *new_pooled_k, stream);
  CopyUnlessAliased(block_rank, *new_block_rank, stream);
  CopyUnlessAliased(cis_cache, *new_cis_cache, stream);
  if (rows * heads == 0) return ffi::Error::Success();
  const auto launch = [&](auto type) {
    using Key = decltype(type);
    const AppendArgs<Key> args{static_cast<const Key*>(projected.untyped_data()),
                               cos.typed_data(),
                               sin.typed_data(),
                               delta.typed_data(),
                               a.typed_data(),
                               lengths.typed_data(),
                               active.typed_data(),
                               static_cast<Key*>(rotated_q->untyped_data()),
                               static_cast<Key*>(rotated_k->untyped_data()),
                               static_cast<Key*>(values->untyped_data()),
                               new_key_sums->typed_data(),
                               new_rank_sums->typed_data(),
                               static_cast<Key*>(new_pooled_k->untyped_data()),
                               new_block_rank->typed_data(),
                               new_cis_cache->typed_data(),
                               static_cast<int32_t>(query[1]),
                               static_cast<int32_t>(heads),
                               static_cast<int32_t>(head_dim),
                               static_cast<int32_t>(sums[2]),
                               static_cast<int32_t>(pooled[2]),
                               static_cast<int32_t>(by_token[2]),
                               static_cast<int32_t>(by_token[3]),
                               static_cast<int32_t>(stride),
                               scored != 0,
                               exponential != 0};
    const auto parts = static_cast<unsigned>(heads + (query[1] + kQueryHeads - 1) / kQueryHeads);
    const auto threads = static_cast<unsigned>((head_dim + kWarp - 1) / kWarp * kWarp);
    AppendKernel<Key><<<dim3(static_cast<unsigned>(rows), parts), threads, 0, stream>>>(args);
  };
  switch (projected.element_type()) {
    case ffi::F32:
      launch(float{});
      break;
    case ffi::F16:
      launch(__half{});
      break;
    case ffi::BF16:
      launch(__nv_bfloat16{});
      break;
    default:
      return fail("projections must be float32, float16 or bfloat16");
  }
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    return ffi::Error::Internal(std::string("append_token: launch failed: ") + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kHandler, AppendToken,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // projections
                           .Arg<FloatBuffer2>()    // cos
                           .Arg<FloatBuffer2>()    // sin
                           .Arg<FloatBuffer3>()    // delta
                           .Arg<FloatBuffer1>()    // a
                           .Arg<Int32Buffer1>()    // lengths
                           .Arg<PredBuffer1>()     // active
                           .Arg<FloatBuffer4>()    // key_sums, aliased as all that follow
                           .Arg<FloatBuffer3>()    // rank_sums
                           .Arg<ffi::AnyBuffer>()  // pooled_k
                           .Arg<FloatBuffer3>()    // block_rank
                           .Arg<FloatBuffer4>()    // cis by block
                           .Ret<ffi::AnyBuffer>()  // rotated q
                           .Ret<ffi::AnyBuffer>()  // rotated k
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<FloatBuffer4>()
                           .Ret<FloatBuffer3>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<FloatBuffer3>()
                           .Ret<FloatBuffer4>()
                           .Attr<int64_t>("stride")
                           .Attr<int64_t>("scored")
                           .Attr<int64_t>("exponential"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void LoadAppendKernels() {
  cudaFuncAttributes unused;
  cudaFuncGetAttributes(&unused, AppendKernel<float>);
  cudaFuncGetAttributes(&unused, AppendKernel<__half>);
  cudaFuncGetAttributes(&unused, AppendKernel<__nv_bfloat16>);
}

XLA_FFI_Handler* const kAppendTokenCuda = kHandler;

}  // namespace nosa
