"""The entry point: puts our metadata, plans and draft runner behind SGLang's name "dsv4"."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from dsv4_backend.adapters.sglang import releases
from dsv4_backend.adapters.sglang.backend import adopt
from dsv4_backend.adapters.sglang.objects import EngineTypes
from dsv4_backend.adapters.sglang.releases import Release, release_of
from dsv4_backend.adapters.sglang.source import MetadataSource

MODES = ("metadata", "off")
NAME = "dsv4"

logger = logging.getLogger("dsv4_backend.sglang")


def register() -> None:
    """What SGLang's plugin loader calls, once in each process, before it reads its arguments.

    DSV4_BACKEND says what is switched on: "metadata" (the default) or "off". An unknown release, or one without a hook
    that we need, leaves SGLang as it is, with one warning; DSV4_BACKEND_STRICT=1 makes it an error that no start
    survives.

    Raises:
        ValueError: under DSV4_BACKEND_STRICT=1, or for another value of DSV4_BACKEND.
    """
    mode = os.environ.get("DSV4_BACKEND", "metadata")
    if mode == "off":
        logger.info("dsv4-backend: off (DSV4_BACKEND=off)")
        return
    try:
        if mode not in MODES:
            raise ValueError(f"DSV4_BACKEND: expected one of {MODES}, got {mode!r}")
        types = engine_types(release_of(metadata.version("sglang")))
        _expect_hooks()
        _install(types)
    except (ValueError, ImportError, AttributeError) as error:
        _give_up(error)
        return
    logger.warning(
        "dsv4-backend %s: metadata, plans and draft runner of %r are ours (sglang %s; DSV4_BACKEND=off switches back)",
        metadata.version("dsv4-backend"),
        NAME,
        types.release.version,
    )


def engine_types(release: Release) -> EngineTypes:
    """The classes of the installed SGLang; ImportError or AttributeError where one is missing."""
    backend = import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    plans = _plan_classes()
    return EngineTypes(
        core=backend.DSV4AttnMetadata,
        metadata=backend.DSV4Metadata,
        decode_plan=plans["CompressorDecodePlan"],
        prefill_plan=plans["CompressorPrefillPlan"],
        new_schedule=lambda: backend._create_flashmla_metadata(),
        release=release,
    )


def take_over(backend: Any, types: EngineTypes) -> Any:
    """`backend` as one of ours, if it is the one that we know; as it is otherwise, with a warning for why."""
    stock = {_resolve(releases.BACKEND_CLASS), _resolve(releases.MULTI_STEP_CLASS)}
    if type(backend) not in stock:
        _give_up(ValueError(f"backend: expected DeepseekV4AttnBackend, got {type(backend).__name__}"))
        return backend
    try:
        return adopt(backend, MetadataSource(backend, types))
    except ValueError as error:
        _give_up(error)
        return backend


def _install(types: EngineTypes) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    factory = ATTENTION_BACKENDS[NAME]

    def create(model_runner: Any) -> Any:
        return take_over(factory(model_runner), types)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, tuple):  # the name that SGLang stamps on it, and the backend
            return (*made[:-1], take_over(made[-1], types))
        return take_over(made, types)

    register_attention_backend(NAME)(create)
    for target in (releases.DRAFT_DECODE_HOOK, releases.DRAFT_EXTEND_HOOK):
        HookRegistry.register(target, around, HookType.AROUND)
    from dsv4_backend.adapters.sglang.draft_runner import runner_class

    HookRegistry.register(
        releases.DRAFT_RUNNER_HOOK, runner_class(_resolve(releases.DRAFT_RUNNER_HOOK)), HookType.REPLACE
    )


def _expect_hooks() -> None:
    """Raises ImportError or AttributeError unless everything that we replace is there."""
    if NAME not in import_module(releases.REGISTRY).ATTENTION_BACKENDS:
        raise ValueError(f"attention backends: expected {NAME!r} among them, got none of that name")
    for owner, names in (
        (releases.BACKEND_CLASS, releases.OVERRIDDEN),
        (releases.MULTI_STEP_CLASS, releases.MULTI_STEP_OVERRIDDEN),
    ):
        for name in names:
            _resolve(f"{owner}.{name}")
    for target in (releases.DRAFT_DECODE_HOOK, releases.DRAFT_EXTEND_HOOK, releases.DRAFT_RUNNER_HOOK):
        _resolve(target)


def _resolve(target: str) -> Any:
    """The object with a dotted name: a module, a class in it, a method of that."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not ".".join(parts[:end]).startswith(error.name):
                raise
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"{target}: expected a module, got none")


def _plan_classes() -> dict[str, Any]:
    """SGLang's plan tuples: the members of its union of the two."""
    union = import_module("sglang.srt.layers.attention.deepseek_v4_backend").FusedCompressMetadata
    return {kind.__name__: kind for kind in union.__args__}


def _give_up(error: Exception) -> None:
    """One warning and the stock path, or an exception where that was asked for."""
    if os.environ.get("DSV4_BACKEND_STRICT") == "1":
        _refuse_to_start(error)
        raise ValueError(f"dsv4-backend: {error}") from error
    logger.warning("dsv4-backend: SGLang's own path is used: %s: %s", type(error).__name__, error)


def _refuse_to_start(error: Exception) -> None:
    """SGLang swallows what a plugin raises: so the backend itself raises, too."""
    reason = f"dsv4-backend: {error}"

    def create(model_runner: Any) -> Any:
        raise ValueError(reason)

    import_module(releases.REGISTRY).ATTENTION_BACKENDS[NAME] = create
