"""How the plugin behaves in an SGLang that is not quite as we know it. Its modules are made up; none is needed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_backend.adapters.sglang import plugin, releases
from dsv4_backend.adapters.sglang.plugin import register, take_over
from sglang_fakes import TYPES, Backend, MultiStep
from test_sglang_adapter import TABLES

HOOKS = "sglang.srt.plugins.hook_registry"


class Engine:
    """An SGLang with everything that is needed, as far as it can be asked for by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.hooks: dict[str, Any] = {}
        for target in (releases.BACKEND_CLASS, releases.MULTI_STEP_CLASS, releases.DRAFT_RUNNER_HOOK):
            self._put(target, type(target.rpartition(".")[2], (), {}))
        for owner, names in releases.NEEDED.items():
            for name in names:
                self._put(f"{owner}.{name}", self.attribute(f"{owner}.{name}") or object())
        plans = SimpleNamespace(__args__=(type("CompressorDecodePlan", (), {}), type("CompressorPrefillPlan", (), {})))
        self._put(f"{releases.BACKEND_CLASS.rpartition('.')[0]}.FusedCompressMetadata", plans)
        self.registry = {"dsv4": lambda _runner: Backend(TABLES)}
        self._put(f"{releases.REGISTRY}.ATTENTION_BACKENDS", self.registry)
        self._put(f"{releases.REGISTRY}.register_attention_backend", self._register)
        self._put(f"{HOOKS}.HookType", SimpleNamespace(AROUND="around", REPLACE="replace"))
        self._put(f"{HOOKS}.HookRegistry", SimpleNamespace(register=self._hook))
        version = plugin.metadata.version
        monkeypatch.setattr(plugin.metadata, "version", lambda name: "0.5.23" if name == "sglang" else version(name))

    def attribute(self, target: str) -> Any:
        module, names = self._split(target)
        found: Any = sys.modules.get(module)
        for name in names:
            found = getattr(found, name, None)
        return found

    def remove(self, target: str) -> None:
        module, names = self._split(target)
        owner: Any = sys.modules[module]
        for name in names[:-1]:
            owner = getattr(owner, name)
        self._monkeypatch.delattr(owner, names[-1])

    def _register(self, name: str) -> Any:
        return lambda factory: self.registry.__setitem__(name, factory)

    def _hook(self, target: str, hook: Any, _kind: str) -> None:
        assert target not in self.hooks, f"{target}: hooked twice"
        self.hooks[target] = hook

    @staticmethod
    def _split(target: str) -> tuple[str, list[str]]:
        """A module, and names in it: what begins with the first class or constant, or else the last part."""
        parts = target.split(".")
        end = next((i for i, part in enumerate(parts) if part != part.lower()), len(parts) - 1)
        return ".".join(parts[:end]), parts[end:]

    def _put(self, target: str, value: Any) -> None:
        module, names = self._split(target)
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if not isinstance(sys.modules.get(name), Fake):
                self._monkeypatch.setitem(sys.modules, name, Fake(name))
        owner: Any = sys.modules[module]
        for name in names[:-1]:
            if not hasattr(owner, name):
                setattr(owner, name, type(name, (), {"__module__": module}))
            owner = getattr(owner, name)
        if isinstance(value, type):
            value.__module__ = module
        setattr(owner, names[-1], value)


class Fake(ModuleType):
    """A module that was made up, and a package at the same time."""

    __path__ = ()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv("DSV4_BACKEND", raising=False)
    monkeypatch.delenv("DSV4_BACKEND_STRICT", raising=False)
    return Engine(monkeypatch)


def test_registering_twice_is_registering_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    register()
    first = engine.registry["dsv4"]
    assert first.__module__ == plugin.__name__
    assert {*engine.hooks} == {releases.DRAFT_DECODE_HOOK, releases.DRAFT_EXTEND_HOOK, releases.DRAFT_RUNNER_HOOK}
    register()
    assert engine.registry["dsv4"] is first
    assert [record.message for record in caplog.records if "SGLang's own path" in record.message] == []


def test_a_backend_that_is_ours_already_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "1")
    backend = Backend(TABLES)
    monkeypatch.setattr(plugin, "_resolve", {releases.BACKEND_CLASS: Backend, releases.MULTI_STEP_CLASS: MultiStep}.get)
    ours = take_over(backend, TYPES)
    assert ours is backend
    assert take_over(ours, TYPES) is ours


@pytest.mark.parametrize("target", [f"{owner}.{name}" for owner in releases.NEEDED for name in releases.NEEDED[owner]])
def test_whatever_is_missing_leaves_sglang_alone(engine: Engine, target: str, caplog: pytest.LogCaptureFixture) -> None:
    engine.remove(target)
    stock = engine.registry["dsv4"]
    register()
    assert engine.registry["dsv4"] is stock
    assert engine.hooks == {}
    assert len([record for record in caplog.records if "SGLang's own path is used" in record.message]) == 1


def test_half_an_installation_is_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock, hook = engine.registry["dsv4"], engine._hook

    def refuse_classes(target: str, what: Any, kind: str) -> None:
        if kind == "replace":
            raise TypeError("replace: a function, please")
        hook(target, what, kind)

    monkeypatch.setattr(engine.attribute(f"{HOOKS}.HookRegistry"), "register", refuse_classes)
    register()
    assert engine.registry["dsv4"] is stock
    assert "SGLang's own path is used: TypeError: replace" in caplog.text
    for made in (Backend(TABLES), ("dsv4", Backend(TABLES))):
        assert engine.hooks[releases.DRAFT_EXTEND_HOOK](lambda made=made: made) is made
    assert caplog.text.count("SGLang's own path is used") == 1


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("no driver"), OSError("libcuda.so")], ids=repr)
@pytest.mark.parametrize("strict", ["0", "1", "true"])
def test_errors_of_any_kind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, strict: str
) -> None:
    def broken(_release: Any) -> Any:
        raise error

    stock = engine.registry["dsv4"]
    monkeypatch.setattr(plugin, "engine_types", broken)
    monkeypatch.setenv("DSV4_BACKEND_STRICT", strict)
    if strict == "0":
        register()
        assert engine.registry["dsv4"] is stock
        assert f"SGLang's own path is used: {type(error).__name__}" in caplog.text
        return
    with pytest.raises(ValueError, match="dsv4-backend: "):
        register()
    with pytest.raises(ValueError, match="dsv4-backend: "):  # SGLang logs what a plugin raises, and goes on
        engine.registry["dsv4"](None)


