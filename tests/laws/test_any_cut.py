"""Law 2 where kernels are shown to give it: a token's state depends on the tokens before it alone.

Everything is compared bit for bit with a memory that has seen nothing and computes the prompt in
one pass, and the rows that go through the language model are counted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import logits
from support.common import in_threads
from support.cuts import (
    BOTH,
    GREEDY,
    assert_bits,
    ids_of,
    logits_of,
    rows,
    why_rounding,
    wrapped,
)
from support.models import ALL, build, in_both, picture, stock_inputs, turn
from torch.nn import functional

import keepsight as ks
from keepsight import Together
from keepsight.core.kernels import doubtful, linear, passes
from keepsight.core.kernels.elementwise import in_whole_vectors
from keepsight.core.kernels.linear import Rows, has_bfloat16, rows_of
from keepsight.core.kernels.packing import Packing
from keepsight.errors import InputError

# Families whose tokens see those before them, or near them, and pictures of which they are part.
SHOWN = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl", "llava_next", "llava_onevision"),
    *("mistral3", "llava_pixtral", "idefics3", "smolvlm", "idefics2", "glm4v", "glm46v", "glm_ocr"),
    *("qwen3_5", "qwen3_5_moe", "lfm2_vl"),  # with states of fixed size
    *("sliding", "aya_vision", "cohere2_vision", "gemma3", "gemma3_sliding", "gemma3_crops"),
    *("gemma4_vision", "paddleocr_vl", "video_llama_3", "qwen2_5_omni_thinker", "got_ocr2"),
    *("deepseek_vl", "ovis2"),
    *("glm4v_moe", "step3p7"),  # whose routers or gates ask for `x.sigmoid()`
    "gemma4",  # some layers of which read the keys of others
)
EXPERTS = ("qwen3_vl_moe", "qwen3_omni_moe_thinker")
VARIANTS = {"sliding": "qwen2_5_vl", "llava_pixtral": "llava", "gemma4_vision": "gemma4"}
VARIANTS |= dict.fromkeys(["gemma3_sliding", "gemma3_crops"], "gemma3")
KINDS = ("qwen3_vl", "sliding", "gemma3_sliding", "cohere2_vision")
# Of which other tests of this file ask for both dtypes; hybrids round in ways of their own.
TOOK_BOTH = ("qwen2_vl", "llava", "internvl", "gemma4", *KINDS, "qwen3_5", "lfm2_vl")
TO_ROUNDING = {
    "aria": "experts",
    "ernie4_5_vl_moe": "decoded",
    "llama4": "bmm",
    "paligemma": "attend to later tokens",
    "mllama": "cross",
}


# -- where it holds --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), in_both(SHOWN, TOOK_BOTH))
def test_it_holds_for(kind: str, dtype: torch.dtype) -> None:
    with wrapped(kind, dtype) as vlm:
        assert_bits(vlm)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_behind_a_router_of_four_outputs(kind: str) -> None:
    """Whose kernel in bfloat16 depends on the number of rows, on some machines."""
    with wrapped(kind) as vlm, wrapped(kind) as other:
        assert_bits(vlm)
        ids = ids_of(vlm, 150)
        logits_of(vlm, ids[:, :77])
        assert torch.equal(logits_of(vlm, ids), logits_of(other, ids))
        assert rows(vlm) == 150


@pytest.mark.parametrize("kind", TO_ROUNDING)
def test_where_it_is_not_shown_the_reason_is_said(kind: str) -> None:
    with wrapped(kind) as vlm:
        assert TO_ROUNDING[kind] in why_rounding(vlm)


def test_the_page_says_of_each_family_what_is_tested_here() -> None:
    """By its model type; some of these models are variants of one."""
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = page.partition("## Equal bits, or to rounding")[2].partition("\n## ")[0].splitlines()
    said = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "|" in row]
    anywhere = next(names for names, how, _ in said if how == "bits")
    types = {VARIANTS.get(kind, kind) for kind in (*SHOWN, *EXPERTS)}
    assert set(re.findall(r"`(\w+)`", anywhere)) == types
    cut = {names.strip("`"): why for names, how, why in said if how == "rounding"}
    assert cut.keys() == TO_ROUNDING.keys() and {*SHOWN, *EXPERTS, *TO_ROUNDING} <= set(ALL)
    assert all(word in cut[kind] for kind, word in TO_ROUNDING.items())


# -- the promise -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    in_both(["qwen2_vl", "llava", "internvl", "gemma4", *KINDS], ["llava", "gemma4", "sliding"]),
)
def test_any_prefix_is_used_to_its_last_token(kind: str, dtype: torch.dtype) -> None:
    """Prompts that share a prefix of any length with one before run their own tokens only."""
    with wrapped(kind, dtype) as vlm, wrapped(kind, dtype) as other:
        ids = ids_of(vlm, 150)
        logits_of(vlm, ids)
        for shared in (1, 2, 31, 32, 33, 77, 128, 149, 150):
            behind = ids_of(vlm, 9, seed=shared) + 100
            prompt, before = torch.cat([ids[:, :shared], behind], dim=1), rows(vlm)
            found = logits_of(vlm, prompt)
            assert rows(vlm) - before == 9
            other.clear()
            assert torch.equal(found, logits_of(other, prompt))
        vlm.runtime.check()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    in_both(["llava", *KINDS, "qwen3_5", "lfm2_vl"], ["qwen3_vl", "qwen3_5", "lfm2_vl"]),
)
def test_what_was_decoded_is_not_computed_again(kind: str, dtype: torch.dtype) -> None:
    """The next turn computes the last token of the reply, which nothing has read yet, and its own
    words."""
    with wrapped(kind, dtype) as vlm, wrapped(kind, dtype) as other:
        options = {"max_new_tokens": 70, "min_new_tokens": 70, **GREEDY}
        options["suppress_tokens"] = sorted(vlm.runtime.family.placeholders.values())
        talk = vlm.generate(input_ids=ids_of(vlm, 60), **options)
        assert isinstance(talk, torch.Tensor)
        for seed in range(3):
            talk, before = torch.cat([talk, ids_of(vlm, 7, seed + 5)], dim=1), rows(vlm)
            found = logits_of(vlm, talk)
            assert rows(vlm) - before == 7 + (1 if seed == 0 else 0)
            other.clear()
            assert torch.equal(found, logits_of(other, talk))


def test_a_cold_prompt_with_six_pictures_is_one_pass(vlm: Any) -> None:
    passes_of = []
    handle = vlm.model.get_decoder().register_forward_pre_hook(lambda *_: passes_of.append(1))
    vlm.chat([turn("Look. " * 60, *map(picture, range(6)))], max_new_tokens=1)
    handle.remove()
    assert len(passes_of) == 1


# -- together --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"), in_both(["gemma4", *KINDS], ["qwen3_vl", "gemma3_sliding"])
)
def test_decoded_together_is_decoded_alone(kind: str, dtype: torch.dtype) -> None:
    """Sampling with a seed included; who joins and leaves changes no bit."""
    chats = [
        [turn("Look.", picture(1))],
        [turn("Only words here.")],
        [turn("Look at this one. " * 9, picture(2, 160, 96))],
        [turn("Compare. " * 3, picture(1), picture(2)), turn("And?")],
    ]
    counts, options = (6, 15, 3, 11), {"do_sample": True, "temperature": 1.5}
    with wrapped(kind, dtype) as vlm, wrapped(kind, dtype) as own:
        together = Together(vlm)
        with together:
            asked = list(enumerate(zip(chats, counts, strict=True)))
            with vlm.runtime.lock:  # nothing is computed until all have come
                tickets = [
                    together.submit(c, max_new_tokens=n, seed=i, **options) for i, (c, n) in asked
                ]
            replies = [ticket.result().tokens for ticket in tickets]
        assert vlm.stats()["engine"]["decode_steps"] < sum(counts) - len(counts)
        for i, (chat, count) in asked:
            alone = own.chat(chat, max_new_tokens=count, seed=i, **options)
            assert alone.tokens == replies[i]


# -- stores ----------------------------------------------------------------------------------------


def test_another_machine_goes_on_from_any_token_at_an_address(tmp_path: Path) -> None:
    """There is no index: small objects say what depends on what."""
    store = f"file://{tmp_path}"
    with wrapped("qwen3_vl", store=store) as vlm:
        options = {"max_new_tokens": 20, "min_new_tokens": 20, **GREEDY}
        options["suppress_tokens"] = sorted(vlm.runtime.family.placeholders.values())
        talk = vlm.generate(input_ids=ids_of(vlm, 60), **options)
        talk = vlm.generate(input_ids=torch.cat([talk, ids_of(vlm, 30, 1)], dim=1), **options)
        assert isinstance(talk, torch.Tensor)
        vlm.flush()
    for shared in (33, 77, 100, 115):  # in the prompts, in the answers
        with wrapped("qwen3_vl", store=store) as vlm, wrapped("qwen3_vl") as other:
            prompt = torch.cat([talk[:, :shared], ids_of(vlm, 7, shared)], dim=1)
            assert torch.equal(logits_of(vlm, prompt), logits_of(other, prompt))
            assert rows(vlm) == 7
    assert list((tmp_path / "upon").rglob("*-*"))
    with wrapped("qwen3_vl", store=store) as vlm:
        vlm.clear(store=True)
    assert not [path for path in tmp_path.rglob("*-*") if path.is_file()]


@pytest.mark.parametrize("piece", [7, 40])
def test_pictures_whose_tokens_see_each_other_are_never_cut(piece: int) -> None:
    """Neither by pieces of a prefill, nor where two prompts part inside the same picture."""
    with wrapped("gemma3_sliding") as vlm, wrapped("gemma3_sliding") as other:
        messages = [turn("Look at it. " * 5, picture(1), picture(2)), turn("What is it?")]
        with Together(vlm, prefill_piece=piece) as together:
            reply = together.submit(messages, max_new_tokens=9, **GREEDY).result()
        assert reply.tokens == other.chat(messages, max_new_tokens=9, **GREEDY).tokens
        changed = [turn("Look at it. " * 5, picture(1), picture(3)), turn("What is it?")]
        other.clear()
        assert torch.equal(logits(vlm, changed), logits(other, changed))


# -- weights ---------------------------------------------------------------------------------------


@BOTH
def test_packed_copies_follow_the_weights(dtype: torch.dtype) -> None:
    model, processor = build("qwen3_vl", dtype)
    layer = model.get_decoder().layers[0].mlp.down_proj
    with ks.wrap(model, processor, pack=True) as vlm:
        packs = dtype == torch.float32 or has_bfloat16()
        assert bool(vlm.stats()["engine"]["packed_bytes"]) == packs
        ids = ids_of(vlm, 40)
        before = logits_of(vlm, ids)
        changes = {
            "in place": lambda: layer.weight.data.mul_(1.5),
            "a new parameter": lambda: setattr(
                layer, "weight", torch.nn.Parameter(layer.weight * 0.5)
            ),
            "loaded": lambda: model.load_state_dict(build("qwen3_vl", dtype)[0].state_dict()),
        }
        for name, change in changes.items():
            change()
            with ks.wrap(model, processor, pack=True) as fresh:
                found = logits_of(vlm, ids)
                assert torch.equal(found, logits_of(fresh, ids)), name
                assert torch.equal(found, before) == (name == "loaded")


def test_wrap_packs_nothing_unasked_and_load_does() -> None:
    with wrapped("qwen3_vl") as vlm:
        assert vlm.stats()["engine"]["packed_bytes"] == 0
    with ks.load("demo", dtype="float32") as vlm:
        assert vlm.stats()["engine"]["packed_bytes"] > 0
    with ks.load("demo", dtype="float32", pack=False) as vlm:
        assert vlm.stats()["engine"]["packed_bytes"] == 0
    with pytest.raises(InputError, match="pack="):
        wrapped("qwen3_vl", pack="often").__enter__()


@pytest.mark.tries_anew
def test_no_memory_for_copies_falls_back(monkeypatch: Any, caplog: Any) -> None:
    class Full(linear.Packed):
        @classmethod
        def of(cls, layers: Sequence[torch.nn.Linear], kernel: str) -> linear.Packed:
            raise MemoryError("no memory")

    monkeypatch.setattr("keepsight.core.kernels.packing.Packed", Full)
    with wrapped("qwen3_vl", pack=True) as vlm:
        assert_bits(vlm)
        assert not vlm.stats()["engine"]["packed_bytes"]
        assert caplog.text.count("weights are not packed") == 1


@pytest.mark.tries_anew
def test_an_answer_keeps_its_packing_while_others_pack_otherwise(monkeypatch: Any) -> None:
    """Some kernels pack otherwise for another number of threads, which each thread has of its own.
    A call in another thread comes between two steps of an answer."""

    class Otherwise(linear.Packed):
        @classmethod
        def of(cls, layers: Sequence[torch.nn.Linear], kernel: str) -> linear.Packed:
            kept = [layer.weight.detach().clone() for layer in layers]
            with torch.no_grad():
                for layer in layers:
                    layer.weight.mul_(1 + torch.get_num_threads() / 64)
                made = super().of(layers, kernel)
                for layer, weight in zip(layers, kept, strict=True):
                    layer.weight.copy_(weight)
            return made

    def talk(vlm: ks.VLM, between: Any = None) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def catch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if len(seen) == 4 and between is not None:
                between()
            seen.append(scores.clone())
            return scores

        ids = torch.arange(20, 60)[None]
        vlm.generate(input_ids=ids, logits_processor=[catch], max_new_tokens=9, min_new_tokens=9)
        return seen

    monkeypatch.setattr("keepsight.core.kernels.packing.Packed", Otherwise)
    with wrapped("qwen3_vl", pack=True) as vlm:
        wanted = talk(vlm)

    def elsewhere() -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)
        vlm.runtime.refresh()

    with wrapped("qwen3_vl", pack=True) as vlm:
        found = talk(vlm, lambda: in_threads(elsewhere))
        assert_bits(vlm)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


# -- kernels ---------------------------------------------------------------------------------------


def test_calls_of_others_are_torchs_own() -> None:
    """Outside of our passes, and in another thread during one, nothing is exchanged."""
    passes.begin()
    weight, inputs = torch.randn(64, 64), torch.randn(3, 64)
    wanted = passes._stock_linear(inputs, weight, None)
    seen: list[torch.Tensor] = [functional.linear(inputs, weight)]
    with passes.running(passes.Kernels()):
        in_threads(lambda: seen.append(functional.linear(inputs, weight)))
    assert all(torch.equal(one, wanted) for one in seen)


def test_a_models_own_answers_stay_as_they_were() -> None:
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, [turn("Look at it.", picture(1))])
    with torch.no_grad():
        before = model(**inputs).logits
        with wrapped("qwen3_vl") as vlm:
            vlm.chat([turn("Look.", picture(1))], max_new_tokens=2)
            assert torch.equal(model(**inputs).logits, before)


@pytest.mark.filterwarnings("ignore")
def test_scripts_and_compilers_see_torchs_own() -> None:
    passes.begin()
    layer, inputs = torch.nn.Linear(8, 8), torch.randn(2, 8)
    assert torch.equal(torch.jit.script(layer)(inputs), layer(inputs))
    exported = torch.export.export(layer, (inputs,))
    assert torch.equal(exported.module()(inputs), layer(inputs))


@pytest.mark.tries_anew
def test_a_machine_that_rounds_otherwise_is_found_out(monkeypatch: Any) -> None:
    """A linear layer that adds in another order for odd numbers of rows, and one that always
    does."""
    plain = linear._plain

    def odd(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if rows.dim() == 2 and len(rows) % 2:
            return plain(rows.flip(-1), weight.flip(-1), bias)
        return plain(rows, weight, bias)

    def restless(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        order = torch.randperm(rows.shape[-1])
        return plain(rows[..., order], weight[:, order], bias)

    shape = (64, 64, torch.float32, False, linear.PLAIN)
    with torch.inference_mode():
        monkeypatch.setattr(linear, "_plain", odd)
        rule = rows_of(shape)
        assert rule is not None and not rule.fill(1) % 2
        monkeypatch.setattr(linear, "_plain", restless)
        assert rows_of(shape) is None
    with wrapped("qwen3_vl") as vlm:
        why = why_rounding(vlm)
        assert "depend on the number of rows" in why and why.endswith("(pack=True may help)")
        assert vlm.chat([turn("Look.", picture(1))], max_new_tokens=2).tokens
    with wrapped("qwen3_vl", pack=True) as vlm:
        assert_bits(vlm)
    with wrapped("qwen3_vl", torch.bfloat16) as vlm:
        assert why_rounding(vlm).endswith("(pack=True or float32 may help)")


@pytest.mark.tries_anew
def test_other_bits_for_another_reason_come_with_no_advice() -> None:
    with wrapped("lfm3_vl", torch.bfloat16) as vlm:
        assert "help" not in vlm.stats()["engine"]["rounding_because"]


@pytest.mark.tries_anew
@BOTH
def test_a_matrix_unit_that_takes_few_rows_in_one_way_is_given_few(
    dtype: torch.dtype, monkeypatch: Any
) -> None:
    """More than 32 rows are added in several orders, by their number: calls are made in parts."""
    plain = linear._plain

    def by_number(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        count = rows.shape[:-1].numel()
        if count > 32:  # some kernels add a mirrored order to the same bits, so it is a random one
            of = torch.Generator().manual_seed(int(count % 3 > 0))
            order = torch.randperm(rows.shape[-1], generator=of)
            return plain(rows[..., order], weight[:, order], bias)
        padded = functional.pad(rows.reshape(count, -1), (0, 0, 0, 128 - count))
        return plain(padded, weight, bias)[:count].view(*rows.shape[:-1], -1)

    monkeypatch.setattr(linear, "_plain", by_number)
    with torch.inference_mode():
        rule = rows_of((64, 64, dtype, False, linear.PLAIN))
        assert rule is not None and rule.most == 32
    with wrapped("qwen3_vl", dtype) as vlm, wrapped("qwen3_vl", dtype) as own:
        assert_bits(vlm)
        ids = ids_of(vlm, 150)
        wanted = logits_of(own, ids)
        for cut in (1, 40, 149):
            logits_of(vlm, ids[:, :cut])
        assert torch.equal(logits_of(vlm, ids), wanted)
        assert rows(vlm) == 150


@pytest.fixture
def three_threads() -> None:
    torch.set_num_threads(3)  # which ends with the test, as every number does


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_threads_that_share_numbers_leave_none_over(kind: str, three_threads: None) -> None:
    """Activations of numbers behind the last whole vector come out with other bits."""
    with wrapped(kind) as vlm, wrapped(kind) as other:
        assert_bits(vlm)
        ids = ids_of(vlm, 731)
        logits_of(vlm, ids[:, :353])
        assert torch.equal(logits_of(vlm, ids), logits_of(other, ids))


def test_weights_are_packed_anew_when_threads_change(monkeypatch: Any) -> None:
    """MKL packs by their number: what one packed must not be read under the name of two."""
    packed: list[int] = []
    follow = Packing.follow

    def noted(self: Packing, *given: Any) -> None:
        packed.append(torch.get_num_threads())
        follow(self, *given)

    monkeypatch.setattr(Packing, "follow", noted)
    with wrapped("qwen3_vl", pack=True) as vlm:
        packed.clear()
        for count in (3, 3, 2):
            torch.set_num_threads(count)
            logits_of(vlm, ids_of(vlm, 20))
        assert packed == [3, 2]


@pytest.mark.tries_anew
@pytest.mark.parametrize("act", [torch.nn.ELU(), torch.nn.Mish(), torch.nn.SiLU(inplace=True)])
def test_activations_that_leave_numbers_over_are_found_out(
    act: torch.nn.Module, three_threads: None
) -> None:
    """A short prompt of even widths has none; a long one that three threads share has."""
    model, processor = build("qwen3_vl")
    for layer in model.get_decoder().layers:
        layer.mlp.act_fn = act
    with ks.wrap(model, processor) as vlm:
        assert "neighbouring rows" in why_rounding(vlm)


@pytest.mark.parametrize(("dtype", "power"), [(torch.float32, -0.5), (torch.bfloat16, 2)])
def test_powers_that_are_functions_of_their_own_leave_nothing_over(
    dtype: torch.dtype, power: float
) -> None:
    """As norms use them."""
    numbers = torch.rand(997, dtype=dtype) + 0.1
    assert doubtful.leaves_none("pow", [numbers, power], 46)
    assert not doubtful.leaves_none("pow", [numbers.float(), 1.7], 46)
    frequencies = [10000.0, numbers.float()]
    assert not doubtful.leaves_none("pow", frequencies, 46)
    whole = numbers.pow(power)
    assert all(torch.equal(numbers[:n].clone().pow(power), whole[:n]) for n in range(1, 70))


@pytest.mark.parametrize("name", ["silu", "sigmoid", "gelu"])
def test_a_function_of_numbers_does_not_depend_on_how_many_there_are(
    name: str, three_threads: None
) -> None:
    function = getattr(functional, name)
    numbers = torch.randn(997, 77, generator=torch.Generator().manual_seed(1)).reshape(-1, 1)
    whole = in_whole_vectors(function, numbers)
    for start, end in ((0, 1), (3, 60), (100, 40_001), (40_001, len(numbers))):
        assert torch.equal(in_whole_vectors(function, numbers[start:end].clone()), whole[start:end])


def test_rows_are_filled_up() -> None:
    assert [Rows(4, 4).fill(n) for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert [Rows(2).fill(n) for n in (1, 2, 3)] == [2, 2, 3]
    assert [Rows().fill(n) for n in (33, 52, 101, 130)] == [36, 52, 104, 144]
    assert [Rows(fine=False).fill(n) for n in (33, 52, 101, 130)] == [64, 64, 128, 160]


@pytest.mark.parametrize("stop", [None, "e"])
def test_a_stream_that_ends_early_keeps_what_stands(vlm: Any, stop: str | None) -> None:
    """Closed by its caller, or at a string inside a word: the next turn has the same tokens."""
    messages = [turn("Look at it. " * 8)]
    with wrapped("qwen3_vl") as other:
        options = {"max_new_tokens": 200, "min_new_tokens": 200, **GREEDY}
        stream = vlm.stream(messages, **options, **({} if stop is None else {"stop": stop}))
        pieces = itertools.islice(stream, 20) if stop is None else stream
        found = [piece.token for piece in pieces]
        stream.close()
        assert vlm.runtime.tree.held_bytes() == 0
        answer = torch.tensor([[token for token in found if token is not None]])
        prompt = torch.cat([vlm.inputs(messages)["input_ids"], answer, ids_of(vlm, 5)], dim=1)
        before = rows(vlm)
        assert torch.equal(logits_of(vlm, prompt), logits_of(other, prompt))
        assert rows(vlm) - before == 6  # the last token of the answer, which nothing has read yet
        vlm.runtime.check()


def test_a_long_prompt_goes_in_pieces_between_the_steps_of_others() -> None:
    """The pieces are those of `prefill_piece`, and change no bit of the answer."""
    with wrapped("qwen3_vl") as vlm, wrapped("qwen3_vl") as own:
        sizes: list[int] = []
        handle = vlm.model.get_decoder().register_forward_pre_hook(
            lambda _, __, options: sizes.append(options["inputs_embeds"].shape[1]),
            with_kwargs=True,
        )
        messages = [turn("Look at it. " * 90, picture(1))]
        with Together(vlm, prefill_piece=100) as together:
            many = {"max_new_tokens": 200, "min_new_tokens": 200}
            beside = together.submit([turn("Only words.")], **many, **GREEDY)
            next(iter(beside))
            sizes.clear()
            reply = together.submit(messages, max_new_tokens=6, **GREEDY).result()
            beside.cancel()
        handle.remove()
        assert max(sizes) == 101 and reply.usage.prompt_tokens > 300
        assert reply.tokens == own.chat(messages, max_new_tokens=6, **GREEDY).tokens
    with wrapped("qwen3_vl") as vlm, pytest.raises(InputError, match="prefill_piece"):
        Together(vlm, prefill_piece=0)


@pytest.mark.parametrize(("kind", "exactness"), [("qwen3_vl", "bits"), ("llama4", "rounding")])
def test_reports_and_verify_say_which_holds(kind: str, exactness: str) -> None:
    messages = [turn("Look.", picture(1))]
    with wrapped(kind) as vlm:
        told = vlm.chat(messages, max_new_tokens=1).report.to_dict()
        found = vlm.verify(messages)
        assert told["exactness"] == found.exactness == exactness and found
        assert bool(found.rounding_because) == (exactness == "rounding")
        assert found.rounding_because in str(found)


@pytest.mark.tries_anew
def test_adapters_of_other_shapes_are_tried_anew() -> None:
    """A shape that was not there when the kernels were tried is tried before it is used."""
    from peft import LoraConfig, inject_adapter_in_model

    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        ids = ids_of(vlm, 50)
        logits_of(vlm, ids)
        for rank in (3, 5):
            config = LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False)
            inject_adapter_in_model(config, model.get_decoder(), adapter_name=f"rank{rank}")
            model.eval()
            found = logits_of(vlm, ids)
            assert_bits(vlm)  # short sums round otherwise, too
            with ks.wrap(model, processor) as fresh:
                assert torch.equal(found, logits_of(fresh, ids))
