"""Law 1: no two different things may have one name, and one thing never two.

The digests are compared with an implementation of the written form that shares no code with ours,
and with digests written down once, because a changed form would orphan every store there is.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import bounded, finished, start

from keepsight.system import digests

CONFUSABLE: list[Any] = [
    *(1, "1", True, 1.0, b"1", "True", b"True", "bool True", 0, False, 0.0, -0.0, "", b"", "0"),
    *(None, "None", b"None", "NoneType None", 10, "10", "a", "b", "ab", b"a", b"ab", "\ud800"),
    *([], [1], ["1"], [[]], [[1]], ["a", "b"], ["ab"], {}, {"a": 1}, {"a": "1"}, {"a": [1]}),
    torch.tensor([1]),
    torch.tensor([[1]]),
    torch.tensor(1),
    torch.tensor([1], dtype=torch.int32),
    torch.tensor([1, 0], dtype=torch.int32),
    torch.tensor([1.0]),
    torch.tensor([True]),
    torch.zeros(0, 3),
    torch.zeros(3, 0),
    torch.zeros(1, dtype=torch.float16),
    torch.zeros(1, dtype=torch.bfloat16),
    np.array([1]),
    np.array(1),
    np.array([[1]]),
    np.array([1], dtype=np.uint64),
    np.array([1], dtype=">i8"),
    np.array([True]),
    np.zeros((0, 3)),
    np.zeros((3, 0)),
]


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of named tensors, as `Weights` makes it."""
    return digests.fingerprint_of((name, digests.weight_digest(t)) for name, t in tensors)


def spelled(part: Any) -> str:
    """What a part is, in Python's words: equal only for parts that may share a digest."""
    if isinstance(part, torch.Tensor):
        raw = part.reshape(-1).view(torch.uint8).tolist() if part.numel() else []
        return f"tensor {part.dtype} {tuple(part.shape)} {raw}"
    if isinstance(part, np.ndarray):
        return f"array {part.dtype.str} {part.shape} {part.tobytes()!r}"
    if isinstance(part, list):
        return f"[{', '.join(map(spelled, part))}]"
    return f"{type(part).__name__} {part!r}"


def test_no_two_lists_of_parts_share_a_digest() -> None:
    seen: dict[str, str] = {}
    for count in range(3):
        for parts in itertools.product(CONFUSABLE, repeat=count):
            name = spelled(list(parts))
            assert seen.setdefault(digests.digest("test", *parts), name) == name
    assert len(seen) == 1 + len(CONFUSABLE) + len(CONFUSABLE) ** 2


@bounded(100)
@given(st.text(min_size=1, max_size=8), st.data())
def test_where_a_text_is_split_matters(text: str, data: st.DataObject) -> None:
    cut, other = (data.draw(st.integers(0, len(text))) for _ in range(2))
    one, two = ([text[:spot], text[spot:]] for spot in (cut, other))
    assert (digests.digest("test", *one) == digests.digest("test", *two)) == (cut == other)
    assert digests.digest("test", *one) != digests.digest("test", text)
    assert digests.digest("test", one) != digests.digest("test", *one)


def test_the_kind_is_part_of_the_name() -> None:
    assert digests.digest("image", "a") != digests.digest("path", "a")
    assert digests.digest("a", "b") != digests.digest("ab") != digests.digest("a/b")


