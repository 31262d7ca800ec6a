"""SGLang's own backend and ours, side by side on a CPU, on the same batches.

What needs a GPU is stubbed in both: FlashMLA's schedules, the plan of its top-k, and its compress planner, in whose
place our reference plans the lengths that SGLang hands to it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import sglang.kernels.ops.attention.dsv4 as dsv4_kernels
import sglang.kernels.ops.attention.dsv4.topk as topk_kernels
import sglang.srt.layers.attention.deepseek_v4_backend as stock
import sglang.srt.layers.attention.dsv4.metadata as stock_indexer
import sglang.test.kits.attention_unittest.attention_methods.dsv4_attention as kit
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import dsv4_backend as d4

CONTEXT = 3332
PAGES = -(-CONTEXT // 256)
REQUESTS = 9
DRAFTS = 4
STEPS = 3
DECODE_PLAN, PREFILL_PLAN = get_args(stock.FusedCompressMetadata)


def plan(compress_ratio: int, *, token_to_kv_pool: Any, req_to_token: torch.Tensor, **given: Any) -> Any:
    """SGLang's planner, as our reference."""
    rings = {"c4_ring": token_to_kv_pool.get_ring_size(4), "c128_ring": token_to_kv_pool.get_ring_size(128)}
    geom = d4.CacheGeometry(**rings)
    tables = d4.RequestTables(req_to_token, token_to_kv_pool.full_to_swa_index_mapping)
    common = dict(tables=tables, geom=geom, ratios=(compress_ratio,), impl="torch")
    req, seq = given["req_pool_indices"], given["seq_lens"]
    if not given["is_prefill"]:
        made = d4.plan_decode(seq, req, **common)
        return DECODE_PLAN(compress_ratio, made.ratio(compress_ratio).rows)
    rows = given.get("num_q_tokens")
    made = d4.plan_prefill(seq, given["extend_lens"], req, num_rows=rows, **common)
    lists = made.ratio(compress_ratio)
    if rows is None:  # lengths on the host: the lists are exactly as long as they need to be
        used = len(lists.compress_records()), len(lists.write_records())
        return PREFILL_PLAN(compress_ratio, lists.compress[: used[0]], lists.write[: used[1]], None)
    return PREFILL_PLAN(compress_ratio, lists.compress, lists.write, None)


def stub_what_needs_a_gpu() -> None:
    def plan_topk(lens: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.stack((torch.arange(len(lens) + 1), torch.cat((lens.new_zeros(1), lens)))).T.int()

    for module in (dsv4_kernels, topk_kernels, stock_indexer):
        module.plan_topk_v2 = plan_topk
    stock._create_flashmla_metadata = lambda: None
    stock.create_paged_compressor_data = plan


def model_runner(*, ratios: tuple[int, ...] = (0, 4, 128), drafts: int = 0, is_draft: bool = False) -> Any:
    """SGLang's mock of a model runner, with tables of shuffled pages and a window pool with evicted tokens."""
    case = kit.DSV4AttentionCase("dsv4", "dsv4", ForwardMode.DECODE, 64, 256, (1,) * (REQUESTS - 1))
    config = kit.TinyDSV4ModelConfig(num_heads=64, context_len=CONTEXT, compression_ratios=list(ratios))
    runner = kit.MockDSV4ModelRunner(
        case=case,
        model_config=config,
        dtype=torch.bfloat16,
        device="cpu",
        max_context_len=CONTEXT,
        swa_size=4096,
        runner_batch_size=REQUESTS - 1,
        compression_ratios=list(ratios),
    )
    pool = runner.token_to_kv_pool
    if drafts:
        runner.spec_algorithm = SpeculativeAlgorithm.EAGLE
        get_context().override(
            "test",
            speculative_algorithm="EAGLE",
            speculative_num_steps=STEPS,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=drafts,
        )
    rings = {4: 16, 128: 256} if drafts else {4: 8, 128: 128}
    pool.get_ring_size = rings.__getitem__
    runner.is_draft_worker = is_draft
    fill_tables(runner.req_to_token_pool.req_to_token, pool)
    return runner


def fill_tables(req_to_token: torch.Tensor, pool: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    num_pages = (REQUESTS - 1) * PAGES
    order = torch.randperm(num_pages, generator=generator) + 1
    offset = torch.arange(256)
    for request in range(1, REQUESTS):
        pages = order[(request - 1) * PAGES : request * PAGES]
        req_to_token[request] = (pages[:, None] * 256 + offset).flatten()[:CONTEXT].int()
    full_to_swa = torch.zeros((num_pages + 2) * 256 + 1, dtype=torch.int64)
    swa_order = torch.randperm(num_pages, generator=generator) + 1
    for page in range(1, num_pages + 1):
        if torch.rand(1, generator=generator) > 0.1:
            full_to_swa[page * 256 : (page + 1) * 256] = swa_order[page - 1] * 256 + offset
    full_to_swa[-1] = -1
    pool.register_mapping(full_to_swa)


def slots(runner: Any, requests: list[int], first: list[int], counts: list[int]) -> torch.Tensor:
    """Write slots of the rows that begin at `first`."""
    table = runner.req_to_token_pool.req_to_token
    parts = [table[r, f : f + n] for r, f, n in zip(requests, first, counts, strict=True)]
    return torch.cat(parts).long() if parts else torch.zeros(0, dtype=torch.int64)


def forward_batch(mode: ForwardMode, requests: list[int], seq_lens: list[int], loc: torch.Tensor, **extra: Any) -> Any:
    extra.setdefault("spec_info", SimpleNamespace(ragged_verify_layout=None, draft_token_num=DRAFTS))
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(requests),
        input_ids=torch.zeros(len(loc), dtype=torch.int64),
        req_pool_indices=torch.tensor(requests, dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_sum=sum(seq_lens),
        out_cache_loc=loc,
        positions=torch.zeros(len(loc), dtype=torch.int64),
        **extra,
    )


def extend_batch(runner: Any, requests: list[int], prefix: list[int], extend: list[int], rows: int = 0) -> Any:
    """A prompt step; `rows` above the sum of `extend` are padding."""
    loc = slots(runner, requests, prefix, extend)
    starts = [sum(extend[:i]) for i in range(len(extend))]
    return forward_batch(
        ForwardMode.EXTEND,
        requests,
        [p + e for p, e in zip(prefix, extend, strict=True)],
        torch.nn.functional.pad(loc, (0, max(0, rows - len(loc)))),
        extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
        extend_seq_lens_cpu=list(extend),
        extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32),
        extend_prefix_lens_cpu=list(prefix),
        extend_start_loc=torch.tensor(starts, dtype=torch.int32),
        extend_num_tokens=sum(extend),
    )


def view_of(batch: Any, **changes: Any) -> Any:
    """What graph runners pass: a plain object with the fields of a batch."""
    return SimpleNamespace(**{**vars(batch), **changes})