def test_strict_misspelt_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "true")
    with pytest.raises(ValueError, match=r"DSV4_BACKEND_STRICT: expected one of \('0', '1'\), got 'true'"):
        register()


def test_strict_without_a_registry_ends_the_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "1")
    engine.remove(f"{releases.REGISTRY}.ATTENTION_BACKENDS")
    with pytest.raises(SystemExit, match="dsv4-backend: "):
        register()


def test_the_extra_installs_a_release_that_we_know() -> None:
    extra = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'sglang = ["sglang>={min(releases.RELEASES)},<={max(releases.RELEASES)}"]' in extra


@pytest.mark.parametrize("value", ["metadata", ""])
def test_switched_on(engine: Engine, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DSV4_BACKEND", value)
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "")
    register()
    assert engine.registry["dsv4"].__module__ == plugin.__name__


def test_switched_off_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_BACKEND", "off")
    stock = engine.registry["dsv4"]
    register()
    assert engine.registry["dsv4"] is stock
    assert [(record.levelno, "off (DSV4_BACKEND=off)" in record.message) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


@pytest.mark.parametrize("kind", [Backend, MultiStep])
@pytest.mark.parametrize("missing", ["model_runner", "token_to_kv_pool", "page_size", "index_topk"])
def test_a_backend_without_what_we_read_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type, missing: str
) -> None:
    monkeypatch.setattr(plugin, "_resolve", {releases.BACKEND_CLASS: Backend, releases.MULTI_STEP_CLASS: MultiStep}.get)
    backend = kind(TABLES, ratios=())
    delattr(backend, missing)
    before = dict(vars(backend))
    assert take_over(backend, TYPES) is backend
    assert type(backend) is kind
    assert vars(backend) == before
    assert f"SGLang's own path is used: AttributeError: '{kind.__name__}' object has no attribute" in caplog.text


def test_a_draft_of_layers_with_compression_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_resolve", {releases.BACKEND_CLASS: Backend, releases.MULTI_STEP_CLASS: MultiStep}.get)
    backend = MultiStep(TABLES, ratios=(4,), drafts=4, steps=3)
    before = dict(vars(backend))
    assert take_over(backend, TYPES) is backend
    assert type(backend) is MultiStep
    assert vars(backend) == before


class StockRunner:
    def __init__(self, eagle_worker: Any, **options: Any) -> None:
        self.eagle_worker, self.options = eagle_worker, options


@pytest.fixture
def runner_class() -> Any:
    from dsv4_backend.adapters.sglang import draft_runner

    return draft_runner.runner_class(StockRunner)


def test_draft_runners_of_other_models_are_not_ours_to_judge(
    runner_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "1")
    worker = SimpleNamespace(draft_attn_backend=object())  # nothing else is looked at
    made = runner_class(worker)
    assert type(made) is StockRunner
    assert made.eagle_worker is worker
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("topk", "reason"), [(2, "drafts with 2 branches"), (1, "AttributeError: ")], ids=["branches", "unknown worker"]
)
def test_drafts_that_our_runner_does_not_serve(
    runner_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, topk: int, reason: str
) -> None:
    monkeypatch.delenv("DSV4_BACKEND_STRICT", raising=False)
    backend = SimpleNamespace(dsv4_source=object())
    worker = SimpleNamespace(draft_attn_backend=None, topk=topk, draft_runner=SimpleNamespace())
    made = runner_class(worker, draft_attn_backend=backend, speculative_num_steps=2)
    assert type(made) is StockRunner
    assert made.options == {"draft_attn_backend": backend, "speculative_num_steps": 2}
    assert f"got {reason}" in caplog.text
    monkeypatch.setenv("DSV4_BACKEND_STRICT", "1")
    with pytest.raises(ValueError, match=f"got {reason}"):
        runner_class(worker, draft_attn_backend=backend)


def test_draft_batches_that_have_no_graph(runner_class: Any) -> None:
    runner = object.__new__(runner_class)
    runner.runner = SimpleNamespace(can_run=lambda _batch: (True, ""))
    size, steps = 2, 3
    ints = torch.ones(size, dtype=torch.int64)

    def batch(**changes: Any) -> Any:
        spec = dict(topk_p=torch.ones(size, 1), topk_index=ints[:, None], hidden_states=torch.ones(size, 4))
        return SimpleNamespace(
            req_pool_indices=ints,
            seq_lens=ints,
            seq_lens_cpu=None,
            positions=ints,
            out_cache_loc=torch.ones(size * steps, dtype=torch.int64),
            spec_info=SimpleNamespace(**spec | changes) if changes.get("spec", True) else None,
        )

    assert runner.can_run_graph(batch())
    assert runner.can_run_graph(batch(num_tokens_per_req=-1))
    for name, value in (
        ("topk_p", None),
        ("hidden_states", None),
        ("draft_probs", torch.ones(1)),
        ("num_tokens_per_req", 4),
        ("spec", None),
    ):
        assert not runner.can_run_graph(batch(**{name: value})), name