# -- tensors -----------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@bounded(80)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**31),
    st.data(),
)
def test_every_byte_of_a_tensor_counts(
    dtype: torch.dtype, shape: list[int], seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    name = digests.digest("test", tensor)
    assert name == digests.digest("test", tensor.clone())
    assert name != digests.digest("test", tensor.numpy() if dtype != torch.bfloat16 else "tensor")
    if tensor.numel():
        changed = tensor.clone().contiguous().reshape(-1)
        spot = data.draw(st.integers(0, tensor.numel() - 1))
        changed[spot] = changed[spot] == 0
        assert name != digests.digest("test", changed.reshape(shape))
    assert name != digests.digest("test", tensor[None])


def test_the_layout_in_memory_does_not_count() -> None:
    tensor, array = torch.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4)
    turned = tensor.t().contiguous().t()
    assert not turned.is_contiguous()
    assert digests.digest("test", tensor) == digests.digest("test", turned)
    assert digests.digest("test", tensor[1:]) == digests.digest("test", tensor[1:].clone())
    assert digests.digest("test", array) == digests.digest("test", np.asfortranarray(array))
    assert digests.digest("test", array[:, ::2]) == digests.digest("test", array[:, ::2].copy())
    frozen = array.copy()
    frozen.flags.writeable = False
    assert digests.digest("test", array) == digests.digest("test", frozen)
    weight = torch.nn.Parameter(torch.ones(2))
    assert digests.digest("test", weight) == digests.digest("test", torch.ones(2))


# -- the written form --------------------------------------------------------------------------


def framed(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def reference(kind: str, *parts: Any) -> str:
    """The form as docs describe it: strings, bytes and tensors, in one thread, piece by piece."""
    text = framed(b"k", f"keepsight-1/{kind}".encode())
    for part in parts:
        if isinstance(part, str):
            text += framed(b"s", part.encode())
        elif isinstance(part, bytes):
            text += framed(b"b", part)
        else:
            text += framed(b"t", f"{part.dtype}{tuple(part.shape)}".encode())
            text += framed(b"d", bytes(part.numpy().tobytes()))
    hasher = blake3()
    for spot in range(0, len(text), 4096):
        hasher.update(text[spot : spot + 4096])
    return hasher.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_large_parts_are_named_as_small_ones(size: int) -> None:
    """However many threads hash a large part, the name is that of the plain form."""
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    tensor = torch.from_numpy(data)
    parts = ("before", data.tobytes(), tensor, "behind")
    assert digests.digest("test", *parts) == reference("test", *parts)


def test_the_form_has_not_changed() -> None:
    """Written down once. A change here orphans every store: give it a new SCHEMA and say so."""
    parts = ["é", b"\x00", 1, 1.5, True, None, [1, ["a"]], {"b": 1, "a": [None, "x"]}]
    assert digests.digest("golden", *parts, torch.arange(3), np.arange(3, dtype="<i4")) == GOLDEN
    assert fingerprint([("a", torch.ones(2)), ("b", torch.zeros(1))]) == GOLDEN_WEIGHTS


GOLDEN = "4d408681f2d0b518fcb708c356366d9a40f71c14ed45c304123779fcfe8a800d"
GOLDEN_WEIGHTS = "2a476d6ce78e313122af903fb48f9d808f1ad61db3007730c9f3459a980a74d6"


# -- fingerprints ------------------------------------------------------------------------------


def weights() -> dict[str, torch.Tensor]:
    return {
        "a": torch.tensor([1.0, -2.0]),
        "b": torch.tensor([[3, 4]], dtype=torch.int16),
        "c": torch.tensor([0.0], dtype=torch.bfloat16),
    }


def test_every_single_bit_of_the_weights_counts() -> None:
    names = {fingerprint(weights().items())}
    total = 0
    for name, tensor in weights().items():
        for spot, bit in itertools.product(range(tensor.nbytes), range(8)):
            changed = weights()
            changed[name].reshape(-1).view(torch.uint8)[spot] ^= 1 << bit
            names.add(fingerprint(changed.items()))
            total += 1
    assert len(names) == total + 1 == 8 * (8 + 4 + 2) + 1


def test_values_count_and_not_the_dtype_that_holds_them() -> None:
    """What fits bfloat16 (or float16) has one name in every wider dtype; what does not, another."""
    half = torch.randn(300, generator=torch.manual_seed(0)).bfloat16()
    small = (torch.arange(4097) / 4096).half()  # eleven bits of mantissa: too fine for bfloat16
    for values in (half, small):
        names = {fingerprint([("a", values.to(t))]) for t in (values.dtype, torch.float32)}
        assert len(names | {fingerprint([("a", values.double())])}) == 1
    finer = half.float()
    finer[-1] += finer[-1].abs() * 2**-20
    assert fingerprint([("a", finer)]) != fingerprint([("a", half)])
    late = torch.zeros(10_000)
    late[-1] = 1 / 3  # beyond what is looked at first
    assert digests.narrowest(late) is late and digests.narrowest(late[:-1]).dtype == torch.bfloat16


def test_names_and_homes_of_weights_count_but_not_their_order() -> None:
    whole = fingerprint(weights().items())
    for order in itertools.permutations(weights().items()):
        assert fingerprint(order) == whole
    a, b, c = weights().values()
    assert fingerprint({"a": a, "b": b, "d": c}.items()) != whole
    assert fingerprint({"b": a, "a": b, "c": c}.items()) != whole
    assert fingerprint({"a": a, "b": b}.items()) != whole
    assert fingerprint({"a": a, "b": b, "c": c, "e": c}.items()) != whole
    assert fingerprint({"a": a[None], "b": b, "c": c}.items()) != whole


# -- canonical json ----------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
)


