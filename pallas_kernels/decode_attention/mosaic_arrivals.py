"""Copying host pages into cache slots within a kernel, and waiting for them there: what Pallas has no operations for.

Programs of one launch divide the work: each of the first few ("copiers") copies its share of the listed pages' pieces
and counts them as arrived; the others attend, and wait where they come to a block that is not there yet. Programs are
begun in the order of their numbers, so whoever is waited for has begun.

One thread of each of a copier's first warps keeps the copy engine busy: pieces go from the host to shared memory and
from there to their slots, some on their way while others are stored. Pages come in the order in which they are needed.
Written in Mosaic GPU's own terms, which JAX's interpreter does not run.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

# Counting a piece costs about a microsecond, in which its warp begins no other: small pieces are slow.
MAX_PIECE_BYTES = 16384
COPIERS = 8  # with the 256 programs of 16 rows, all that an H200 can run at once
WARPS = 2
STAGES = 3  # pieces of a warp that are on their way, one of them from shared memory to its slot
THREADS = 128  # of a program; as many pages are put in order at a time
AT_ONCE = 256  # programs that attend at the same time, about
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


def page_is_there(arrived_ref: Any, pieces: int) -> jax.Array:
    """Whether the page whose count of pieces this is, int32 [1], can be copied by TMA: one answer for all threads."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def look(_: Any, count: ir.Value) -> mgpu.FragmentedArray:
        # Threads may read different counts, so they vote; afterwards as in `wait_for_page`.
        answer = utils.inline_ptx(
            "{ .reg .b32 count; .reg .pred mine, all; "
            f"ld.relaxed.gpu.global.b32 count, [$1]; setp.ge.u32 mine, count, {pieces}; "
            f"barrier.cta.red.and.pred.aligned all, $2, {THREADS}, mine; "
            "fence.acq_rel.gpu; fence.proxy.async.global; selp.b32 $0, 1, 0, all; }",
            utils.memref_ptr(count), utils.warpgroup_barrier_idx(),
            result_types=_i32_type(), has_side_effects=True, convergent=True,
        )  # fmt: skip
        return mgpu.FragmentedArray.splat(answer, (), is_signed=True)

    return look(arrived_ref) != 0


class Order(NamedTuple):
    """In which order the programs of a launch come to the entries of the lists of blocks.

    Attributes:
      slots: per pair of a row and a KV head.
      splits, entries: programs of a pair, and entries of its list for each of them.
    """

    slots: int
    splits: int
    entries: int


