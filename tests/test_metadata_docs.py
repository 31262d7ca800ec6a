"""docs/metadata.md shows the table of fields that the code has."""

from __future__ import annotations

from dsv4_backend.metadata import FIELDS
from layout import ROOT

SHAPES = {
    "": "[T]",
    "pages": "[T, pages]",
    "window": "[T, window]",
    "topk": "[T, index_topk]",
    "entries": "[T, entries]",
}


def test_the_table_of_fields_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "metadata.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    expected = [
        [
            f"`{name}`",
            str(field.dtype).removeprefix("torch."),
            SHAPES[field.columns],
            str(field.ratio or "-"),
            field.meaning,
            field.read,
        ]
        for name, field in FIELDS.items()
    ]
    assert rows == expected
