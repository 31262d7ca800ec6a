"""Block tables as request tables: every token keeps its slot, and its metadata is that of tables written by hand."""

from __future__ import annotations

import pytest
import torch

from dsv4_backend import CacheGeometry, DSV4Config, ForwardMode, MetadataBuilder, RawBatch
from dsv4_backend.adapters.vllm import extend_lens, request_ids, request_tables

BLOCKS = torch.tensor([[5, 2, 9], [7, 0, 0], [5, 1, 0]], dtype=torch.int32)
WINDOW_BLOCKS = torch.tensor([[0, 0, 3, 8, 4, 6], [1, 2, 0, 0, 0, 0], [0, 7, 5, 9, 0, 0]], dtype=torch.int32)


def test_every_token_keeps_its_slots() -> None:
    tables = request_tables(BLOCKS, 256, WINDOW_BLOCKS, 128, 12)
    assert tables.num_requests == 4
    assert tables.max_seq_len == 768
    assert not tables.req_to_token[0].any()
    for request in range(3):
        for position in range(768):
            block, window_block = int(BLOCKS[request, position // 256]), int(WINDOW_BLOCKS[request, position // 128])
            slot = int(tables.req_to_token[request + 1, position])
            assert slot == (block * 256 + position % 256 if block else 0)
            if block and window_block:
                assert int(tables.full_to_swa[slot]) == window_block * 128 + position % 128
    assert not tables.full_to_swa[:256].any()
    assert int(tables.full_to_swa[-1]) == -1
    # Positions 128 to 255 of requests 0 and 2 share block 5; one of them lost its window block.
    assert int(tables.full_to_swa[5 * 256 + 130]) == 7 * 128 + 2
    assert int(tables.full_to_swa[5 * 256]) == 0


def test_metadata_of_a_mixed_step() -> None:
    tables = request_tables(BLOCKS, 256, WINDOW_BLOCKS, 128, 12)
    geom = CacheGeometry(page_size=256, swa_page_size=128)
    builder = MetadataBuilder(DSV4Config.v4_flash(), geom, tables, max_rows=16, max_seq_len=768)
    lens = extend_lens(torch.tensor([0, 1, 3, 4], dtype=torch.int32))
    seq = torch.tensor([700, 130, 260])
    slots = torch.cat([tables.req_to_token[b + 1, s - n : s] for b, (s, n) in enumerate(zip(seq, lens, strict=True))])
    batch = RawBatch(ForwardMode.EXTEND, request_ids(3, 3, "cpu"), seq, slots, extend_lens=lens)
    meta = builder.build(batch, padded_rows=6)
    builder.check()
    assert meta.positions.tolist() == [699, 128, 129, 259, 0, 0]
    assert meta.page_table[0, :3].tolist() == [5, 2, 9]
    assert meta.swa_page_indices[3, :2].tolist() == [5 * 128 + 3, 5 * 128 + 2]
    assert meta.req_pool_indices_per_row.tolist() == [1, 2, 2, 3, 0, 0]


def test_ids_of_a_padded_batch() -> None:
    assert request_ids(2, 4, "cpu").tolist() == [1, 2, 0, 0]
    assert request_ids(0, 2, "cpu").tolist() == [0, 0]
    with pytest.raises(ValueError, match="padded_size: expected at least batch_size 3, got 2"):
        request_ids(3, 2, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 64}, "block_size: expected a multiple of 128, got 64"),
        ({"swa_block_size": 0}, "swa_block_size: expected a positive int, got 0"),
        ({"swa_block_table": WINDOW_BLOCKS[:2]}, "swa_block_table: expected 3 elements, got 2"),
        ({"num_blocks": 2**23 + 1}, "num_blocks: expected slots of at most 31 bits, got 8388609 blocks of 256"),
        ({"block_table": BLOCKS[:, :0]}, "block_table: expected at least one column, got none"),
        ({"block_table": BLOCKS.float()}, "block_table: expected dtype int"),
    ],
)
def test_refusals(changes: dict, message: str) -> None:
    arguments = dict(
        block_table=BLOCKS, block_size=256, swa_block_table=WINDOW_BLOCKS, swa_block_size=128, num_blocks=12
    )
    with pytest.raises(ValueError, match=message):
        request_tables(**arguments | changes)
