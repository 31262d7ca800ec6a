"""Compiles every kernel for every chip that the project names; run as a script, without Triton's interpreter.

No GPU is needed: Triton brings its own assembler. Prints a line a kernel, fails on the first that does not compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compile_attention import attention_cases, index_cases
from dsv4_backend.layouts import EntryLayout
from dsv4_triton_kernels import attention_attend, compressor, kv_store, metadata, planner

CAPABILITIES = (90, 100, 103, 120)
INPUTS = ("seq_ptr", "extend_ptr", "req_ptr", "loc_ptr", "req_to_token_ptr", "full_to_swa_ptr")
INPUTS += ("slot_ptr", "position_ptr", "out_loc_ptr", "sink_ptr", "lse_ptr")
INPUTS += ("window_index_ptr", "window_length_ptr", "compressed_index_ptr", "compressed_length_ptr")
WIDE_OUTPUTS = ("row_req_ptr", "req_per_row_ptr", "raw_out_ptr", "c4_out_ptr", "c128_out_ptr")
NO_LAYOUT = {
    "LAYOUT": False,
    "SEQ_BEFORE": False,
    **dict.fromkeys(("num_batch_rows", "extend_limit", "row_req_ptr", "row_position_ptr", "row_owner_ptr")),
}
UNIFORM_LAYOUT = {
    "LAYOUT": True,
    "SEQ_BEFORE": True,
    **dict.fromkeys(("row_req_ptr", "row_position_ptr", "row_owner_ptr")),
}
RAGGED_LAYOUT = {"LAYOUT": True, "SEQ_BEFORE": False}
GEOMETRY = {"SWA_PAGE": 256, "C4_RING": 16, "C128_RING": 256}
PREFILL = {**GEOMETRY, **NO_LAYOUT, "C4_WRITE_PAD": 10, "C128_WRITE_PAD": 130, "FORCE_UNIFORM": None}
BOTH = {"HAS_C4": True, "HAS_C128": True, "PDL": True}


FLOATS = ("kv_score_ptr", "state_ptr", "bias_ptr", "weight_ptr", "rope_ptr", "pooled_ptr")
CACHE_POINTERS = {**dict.fromkeys(FLOATS, "*fp32"), "eps": "fp32", "out_loc_ptr": "*i64"}


def compile_kernel(
    kernel: object, capability: int, lengths: str, constants: dict[str, object], types: dict[str, str] | None = None
) -> None:
    """`types`: of arguments that are not what the planner's of the same kind are."""
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif types and name in types:
            signature[name] = types[name]
        elif name in ("seq_ptr", "extend_ptr", "req_ptr", "loc_ptr"):
            signature[name] = lengths
        elif name.endswith("_ptr"):
            signature[name] = "*i64" if name in ("full_to_swa_ptr", *WIDE_OUTPUTS) else "*i32"
        else:
            signature[name] = "i32"
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name.endswith("_ptr") and name not in (*INPUTS, *constants)
        },
    )
    options = {"num_warps": num_warps, "launch_pdl": constants["PDL"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    # A program's shared memory: 227 KiB on Hopper and data center Blackwell, 99 KiB elsewhere.
    assert compiled.metadata.shared <= (99 if capability // 10 == 12 else 227) << 10, compiled.metadata.shared
    if capability == 90 and kernel is attention_attend._attend_entries_kernel and num_warps == 8:
        # Eight warps along 64 heads would do all products twice: see the branch in the kernel.
        layouts = [line for line in compiled.asm["ttgir"].splitlines() if "nvidia_mma<" in line]
        assert layouts
        assert not any("warpsPerCTA = [8, 1]" in line for line in layouts), layouts
    # Columns of tensor memory, on data center Blackwell.
    assert (getattr(compiled.metadata, "tmem_size", 0) or 0) <= 512, compiled.metadata.tmem_size


def cases() -> Iterator[tuple[object, str, dict[str, object]]]:
    """Every size class once, and every other choice at least once: kernel, pointer type of the lengths, constants."""
    packed, wide = {**PREFILL, **BOTH, "WIDE": False}, {**PREFILL, **BOTH, "WIDE": True}
    single = [sizes for _, _, sizes in planner.PREFILL_TIERS]
    for sizes in single:
        yield planner._plan_prefill_kernel, "*i64", packed | sizes
    yield planner._plan_prefill_kernel, "*i64", wide | single[-1]
    yield planner._plan_prefill_kernel, "*i32", packed | single[0] | {"PDL": False, "HAS_C4": False}
    yield planner._plan_prefill_kernel, "*i32", packed | single[0] | {"HAS_C128": False}
    for layout in (UNIFORM_LAYOUT, RAGGED_LAYOUT, RAGGED_LAYOUT | {"row_owner_ptr": None}):
        yield planner._plan_prefill_kernel, "*i64", with_layout(packed, layout) | single[0]
    chunked = [sizes for _, sizes in planner.CHUNKED_TIERS]
    yield planner._plan_prefill_chunked_kernel, "*i64", packed | chunked[0] | {"DENSE": True}
    yield planner._plan_prefill_chunked_kernel, "*i32", wide | chunked[1] | {"DENSE": False}
    yield (
        planner._plan_prefill_chunked_kernel,
        "*i64",
        with_layout(packed, RAGGED_LAYOUT) | chunked[0] | {"DENSE": False},
    )
    decode = {**GEOMETRY, **BOTH, "BLOCK": planner.DECODE_BLOCK, "num_warps": 1}
    yield planner._plan_decode_kernel, "*i64", decode
    yield planner._plan_decode_kernel, "*i32", decode | {"HAS_C4": False}


def with_layout(constants: dict[str, object], layout: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in constants.items() if name not in NO_LAYOUT} | layout


def metadata_cases() -> Iterator[tuple[object, str, dict[str, object]]]:
    """Decode, uniform and ragged batches, tables once a request, draft steps; with and without compression."""
    both = {
        **GEOMETRY,
        **BOTH,
        **{"PAGE_SIZE": 256, "WINDOW": 128, "SWA_COLUMNS": 128, "SWA_SIZE": 128, "TOPK": 512, "TOPK_BLOCK": 512},
        **{"HAS_DECODE_PLAN": False, "FROM_ROWS": False, "PER_REQUEST": False, "GROWS": False},
        **{"ROWS": 1, "PAGES": metadata.PAGES, "num_warps": 1},
    }
    for change in (
        {"HAS_DECODE_PLAN": True},
        {},
        {"FROM_ROWS": True},
        {"FROM_ROWS": True, "PER_REQUEST": True},
        {"GROWS": True, "HAS_C4": False, "HAS_C128": False},
        {"PDL": False, "HAS_C4": False, "TOPK": 1000, "TOPK_BLOCK": 1024, "PAGE_SIZE": 128, "WINDOW": 16},
    ):
        yield metadata._build_metadata_kernel, "*i64", both | change
    yield metadata._build_metadata_kernel, "*i32", both


def cache_cases() -> Iterator[tuple[object, str, dict[str, object], dict[str, str]]]:
    """Compressor and store of every format; both forms of a step, and wide plans."""
    layouts = [EntryLayout(kv, 512, 64, 64) for kv in ("fp8", "bf16", "fp32")]
    layouts += [EntryLayout(kv, 128, 64, 64, indexer=True) for kv in ("fp8", "bf16")]
    layouts += [EntryLayout("bf16", 64, 16, 64), EntryLayout("fp32", 32, 16, 64, indexer=True)]
    for layout in layouts:
        data = {"fp8": "*u8", "bf16": "*i16", "fp32": "*fp32"}[layout.format]
        extra = ("*fp32" if layout.indexer else "*i16") if layout.format == "fp8" else data
        types = {**CACHE_POINTERS, "data_ptr": data, "extra_ptr": extra}
        pool, dim = kv_store.pool_constants(layout), layout.head_dim
        stored = kv_store.ROWS_BY_DIM.get(dim, kv_store.SMALL_ROWS)
        for value, slot, norm_rope in (("*bf16", "*i32", True), ("*fp32", "*i64", False)):
            inputs = {"value_ptr": value, "slot_ptr": slot, "position_ptr": slot}
            yield kv_store._store_kv_kernel, "", {"NORM_ROPE": norm_rope, **pool, **stored, "PDL": True}, types | inputs
        finish = {**pool, **compressor.FINISH_ROWS.get(dim, compressor.FINISH_SMALL_ROWS), "PDL": True}
        c4 = {**pool, **compressor.C4_ROWS.get(dim, compressor.SMALL_ROWS), "PDL": True}
        whole = {**pool, **compressor.C128_WHOLE, "PDL": True}
        for form in ("packed", "decode", "wide") if layout is layouts[0] else ("packed", "decode"):
            yield compressor._compress_c4_kernel, "", {"FORM": form, **c4}, types
            if layout.indexer:
                continue
            parts = compressor.DECODE_POOL_PARTS if form == "decode" else compressor.POOL_PARTS
            yield compressor._pool_c128_kernel, "", {"FORM": form, "D": dim, **parts, "PDL": True}, types
            if form != "decode":
                yield compressor._compress_c128_kernel, "", {"FORM": form, **whole}, types
            both = {"FORM": form, "ENTRIES": True, "WIDTH": 2 * dim, **finish}
            yield compressor._finish_step_kernel, "", both, types
        write = {"FORM": "packed", "ENTRIES": False, "WIDTH": 4 * dim, **finish}
        yield compressor._finish_step_kernel, "", write, types
        yield compressor._finish_step_kernel, "", write | {"WRITE_ROWS": 1}, types


def compile_all(capability: int) -> str:
    done = 0
    for case in (
        *cases(),
        *metadata_cases(),
        *cache_cases(),
        *index_cases(),
        *attention_cases(capability // 10),
    ):
        kernel, lengths, constants, *types = case
        compile_kernel(kernel, capability, lengths, constants, *types)
        done += 1
    return f"sm_{capability}: {done} kernels"


def main() -> None:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(compile_all, CAPABILITIES):
            print(line, flush=True)


if __name__ == "__main__":
    main()
