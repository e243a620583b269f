"""Copying host pages into cache slots within a kernel, and waiting for them there: what Pallas has no operations for.

Programs of one launch divide the work: each of the first few ("copiers") copies its own piece of every listed page and
counts it as arrived; the others attend, and wait where they come to a block that is not there yet. Programs are begun
in the order of their numbers, so whoever is waited for has begun.

Written in Mosaic GPU's own terms, which JAX's interpreter does not run.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

PIECE_BYTES = 2048  # 16 bytes for each thread of a warpgroup
MAX_PIECES = 8  # with the 256 programs of 16 rows, all that an H200 can run at once
IN_FLIGHT = 8  # loads of a thread
UNIT_BYTES = 16


def pieces_of(page_bytes: int) -> int:
    """Pieces of a page, one for each copier."""
    return min(MAX_PIECES, page_bytes // PIECE_BYTES)


def why_not_copied(page_bytes: int) -> str | None:
    """Why pages of this size cannot be copied here, or None if they can."""
    pieces = pieces_of(page_bytes)
    if not pieces or page_bytes % (pieces * PIECE_BYTES):
        return f"pages of {page_bytes} bytes are no {PIECE_BYTES} or {MAX_PIECES * PIECE_BYTES} bytes, or multiples"
    return None


def wait_for_page(arrived_ref: Any, pieces: int) -> None:
    """Return when the page whose count of pieces this is, int32 [1], can be copied by TMA."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, count: ir.Value) -> None:
        utils.SemaphoreRef(utils.memref_ptr(count)).wait(pieces, decrement=False, memory_scope="gpu")
        # What other programs wrote by plain stores is read by the copy engine next.
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    wait(arrived_ref)


def copy_pieces(pages_ref: Any, n_pages_ref: Any, slots_ref: Any, arrived_ref: Any, page_bytes: int) -> None:
    """Copy this program's piece of every listed page; the program's number is that of the piece.

    Args:
      pages_ref: int32 [lists, most, 4]. n_pages_ref: int32 [lists].
      slots_ref: all slots. arrived_ref: int32, a count of pieces for each of them.
    """
    lists, most, _ = pages_ref.shape
    piece_bytes = page_bytes // pieces_of(page_bytes)
    per_page = piece_bytes // PIECE_BYTES  # loads of a thread
    at_once = max(1, IN_FLIGHT // per_page)  # pages

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
    def copy(_: Any, pages: ir.Value, n_pages: ir.Value, slots: ir.Value, arrived: ir.Value) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)

        def const(value: int, kind: ir.Type = i32) -> ir.Value:
            return utils.c(value, kind)

        def wide(value: ir.Value) -> ir.Value:
            return arith.extui(i64, value)

        def at(base: ir.Value, index: ir.Value, size: int) -> ir.Value:
            return arith.addi(base, arith.muli(wide(index), const(size, i64)))

        pages, n_pages, slots, arrived = (
            llvm.ptrtoint(i64, utils.memref_ptr(ref)) for ref in (pages, n_pages, slots, arrived)
        )
        thread = utils.thread_idx()
        program = utils.inline_ptx("mov.u32 $0, %ctaid.x;", result_types=i32)
        offset = arith.addi(
            arith.muli(program, const(piece_bytes)), arith.muli(thread, const(UNIT_BYTES))
        )  # of this thread in a page

        for number in range(lists):
            count = utils.inline_ptx(
                "ld.global.b32 $0, [$1];", at(n_pages, const(number), 4), result_types=i32, has_side_effects=True
            )
            rounds = arith.divui(arith.addi(count, const(at_once - 1)), const(at_once))

            @utils.fori(rounds, [])
            def _(turn: ir.Value, carry: list, number: int = number, count: ir.Value = count) -> list:
                last = arith.subi(count, const(1))
                found = []
                for i in range(at_once):
                    entry = arith.addi(arith.muli(turn, const(at_once)), const(i))
                    exists = arith.cmpi(arith.CmpIPredicate.ult, entry, count)
                    place = arith.addi(const(number * most), arith.minui(entry, last))
                    low, high, slot, _ = utils.inline_ptx(
                        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", at(pages, place, 16),
                        result_types=(i32,) * 4, has_side_effects=True,
                    )  # fmt: skip
                    source = arith.ori(arith.shli(wide(high), const(32, i64)), wide(low))
                    exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ne, source, const(0, i64)))
                    found.append((exists, source, slot))
                units = []
                for exists, source, slot in found:
                    for i in range(per_page):
                        here = arith.addi(wide(offset), const(i * PIECE_BYTES, i64))
                        values = utils.inline_ptx(
                            "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
                            "mov.b32 $3, 0; @p ld.global.cs.v4.b32 {$0, $1, $2, $3}, [$4]; }",
                            arith.addi(source, here), arith.extui(i32, exists),
                            result_types=(i32,) * 4, has_side_effects=True,
                        )  # fmt: skip
                        units.append((exists, arith.addi(at(slots, slot, page_bytes), here), values))
                for exists, target, values in units:
                    utils.inline_ptx(
                        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$4], {$0, $1, $2, $3}; }",
                        *values, target, arith.extui(i32, exists), has_side_effects=True,
                    )  # fmt: skip
                utils.warpgroup_barrier()  # then every thread's stores are part of what the count says
                for i, (exists, _, slot) in enumerate(found):
                    mine = arith.cmpi(arith.CmpIPredicate.eq, thread, const(i))
                    utils.inline_ptx(
                        "red.release.gpu.global.add.u32 [$0], $1;", at(arrived, slot, 4), const(1),
                        predicate=arith.andi(mine, exists), has_side_effects=True,
                    )  # fmt: skip
                return carry

    copy(pages_ref, n_pages_ref, slots_ref, arrived_ref)
