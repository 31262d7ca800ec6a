"""Step files: one step with all that its plan, its metadata and their check depend on, to be replayed alone."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from dsv4_backend.files import atomic_file
from dsv4_backend.geometry import CacheGeometry
from dsv4_backend.replay.building import StepBuilder, cache_sizes
from dsv4_backend.replay.builds import IDLE_ROWS
from dsv4_backend.replay.faults import check_fault
from dsv4_backend.replay.judging import judge
from dsv4_backend.replay.ledger import SAVED, Ledger
from dsv4_backend.replay.step import Step, StepMode
from dsv4_backend.replay.violation import Findings
from dsv4_backend.tables import RequestTables

# What reading a file that was cut off, changed or made by something else can end in.
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, OverflowError, MemoryError)
_FORMAT = "dsv4 replay step 2"
_STEP_ARRAYS = ("requests", "req_pool_indices", "before", "extend_lens", "out_cache_loc")


@dataclass(frozen=True)
class SavedStep:
    """What a step file holds.

    Args:
        step: the step, begun: admissions and fresh pages are in the ledger already.
        accepts: int64 [B], rows that stay.
        geom: cache geometry.
        req_to_token, full_to_swa: the slot tables, int32 [R, C] and int64 [S].
        ledger: what `Ledger.save` returned before the step.
        fault: name of the fault that was injected, or None.
    """

    step: Step
    accepts: np.ndarray
    geom: CacheGeometry
    req_to_token: np.ndarray
    full_to_swa: np.ndarray
    ledger: dict[str, np.ndarray]
    fault: str | None

    def replay(self, impl: str, device: torch.device) -> Findings:
        """Builds the step again with `impl` on `device`, injects the fault again, and checks."""
        sizes = cache_sizes(self.geom)
        window_pages = len(self.ledger["window"]) // sizes.window_page_size - 1
        ledger = Ledger(self.req_to_token, self.full_to_swa, sizes, window_pages)
        ledger.load(self.ledger)
        tables = RequestTables(
            torch.from_numpy(self.req_to_token).to(device), torch.from_numpy(self.full_to_swa).to(device)
        )
        builder = StepBuilder(self.geom, impl, tables, max(self.step.num_rows, IDLE_ROWS))
        # Twice: the first time leaves used buffers behind, as the steps before this one did.
        judge(self.step, builder, ledger, self.accepts, None)
        return judge(self.step, builder, ledger, self.accepts, self.fault)[0]

    def save(self, path: Path) -> None:
        """Writes the file; OSError if that is not possible."""
        meta = {
            "format": _FORMAT,
            "geometry": asdict(self.geom),
            "index": self.step.index,
            "mode": self.step.mode.value,
            "num_rows": self.step.num_rows,
            "num_draft_tokens": self.step.num_draft_tokens,
            "fault": self.fault,
            "table_shape": self.req_to_token.shape,
        }
        # Only the batch's rows, and no columns past its longest request.
        rows, columns = np.unique(self.step.req_pool_indices), int(self.step.after.max())
        arrays = {name: getattr(self.step, name) for name in _STEP_ARRAYS}
        arrays |= {f"ledger_{name}": self.ledger[name] for name in SAVED}
        arrays |= {
            "accepts": self.accepts,
            "table_rows": rows,
            "table": self.req_to_token[rows, :columns],
            "full_to_swa": self.full_to_swa,
            "meta": np.array(json.dumps(meta)),
        }
        with atomic_file(path, "wb") as file:
            np.savez_compressed(file, **arrays)


def load_step(path: Path) -> SavedStep:
    """Reads a step file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no step file, or one that does not hold together.
    """
    try:
        with path.open("rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("not an npz file")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays["meta"]))
        if meta["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT!r}, got {meta['format']!r}")
        return _rebuild(arrays, meta)
    except (*_BROKEN, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: expected a step file of dsv4 replay: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"no entry {error}" if isinstance(error, KeyError) else str(error)


def _rebuild(arrays: dict[str, np.ndarray], meta: dict) -> SavedStep:
    req_to_token = np.zeros(meta["table_shape"], np.int32)
    table = arrays["table"]
    req_to_token[arrays["table_rows"], : table.shape[1]] = table
    step = Step(
        index=int(meta["index"]),
        mode=StepMode(meta["mode"]),
        num_rows=int(meta["num_rows"]),
        num_draft_tokens=int(meta["num_draft_tokens"]),
        requests=arrays["requests"],
        req_pool_indices=arrays["req_pool_indices"],
        before=arrays["before"],
        extend_lens=arrays["extend_lens"],
        out_cache_loc=arrays["out_cache_loc"],
    )
    _check_step(step, arrays["accepts"], req_to_token.shape)
    full_to_swa, geom = arrays["full_to_swa"], CacheGeometry(**meta["geometry"])
    if req_to_token.min() < 0 or req_to_token.max() >= len(full_to_swa):
        raise ValueError(f"expected slots below {len(full_to_swa)}, got up to {req_to_token.max()}")
    if full_to_swa.max() >= len(arrays["ledger_window"]):
        raise ValueError(f"expected window slots below {len(arrays['ledger_window'])}, got up to {full_to_swa.max()}")
    if meta["fault"] is not None:
        check_fault(meta["fault"])
    return SavedStep(
        step=step,
        accepts=arrays["accepts"],
        geom=geom,
        req_to_token=req_to_token,
        full_to_swa=full_to_swa,
        ledger={name: arrays[f"ledger_{name}"] for name in SAVED},
        fault=meta["fault"],
    )


def _check_step(step: Step, accepts: np.ndarray, table_shape: tuple[int, int]) -> None:
    batch = len(step.before)
    per_request = (step.requests, step.req_pool_indices, step.before, step.extend_lens, accepts)
    if not batch or any(array.shape != (batch,) or array.dtype != np.int64 for array in per_request):
        raise ValueError("expected int64 arrays with an entry for each request, at least one")
    if step.extend_lens.min() < 1 or int(step.extend_lens.sum()) != step.total_rows:
        raise ValueError(f"expected extend lengths that sum up to {step.total_rows}, got {step.extend_lens.tolist()}")
    if accepts.min() < 1 or (accepts > step.extend_lens).any():
        raise ValueError(f"expected accept lengths within the extend lengths, got {accepts.tolist()}")
    if step.num_rows < step.total_rows:
        raise ValueError(f"expected a bucket of at least {step.total_rows} rows, got {step.num_rows}")
    rows, length = step.req_pool_indices, int(step.after.max())
    if rows.min() < 0 or rows.max() >= table_shape[0] or step.before.min() < 0 or length > table_shape[1]:
        raise ValueError(f"expected requests within a table of {table_shape}, got rows up to {rows.max()}")
