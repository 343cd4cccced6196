"""Set-up shared by all tests: torchvision made importable, quiet stores, the demo models.

Keepsight itself never needs torchvision, but stock Qwen processors and all video processors do, and
tests compare with those.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision_operators  # noqa: F401  (declares them)
from support.intel_avx2 import skip_what_asks_for_more
from support.since_5_24 import skip_what_5_24_cannot
from support.slow_tests import mark_repetitions_slow

from keepsight.store import DiskStore

for _name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(_name, None)  # processes that tests start write as a user's do
# A shell starts what runs in its background with Ctrl-C ignored, nohup with the end of a terminal,
# and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
_THREADS = 1  # tiny models gain nothing from a second one, and two test processes share two cores
torch.set_num_threads(_THREADS)
# Exports are made once for all processes of a run; the first one makes the folder and removes it.
_SHARED = "KEEPSIGHT_TEST_EXPORTS"
_OWNER = _SHARED not in os.environ
if _OWNER:
    os.environ[_SHARED] = tempfile.mkdtemp(prefix="keepsight-exports-")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Stores wait for the disk with all they write. In memory, where there is room, nothing waits.
_FILES, _MEMORY, _ROOM = "", "/dev/shm", 4 << 30
if _OWNER and os.path.isdir(_MEMORY) and shutil.disk_usage(_MEMORY).free > _ROOM:
    _FILES = tempfile.mkdtemp(prefix="keepsight-tests-", dir=_MEMORY)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _FILES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_what_asks_for_more(items)
    skip_what_5_24_cannot(items)
    mark_repetitions_slow(items)


def pytest_collection_finish() -> None:
    """The million objects of torch and Transformers are looked at by no collection any more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # models of tests are few bytes, and a look at all takes 0.1 s


def pytest_unconfigure() -> None:
    if _OWNER:
        shutil.rmtree(os.environ.pop(_SHARED, ""), ignore_errors=True)
    if _FILES:
        shutil.rmtree(_FILES, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _trees_can_be_checked() -> None:
    from support import tree_invariants  # noqa: F401 (adds `tree.check()` and `runtime.check()`)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Features depend on the number of threads, and tests compare runs; some tests change it."""
    yield
    torch.set_num_threads(_THREADS)


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSIGHT_STORE", raising=False)


@pytest.fixture(scope="session")
def trials() -> dict[Any, Any]:
    """What trying was found to give, by all that a finding may depend on."""
    return {}


@pytest.fixture(autouse=True)
def _equal_models_are_tried_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, trials: dict[Any, Any]
) -> None:
    """Whether tokens may be cut anywhere is tried by the first memory of a process that asks.

    Trying takes longer than most tests. Another memory around a model of the same weights, code and
    settings gets kernels of its own, by the rules that were found. Tests of trying itself are
    marked `tries_anew`.
    """
    if request.node.get_closest_marker("tries_anew"):
        return
    from keepsight.core.any_cut import AnyCut
    from keepsight.core.kernels import attention, linear, packing
    from keepsight.core.kernels.passes import Kernels
    from keepsight.models.switches import switches

    try_model, try_shape, try_heads = AnyCut._try, linear.rows_of, attention._padding_for

    def environment() -> tuple[Any, ...]:
        return torch.get_num_threads(), *switches("cpu", [])

    def anew(found: Any, packed: Callable[[], Any] = dict) -> Any:
        """A finding with kernels of its own, which hold no model."""
        if (of := found.kernels) is None:
            return found
        linears = linear.Linears(packed)
        linears.rows.update(of.linears.rows)
        query_rows = attention.QueryRows(of.query_rows.windows, of.query_rows.fillings)
        more = {"in_graphs": of.in_graphs, "whole_steps": of.whole_steps}
        return dataclasses.replace(found, kernels=Kernels(linears, query_rows, **more))

    def model_once(self: AnyCut, tried: Any) -> Any:
        graphs = str(getattr(getattr(self._model, "exported", None), "environment", ""))
        key = (self._weights.state, str(self._decoder.shape), self.packing.wanted, environment())
        key += (graphs, type(self._family))
        if key in trials:
            return anew(trials[key], lambda: self.packing.packed)
        found = try_model(self, tried)
        if found.kernels is not None or found.lasts:
            trials[key] = anew(found)
        return found

    def shape_once(shape: linear.Shape) -> linear.Rows | None:
        key = (shape, environment())
        if key not in trials:
            trials[key] = try_shape(shape)
        rows: linear.Rows | None = trials[key]
        return rows

    def heads_once(heads: Any, windows: bool) -> Any:
        key = ("attention", heads, windows, environment())
        if key not in trials:
            trials[key] = try_heads(heads, windows)
        return trials[key]

    monkeypatch.setattr(AnyCut, "_try", model_once)
    monkeypatch.setattr(attention, "_padding_for", heads_once)
    for module in (linear, packing):
        monkeypatch.setattr(module, "rows_of", shape_once)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """For memories that are asked for features alone: the decoder's kernels are not tried."""
    from keepsight.core.any_cut import AnyCut

    monkeypatch.setattr(AnyCut, "_why_not", lambda *_: "it was not tried")


@pytest.fixture(scope="session")
def demo_parts() -> dict[str, tuple[Any, Any]]:
    """Model and processor of both demo models, float32; loaded once, wrapped anew by each test."""
    from support import models

    from keepsight.models import loading

    return {name: models.demo_parts(name) for name in loading.DEMO}


@pytest.fixture(params=["demo", "demo-hybrid"])
def demo(request: pytest.FixtureRequest, demo_parts: dict[str, Any]) -> Iterator[Any]:
    """Each demo model with an empty memory."""
    import keepsight as ks

    model, processor = demo_parts[request.param]
    with ks.wrap(model, processor) as vlm:
        yield vlm


@pytest.fixture
def dense(demo_parts: dict[str, Any]) -> Iterator[Any]:
    """The demo model of full attention, for what is the same whatever the layers."""
    import keepsight as ks

    with ks.wrap(*demo_parts["demo"]) as vlm:
        yield vlm


@pytest.fixture
def vlm() -> Iterator[Any]:
    """A tiny Qwen3-VL with random weights, which the test may change, and an empty memory."""
    from support.models import build

    import keepsight as ks

    with ks.wrap(*build("qwen3_vl")) as vlm:
        yield vlm


@pytest.fixture
def opened() -> Iterator[Callable[..., DiskStore]]:
    """Opens stores, and closes them after the test."""
    made: list[DiskStore] = []

    def make(*arguments: Any, **options: Any) -> DiskStore:
        made.append(DiskStore(*arguments, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()
