"""How the GPU kernels cut queries, keys and shared memory into tiles."""

import math
from dataclasses import dataclass

import jax.experimental.pallas.mosaic_gpu as plgpu

ROWS = 64  # query rows of a warpgroup: the M of one wgmma
LOG2E = math.log2(math.e)
SHARED_MEMORY = 224 * 1024  # bytes of a Hopper SM that one program may take, less room for barriers


@dataclass(frozen=True)
class Tiling:
    """Static sizes of the kernels.

    A row is one query head of one token; the `padded_group` rows of a token are neighbours. `warpgroups` consumers of
    64 rows share the stream of keys and values, so a tile is `tokens` queries. `step` keys are handled at a time.
    """

    head_dim: int
    block_size: int
    group: int
    padded_group: int
    warpgroups: int
    step: int

    @classmethod
    def choose(cls, head_dim: int, block_size: int, group: int, warpgroups: int = 2) -> "Tiling":
        """Groups are padded to a power of two, and to 4 so that a tile's queries fit the 32 bits of a list entry."""
        padded = max(4, 1 << (group - 1).bit_length())
        longest = 64 if head_dim <= 192 else 32  # two stages must fit beside the queries and their cotangents
        step = max(s for s in range(16, longest + 1, 16) if block_size % s == 0)
        return cls(head_dim, block_size, group, padded, warpgroups, step)

    @property
    def tokens(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * self.unit_tokens

    @property
    def unit_tokens(self) -> int:
        """Queries of one warpgroup."""
        return ROWS // self.padded_group

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * ROWS

    @property
    def substeps(self) -> int:
        """Steps per block."""
        return self.block_size // self.step

    @property
    def padded_step(self) -> int:
        """Biases of a step, padded so that each stage starts at a multiple of the 128 bytes that copies ask for."""
        return -(-self.step // 32) * 32

    def forward_stages(self, listed: int) -> int:
        """Blocks of keys and values that fit in shared memory beside the queries and the lists."""
        fixed = self.rows * (self.head_dim * 2 + 8) + listed * 8
        stage = self.step * self.head_dim * 4 + self.padded_step * 4
        return min(4, (SHARED_MEMORY - fixed) // stage)

    def query_gradient_stages(self, listed: int) -> int:
        """The same for the kernel that also holds the output's cotangents."""
        fixed = self.rows * (self.head_dim * 4 + 12) + listed * 8
        stage = self.step * self.head_dim * 4 + self.padded_step * 4
        return min(4, (SHARED_MEMORY - fixed) // stage)

    def key_gradient_stages(self, keys: int) -> int:
        """Tiles of queries and cotangents that fit in shared memory beside one block of `keys` keys and values."""
        stage = self.rows * (self.head_dim * 4 + 12) + 128
        return min(3, (SHARED_MEMORY - keys * (self.head_dim * 4 + 4)) // stage)


def forward_warpgroups(head_dim: int, group: int) -> int:
    """Three consumers where their accumulators fit in registers and their queries in 32 bits, else two.

    128K tokens, 32 query heads on 2 KV heads, H200: 22.8 ms with three, 25.3 ms with two.
    """
    return 3 if head_dim <= 128 and Tiling.choose(head_dim, 16, group, 3).tokens <= 32 else 2


def matrix_transforms(rows: int, columns: int) -> tuple:
    """Tiling and swizzle of a 16-bit matrix in shared memory; wgmma contracts either dimension in whole tiles."""
    swizzle = plgpu.find_swizzle(math.gcd(rows, columns) * 16)
    return (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
