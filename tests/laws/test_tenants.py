"""Law 8: what another tenant holds looks exactly like `new`, in reports, counts and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_parts import picture
from support.models import demo_parts

import keepsight as ks
from keepsight.core import runtime
from keepsight.errors import InputError, PinsFull
from keepsight.system.accounts import account_of, under_salt

QUESTION = "What is in this picture, and where does it stand?"


@pytest.fixture
def vlm(demo: Any) -> Any:
    return demo


def load(**options: Any) -> ks.VLM:
    return ks.wrap(*demo_parts("demo"), **options)


def ask(vlm: Any, **more: Any) -> Any:
    return vlm.ask(picture(3), QUESTION, max_new_tokens=6, **more)


def untimed(report: Any) -> dict[str, Any]:
    return {**report.to_dict(), "milliseconds": None}


def test_tenants_share_nothing(vlm: Any) -> None:
    fresh = ask(vlm, tenant="a")
    assert fresh.usage.images_encoded == 1 and fresh.usage.cached_tokens == 0
    again = ask(vlm, tenant="a")
    assert again.usage.images_encoded == 0 and again.usage.cached_tokens > 0
    for tenant in ("b", None):
        other = ask(vlm, tenant=tenant)
        assert other.text == fresh.text
        assert untimed(other.report) == untimed(fresh.report)
        assert vars(other.usage) == vars(fresh.usage)
        assert {s.reason for s in other.report.segments} == {"new"}
    vlm.runtime.tree.check()


def test_a_name_is_not_put_together_from_others(vlm: Any) -> None:
    ask(vlm, tenant="ab")
    for near in ("a", "b", "ab ", "Ab", "a/b", "abc"):
        assert ask(vlm, tenant=near).usage.cached_tokens == 0


def test_every_call_takes_a_tenant(vlm: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(4)}, _text("Hm?")]}]
    vlm.prepare(messages, tenant="a")
    assert vlm.explain(messages, tenant="a").cached_tokens > 0
    assert vlm.explain(messages, tenant="b").cached_tokens == 0
    assert vlm.explain(messages).cached_tokens == 0
    encoded = vlm.stats()["features"]["encoded"]
    vlm.inputs(messages, tenant="a")
    vlm.encode(picture(4), tenant="a")
    assert vlm.stats()["features"]["encoded"] == encoded
    vlm.encode(picture(4), tenant="b")
    assert vlm.stats()["features"]["encoded"] == encoded + 1
    inputs = vlm.inputs(messages, tenant="a")
    out = vlm.generate(
        input_ids=inputs["input_ids"][:, :8],
        max_new_tokens=2,
        tenant="a",
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.usage.prompt_tokens == 8
    chat = vlm.session(tenant="a")
    assert chat.ask("Hm?", images=[picture(4)], max_new_tokens=4).usage.images_encoded == 0
    with pytest.raises(InputError, match="tenant"):
        chat.ask("And?", tenant="b")
    assert chat.fork().tenant == "a"


def test_the_whole_object_may_be_of_one_tenant(tmp_path: Path) -> None:
    for tenant, cached in (("a", False), ("a", True), ("b", False), (None, False)):
        with load(store=tmp_path, tenant=tenant) as vlm:
            reply = ask(vlm)
            assert bool(reply.usage.cached_tokens) == cached
            assert (reply.usage.images_encoded == 0) == cached
            assert ask(vlm, tenant="a").usage.cached_tokens > 0 or tenant is None or tenant == "b"
            vlm.flush()


def test_stats_of_one_tenant_tell_of_no_other(vlm: Any) -> None:
    nobody = vlm.stats("a")
    ask(vlm, tenant="b")
    assert vlm.stats("a") == nobody
    ask(vlm, tenant="a")
    mine = vlm.stats("a")
    assert mine["features"]["packages"] == 1 and mine["prefix"]["bytes"] > 0
    every = vlm.stats()
    assert every["features"]["packages"] == 2
    assert every["prefix"]["bytes"] >= 2 * mine["prefix"]["bytes"] > 0


def test_other_weights_of_another_tenant_are_not_told(vlm: Any) -> None:
    ask(vlm, tenant="a")
    weight = vlm.model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        assert "other weights" in {s.reason for s in ask(vlm, tenant="a").report.segments}
        assert {s.reason for s in ask(vlm, tenant="b").report.segments} == {"new"}
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_one_tenant_is_cleared(vlm: Any) -> None:
    """By the name of nobody in particular, too."""
    for cleared in ("a", ""):
        for tenant in ("a", "b", None):
            ask(vlm, tenant=tenant)
        vlm.clear(tenant=cleared)
        for tenant in ("a", "b", None):
            usage = ask(vlm, tenant=tenant).usage
            known = (tenant or "") != cleared
            assert (usage.cached_tokens > 0, usage.images_encoded) == (known, int(not known))


def test_clearing_the_store_clears_that_of_every_tenant(tmp_path: Path) -> None:
    with load(store=tmp_path) as vlm:
        for tenant in (None, "a", "b"):
            ask(vlm, tenant=tenant)
        vlm.clear(store=True, tenant="a")
        vlm.flush()
        tenants = {t: len(list(vlm.runtime.store_of(t).entries())) for t in ("", "a", "b")}
        assert tenants[""] and tenants["b"] and not tenants["a"]
        vlm.clear(store=True)
        assert not [path for path in tmp_path.rglob("*.sight") if path.is_file()]
        assert ask(vlm, tenant="b").usage.images_encoded == 1


def test_a_quota_is_one_tenants_own(tmp_path: Path) -> None:
    with load(tenant_quota="600KB", store=tmp_path) as vlm:
        ask(vlm, tenant="quiet")
        for seed in range(12):
            vlm.ask(picture(10 + seed), QUESTION, max_new_tokens=2, tenant="loud")
            for tenant in ("loud", "quiet"):
                told = vlm.stats(tenant)
                assert told["prefix"]["bytes"] <= 600_000 and told["features"]["bytes"] <= 600_000
        again = ask(vlm, tenant="quiet")
        assert again.usage.cached_tokens > 0 and again.usage.images_encoded == 0
        vlm.flush()
        assert vlm.stats("loud")["store"]["bytes"] <= 600_000


@pytest.mark.parametrize("tenant", ["", 7, b"a", "x" * 1025, True])
def test_a_tenant_is_a_text(tenant: Any) -> None:
    with pytest.raises(InputError, match="tenant"):
        ks.load("demo", tenant=tenant)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_any_number_of_tenants_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory knows the latest; who comes back later is new, and nobody sees another's."""
    monkeypatch.setattr(runtime, "MAX_TENANTS", 3)
    with load() as vlm:
        for tenant in "abcd":
            ask(vlm, tenant=tenant)
        assert ask(vlm, tenant="d").usage.cached_tokens > 0
        assert ask(vlm, tenant="a").usage.cached_tokens == 0
        assert len(vlm.runtime.visions) <= 3 and len(vlm.runtime.tree.roots) <= 3
        for n in range(20):  # whoever sends a salt names one, so nothing may be left of each
            ask(vlm, tenant=f"number {n}")
        tree = vlm.runtime.tree
        for known in (tree._homes, tree.device.owned, tree.device.bytes_of):
            assert len(known) <= 4, known
        vlm.runtime.tree.check()
        vlm.runtime.check()


