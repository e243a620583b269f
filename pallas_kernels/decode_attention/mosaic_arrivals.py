"""Copying host pages into cache slots within a kernel, and waiting for them there: what Pallas has no operations for.

Programs of one launch divide the work: each of the first few ("copiers") copies its share of the listed pages' pieces
and counts them as arrived; the others attend, and wait where they come to a block that is not there yet. Programs are
begun in the order of their numbers, so whoever is waited for has begun.

One thread of each of a copier's first warps keeps the copy engine busy: pieces go from the host to shared memory and
from there to their slots, some on their way while others are stored. Written in Mosaic GPU's own terms, which JAX's
interpreter does not run.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

# Counting a piece costs about a microsecond, in which its warp begins no other: small pieces are slow.
MAX_PIECE_BYTES = 16384
COPIERS = 8  # with the 256 programs of 16 rows, all that an H200 can run at once
WARPS = 2
STAGES = 3  # pieces of a warp that are on their way
STORING = 1  # of them, from shared memory to their slots
PATIENCE = 10_000_000  # ticks of a wait after which the hardware looks again


def piece_bytes_of(page_bytes: int) -> int:
    """What is copied at a time."""
    return math.gcd(page_bytes, MAX_PIECE_BYTES)


def pieces_of(page_bytes: int) -> int:
    """Pieces of a page, each of which is counted when it has arrived."""
    return page_bytes // piece_bytes_of(page_bytes)


def wait_for_page(arrived_ref: Any, pieces: int) -> None:
    """Return when the page whose count of pieces this is, int32 [1], can be copied by TMA."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, count: ir.Value) -> None:
        utils.SemaphoreRef(utils.memref_ptr(count)).wait(pieces, decrement=False, memory_scope="gpu")
        # What other programs' copy engines wrote is read by this one's next.
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    wait(arrived_ref)


