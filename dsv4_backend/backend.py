"""What an engine calls: a step's metadata, eager or in a CUDA graph, and the attention of each layer on it."""

from __future__ import annotations

import torch

from dsv4_backend.batch import ForwardMode, RawBatch
from dsv4_backend.cache import DSV4Cache
from dsv4_backend.config import DSV4Config
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.layer import DSV4Attention
from dsv4_backend.metadata import AttnMetadata
from dsv4_backend.metadata_builder import MetadataBuilder
from dsv4_backend.step_inputs import BOUND_MODES, StepInputs
from dsv4_backend.tables import RequestTables
from dsv4_backend.validation import expect_type


class DSV4AttnBackend:
    """The attention backend of an engine: six methods over one cache and its request tables.

    `prepare` and `attend` run a step without a graph; `bind`, `load` and `record` are the parts of one that a CUDA
    graph replays (`dsv4_graph_runner.StepGraphRunner` puts them together); `check` raises what the device flagged.

    Args:
        cfg: the model; that of the cache.
        geom: cache geometry; that of the cache.
        cache: the pools of all layers.
        tables: the request tables, on the cache's device. Kept, not copied: steps read what the engine has written to
            them by then.
        impl: of the metadata: "auto" (Triton on a GPU, torch on a CPU), "triton" or "torch". Layers have their own.
        max_rows: most rows of a step, padding included; only a bound, memory is taken for the steps that come. None:
            as many as the full pool has slots, since every row is written to one of its own.
        max_seq_len: longest length of a request, which sets the width of page tables. None: what `tables` can hold.

    Attributes:
        cfg, geom, cache, tables: as given.
        builder: the MetadataBuilder of all ratios of the cache's layers.

    Calls come from one thread, and steps run one after another on one stream.

    Raises:
        ValueError: an argument is not as above, or does not go with the others.

    Source: docs/backend.md.
    """

    def __init__(
        self,
        cfg: DSV4Config,
        geom: CacheGeometry,
        cache: DSV4Cache,
        tables: RequestTables,
        impl: str = "auto",
        *,
        max_rows: int | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        for name, value, kind in (
            ("cfg", cfg, DSV4Config),
            ("geom", geom, CacheGeometry),
            ("cache", cache, DSV4Cache),
            ("tables", tables, RequestTables),
        ):
            expect_type(name, value, kind)
        self._check_cache(cfg, geom, cache, tables)
        self.cfg, self.geom, self.cache, self.tables = cfg, geom, cache, tables
        self.builder = self._new_builder(
            tables.num_slots if max_rows is None else max_rows,
            tables.max_seq_len if max_seq_len is None else max_seq_len,
            impl,
        )

    @property
    def device(self) -> torch.device:
        """Where cache, tables and metadata are."""
        return self.tables.device

    def prepare(self, batch: RawBatch, padded_rows: int | None = None) -> AttnMetadata:
        """Builds the metadata of a step that runs without a graph.

        Before: each row's slot belongs to the request at the row's position, in `tables` and in `full_to_swa`, and
        nothing else is written there; tokens that the lengths count as earlier ones are in the cache.
        After: the metadata is fit for `attend` on every layer, until the next `prepare` of the same mode. Nothing has
        been written but the builder's buffers. Nothing has waited for the device, unless this is the first step of its
        mode and size (rounded up to a power of two), for which buffers are made.

        Args:
            batch: any mode but DRAFT_DECODE, on the tables' device.
            padded_rows: rows to build, at least those of the batch; None: no more than those.

        Raises:
            ValueError: before anything is written, as `MetadataBuilder.build`.
        """
        return self.builder.build(batch, padded_rows)

    def bind(self, mode: ForwardMode, batch_size: int, width: int = 1) -> StepInputs:
        """Fixed inputs, and metadata, for steps of up to `batch_size` requests with `width` rows each.

        Before: no graph is being captured.
        After: the inputs hold padding, and `meta` is built from it. Neither moves, so a graph may record whatever reads
        them; it needs backend and inputs to live as long as itself.

        Args:
            mode: DECODE, TARGET_VERIFY or DRAFT_EXTEND.
            batch_size: requests, at least 1, padding included.
            width: rows of a request: 1 for DECODE, else the draft tokens.

        Raises:
            ValueError: an argument is not as above, or more draft tokens than the rings hold.
        """
        if mode not in BOUND_MODES:
            names = ", ".join(each.value for each in BOUND_MODES)
            raise ValueError(f"mode: expected one of {names}, got {getattr(mode, 'value', mode)}")
        for name, value in (("batch_size", batch_size), ("width", width)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        if mode is ForwardMode.DECODE and width != 1:
            raise ValueError(f"width: expected 1 in mode DECODE, got {width}")
        rows = batch_size * width
        return StepInputs(mode, batch_size, width, self.device, lambda batch: self.builder.build(batch, rows))

    def load(self, inputs: StepInputs, batch: RawBatch, ids: torch.Tensor) -> None:
        """Copies a batch into bound inputs, and makes padding of what is behind it; on the host's side of a replay.

        Before: as for `prepare`; the graph's last replay, if there was one, is in the same stream.
        After: a replay of what recorded `inputs` works on this batch. Batch and ids are as they were, and may change
        once the stream has come past this call. Nothing has waited or been allocated on the device; one launch, if all
        tensors are contiguous int64, else one more for each other dtype or stride.

        Args:
            inputs: what `bind` gave.
            batch: at most as many requests, of the same mode and width; or none, of any mode.
            ids: int32 or int64 [T], on the same device: the rows' tokens.

        Raises:
            ValueError: before anything is written.
        """
        inputs.load(batch, ids)

    def record(self, inputs: StepInputs) -> None:
        """Builds `inputs.meta` from what `inputs` holds; for a graph to record, or to be called.

        Before: `bind` made the inputs, and `load` filled them.
        After: as after `prepare`, whenever it runs. One launch is enqueued for DECODE, two for the others; nothing
        waits or is allocated.

        Raises:
            ValueError: on a CPU, for values that don't make sense; before anything is written.
        """
        self.builder.build(inputs.batch, inputs.num_rows)

    def attend(self, layer_index: int, attention: DSV4Attention, x: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        """Stores a step in a layer's cache and attends, for a layer of any kind.

        Before: `meta` is that of this step, and earlier layers have run; each layer runs once a step.
        After: the cache holds the step's tokens in this layer. Rows of padding are finite, mean nothing, and stored
        nothing that anybody reads. What the layer allocated, the result among it, comes from torch's allocator: while a
        graph is captured, from the graph's pool.

        Args:
            layer_index: of the decoder layer, from 0.
            attention: its attention, of the ratio that `cfg` says.
            x: [T, hidden_size], of the layer's dtype: hidden states after the block's input norm.
            meta: what `prepare`, or `bind`, returned.

        Returns:
            [T, hidden_size], of the layer's dtype.

        Raises:
            ValueError: before anything is written, as `DSV4Attention.forward`.
        """
        expect_type("attention", attention, DSV4Attention)
        layers = self.cache.layers
        if type(layer_index) is not int or not 0 <= layer_index < len(layers):
            raise ValueError(f"layer_index: expected 0 to {len(layers) - 1}, got {layer_index!r}")
        out: torch.Tensor = attention(x, meta, layers[layer_index])
        return out

    def check(self) -> None:
        """Raises ValueError if a step met a bad input on the device since the last check: a request, length or slot
        that does not exist, which was then taken for padding. Waits for the current stream, so call it where the engine
        waits anyway.
        """
        self.builder.check()

    def _new_builder(self, max_rows: int, max_seq_len: int, impl: str) -> MetadataBuilder:
        ratios = {layer.ratio for layer in self.cache.layers} - {0}
        return MetadataBuilder(
            self.cfg,
            self.geom,
            self.tables,
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            ratios=ratios,
            impl=impl,
        )

    @staticmethod
    def _check_cache(cfg: DSV4Config, geom: CacheGeometry, cache: DSV4Cache, tables: RequestTables) -> None:
        if cache.cfg != cfg:
            raise ValueError("cache: expected one made for cfg, got one for another model")
        if cache.geom != geom:
            raise ValueError(f"cache: expected one of {geom}, got one of {cache.geom}")
        if cache.layers and cache.layers[0].window.device != tables.device:
            raise ValueError(f"cache: expected it on {tables.device}, got it on {cache.layers[0].window.device}")
        if tables.num_requests > cache.size.num_requests:
            raise ValueError(
                f"tables: expected at most the {cache.size.num_requests} requests of the cache, got "
                f"{tables.num_requests}"
            )
        slots = cache.size.num_pages * geom.page_size + 1
        if tables.num_slots > slots:
            raise ValueError(f"tables: expected at most the cache's {slots - 1} slots and one, got {tables.num_slots}")
