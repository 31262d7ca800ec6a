"""A draft made of the target itself: its first layers, which see the sliding window only, with its own head."""

from __future__ import annotations

import torch

from dsv4_backend import AttnMetadata, DSV4AttnBackend
from dsv4_examples.hf_dsv4.model import FlatModel


class FirstLayersDraft:
    """The target's first layers, its embedding, final norm and head, as a `dsv4_graph_runner.DraftModel`.

    It shares the target's cache. A window entry of a layer depends on the tokens up to its own and on the layers before
    it, which are the target's own, so for the same tokens both store the same entries, and the draft finds the window
    of the committed tokens ready: it has no prompt to compute. What it stores for drafts lies beyond every committed
    length until the verify step stores all of its rows over it, before they attend: not a bit of what the target reads
    comes from the draft, whatever the dtype and format of the cache and however products are rounded.

    Args:
        model: the target.
        backend: of the window metadata, over the target's cache and tables: a `DSV4DraftBackend`.
        num_layers: how many layers of the target, at least 1; each of them of ratio 0.

    Raises:
        ValueError: there are not that many, or one of them compresses: its state would have to be the target's, too,
            and drafts that the target has not seen would go into it.
    """

    def __init__(self, model: FlatModel, backend: DSV4AttnBackend, num_layers: int) -> None:
        self.model, self.backend = model.first_layers(num_layers), backend
        for index, layer in enumerate(self.model.layers):
            if layer.ratio:
                raise ValueError(
                    f"num_layers: expected layers with a sliding window only (ratio 0), got {num_layers}, of which "
                    f"layer {index} has ratio {layer.ratio}"
                )

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        metadata: AttnMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step; arguments and results as `DraftModel.forward` has them.

        `hidden_states` are not read: the layers begin with the embedding. Positions and slots are those of `metadata`.
        """

        def attend(layer: int, x: torch.Tensor) -> torch.Tensor:
            return self.backend.attend(layer, self.model.layers[layer], x, metadata)

        hidden = self.model.hidden(input_ids, attend)
        return self.model.logits(hidden), hidden
