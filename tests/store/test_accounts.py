"""The quota of a tenant on disk: all that salts make of one tenant counts together."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.hostile import bounded

from keepsight.errors import PinsFull
from keepsight.store import DiskStore, layout
from keepsight.store.index import NAME
from keepsight.system import digests
from keepsight.system.accounts import account_of, under_salt

QUOTA = 20_000
Opened = Callable[..., DiskStore]


def put(store: DiskStore, name: str | None, number: int = 0, size: int = 1000) -> str:
    key = digests.digest("n", name or "", number)
    content = {"a": torch.full((size,), float(number))}
    store.tenant(name).put("package", key, content, {"n": number})
    return key


def nbytes(root: Path, *names: str | None) -> int:
    """Bytes of some tenants' packages, by their files."""
    folders = (layout.tenant_prefix(layout.tenant_digest(name)) for name in names)
    return sum(
        file.stat().st_size
        for folder in folders
        for file in (root / f"{folder}package").rglob("*.sight")
    )


def salts(tenant: str, count: int = 12) -> list[str | None]:
    return [under_salt(tenant, f"salt {n}") for n in range(count)]


@pytest.mark.parametrize("tenant", ["ann", ""])
def test_all_salts_of_a_tenant_have_one_quota_on_disk(
    tmp_path: Path, opened: Opened, tenant: str
) -> None:
    store = opened(tmp_path, quota=QUOTA)
    put(store, "bob", 1)
    for name in salts(tenant):
        put(store, name)
    put(store, tenant or None)
    store.flush()
    assert QUOTA // 2 < nbytes(tmp_path, tenant or None, *salts(tenant)) <= QUOTA
    assert nbytes(tmp_path, "bob") > 0 and store.check() == []


def test_pins_of_all_salts_count_together(tmp_path: Path, opened: Opened) -> None:
    loose = opened(tmp_path)
    keys = {name: put(loose, name) for name in salts("ann", 6)}
    loose.close()
    store = opened(tmp_path, quota=QUOTA)
    pinned = 0
    with pytest.raises(PinsFull, match="unpin something"):
        for name, key in keys.items():
            pinned += store.tenant(name).pin("package", key)
    assert pinned == 4 and not list(tmp_path.glob(f"tenants/*/pins/*/{list(keys.values())[4]}*"))
    first, key = next(iter(keys.items()))
    assert store.tenant(first).pin("package", key)  # it is pinned already
    store.tenant(first).pin("package", key, False)
    last = list(keys)[5]
    assert store.tenant(last).pin("package", keys[last]) and store.check() == []


def test_salts_that_have_nothing_any_more_leave_nothing(tmp_path: Path, opened: Opened) -> None:
    """A folder takes room that no quota counts, and a key may have any number of salts."""
    store = opened(tmp_path, quota=QUOTA)
    for name in salts("ann", 40):
        key = put(store, name)
        store.flush()
        store.tenant(name).pin("package", key)
        store.tenant(name).pin("package", key, False)
    whose = {folder.name for folder in (tmp_path / "tenants").iterdir()}
    assert 0 < len(whose) <= 4
    assert whose == set(store.tenants())
    for name in salts("ann", 40):
        store.tenant(name).clear()
    assert not list((tmp_path / "tenants").iterdir()) and store.check() == []


def test_a_salt_is_written_while_another_process_removes_its_folders(
    tmp_path: Path, opened: Opened
) -> None:
    one, two = opened(tmp_path, quota=QUOTA), opened(tmp_path, quota=QUOTA)
    name, over = under_salt("ann", "salt"), threading.Event()

    def clear() -> None:
        while not over.is_set():
            two.tenant(name).clear()

    with ThreadPoolExecutor(1) as other:
        done = other.submit(clear)
        try:
            for number in range(60):
                put(one, name, number, 10)
                one.flush()  # nothing is refused, whoever removes what
        finally:
            over.set()
        done.result(30)
    two.tenant(name).clear()  # what was written behind the last removal
    key = put(one, name, -1)
    one.flush()
    assert two.tenant(name).get("package", key) is not None and two.check() == []
    (entry,) = two.tenant(name).entries()
    assert entry.account == layout.tenant_digest("ann")


# -- at random -----------------------------------------------------------------------------------

NAMES = [None, "ann", "bob", *salts("", 2), *salts("ann", 3), *salts("bob", 2)]


class Accounts(RuleBasedStateMachine):
    """Whatever is written, pinned, removed and lost: no tenant has more than its quota on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.stores = [DiskStore(self.root, quota=QUOTA) for _ in range(2)]

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)

    names = st.sampled_from(NAMES)
    which = st.integers(0, 1)

    @rule(
        which=which, name=names, number=st.integers(0, 5), size=st.sampled_from([200, 1000, 3000])
    )
    def put(self, which: int, name: str | None, number: int, size: int) -> None:
        put(self.stores[which], name, number, size)
        self.stores[which].flush()

    @rule(which=which, name=names, number=st.integers(0, 5), pinned=st.booleans())
    def pin(self, which: int, name: str | None, number: int, pinned: bool) -> None:
        key = digests.digest("n", name or "", number)
        self.stores[which].tenant(name).pin("package", key, pinned)

    @rule(which=which, name=names)
    def clear(self, which: int, name: str | None) -> None:
        self.stores[which].tenant(name).clear()

    @rule(which=which)
    def lose_the_index(self, which: int) -> None:
        for store in self.stores:
            store.close()
        for suffix in ("", "-wal", "-shm"):
            (self.root / f"{NAME}{suffix}").unlink(missing_ok=True)
        self.stores[which].stats()

    @invariant()
    def quotas_hold(self) -> None:
        for store in self.stores:
            store.stats()
        for account in (None, "ann", "bob"):
            own = [name for name in NAMES if account_of(name or "") == (account or "")]
            assert nbytes(self.root, *own) <= QUOTA


test_quotas_hold_at_random = pytest.mark.filterwarnings("ignore")(Accounts.TestCase)
Accounts.TestCase.settings = bounded(8, stateful_step_count=20)
