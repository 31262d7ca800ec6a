"""What only the Triton metadata has: launches, compilation, its own constants, and sizes that need a GPU."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import dsv4_backend as d4
from backends import each_compiled_backend, each_triton_backend
from dsv4_backend import ForwardMode, plans
from metadata_checks import check_build, setting_of
from metadata_steps import Step, UncheckedBuilder
from strategies import GARBAGE_SLOT

pytest.importorskip("triton")
from dsv4_triton_kernels import common, planner, planner_rows

SETTING = setting_of(600, num_requests=9)
SLOTS = list(range(300, 340))
STEPS = {
    "decode": Step(ForwardMode.DECODE, [1, 2, 0], [50, 256, 9], SLOTS[:3]),
    "idle": Step(ForwardMode.IDLE, [1], [50], [300], padded=3),
    "growing": Step(ForwardMode.DRAFT_DECODE, [1, 2, 0], [50, 255, 9], SLOTS[:12], num_steps=4),
    "frozen": Step(ForwardMode.DRAFT_DECODE, [1, 2, 0], [50, 255, 9], SLOTS[:12], num_steps=4, grows=False),
    "verify": Step(ForwardMode.TARGET_VERIFY, [1, 2, 0], [50, 255, 9], SLOTS[:12], drafts=4),
    "draft extend": Step(ForwardMode.DRAFT_EXTEND, [1, 2, 0], [50, 255, 9], SLOTS[:12], drafts=4),
    "ragged verify": Step(ForwardMode.TARGET_VERIFY, [1, 2, 0], [50, 255, 9], SLOTS[:9], [4, 2, 3]),
    "ragged draft extend": Step(ForwardMode.DRAFT_EXTEND, [1, 2, 0], [50, 255, 9], SLOTS[:9], [4, 2, 3]),
    "extend": Step(ForwardMode.EXTEND, [1, 2, 0], [50, 255, 9], SLOTS[:9], [4, 2, 3]),
}
ONE, TWO = ["_build_metadata_kernel"], ["_plan_prefill_kernel", "_build_metadata_kernel"]


def launches_of(name: str, ratios: tuple[int, ...]) -> list[str]:
    """Two where rows need a plan, or an owner that no division finds."""
    step = STEPS[name]
    planned = step.mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) and ratios
    return TWO if planned or step.extends else ONE


@each_triton_backend
@pytest.mark.parametrize("ratios", [(4, 128), ()], ids=str)
def test_no_build_takes_more_than_two_launches(
    impl: str, device: str, ratios: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner's where there is a plan, and one for all else, of all draft steps together."""
    launched: list[str] = []
    launch = common.Launcher.__call__

    def counted(self: common.Launcher, *args: object) -> None:
        launched.append(self._kernel.fn.__name__)
        launch(self, *args)

    monkeypatch.setattr(common.Launcher, "__call__", counted)
    for once in (False, True):
        setting = dataclasses.replace(SETTING, ratios=ratios, once_a_request=once)
        builder = setting.builder(impl, device)
        for name, step in STEPS.items():
            launched.clear()
            with setting.limits():
                step.build(builder)
            assert launched == launches_of(name, ratios), name
            assert len(launched) <= 2


