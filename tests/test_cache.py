"""The cache of a model: pools of each layer, one base pointer, sizes."""

from __future__ import annotations

import pytest

from cache_harness import small_config
from dsv4_backend import CacheGeometry, CacheSize, DSV4Cache, DSV4Config, LayerCache

GEOM = CacheGeometry(page_size=256, swa_page_size=128, c4_ring=16)
SIZE = CacheSize(num_pages=5, num_window_pages=4, num_requests=3)


def layer(ratio: int, kv: str) -> LayerCache:
    return LayerCache.empty(DSV4Config.v4_flash(), GEOM, SIZE, ratio, format=kv)


@pytest.mark.parametrize("ratio", [4, 128], ids=["c4", "c128"])
@pytest.mark.parametrize("kv", ["bf16", "fp32"])
def test_one_base_pointer_reaches_window_and_compressed_rows(ratio: int, kv: str) -> None:
    cache = layer(ratio, kv)
    assert cache.rows is not None
    assert cache.compressed is not None
    cache.window.data[130] = 1.0
    cache.compressed.data[3] = 2.0
    assert (cache.rows[130] == 1).all()
    assert (cache.rows[cache.first_compressed_row + 3] == 2).all()
    assert cache.first_compressed_row == 4 * 128
    assert len(cache.rows) == 4 * 128 + 5 * 256 // ratio


def test_packed_pools_stand_alone() -> None:
    cache = layer(4, "fp8")
    assert cache.rows is None
    assert cache.compressed is not None
    assert cache.index_keys is not None
    assert cache.window.data.shape == (4, 74_880)
    assert cache.compressed.data.shape == (5, 37_440)
    assert cache.index_keys.data.shape == (5, 8448)
    assert layer(128, "fp8").compressed.data.shape == (5, 1728)  # type: ignore[union-attr]


def test_state_pools() -> None:
    cache = layer(4, "fp8")
    assert cache.state is not None
    assert cache.index_state is not None
    assert cache.state.shape == (4 * 16, 2048)
    assert cache.index_state.shape == (4 * 16, 512)
    heavy = layer(128, "fp8")
    assert heavy.index_keys is heavy.index_state is None
    assert heavy.state is not None
    assert heavy.state.shape == (3 * 128, 1024)


def test_a_window_only_layer_has_nothing_else() -> None:
    cache = layer(0, "bf16")
    assert cache.compressed is cache.index_keys is cache.state is cache.index_state is None
    assert cache.rows is cache.window.data
    assert cache.nbytes() == {"window": 4 * 128 * 512 * 2}


def test_layers_follow_the_model() -> None:
    cfg = small_config(4)
    cache = DSV4Cache(cfg, CacheGeometry(window=16), SIZE, format="bf16")
    assert [each.ratio for each in cache.layers] == [4]
    assert cache.nbytes() == cache.layers[0].nbytes()
    flash = DSV4Cache(DSV4Config.v4_flash(), GEOM, SIZE, device="meta")
    assert [each.ratio for each in flash.layers] == list(DSV4Config.v4_flash().compress_ratios)


def test_room_for_requests() -> None:
    size = CacheSize.for_requests(
        DSV4Config.v4_flash(), CacheGeometry(), num_requests=3, max_seq_len=1000, chunk_size=512
    )
    assert size == CacheSize(num_pages=13, num_window_pages=3 * 2 + 3 + 1, num_requests=4)


def test_refusals() -> None:
    cfg = DSV4Config.v4_flash()
    with pytest.raises(ValueError, match="format: expected one of"):
        DSV4Cache(cfg, GEOM, SIZE, format="int8")
    with pytest.raises(ValueError, match="geom: expected the model's window of 128 tokens, got 16"):
        DSV4Cache(cfg, CacheGeometry(window=16), SIZE)
    with pytest.raises(ValueError, match="num_pages: expected an int of at least 1, got 0"):
        CacheSize(0, 1, 1)
    with pytest.raises(ValueError, match="head_dim: expected 1 to 8 blocks of 64"):
        DSV4Cache(small_config(4), CacheGeometry(window=16), SIZE)
