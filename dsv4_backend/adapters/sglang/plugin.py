"""The entry point: puts our metadata, plans and draft runner behind SGLang's name "dsv4"."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from dsv4_backend import __version__
from dsv4_backend.adapters.sglang import releases
from dsv4_backend.adapters.sglang.backend import adopt
from dsv4_backend.adapters.sglang.fallback import expect_switches, give_up, is_strict, refuse_to_start, switch
from dsv4_backend.adapters.sglang.objects import EngineTypes
from dsv4_backend.adapters.sglang.releases import Release, release_of
from dsv4_backend.adapters.sglang.source import MetadataSource

logger = logging.getLogger("dsv4_backend.sglang")


def register() -> None:
    """What SGLang's plugin loader calls, once in each process, before it reads its arguments. Once more does nothing.

    DSV4_BACKEND says what is switched on: "metadata" (the default) or "off". An unknown release, or one without a hook
    that we need, leaves SGLang as it is, with one warning; DSV4_BACKEND_STRICT=1 makes it an error that no start
    survives.

    Raises:
        ValueError: under DSV4_BACKEND_STRICT=1, what would have been a warning.
        SystemExit: the same, where SGLang has not even the place in which its start could be stopped.
    """
    if switch("DSV4_BACKEND") == "off":
        logger.warning("dsv4-backend %s: off (DSV4_BACKEND=off)", __version__)
        return
    try:
        expect_switches()
        release = release_of(metadata.version("sglang"))
        if not _is_registered():
            types = engine_types(release)
            _expect_hooks()
            _install(types)
    except Exception as error:  # whatever an SGLang that is not as we know it raises
        if is_strict():
            refuse_to_start(error)
        give_up(error)
        return
    logger.warning(
        "dsv4-backend %s: metadata, plans and draft runner of %r are ours (sglang %s; DSV4_BACKEND=off switches back)",
        __version__,
        releases.NAME,
        release.version,
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
    if hasattr(backend, "dsv4_source"):
        return backend
    try:
        stock = {_resolve(releases.BACKEND_CLASS), _resolve(releases.MULTI_STEP_CLASS)}
        if type(backend) not in stock:
            raise ValueError(f"backend: expected DeepseekV4AttnBackend, got {type(backend).__name__}")
        return adopt(backend, MetadataSource(backend, types))
    except Exception as error:  # an attribute that another release has not, too: what SGLang built still works
        give_up(error)
        return backend


def _is_registered() -> bool:
    factory = import_module(releases.REGISTRY).ATTENTION_BACKENDS.get(releases.NAME)
    return getattr(factory, "__module__", None) == __name__


def _install(types: EngineTypes) -> None:
    """Registers our hooks, then our factory; the hooks do nothing before all of them are there."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dsv4_backend.adapters.sglang.draft_runner import runner_class

    factory, complete = ATTENTION_BACKENDS[releases.NAME], False

    def create(model_runner: Any) -> Any:
        return take_over(factory(model_runner), types)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if not complete:
            return made
        if isinstance(made, tuple):  # the name that SGLang stamps on it, and the backend
            return (*made[:-1], take_over(made[-1], types))
        return take_over(made, types)

    runner = runner_class(_resolve(releases.DRAFT_RUNNER_HOOK))
    for target in (releases.DRAFT_DECODE_HOOK, releases.DRAFT_EXTEND_HOOK):
        HookRegistry.register(target, around, HookType.AROUND)
    HookRegistry.register(releases.DRAFT_RUNNER_HOOK, runner, HookType.REPLACE)
    register_attention_backend(releases.NAME)(create)
    complete = True


def _expect_hooks() -> None:
    """Raises ImportError, AttributeError or ValueError unless everything that we replace or call is there."""
    if releases.NAME not in import_module(releases.REGISTRY).ATTENTION_BACKENDS:
        raise ValueError(f"attention backends: expected {releases.NAME!r} among them, got none of that name")
    for owner, names in releases.NEEDED.items():
        for name in names:
            _resolve(f"{owner}.{name}")


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
