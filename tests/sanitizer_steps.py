"""Steps of every kind on a GPU, for a sanitizer to watch; run as a script."""

from __future__ import annotations

from cache_harness import Harness, small_geometry


def main() -> None:
    for ratio in (4, 128):
        for kv, head, index_dim in (("fp32", (64, 16), 32), ("bf16", (128, 64), 64), ("fp8", (512, 64), 128)):
            harness = Harness(
                "triton",
                "cuda",
                ratio,
                head=head,
                index_dim=index_dim,
                kv=kv,
                geom=small_geometry(drafts=True),
                lanes=2,
                tokens=300,
            )
            first, second = harness.open(), harness.open()
            harness.extend({first: 125, second: 6}, padded_rows=160)
            harness.verify({first: 4, second: 3}, {first: 2, second: 1})
            harness.decode([first, second], padding=2)
            harness.extend({first: 1, second: 140})
            for lane in (first, second):
                found = harness.stored(lane)
                assert not any(entries.isnan().any() for entries in found.values()), (ratio, kv)
    print("done")


if __name__ == "__main__":
    main()