def test_salts_give_way_to_salts_of_the_same_tenant_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "MAX_SALTS", 3)
    with load() as vlm:
        others = ["bob", under_salt("bob", "salt"), "ann", under_salt("ann", "pinned")]
        for tenant in others:
            ask(vlm, tenant=tenant)
        vlm.pin(picture(3), tenant=others[-1])
        for n in range(10):
            ask(vlm, tenant=under_salt("ann", str(n)))
        known = [name for name in vlm.runtime.visions if account_of(name) == "ann"]
        assert len(known) == 1 + 3 and set(others) <= set(vlm.runtime.visions)
        for tenant in others:
            assert ask(vlm, tenant=tenant).usage.cached_tokens > 0
        for n in (8, 9):
            vlm.pin(picture(3), tenant=under_salt("ann", str(n)))
        with pytest.raises(PinsFull, match="3 salts of one key"):
            ask(vlm, tenant=under_salt("ann", "one more"))
        vlm.runtime.tree.check()


def test_all_salts_of_a_tenant_have_one_quota() -> None:
    quota = 300_000
    with load(tenant_quota=quota) as vlm:
        for n in range(6):
            ask(vlm, tenant=under_salt("ann", str(n)))
        tree, shelf = vlm.runtime.tree, vlm.runtime.caches.packages
        of = [under_salt("ann", str(n)) for n in range(6)]
        assert 0 < sum(map(tree.bytes_of, of)) <= quota
        assert 0 < sum(map(shelf.bytes_of, of)) <= quota // 2
        vlm.runtime.check()