@pytest.fixture
def restored_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@each_compiled_backend
@pytest.mark.usefixtures("restored_sync_mode")
def test_no_wait_no_allocation_and_nothing_beside_the_launches(impl: str, device: str) -> None:
    """As the profiler sees it: no copy, no fill, no other kernel, in any mode."""
    builders = [dataclasses.replace(SETTING, ratios=ratios).builder(impl, device) for ratios in ((4, 128), ())]
    built = [(builder, name, step, step.tensors(device)) for builder in builders for name, step in STEPS.items()]
    for builder, _, step, tensors in built:
        step.build(builder, tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for builder, _, step, tensors in built:
            step.build(builder, tensors)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    expected = [launches_of(name, builder.ratios) for builder, name, _, _ in built]
    assert names == [kernel for launches in expected for kernel in launches]
    for builder in builders:
        builder.check()


def test_constants_are_those_of_the_contract() -> None:
    assert planner_rows.ERROR_UNOWNED.value == plans.ERROR_UNOWNED
    codes = {plans.ERROR_LENGTHS, plans.ERROR_SLOT, plans.ERROR_UNOWNED}
    assert codes == set(plans.ERROR_TEXT)
    assert sum(codes) == 7  # one bit each


CHUNKS = {"CHUNK": 32, "SEARCH": 32, "BLOCK": 64, "num_warps": 1}
SPOILT = {
    "good": {},
    "a bad length": {"seqs": 601},
    "a bad id": {"reqs": 9},
    "padding of a bad length": {"reqs": 0, "seqs": -5},
}
CHUNKED = [(name, values) for name in ("ragged", "uniform") for values in SPOILT.values()]


@each_triton_backend
@pytest.mark.parametrize(
    ("name", "spoilt"),
    [*CHUNKED, ("ragged", {"extends": -1})],
    ids=[f"{name}, {what}" for name in ("ragged", "uniform") for what in SPOILT] + ["ragged, a senseless count"],
)
def test_lengths_read_in_chunks(
    impl: str, device: str, name: str, spoilt: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and blocks small enough for a test: several of each a program, and padding on every border of them."""
    monkeypatch.setattr(planner, "PREFILL_TIERS", ())
    monkeypatch.setattr(planner, "CHUNKED_TIERS", ((2**31, CHUNKS),))
    monkeypatch.setattr(planner, "CHUNKED_PROGRAMS", 2)
    counts = [b % 4 for b in range(70)] if name == "ragged" else [2] * 70
    slots = [300 + row % 200 for row in range(sum(counts))]
    lists = {"reqs": [b % 9 for b in range(70)], "seqs": [9 * b % 300 + 5 for b in range(70)], "extends": counts}
    for key, value in spoilt.items():
        lists[key][33] = value
    step = Step(ForwardMode.EXTEND, **lists, slots=slots)
    if name == "uniform":
        step = dataclasses.replace(step, mode=ForwardMode.TARGET_VERIFY, extends=None, drafts=2)
    builder = SETTING.builder(impl, device, UncheckedBuilder)
    check_build(builder, step.build(builder), SETTING, step)


@each_compiled_backend
def test_inputs_that_change_just_before_a_build(impl: str, device: str) -> None:
    """Kernels that start early must not read early: 300 builds behind the kernels that write what they read."""
    builder = SETTING.builder(impl, device)
    step = STEPS["ragged verify"]
    tensors = dataclasses.replace(step, reqs=[1, 2, 3], seqs=[0, 0, 0]).tensors(device)
    batch = dataclasses.replace(step, padded=9).batch(tensors)
    positions = builder.build(batch, 9).positions
    found = torch.zeros(300, 9, dtype=torch.int32, device=device)
    for i in range(300):
        tensors["seq_lens"].add_(1)
        tensors["extend_lens"].copy_(tensors["extend_lens"].roll(1))
        builder.build(batch, 9)
        found[i] = positions
    extends = [4, 2, 3]
    for i, row in enumerate(found.tolist()):
        extends = [extends[-1], *extends[:-1]]
        assert row == [i + 1 + j for extend in extends for j in range(extend)]
    builder.check()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2**30, 2**31 + 64], ids=["offset beyond 2^31", "row stride beyond 2^31"])
def test_tables_beyond_two_to_the_31_elements(width: int) -> None:
    if torch.cuda.mem_get_info()[0] < 16 * width:
        pytest.skip(f"needs {16 * width >> 30} GiB of GPU memory")
    setting = setting_of(600, num_requests=4)
    small = setting.tables("cuda")
    memory = torch.full((3 * width + 600,), GARBAGE_SLOT, dtype=torch.int32, device="cuda")
    req_to_token = memory.as_strided((4, 600), (width, 1))
    req_to_token.copy_(small.req_to_token)
    builder = setting.builder("triton", "cuda", tables=d4.RequestTables(req_to_token, small.full_to_swa))
    for name in ("decode", "extend", "growing"):
        step = dataclasses.replace(STEPS[name], reqs=[1, 3, 0])
        check_build(builder, step.build(builder), setting, step)


SANITIZED = """
import torch, dsv4_backend as d4
from dsv4_backend import ForwardMode as Mode, metadata_buffers
geom = d4.CacheGeometry.for_drafts(4)
rows = torch.arange(64 * 1024, dtype=torch.int32, device="cuda").view(64, 1024)
tables = d4.RequestTables(rows, torch.arange(64 * 1024, device="cuda"))
for ratios in ((4, 128), ()):
    for limit in (metadata_buffers.MAX_TABLE_BYTES, 0):
        metadata_buffers.MAX_TABLE_BYTES = limit
        builder = d4.MetadataBuilder(
            d4.DSV4Config.v4_flash(), geom, tables, max_rows=4096, max_seq_len=900, ratios=ratios
        )
        for size in (1, 33, 64):
            req, seq = torch.arange(size, device="cuda"), 20 + torch.arange(size, device="cuda") * 13
            if size > 1:
                req[7], seq[5], seq[9], seq[11] = 64, -7, 901, 1024
            for mode, extends, most in (
                (Mode.DECODE, None, 1), (Mode.IDLE, None, 1), (Mode.DRAFT_DECODE, None, 3),
                (Mode.TARGET_VERIFY, None, 4), (Mode.DRAFT_EXTEND, None, 4), (Mode.TARGET_VERIFY, req % 5, 4),
                (Mode.EXTEND, req * 3 % 20, 20), (Mode.EXTEND, req * 0 - 1, 4),
            ):
                total = size * most if extends is None else max(0, int(extends.sum()))
                slots = torch.arange(total, device="cuda") * 37
                drafts = most if mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND) else 0
                batch = d4.RawBatch(mode, req, seq, slots, extends, num_draft_tokens=drafts, num_steps=3)
                if mode is Mode.DRAFT_DECODE:
                    builder.build_draft_steps(batch)
                    builder.build_draft_steps(batch, size + 3, "frozen")
                else:
                    builder.build(batch)
                    builder.build(batch, total + 4)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer on this machine")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