def copy_pieces(pages_ref: Any, n_pages_ref: Any, slots_ref: Any, arrived_ref: Any, page_bytes: int) -> None:
    """Copy this program's share of the listed pages' pieces; the program's number is below COPIERS.

    Args:
      pages_ref: int32 [lists, most, 4]. n_pages_ref: int32 [lists].
      slots_ref: all slots. arrived_ref: int32, a count of pieces for each of them.
    """
    piece_bytes = piece_bytes_of(page_bytes)

    def scope(buffers_ref: Any, barriers_ref: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6)
        def copy(_: Any, *refs: ir.Value) -> None:
            pages, n_pages, slots, arrived, buffers, barriers = map(_address, refs)
            thread = utils.thread_idx()
            warp = arith.divui(thread, _i32(32))
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, _i32(32)), _i32(0))
            with utils.when(arith.andi(first, arith.cmpi(arith.CmpIPredicate.ult, warp, _i32(WARPS)))):
                mine = arith.muli(warp, _i32(STAGES))  # the first of this warp's stages
                buffers = arith.addi(buffers, arith.muli(mine, _i32(piece_bytes)))
                barriers = arith.addi(barriers, arith.muli(mine, _i32(8)))
                _Copier(pages_ref.shape, page_bytes, pages, n_pages, slots, arrived, buffers, barriers).run(warp)

        copy(pages_ref, n_pages_ref, slots_ref, arrived_ref, buffers_ref, barriers_ref)

    pl.run_scoped(
        scope,
        plgpu.SMEM((WARPS * STAGES * piece_bytes // 4,), jnp.int32),
        plgpu.SMEM((WARPS * STAGES * 2,), jnp.int32),  # 8 bytes each
    )


class _Copier:
    """The code of one thread. Its pieces are numbered; that of number n uses stage n % STAGES."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        page_bytes: int,
        pages: ir.Value,
        n_pages: ir.Value,
        slots: ir.Value,
        arrived: ir.Value,
        buffers: ir.Value,
        barriers: ir.Value,
    ):
        self.lists, self.most, _ = shape
        self.page_bytes, self.piece_bytes = page_bytes, piece_bytes_of(page_bytes)
        self.pages, self.slots, self.arrived = pages, slots, arrived
        self.buffers, self.barriers = buffers, barriers
        self.pieces = pieces_of(page_bytes)
        self.counts = [_load(_at(n_pages, _i32(number), 4), 1)[0] for number in range(self.lists)]
        self.program = utils.inline_ptx("mov.u32 $0, %ctaid.x;", result_types=_i32_type())

    def run(self, warp: ir.Value) -> None:
        """Copy all pieces of this thread; `warp` is its warp's number."""
        longest = self.counts[0]
        for count in self.counts[1:]:
            longest = arith.maxui(longest, count)
        n_pieces = arith.muli(longest, _i32(self.lists * self.pieces))
        total = arith.divui(arith.addi(n_pieces, _i32(WARPS * COPIERS - 1)), _i32(WARPS * COPIERS))
        for stage in range(STAGES):
            _ptx("mbarrier.init.shared::cta.b64 [$0], 1;", arith.addi(self.barriers, _i32(8 * stage)))
        _ptx("fence.mbarrier_init.release.cluster; fence.proxy.async;")
        loading = [self._begin(_i32(n), self._find(_i32(n), warp, total)) for n in range(STAGES - STORING)]
        following = self._find(_i32(STAGES - STORING), warp, total)
        nothing = (_i32(0), _i32(0), _i32(0))

        @utils.fori(total, [[nothing] * STORING, loading, following])
        def loop(number: ir.Value, carry: list) -> list:
            storing, (arriving, *loading), following = carry
            self._store(number, arriving)
            _ptx(f"cp.async.bulk.commit_group; cp.async.bulk.wait_group {STORING};")
            self._count(storing[0])  # whose stage is free now
            loading.append(self._begin(arith.addi(number, _i32(STAGES - STORING)), following))
            following = self._find(arith.addi(number, _i32(STAGES - STORING + 1)), warp, total)  # waited for next time
            return [[*storing[1:], arriving], loading, following]

        _ptx("cp.async.bulk.wait_group 0;")
        for piece in loop.results[0]:
            self._count(piece)

    def _find(self, number: ir.Value, warp: ir.Value, total: ir.Value) -> tuple[ir.Value, ...]:
        """What to copy under a number: (which piece of its page + 1, or 0 for nothing; the page's entry, 16 bytes)."""
        # Pages are taken from the lists in turn; their pieces by the programs in turn, and then by the warps.
        mine = arith.addi(arith.muli(warp, _i32(COPIERS)), self.program)
        mine = arith.addi(arith.muli(number, _i32(WARPS * COPIERS)), mine)
        page, piece = arith.divui(mine, _i32(self.pieces)), arith.remui(mine, _i32(self.pieces))
        which, entry = arith.remui(page, _i32(self.lists)), arith.divui(page, _i32(self.lists))
        count = self.counts[0]
        for i, other in enumerate(self.counts[1:], 1):
            count = arith.select(arith.cmpi(arith.CmpIPredicate.eq, which, _i32(i)), other, count)
        exists = arith.cmpi(arith.CmpIPredicate.ult, number, total)
        exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ult, entry, count))
        place = arith.addi(arith.muli(which, _i32(self.most)), arith.minui(entry, _i32(self.most - 1)))
        found = _load(_at(self.pages, place, 16), 4)
        return (arith.select(exists, arith.addi(piece, _i32(1)), _i32(0)), *found)

    def _begin(self, number: ir.Value, found: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        """Begin a piece's way to shared memory; (it + 1 or 0, its slot, its place in the slots)."""
        piece, low, high, slot, _ = found
        page = arith.ori(arith.shli(_wide(high), _i64(32)), _wide(low))
        exists = arith.cmpi(arith.CmpIPredicate.ne, piece, _i32(0))
        exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ne, page, _i64(0)))
        offset = arith.muli(arith.subi(piece, _i32(1)), _i32(self.piece_bytes))
        buffer, barrier = self._stage(number)
        _ptx(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
            barrier, arith.select(exists, _i32(self.piece_bytes), _i32(0)),
        )  # fmt: skip
        _ptx(
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {self.piece_bytes}, [$2];",
            buffer, arith.addi(page, _wide(offset)), barrier, predicate=exists,
        )  # fmt: skip
        return arith.select(exists, piece, _i32(0)), slot, offset

    def _store(self, number: ir.Value, piece: tuple[ir.Value, ...]) -> None:
        """Begin the way of a piece from shared memory to its slot, once it is there."""
        there, slot, offset = piece
        buffer, barrier = self._stage(number)
        parity = arith.andi(arith.divui(number, _i32(STAGES)), _i32(1))
        nvvm.mbarrier_try_wait_parity(llvm.inttoptr(_shared_type(), barrier), parity, _i32(PATIENCE))
        target = arith.addi(_at(self.slots, slot, self.page_bytes), _wide(offset))
        _ptx(
            f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {self.piece_bytes};",
            target, buffer, predicate=arith.cmpi(arith.CmpIPredicate.ne, there, _i32(0)),
        )  # fmt: skip

    def _count(self, piece: tuple[ir.Value, ...]) -> None:
        """Tell that a piece is in its slot."""
        there, slot, _ = piece
        _ptx(
            "red.release.gpu.global.add.u32 [$0], $1;", _at(self.arrived, slot, 4), _i32(1),
            predicate=arith.cmpi(arith.CmpIPredicate.ne, there, _i32(0)),
        )  # fmt: skip

    def _stage(self, number: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The buffer and the barrier of a piece."""
        stage = arith.remui(number, _i32(STAGES))
        buffer = arith.addi(self.buffers, arith.muli(stage, _i32(self.piece_bytes)))
        return buffer, arith.addi(self.barriers, arith.muli(stage, _i32(8)))


def _i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64_type() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _shared_type() -> ir.Type:
    return llvm.PointerType.get(utils.WORKGROUP_NVPTX_ADDRESS_SPACE)


def _i32(value: int) -> ir.Value:
    return utils.c(value, _i32_type())


def _i64(value: int) -> ir.Value:
    return utils.c(value, _i64_type())


def _wide(value: ir.Value) -> ir.Value:
    return arith.extui(_i64_type(), value)


def _address(ref: ir.Value) -> ir.Value:
    """An integer of 64 bits, or of 32 for shared memory."""
    return llvm.ptrtoint(_i32_type() if utils.is_smem_ref(ref) else _i64_type(), utils.memref_ptr(ref))


def _at(base: ir.Value, index: ir.Value, size: int) -> ir.Value:
    return arith.addi(base, arith.muli(_wide(index), _i64(size)))


def _load(address: ir.Value, count: int) -> tuple[ir.Value, ...]:
    """Integers of 32 bits, one or four."""
    into = ", ".join(f"${i}" for i in range(count))
    ptx = f"ld.global.v4.b32 {{{into}}}, [$4];" if count == 4 else "ld.global.b32 $0, [$1];"
    return tuple(utils.inline_ptx(ptx, address, result_types=(_i32_type(),) * count, has_side_effects=True))


def _ptx(code: str, *args: ir.Value, predicate: ir.Value | None = None) -> None:
    utils.inline_ptx(code, *args, predicate=predicate, has_side_effects=True)
