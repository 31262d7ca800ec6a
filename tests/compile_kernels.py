"""Compiles every kernel for every chip that the project names; run as a script, without Triton's interpreter.

No GPU is needed: Triton brings its own assembler. Prints a line a kernel, fails on the first that does not compile.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4_triton_kernels import metadata, planner

CAPABILITIES = (90, 100, 103, 120)
INPUTS = ("seq_ptr", "extend_ptr", "req_ptr", "loc_ptr", "req_to_token_ptr", "full_to_swa_ptr")
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


def compile_kernel(kernel: object, capability: int, lengths: str, constants: dict[str, object]) -> None:
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
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


def main() -> None:
    for capability in CAPABILITIES:
        done = 0
        for kernel, lengths, constants in (*cases(), *metadata_cases()):
            compile_kernel(kernel, capability, lengths, constants)
            done += 1
        print(f"sm_{capability}: {done} kernels")


if __name__ == "__main__":
    main()
