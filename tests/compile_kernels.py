"""Compiles every planner kernel for every chip that the project names; run as a script, without Triton's interpreter.

No GPU is needed: Triton brings its own assembler. Prints a line a kernel, fails on the first that does not compile.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4_triton_kernels import planner

CAPABILITIES = (90, 100, 103, 120)
OUTPUTS = ("header_ptr", "error_ptr", "c4_compress_ptr", "c4_write_ptr", "c128_compress_ptr", "c128_write_ptr")
GEOMETRY = {"SWA_PAGE": 256, "C4_RING": 16, "C128_RING": 256}
PREFILL = {**GEOMETRY, "C4_WRITE_PAD": 10, "C128_WRITE_PAD": 130, "FORCE_UNIFORM": None}
BOTH = {"HAS_C4": True, "HAS_C128": True, "PDL": True}


def compile_kernel(kernel: object, capability: int, lengths: str, constants: dict[str, object]) -> None:
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("seq_ptr", "extend_ptr", "req_ptr"):
            signature[name] = lengths
        elif name.endswith("_ptr"):
            signature[name] = "*i64" if name == "full_to_swa_ptr" else "*i32"
        else:
            signature[name] = "i32"
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in OUTPUTS if name in names},
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
    chunked = [sizes for _, sizes in planner.CHUNKED_TIERS]
    yield planner._plan_prefill_chunked_kernel, "*i64", packed | chunked[0] | {"DENSE": True}
    yield planner._plan_prefill_chunked_kernel, "*i32", wide | chunked[1] | {"DENSE": False}
    decode = {**GEOMETRY, **BOTH, "BLOCK": planner.DECODE_BLOCK, "num_warps": 1}
    yield planner._plan_decode_kernel, "*i64", decode
    yield planner._plan_decode_kernel, "*i32", decode | {"HAS_C4": False}


def main() -> None:
    for capability in CAPABILITIES:
        done = 0
        for kernel, lengths, constants in cases():
            compile_kernel(kernel, capability, lengths, constants)
            done += 1
        print(f"sm_{capability}: {done} kernels")


if __name__ == "__main__":
    main()