def copy_pieces(
    pages_ref: Any, n_pages_ref: Any, slots_ref: Any, arrived_ref: Any, page_bytes: int, order: Order
) -> None:
    """Copy this program's share of the listed pages' pieces; the program's number is below COPIERS.

    Args:
      pages_ref: int32 [lists, most, 4]. n_pages_ref: int32 [lists].
      slots_ref: all slots. arrived_ref: int32, a count of pieces for each of them.
    """
    n_buffers = WARPS * STAGES
    scratch = {
        "buffers": plgpu.SMEM((n_buffers * piece_bytes_of(page_bytes) // 4,), jnp.int32),
        "barriers": plgpu.SMEM((n_buffers * 2,), jnp.int32),  # 8 bytes each
        "sorted_pages": plgpu.SMEM((THREADS * 4,), jnp.int32),
        "keys": plgpu.SMEM((THREADS,), jnp.int32),
    }

    def scope(**scratch_refs: Any) -> None:
        refs = {"pages": pages_ref, "n_pages": n_pages_ref, "slots": slots_ref, "arrived": arrived_ref, **scratch_refs}

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def copy(_: Any, *values: ir.Value) -> None:
            addresses = dict(zip(refs, map(_address, values), strict=True))
            _Copier(addresses, pages_ref.shape, page_bytes, order).run()

        copy(*refs.values())

    pl.run_scoped(scope, **scratch)


class _Copier:
    """The code of a program that copies. Pieces of a warp are numbered; that of number n uses stage n % STAGES."""

    def __init__(self, at: dict[str, ir.Value], shape: tuple[int, int, int], page_bytes: int, order: Order):
        self.at, self.order = at, order
        self.lists, self.most, _ = shape
        self.page_bytes, self.piece_bytes = page_bytes, piece_bytes_of(page_bytes)
        self.pieces = pieces_of(page_bytes)
        self.thread = utils.thread_idx()
        self.warp = arith.divui(self.thread, _i32(32))
        self.stages = arith.muli(self.warp, _i32(STAGES))  # the first of this warp's
        self.program = utils.inline_ptx("mov.u32 $0, %ctaid.x;", result_types=_i32_type())
        self.counts = [_load(_at(at["n_pages"], _i32(number), 4), 1)[0] for number in range(self.lists)]

    def run(self) -> None:
        """Copy this program's pieces."""
        first = _is(arith.CmpIPredicate.eq, arith.remui(self.thread, _i32(32)), _i32(0))
        issues = arith.andi(first, _is(arith.CmpIPredicate.ult, self.warp, _i32(WARPS)))
        with utils.when(issues):
            for stage in range(STAGES):
                _ptx("mbarrier.init.shared::cta.b64 [$0], 1;", self._stage(_i32(stage))[1])
            _ptx("fence.mbarrier_init.release.cluster; fence.proxy.async;")
        n_pages = self.counts[0]
        for count in self.counts[1:]:
            n_pages = arith.addi(n_pages, count)

        @utils.fori(_ceil_div(n_pages, THREADS), [_i32(0)])
        def _(turn: ir.Value, carry: list) -> list:
            begin = arith.muli(turn, _i32(THREADS))
            count = arith.minui(arith.subi(n_pages, begin), _i32(THREADS))
            self._sort(begin, count)
            total = _ceil_div(arith.muli(count, _i32(self.pieces)), WARPS * COPIERS)
            with utils.when(issues):
                self._copy(carry[0], total, count)
            utils.warpgroup_barrier()  # until here the sorted pages are read
            return [arith.addi(carry[0], arith.addi(total, _i32(STAGES - 1)))]

    def _sort(self, begin: ir.Value, count: ir.Value) -> None:
        """Put `count` pages of all lists into shared memory: first those that a program comes to first.

        Args:
          begin: the first page's number among those of all lists, one list after the other.
        """
        mine = _is(arith.CmpIPredicate.ult, self.thread, count)
        entry = arith.addi(begin, arith.select(mine, self.thread, _i32(0)))  # exists in any case
        place, ahead = entry, _i32(0)
        for number, length in enumerate(self.counts[:-1], 1):
            ahead = arith.addi(ahead, length)  # pages of the lists before this one
            beyond = _is(arith.CmpIPredicate.uge, entry, ahead)
            here = arith.addi(_i32(number * self.most), arith.subi(entry, ahead))
            place = arith.select(beyond, here, place)
        low, high, slot, wanted = _load(_at(self.at["pages"], place, 16), 4)
        split = arith.muli(arith.divui(slot, _i32(self.order.slots)), _i32(self.order.splits))
        split = arith.addi(split, arith.divui(wanted, _i32(self.order.entries)))
        key = arith.muli(arith.divui(split, _i32(AT_ONCE)), _i32(self.order.entries))
        key = arith.addi(key, arith.remui(wanted, _i32(self.order.entries)))
        key = arith.select(mine, key, _i32(2**31 - 1))
        _ptx("st.shared.b32 [$0], $1;", _shared_at(self.at["keys"], self.thread, 4), key)
        utils.warpgroup_barrier()

        @utils.fori(_ceil_div(count, 4), [_i32(0)])
        def ranked(turn: ir.Value, carry: list) -> list:
            (rank,) = carry
            for i, other in enumerate(_load(_shared_at(self.at["keys"], turn, 16), 4)):
                before = _is(arith.CmpIPredicate.ult, arith.addi(arith.muli(turn, _i32(4)), _i32(i)), self.thread)
                before = arith.andi(before, _is(arith.CmpIPredicate.eq, other, key))
                before = arith.ori(before, _is(arith.CmpIPredicate.ult, other, key))
                rank = arith.addi(rank, arith.extui(_i32_type(), before))
            return [rank]

        (rank,) = ranked.results
        target = _shared_at(self.at["sorted_pages"], rank, 16)
        _ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", target, low, high, slot, wanted, predicate=mine)
        utils.warpgroup_barrier()

    def _copy(self, first: ir.Value, total: ir.Value, count: ir.Value) -> None:
        """Copy this warp's pieces of the sorted pages, as `total` numbers from `first` on."""

        def begin(index: ir.Value) -> tuple[ir.Value, ...]:
            return self._begin(arith.addi(first, index), *self._find(index, total, count))

        @utils.fori(total, [begin(_i32(n)) for n in range(STAGES - 1)])
        def _(index: ir.Value, loading: list) -> list:
            arriving, *loading = loading
            self._store(arith.addi(first, index), *arriving)
            _ptx("cp.async.bulk.commit_group;")
            loading.append(begin(arith.addi(index, _i32(STAGES - 1))))  # where the piece before this one was
            # Counted as soon as it is there: were it counted with the next one, who waits for it would wait for both.
            _ptx("cp.async.bulk.wait_group 0;")
            self._count(*arriving)
            return loading

    def _find(self, index: ir.Value, total: ir.Value, count: ir.Value) -> tuple[ir.Value, ...]:
        """What to copy as this warp's piece of an index: (the piece of its page + 1, or 0 for nothing; page, slot)."""
        mine = arith.addi(arith.muli(self.warp, _i32(COPIERS)), self.program)
        mine = arith.addi(arith.muli(index, _i32(WARPS * COPIERS)), mine)
        page, piece = arith.divui(mine, _i32(self.pieces)), arith.remui(mine, _i32(self.pieces))
        exists = arith.andi(_is(arith.CmpIPredicate.ult, index, total), _is(arith.CmpIPredicate.ult, page, count))
        entry = arith.minui(page, _i32(THREADS - 1))
        low, high, slot, _ = _load(_shared_at(self.at["sorted_pages"], entry, 16), 4)
        page = arith.ori(arith.shli(_wide(high), _i64(32)), _wide(low))
        exists = arith.andi(exists, _is(arith.CmpIPredicate.ne, page, _i64(0)))
        return arith.select(exists, arith.addi(piece, _i32(1)), _i32(0)), page, slot

    def _begin(self, number: ir.Value, piece: ir.Value, page: ir.Value, slot: ir.Value) -> tuple[ir.Value, ...]:
        """Begin a piece's way to shared memory; (it + 1 or 0, its slot, its place in a slot)."""
        exists = _is(arith.CmpIPredicate.ne, piece, _i32(0))
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
        return piece, slot, offset

    def _store(self, number: ir.Value, piece: ir.Value, slot: ir.Value, offset: ir.Value) -> None:
        """Begin the way of a piece from shared memory to its slot, once it is there."""
        buffer, barrier = self._stage(number)
        parity = arith.andi(arith.divui(number, _i32(STAGES)), _i32(1))
        nvvm.mbarrier_try_wait_parity(llvm.inttoptr(_shared_type(), barrier), parity, _i32(PATIENCE))
        target = arith.addi(_at(self.at["slots"], slot, self.page_bytes), _wide(offset))
        _ptx(
            f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {self.piece_bytes};",
            target, buffer, predicate=_is(arith.CmpIPredicate.ne, piece, _i32(0)),
        )  # fmt: skip

    def _count(self, piece: ir.Value, slot: ir.Value, _: ir.Value) -> None:
        """Tell that a piece is in its slot."""
        _ptx(
            "red.release.gpu.global.add.u32 [$0], $1;", _at(self.at["arrived"], slot, 4), _i32(1),
            predicate=_is(arith.CmpIPredicate.ne, piece, _i32(0)),
        )  # fmt: skip

    def _stage(self, number: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The buffer and the barrier of a piece of this warp."""
        stage = arith.addi(self.stages, arith.remui(number, _i32(STAGES)))
        buffer = _shared_at(self.at["buffers"], stage, self.piece_bytes)
        return buffer, _shared_at(self.at["barriers"], stage, 8)


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


def _shared_at(base: ir.Value, index: ir.Value, size: int) -> ir.Value:
    return arith.addi(base, arith.muli(index, _i32(size)))


def _load(address: ir.Value, count: int) -> tuple[ir.Value, ...]:
    """Integers of 32 bits, one or four, from global or (addresses of 32 bits) shared memory."""
    space = "shared" if address.type == _i32_type() else "global"
    into = ", ".join(f"${i}" for i in range(count))
    ptx = f"ld.{space}.v4.b32 {{{into}}}, [$4];" if count == 4 else f"ld.{space}.b32 $0, [$1];"
    return tuple(utils.inline_ptx(ptx, address, result_types=(_i32_type(),) * count, has_side_effects=True))


def _is(relation: arith.CmpIPredicate, left: ir.Value, right: ir.Value) -> ir.Value:
    return arith.cmpi(relation, left, right)


def _ceil_div(value: ir.Value, by: int) -> ir.Value:
    return arith.divui(arith.addi(value, _i32(by - 1)), _i32(by))


def _ptx(code: str, *args: ir.Value, predicate: ir.Value | None = None) -> None:
    utils.inline_ptx(code, *args, predicate=predicate, has_side_effects=True)
