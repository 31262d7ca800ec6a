"""The console script `dsv4`."""

from __future__ import annotations

import typer

from dsv4_backend.commands import bench, capture_test, doctor, generate, replay, verify

app = typer.Typer(
    name="dsv4",
    help="DeepSeek-V4 attention on a paged cache: replayed, verified, measured, and run end to end.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("replay")(replay.replay)
app.command("doctor")(doctor.doctor)
app.command("generate")(generate.generate)
app.command("capture-test")(capture_test.capture_test)
app.add_typer(verify.app, name="verify")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
