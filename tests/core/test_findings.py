"""What was found about the kernels of a model is a note in the store, for one machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build, picture, turn

import keepsight as ks
from keepsight.core import any_cut
from keepsight.core.any_cut import AnyCut
from keepsight.core.kernels import linear

pytestmark = pytest.mark.tries_anew
LOOK = [turn("Look.", picture(1))]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One item for each time that a model is tried as a whole."""
    found: list[str] = []
    whole = AnyCut._try

    def counted(self: AnyCut, tried: Any) -> Any:
        found.append("tried")
        return whole(self, tried)

    monkeypatch.setattr(AnyCut, "_try", counted)
    return found


def ask(store: Path, kind: str = "qwen3_vl", **settings: Any) -> tuple[Any, ...]:
    """An answer by a model that is new, with this store: reused tokens, tokens, engine."""
    with ks.wrap(*build(kind), store=store, **settings) as vlm:
        reply = vlm.chat(LOOK, max_new_tokens=3)
        engine = vlm.stats()["engine"]
        vlm.flush()
        return reply.report.cached_tokens, reply.tokens, engine["exactness"] == "bits", engine


def notes(store: Path) -> list[Path]:
    return sorted(store.glob("kernels/*/*.json"))


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("pack", [True, False])
def test_a_model_is_tried_once_for_a_store(
    kind: str, pack: bool, tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(tmp_path, kind, pack=pack)
    assert trials == ["tried"] and len(notes(tmp_path)) == 1
    shapes: list[Any] = []
    monkeypatch.setattr(linear, "rows_of", shapes.append)
    monkeypatch.setattr("keepsight.core.kernels.packing.rows_of", shapes.append)
    second = ask(tmp_path, kind, pack=pack)
    assert trials == ["tried"] and not shapes
    assert second[0] and second[1:3] == first[1:3] == (first[1], True)
    assert second[3]["packed_bytes"] == first[3]["packed_bytes"] and bool(pack) == bool(
        second[3]["packed_bytes"]
    )


def test_why_it_does_not_hold_is_noted_too(tmp_path: Path, trials: list[str]) -> None:
    first, second = (ask(tmp_path, "llama4")[3] for _ in range(2))
    assert len(trials) <= 1 and first["exactness"] == "rounding"
    assert first["rounding_because"] == second["rounding_because"]


def test_the_code_that_decides_a_trial_is_part_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = Path(ks.__file__).parent
    names = {str(file.relative_to(house)) for file in any_cut.code_files()}
    deciding = ["kernels/attention.py", "any_cut.py", "decoding/forward.py"]
    assert names >= {f"core/{name}" for name in deciding} | {"runtimes/modules.py"}
    shutil.copytree(house / "core", tmp_path / "core")
    monkeypatch.setattr(any_cut, "_HOUSE", tmp_path)
    before = any_cut.machine.__wrapped__()
    with (tmp_path / "core" / "kernels" / "attention.py").open("a") as file:
        file.write("# another kernel\n")
    assert any_cut.machine.__wrapped__() != before


def test_another_machine_and_other_code_try_anew(
    tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(tmp_path)
    monkeypatch.setattr(any_cut, "machine", lambda: "another")
    ask(tmp_path)
    monkeypatch.setattr(torch, "__version__", "99.0")
    ask(tmp_path)
    assert len(trials) == 3 and len(notes(tmp_path)) == 3


def test_a_kernel_that_no_longer_agrees_is_found_out(
    tmp_path: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note says which numbers of rows give equal bits, and now none do."""
    ask(tmp_path, pack=False)
    plain = linear._plain

    def restless(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        order = torch.randperm(rows.shape[-1])
        return plain(rows[..., order], weight[:, order], bias)

    monkeypatch.setattr(linear, "_plain", restless)
    engine = ask(tmp_path, pack=False)[3]
    assert len(trials) == 2
    assert engine["exactness"] == "rounding"
    assert "depend on the number of rows" in engine["rounding_because"]


SHAPE = [8, 8, "torch.float32", False, False]
NONSENSE = [None, 7, [[1]], [["x"] * 8], [[0, 8, "torch.int8", 1, 1, 1, 1, 512]]]
NONSENSE += [[[*SHAPE, 3, 1, 512]], [SHAPE], [[*SHAPE, 1, 1]]]


@pytest.mark.parametrize("field", ["rows", "heads", "names", "packing", "why"])
@pytest.mark.parametrize("value", NONSENSE)
def test_a_note_that_says_nonsense_is_as_none(field: str, value: object) -> None:
    sound: dict[str, object] = {"rows": [], "heads": [], "names": [], "packing": [], "why": ""}

    assert any_cut.read_note({**sound, field: value}, linear.Linears()) is None


def test_what_only_this_process_can_know_is_not_noted(tmp_path: Path, trials: list[str]) -> None:
    model, processor = build("qwen3_vl")
    model.get_decoder().layers[0].register_forward_hook(lambda *given: None)
    with ks.wrap(model, processor, store=tmp_path) as vlm:
        vlm.chat(LOOK, max_new_tokens=1)
        vlm.flush()
        private = vlm.runtime.weights.is_private
    assert bool(notes(tmp_path)) is not private
