"""Private things of Transformers and torch are named in one place, for the versions of the pin."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.requirements import Requirement
from support.models import build

import keepsight as ks
from keepsight.models import upstream
from keepsight.models.renamed import RETURNED, EncoderOutput, with_cache
from keepsight.models.tested import OLDEST_TESTED, TESTED

HOUSE = Path(ks.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
FILES = [path for path in sorted(HOUSE.rglob("*.py")) if path.name != "upstream.py"]
LIBRARIES = ("transformers", "torch")
# Parts of Transformers that its documentation names as places to import from.
PUBLIC = {f"transformers{part}" for part in ("", ".exporters", ".generation", ".modeling_outputs")}
# Private names of others, which are how those want it: vLLM's connectors, and Python itself.
OTHERS = {
    "_get_connector_metadata",
    "_exit",
    "_register_atexit",
    "_lru_cache_wrapper",
    "_is_gil_enabled",
    "_forward_pre_hooks",
}
REACHED = ("getattr", "setattr", "hasattr", "delattr")


# -- one place ---------------------------------------------------------------------------------


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules of the two libraries, and private names in them, that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            library = module.split(".")[0]
            inner = library == "transformers" and module not in PUBLIC
            private = library in LIBRARIES and "._" in f"{module}.{name}"
            if inner or private:
                yield f"{module}.{name}"


def own_names(tree: ast.Module) -> Iterator[str]:
    """Names that a file itself gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def reached(tree: ast.Module) -> Iterator[str]:
    """Private attributes that a file asks for, by name or by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in REACHED:
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))
        elif isinstance(node, ast.Subscript) and getattr(node.value, "func", None):
            yield from (a.value for a in [node.slice] if isinstance(a, ast.Constant))  # vars(x)[""]


def test_no_other_file_names_a_private_thing_of_upstreams() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    ours = {name for tree in trees.values() for name in own_names(tree)}
    wrong = []
    for path, tree in trees.items():
        private = {n for n in reached(tree) if re.fullmatch(r"_[A-Za-z]\w*", str(n))}
        named = {*imports(tree), *(private - ours - upstream.NAMED - OTHERS)}
        wrong += [f"{path.relative_to(HOUSE)}: {name}" for name in sorted(named)]
    assert not wrong, "name it in upstream.py"


# -- newer versions ----------------------------------------------------------------------------


def test_the_tested_versions_are_those_of_the_tests() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    limits = (ROOT / "docs" / "limits.md").read_text()
    newest = (ROOT / "Makefile").read_text()
    assert f"transformers=={TESTED['transformers']}\n" in newest
    for library, version in TESTED.items():
        assert f"{library}=={OLDEST_TESTED[library]}\n" in pins
        assert re.search(rf"{library} {re.escape(OLDEST_TESTED[library])}", limits, re.IGNORECASE)
        assert re.search(rf"{library} {re.escape(version)}", limits, re.IGNORECASE)


def test_a_version_that_was_not_tried_is_not_installed() -> None:
    """Since 5.24 caches have another name; what 5.25 renames nobody knows."""
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (wanted,) = (
        Requirement(line)
        for line in written["project"]["dependencies"]
        if line.startswith("transformers")
    )
    for version in (OLDEST_TESTED["transformers"], TESTED["transformers"]):
        assert wanted.specifier.contains(version)
    assert not wanted.specifier.contains("5.25.0")
    assert wanted.specifier.contains(transformers.__version__)


class _TakesNew(torch.nn.Module):
    def forward(self, ids: Any, cache: Any = None) -> Any: ...


class _TakesBoth(torch.nn.Module):
    """Code of a checkpoint, in which the other name may mean something else."""

    def forward(self, ids: Any, cache: Any = None, past_key_values: Any = None) -> Any: ...


class _TakesOld(torch.nn.Module):
    def forward(self, ids: Any, past_key_values: Any = None, **more: Any) -> Any: ...


class _PassesOn(torch.nn.Module):
    def forward(self, *given: Any, **named: Any) -> Any: ...


def test_a_cache_is_given_by_the_name_that_forward_has() -> None:
    cache = transformers.DynamicCache()
    assert with_cache(_TakesNew(), cache) == {"cache": cache}
    assert with_cache(_TakesOld(), cache) == {"past_key_values": cache}
    for module in (_TakesBoth(), _PassesOn()):
        assert with_cache(module, cache) == {RETURNED: cache}
    model, _ = build("qwen3_vl")
    (name,) = with_cache(model, cache)
    assert name == RETURNED
    ids = torch.tensor([[5, 6, 7]])
    output = model(input_ids=ids, use_cache=True, **with_cache(model, cache))
    assert output[RETURNED] is cache and cache.get_seq_length() == 3


def test_features_look_like_the_output_of_a_tower() -> None:
    features = EncoderOutput(pooler_output=(torch.ones(2),), last_hidden_state=None, more=3)
    assert features.to_tuple() == (features.pooler_output, 3)