@bounded(100)
@given(plain)
def test_canonical_json_reads_back_and_is_stable(value: Any) -> None:
    text = digests.canonical_json(value)
    back = json.loads(text)
    assert back == value
    assert digests.canonical_json(back) == text


@bounded(60)
@given(st.dictionaries(st.text(max_size=2), st.integers(), min_size=2), st.randoms())
def test_canonical_json_does_not_depend_on_order(value: dict[str, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert digests.canonical_json(dict(items)) == digests.canonical_json(value)
    assert digests.canonical_json([dict(items)]) == digests.canonical_json([value])


@bounded(60)
@given(st.dictionaries(st.integers(0, 30), st.integers(), min_size=2))
def test_keys_that_are_no_text_survive_a_file(value: dict[int, int]) -> None:
    """Sorted as numbers they would stand in another order than when read back as text."""
    text = digests.canonical_json({"labels": value})
    assert digests.canonical_json(json.loads(text)) == text


class Colour(enum.Enum):
    RED = 1


def test_canonical_json_of_what_configs_hold() -> None:
    config = {"dtype": torch.float32, "mean": np.float32(0.5), "grid": torch.tensor([[1, 2]])}
    config |= {"set": {"b", "a"}, "limit": math.inf, "row": (1, 2), "colour": Colour.RED}
    assert json.loads(digests.canonical_json(config)) == {
        "dtype": "torch.float32",
        "mean": 0.5,
        "grid": [[1, 2]],
        "set": ["a", "b"],
        "limit": math.inf,
        "row": [1, 2],
        "colour": "Colour.RED",
    }


def test_what_has_no_form_is_refused() -> None:
    """An address would be a name that another object may have tomorrow."""
    for nameless in (object(), lambda: None):
        with pytest.raises(TypeError, match="canonical form"):
            digests.canonical_json({"x": nameless})
        with pytest.raises(TypeError, match="canonical form"):
            digests.digest("test", nameless)
    with pytest.raises(TypeError, match="one spelling"):
        digests.canonical_json({1: "a", "1": "b"})
    with pytest.raises(TypeError, match="canonical form"):
        digests.digest("test", 1j)


def test_a_forked_process_names_things_too() -> None:
    """The threads that hash large things are not there after a fork."""
    code = """
import os, signal
import numpy as np
from keepsight.system import digests
large = np.zeros(4_000_000, dtype=np.uint8)
wanted = digests.digest("image", large)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(digests.digest("image", large) != wanted)
print(os.waitpid(child, 0)[1])
"""
    assert finished(start(code)) == "0\n"
