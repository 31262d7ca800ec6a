"""The attention layer beyond goldens: padding, drafts, dtypes, formats, state dicts, graphs, refusals."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from backend_harness import World
from backends import each_compiled_backend, each_fast_backend
from cache_harness import Harness, Lane, small_config
from dsv4_backend import AttnMetadata, DSV4Attention, ForwardMode, RawBatch
from dsv4_backend.layer_weights import layer_weights

RATIOS = pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "c4", "c128"])
FORMATS = pytest.mark.parametrize("kv", ["fp32", "bf16", "fp8"])
PACKABLE = (128, 64)
"""Head and rope dimension that fp8 has room for."""
TOLERANCE = 5e-6


class LayerHarness(Harness):
    """Serves requests through a layer; keeps the metadata and the output of the last step.

    Padding gets hidden states of its own. The reserved page of the window is full of zeros, as caches begin.
    """

    def __init__(
        self, impl: str, device: str, ratio: int, *, dtype: torch.dtype = torch.float32, **sizes: object
    ) -> None:
        super().__init__(impl, device, ratio, **sizes)  # type: ignore[arg-type]
        torch.manual_seed(ratio)
        made = DSV4Attention(self.cfg, ratio, dtype=torch.float32)
        for name, each in made.named_parameters():
            if name.endswith(("ape", "norm", "sink")):
                each.add_(torch.randn(each.shape) * 0.3)
        weights = made.state_dict()
        self.layer = DSV4Attention.from_weights(weights, self.cfg, ratio, impl=impl, device=device, dtype=dtype)
        self.writer = self  # type: ignore[assignment] - what `_step` hands its rows to
        reserved = 1 if self.cache.window.layout.format == "fp8" else self.geom.swa_page_size
        self.cache.window.data[:reserved] = 0

    def streams(self, count: int) -> dict[str, torch.Tensor]:
        return {"kv": self.random(count, self.cfg.hidden_size)}  # hidden states

    def write(self, meta: AttnMetadata, kv: torch.Tensor) -> None:
        self.meta, self.x = meta, kv.nan_to_num(nan=2.0).to(self.layer.dtype)
        self.out = self.layer(self.x, meta, self.cache)

    def whole(self, lane: Lane) -> torch.Tensor:
        """Outputs of all tokens of a request, as another one gets them at once."""
        other = self.open()
        other.streams["kv"] = lane.streams["kv"]
        self.extend({other: lane.length})
        return self.out

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.view(torch.uint8).clone() for name, tensor in self.tensors().items()}

    def reserved_state(self) -> int:
        """Rows of state that belong to the reserved page, or request."""
        return self.geom.ring(self.ratio) if self.ratio else 0


@each_fast_backend
@RATIOS
def test_steps_of_all_kinds_agree(impl: str, device: str, ratio: int) -> None:
    harness = LayerHarness(impl, device, ratio, tokens=300, lanes=4)
    first, second = harness.open(), harness.open()
    found: dict[Lane, list[torch.Tensor]] = {first: [], second: []}

    def keep(sizes: dict[Lane, int], rows: dict[Lane, int] | None = None) -> None:
        start = 0
        for lane, size in sizes.items():
            found[lane].append(harness.out[start : start + size])
            start += (rows or sizes)[lane]

    harness.extend({first: 130})
    keep({first: 130})
    harness.extend({first: 9, second: 127}, padded_rows=140)
    keep({first: 9, second: 127})
    for _ in range(6):
        harness.decode([second, first], padding=2)
        keep({second: 1, first: 1})
    harness.verify({first: 2, second: 2}, {first: 1, second: 2})  # one draft of the first is rejected
    keep({first: 1, second: 2}, {first: 2, second: 2})
    harness.decode([first, second])
    keep({first: 1, second: 1})
    for lane, parts in found.items():
        got, expected = torch.cat(parts), harness.whole(lane)
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) <= TOLERANCE


@each_fast_backend
@RATIOS
@FORMATS
def test_padding_is_finite_and_touches_nothing(impl: str, device: str, ratio: int, kv: str) -> None:
    harness = LayerHarness(impl, device, ratio, kv=kv, head=PACKABLE, index_dim=64)
    lane = harness.open()
    harness.extend({lane: 131}, padded_rows=136)
    assert harness.out.shape == (136, harness.cfg.hidden_size)
    assert harness.out.isfinite().all()
    before, skip = harness.snapshot(), harness.reserved_state()
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    idle = harness.builder.build(RawBatch(ForwardMode.IDLE, nothing, nothing, nothing), 4)
    out = harness.layer(torch.ones((4, harness.cfg.hidden_size), device=device), idle, harness.cache)
    assert out.isfinite().all()
    for name, tensor in harness.snapshot().items():
        rows = skip if "state" in name else 0
        assert torch.equal(tensor[rows:], before[name][rows:]), name


@each_fast_backend
@RATIOS
@FORMATS
def test_bfloat16_is_close_to_float32(impl: str, device: str, ratio: int, kv: str) -> None:
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        harness = LayerHarness(impl, device, ratio, kv=kv, head=PACKABLE, index_dim=64, dtype=dtype, tokens=200)
        lane = harness.open()
        harness.extend({lane: 30})  # the indexer selects all entries
        assert harness.out.dtype == dtype
        outs.append(harness.out.double())
    assert float((outs[0] - outs[1]).norm() / outs[0].norm()) < 2e-2


@each_fast_backend
@RATIOS
def test_tables_that_are_kept_once_a_request(impl: str, device: str, ratio: int) -> None:
    harness = LayerHarness(impl, device, ratio)
    first, second = harness.open(), harness.open()
    harness.extend({first: 140, second: 133})
    meta, out = harness.meta, harness.out
    starts = torch.tensor([139, 272], device=device)
    once = dataclasses.replace(
        meta,
        page_table=meta.page_table[starts],
        c128_page_indices=None if meta.c128_page_indices is None else meta.c128_page_indices[starts],
        table_rows=torch.tensor([0] * 140 + [1] * 133, dtype=torch.int32, device=device),
    )
    again = harness.layer(harness.x, once, harness.cache)
    assert torch.equal(again, out)


@each_fast_backend
@RATIOS
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE], ids=["decode", "idle"])
def test_a_step_without_rows(impl: str, device: str, ratio: int, mode: ForwardMode) -> None:
    world = World(impl, device, ratios=(ratio,))
    none = torch.empty(0, dtype=torch.int64, device=device)
    meta = world.backend.prepare(RawBatch(mode, none, none, none))
    x = torch.empty((0, world.cfg.hidden_size), device=device)
    assert world.backend.attend(0, world.layers[0], x, meta).shape == x.shape


@each_compiled_backend
@RATIOS
def test_a_graph_replays_it(impl: str, device: str, ratio: int) -> None:
    harness = LayerHarness(impl, device, ratio, kv="bf16", dtype=torch.bfloat16)
    lanes = [harness.open() for _ in range(3)]
    harness.extend(dict.fromkeys(lanes, 127))
    harness.decode(lanes, padding=1)
    x, meta, expected = harness.x.clone(), harness.meta, harness.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = harness.layer(x, meta, harness.cache)
    out.fill_(torch.nan)
    graph.replay()
    # cuBLAS may choose another product under capture.
    assert float((out.double() - expected.double()).norm() / expected.double().norm()) < 1e-2


@RATIOS
def test_state_dicts_go_round(ratio: int) -> None:
    harness = LayerHarness("torch", "cpu", ratio)
    lane = harness.open()
    harness.extend({lane: 140})
    layer, expected = harness.layer, harness.out

    def run(other: DSV4Attention) -> torch.Tensor:
        return other(harness.x, harness.meta, harness.cache)

    assert list(layer.state_dict()) == list(layer_weights(layer.cfg, ratio))
    other = DSV4Attention(layer.cfg, ratio, dtype=torch.float32)
    assert not torch.equal(run(other), expected)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(run(other), expected)
    assigned = DSV4Attention(layer.cfg, ratio, dtype=torch.float32)
    assigned.load_state_dict({name: each.clone() for name, each in layer.state_dict().items()}, assign=True)
    assert torch.equal(run(assigned), expected)
    copied = copy.deepcopy(layer)
    copied.wq_a.zero_()  # which is joined with other weights: the copy's change, the layer's do not
    assert not torch.equal(run(copied), expected)
    assert torch.equal(run(layer), expected)
    assert torch.equal(run(layer.to("cpu")), expected)


def test_rope_tables_are_shared() -> None:
    layers = {ratio: DSV4Attention(small_config(4), ratio) for ratio in (0, 4, 128)}
    assert layers[4].rope is layers[128].rope
    assert layers[0].rope is not layers[4].rope
    assert layers[4].rope is DSV4Attention(small_config(4), 4).rope
    assert not torch.equal(layers[0].rope, layers[4].rope)
    assert "rope" not in layers[4].state_dict()


def test_refusals_at_construction() -> None:
    cfg = small_config(4)
    for arguments, message in (
        ({"ratio": 8}, "ratio: expected 0, 4 or 128, got 8"),
        ({"dtype": torch.float16}, "dtype: expected torch.float32 or torch.bfloat16, got torch.float16"),
        ({"impl": "cuda"}, "impl: expected one of"),
        ({"cfg": dataclasses.replace(cfg, q_lora_rank=20)}, "q_lora_rank: expected a multiple of 8, got 20"),
        ({"cfg": dataclasses.replace(cfg, index_heads=6)}, "index_heads: expected a multiple of 4, got 6"),
    ):
        with pytest.raises(ValueError, match=message):
            DSV4Attention(**({"cfg": cfg, "ratio": 4} | arguments))  # type: ignore[arg-type]


def test_refusals_before_anything_is_written() -> None:
    harness = LayerHarness("torch", "cpu", 4)
    lane = harness.open()
    harness.extend({lane: 20})
    layer, x, meta, cache = harness.layer, harness.x, harness.meta, harness.cache
    other = LayerHarness("torch", "cpu", 128).cache
    without = dataclasses.replace(meta, c4_sparse_page_indices=None)
    thin = dataclasses.replace(cache, index_keys=LayerHarness("torch", "cpu", 4, index_dim=64).cache.index_keys)
    before = harness.snapshot()
    for arguments, message in (
        ((x.bfloat16(), meta, cache), "x: expected dtype float32, got bfloat16"),
        ((x[:3], meta, cache), "x: expected 20 rows, those of meta, got 3"),
        ((x[:, :8], meta, cache), "x: expected 64 columns, got 8"),
        ((x, meta, thin), "cache.index_keys: expected head_dim 32 and rope_dim 16, got 64 and 16"),
        ((x, meta, other), "cache: expected that of a layer of ratio 4, got one of ratio 128"),
        ((x, without, cache), "meta: expected metadata with plans of ratio 4, got some without"),
        ((x, dataclasses.replace(meta, plans=None), cache), "meta: expected metadata with plans of ratio 4"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*arguments)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.raises(ValueError, match="expected float32 products in full precision"):
            layer(x, meta, cache)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert all(torch.equal(tensor, before[name]) for name, tensor in harness.snapshot().items())
