"""A draft batch, what a provider sees of it, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def split_draft_out_cache_loc(out_cache_loc: torch.Tensor, batch_size: int, topk: int, num_steps: int) -> torch.Tensor:
    """The write slots of each draft step.

    Args:
        out_cache_loc: [batch_size * topk * num_steps], request-major: the slots of a request lie together, within it
            those of a branch, and these are in the order of the steps.
        batch_size: requests, at least 0.
        topk: branches a request, at least 1.
        num_steps: draft steps, at least 1.

    Returns:
        [num_steps, batch_size * topk], contiguous, same dtype and device: row i holds what step i writes.

    Raises:
        ValueError: any other length. A list that was not padded with its batch would hand every step the slots of
            another one.
    """
    for name, value, least in (("batch_size", batch_size, 0), ("topk", topk, 1), ("num_steps", num_steps, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected an int of at least {least}, got {value!r}")
    expected = batch_size * topk * num_steps
    if not isinstance(out_cache_loc, torch.Tensor) or tuple(out_cache_loc.shape) != (expected,):
        got = list(out_cache_loc.shape) if isinstance(out_cache_loc, torch.Tensor) else type(out_cache_loc).__name__
        raise ValueError(
            f"out_cache_loc: expected shape [{expected}] (batch_size {batch_size} * topk {topk} * num_steps "
            f"{num_steps}), got {got}"
        )
    return out_cache_loc.view(batch_size * topk, num_steps).t().contiguous()


_ON_DEVICE = (
    "req_pool_indices",
    "seq_lens",
    "positions",
    "out_cache_loc",
    "topk_p",
    "topk_index",
    "hidden_states",
)


class _Derived:
    """What a batch knows about itself, beside its fields: worked out once, since a replay has better things to do."""

    __slots__ = ("batch_size", "devices", "num_steps", "topk")

    batch_size: int
    topk: int
    num_steps: int | None
    devices: dict[str, torch.device]


@dataclass(frozen=True, eq=False)
class DraftBatch(_Derived):
    """A batch as the engine has it. The runner reads it and never changes it, nor any tensor in it.

    Args:
        req_pool_indices: int32 or int64 [B]. Rows of the request table; 0 is reserved for padding.
        seq_lens: int32 or int64 [B]. Committed prefix: tokens whose cache entries are ready. The same for every step.
        positions: int32 or int64 [B*topk]. Position of the first draft token: seq_lens, for a chain.
        out_cache_loc: int32 or int64 [B*topk*num_steps]. Slots to write, request-major (`split_draft_out_cache_loc`).
        topk_p: float32, bfloat16 or float16 [B, topk]. Probability of the first draft token.
        topk_index: int32 or int64 [B, topk]. The first draft token.
        hidden_states: [B, H]. Of the target model at the last committed token.
        seq_lens_cpu: int32 or int64 [B] on the CPU, the same lengths, or None. A provider that plans on the host needs
            it; the runner doesn't.
        variant: which of the runner's draft models is to run; "" where it has only one.

    All but `seq_lens_cpu` lie on the runner's device. B = 0 is the batch of an idle rank.

    Attributes:
        batch_size: B.
        topk: branches of a request.
        num_steps: draft steps that the slots are for; None in an empty batch.
        devices: where each tensor lies, by name, but for `seq_lens_cpu`; only one entry where they all lie together.

    Raises:
        ValueError: a type, dtype or shape is not as above.
    """

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden_states: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    variant: str = ""

    def __post_init__(self) -> None:
        expect_tensor("req_pool_indices", self.req_pool_indices, INTS, 1)
        expect_tensor("topk_p", self.topk_p, FLOATS, 2)
        size, topk = self.req_pool_indices.shape[0], self.topk_p.shape[1]
        if topk < 1:
            raise ValueError(f"topk_p: expected at least one column, got shape {list(self.topk_p.shape)}")
        expect_tensor("topk_p", self.topk_p, FLOATS, 2, (size, topk))
        expect_tensor("topk_index", self.topk_index, INTS, 2, (size, topk))
        expect_tensor("seq_lens", self.seq_lens, INTS, 1, (size,))
        expect_tensor("positions", self.positions, INTS, 1, (size * topk,))
        expect_tensor("out_cache_loc", self.out_cache_loc, INTS, 1)
        expect_tensor("hidden_states", self.hidden_states, None, 2)
        if self.hidden_states.shape[0] != size:
            raise ValueError(f"hidden_states: expected {size} rows, got shape {list(self.hidden_states.shape)}")
        slots, lanes = self.out_cache_loc.shape[0], size * topk
        if slots % lanes if lanes else slots:
            raise ValueError(
                f"out_cache_loc: expected a multiple of {lanes} slots (B {size} * topk {topk}), got {slots}"
            )
        if self.seq_lens_cpu is not None:
            expect_tensor("seq_lens_cpu", self.seq_lens_cpu, INTS, 1, (size,))
            if self.seq_lens_cpu.device.type != "cpu":
                raise ValueError(f"seq_lens_cpu: expected a tensor on cpu, got one on {self.seq_lens_cpu.device}")
        if not isinstance(self.variant, str):
            raise ValueError(f"variant: expected a str, got {type(self.variant).__name__}")
        devices = {name: getattr(self, name).device for name in _ON_DEVICE}
        if len(set(devices.values())) == 1:
            devices = {_ON_DEVICE[0]: self.req_pool_indices.device}
        for name, value in (
            ("batch_size", size),
            ("topk", topk),
            ("num_steps", slots // lanes if lanes else None),
            ("devices", devices),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def idle(
        cls, hidden_size: int, hidden_dtype: torch.dtype, device: torch.device | str, variant: str = ""
    ) -> DraftBatch:
        """The batch of a rank that has no request while others have."""
        ints = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(
            req_pool_indices=ints,
            seq_lens=ints,
            positions=ints,
            out_cache_loc=ints,
            topk_p=torch.zeros(0, 1, device=device),
            topk_index=ints.view(0, 1),
            hidden_states=torch.zeros(0, hidden_size, dtype=hidden_dtype, device=device),
            seq_lens_cpu=torch.zeros(0, dtype=torch.int64),
            variant=variant,
        )


@dataclass(eq=False)
class DraftInputs:
    """A padded batch, as models and providers see it. Only the runner changes it.

    Attributes:
        batch_size: B, padding lanes included.
        num_steps, topk: of the runner.
        req_pool_indices: int64 [B]; padding 0.
        seq_lens: int64 [B]; padding 1.
        positions: int64 [B*topk]; padding 0.
        out_cache_loc: int64 [B*topk*num_steps], request-major: step i of request b of a chain writes
            `[b*num_steps + i]`; padding 0.
        topk_p: float32 [B, topk]; padding 0.
        topk_index: int64 [B, topk]; padding 0.
        hidden_states: [B, H]; padding 0.
        seq_lens_cpu: int64 [B] on the CPU, padding 1, where the batch has host lengths; else None.
    """

    batch_size: int
    num_steps: int
    topk: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden_states: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None

    @property
    def seq_lens_sum(self) -> int | None:
        """Sum of the lengths, padding included; None without host lengths."""
        return None if self.seq_lens_cpu is None else int(self.seq_lens_cpu.sum())


@dataclass(frozen=True, eq=False)
class DraftOutput:
    """Drafts of the live requests.

    Attributes:
        draft_tokens: int64 [B, num_steps].
        parents: int64 [B, num_steps]. Index of the token that each one continues, -1 for the first.
        scores: float32 [B, num_steps]. Probability of the token together with all before it.
        fallback_reason: why no bucket served the batch, which then ran without padding and without a graph; None where
            one did.

    Unless `clone=True` was asked for, the tensors are valid until the runner's next replay or capture.
    """

    draft_tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    fallback_reason: str | None = None

    def clone(self) -> DraftOutput:
        """The same values in memory of their own."""
        return DraftOutput(self.draft_tokens.clone(), self.parents.clone(), self.scores.clone(), self.fallback_reason)


def expect_tensor(
    name: str,
    value: object,
    dtypes: tuple[torch.dtype, ...] | None,
    ndim: int,
    shape: tuple[int, ...] | None = None,
) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if dtypes is not None and value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.ndim != ndim or (shape is not None and tuple(value.shape) != shape):
        wanted = f"shape {list(shape)}" if shape is not None else f"{ndim} dimension{'s' * (ndim != 1)}"
        raise ValueError(f"{name}: expected {wanted}, got shape {list(value.shape)}")
