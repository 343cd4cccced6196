"""One live model, everything remembered of it, and the lock for its use.

`refresh` runs before each call: it checks the weights and the settings that change results, and
returns the namespace. Two calls share a namespace only if a snapshot of one is bit for bit what the
other would compute, and only for one tenant. Each tenant has its own names, packages and paths;
tenants share the model and the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.core.any_cut import AnyCut, Finding
from keepsight.core.call import Call
from keepsight.core.decoding.state import Shape
from keepsight.core.engine import Engine
from keepsight.core.kernels import passes
from keepsight.core.settings import (
    RuntimeSettings,
    image_options,
    refuse_stretching_rope,
)
from keepsight.core.structured.formats import wanted
from keepsight.core.structured.grammars import Grammars
from keepsight.core.structured.thoughts import may_open, opened
from keepsight.errors import Closed, InputError, ModelError, PinsFull, UnsupportedInput
from keepsight.kinds import Message, Options, Processor, Record
from keepsight.media.caches import MediaCaches
from keepsight.media.features import COUNTS, Vision
from keepsight.media.medium import Medium
from keepsight.media.naming import Namer
from keepsight.models.environment import (
    about,
    backend_version,
    beside_the_decoder,
    compiled,
    environment_of,
)
from keepsight.models.families import Family
from keepsight.models.identity import Identity, ProcessorCode
from keepsight.models.quantised import refuse_experts_without_kernel, refuse_shared_scales
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.prefix.tree import Tree
from keepsight.prompt.render import Name, Renderer
from keepsight.store import Store
from keepsight.system import digests
from keepsight.system.accounts import account_of
from keepsight.system.lock import FairLock, Mutex
from keepsight.system.units import parse_bytes, parse_seconds

_STATS_WAIT = 0.2  # seconds that statistics wait while a store counts its entries
_NO_PROCESSOR = "this model was wrapped without a processor: use generate(**tensors)"
MAX_TENANTS = 10_000  # tenants in memory at a time; a store keeps all
MAX_SALTS = 1_000  # of one tenant, likewise
HOST_BUDGET = "4GiB"  # for entries evicted from an accelerator


@dataclass(frozen=True)
class SnapshotOrigin:
    """The conditions under which a namespace's snapshots were made, and their tenant."""

    weights: str
    tenant: str


class Runtime:
    """A model with its family, processor and weights; tree, engine, features and store; and a lock.

    Hold `lock` to compute with the model or to change what is remembered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        processor: Processor | None,
        weights: Identity,
        settings: RuntimeSettings,
        store: Store | None,
        renderer: Renderer | None = None,
        owned: bool = False,
    ) -> None:
        settings.check()
        passes.begin()
        self.lock, self._renderer, self.closed = FairLock(), renderer, False
        self.decides_only = False  # its head scores options, not words
        self.housekeeping = Mutex()  # taken before `lock`, to pin or remove in all tiers
        self.model, self.family, self.processor = model, family, processor
        self.weights, self.store, self.settings = weights, store, settings
        refuse_stretching_rope(model)
        refuse_experts_without_kernel(model)
        self._quota = None if settings.tenant_quota is None else parse_bytes(settings.tenant_quota)
        self._ttl = None if settings.ttl is None else parse_seconds(settings.ttl)
        self.image_options = image_options(processor, dict(settings.image_options))
        self._processor_code = ProcessorCode(processor)
        self.caches = MediaCaches.of(parse_bytes(settings.vision_budget), self._quota, self._ttl)
        self.visions: OrderedDict[str, Vision] = OrderedDict()  # most recently refreshed last
        self.tree = self._tree(model)
        shape = Shape.of(model)
        budget = parse_bytes(settings.cache_budget or 0)
        self.engine = Engine(self, shape, budget, settings.drafts)
        self.tree.receive, self.tree.on_forget = self.engine.receive, self.engine.lanes.forget
        self.tree.beside = lambda: self.engine.lanes.nbytes + self.engine.decoder.pool_bytes
        tokenizer = getattr(processor, "tokenizer", None)
        self.rule = self._plain = Rule(
            turn_ends=family.turn_ends(tokenizer),
            whole_media=family.sees_whole_media,
            reuse=family.reuse,
            media_ends=family.media_ends,
            states=shape.has_states,
        )
        self._any_cut = AnyCut(model, family, self.engine.decoder, weights, settings, owned, store)
        self.finding = Finding(None)
        self._compiled = compiled(model)
        refuse_shared_scales(model)
        self._read_at: tuple[str, ...] | None = None  # state of the model when it was last read
        self._grammars: Grammars | None = None
        self._made_of: tuple[tuple[object, ...], str] = ((), "")  # state last seen, its digest
        # By namespace, to explain why a path is missing.
        self.made_under: dict[str, SnapshotOrigin] = {}

    def fresh(self, family: Family | None = None) -> Runtime:
        """A runtime with the same model, settings and lock, and nothing remembered."""
        other = Runtime(
            self.model,
            family or self.family,
            self.processor,
            self.weights,
            self.settings,
            store=None,
            renderer=self.renderer,
        )
        other.lock, other.rule, other._plain = self.lock, self.rule, self._plain
        other._any_cut, other.finding = self._any_cut, self.finding
        self.weights.on_forget = self._any_cut.packing.forget
        return other

    # -- what a call needs -----------------------------------------------------------------------

    @property
    def renderer(self) -> Renderer | None:
        """The renderer for the tokenizer and the chat template in their present state."""
        self._renderer = self._renderer and self._renderer.current()
        return self._renderer

    def require_open(self) -> None:
        """Refuse calls after `close`."""
        if self.closed:
            raise Closed("this VLM was closed; load or wrap the model again")

    def require_answers(self) -> None:
        """Refuse calls that need a language model if there is none."""
        self.require_open()
        if what := self.family.packages_only:
            raise UnsupportedInput(
                f"{self.model.config.model_type} is {what}: here it makes packages, with encode(), "
                "and answers nothing"
            )

    def require_words(self) -> None:
        """Refuse calls that need words of a model that only decides."""
        if self.decides_only:
            raise UnsupportedInput(
                "this is a decision model: it writes no text and scores none; use decide()"
            )

    def close(self) -> None:
        """Finish writing and release everything but the model. Safe to call twice."""
        if self.lock.unusable:  # a forked child has nothing usable to close
            return
        with self.lock:
            if not self.closed:
                self.closed = True
                self.clear()
        if self.store is not None:  # without the lock: a disk may be slow
            self.store.close()

    def needed_processor(self) -> Processor:
        """The processor, or an error that says none was given."""
        if self.processor is None:
            raise InputError(_NO_PROCESSOR)
        return self.processor

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.needed_processor().tokenizer

    def grammar(self, options: Options, prompt: Prompt) -> Options:
        """The form of an answer that some options ask for, compiled; nothing if there is none."""
        form = wanted(options.get("response_format"))
        if form is None:
            return {"response_format": None} if "response_format" in options else {}
        tokenizer, renderer = self.tokenizer(), self.renderer
        if self._grammars is None:
            self._grammars = Grammars(tokenizer, *_logits_of(self.model))
        end = prompt.ids[-32:].tolist()
        may = renderer is not None and may_open(tokenizer, renderer.template, end)
        grammar = self._grammars.compiled(form, may, opened(tokenizer, end))
        return {"response_format": grammar}

    def render(
        self, messages: list[Message], call: Call, generate: bool = True, name: Name | None = None
    ) -> Prompt:
        """The prompt of a conversation: token ids, media and their ranges. Nothing is encoded."""
        if (renderer := self.renderer) is None:
            raise InputError(_NO_PROCESSOR)
        namer = name or self.vision_of(call.tenant).name
        return renderer.render(messages, namer, generate, call.tenant, **call.template)

    # -- tenants ---------------------------------------------------------------------------------

    def _tree(self, model: PreTrainedModel) -> Tree:
        host = self.settings.host_budget
        if host is None:  # a model on the host needs no second memory
            host = 0 if model.device.type == "cpu" else HOST_BUDGET
        return Tree(
            parse_bytes(self.settings.cache_budget or 0),
            Shape.of(model).has_states,
            self.store,
            reuse=self.family.reuse,
            host_budget=parse_bytes(host),
            quota=self._quota,
            ttl=self._ttl,
        )

    @property
    def vision(self) -> Vision:
        return self.vision_of("")

    def vision_of(self, tenant: str) -> Vision:
        """The names and packages of one tenant, invisible to others. A new tenant is created, which
        needs the model's lock."""
        if (known := self.visions.get(tenant)) is not None:
            return known
        self._make_room_for(tenant)
        store, settings = self.store_of(tenant), self.settings
        namer = Namer(
            self.family,
            self.processor,
            self.image_options,
            store,
            self.caches,
            tenant=tenant,
            ttl=self._ttl,
        )
        self.visions[tenant] = vision = Vision(
            self.family,
            namer,
            self.caches,
            store,
            accept_features=settings.accept_features,
            tenant=tenant,
            ttl=self._ttl,
            codec=settings.feature_codec,
        )
        vision.tower.about = about(self.model, self.processor)
        return vision

    def bound_vision_of(self, tenant: str) -> Vision:
        """The same, ready to look at media without the model's lock."""
        vision = self.visions.get(tenant)
        if vision is None or vision.namer.bound is None:
            with self.lock:
                self.refresh(tenant)
                vision = self.vision_of(tenant)
        return vision

    def _make_room_for(self, tenant: str) -> None:
        """Forget the tenant unused for longest if there are too many, since callers may invent
        names. Salts of a tenant only displace other salts of it. A tenant with pins is kept."""
        if tenant != (account := account_of(tenant)):
            own = [name for name in self.visions if name != account == account_of(name)]
            while len(own) >= MAX_SALTS:
                self._let_go_of_one(own, "salts of one key")
        else:
            plain = [name for name in self.visions if name == account_of(name)]
            while len(plain) >= MAX_TENANTS:
                self._let_go_of_one(plain, "tenants")

    def _let_go_of_one(self, names: list[str], what: str) -> None:
        """Forget the first of some tenants that has nothing pinned."""
        pinned = self.caches.packages.pinning() | self.tree.pinning()
        oldest = next((name for name in names if name not in pinned), None)
        if oldest is None:
            raise PinsFull(
                f"{len(names)} {what} are remembered, the maximum, and each has something "
                "pinned; unpin something"
            )
        names.remove(oldest)
        self.tree.let_go_of(oldest)
        self.forget_said(oldest)
        self.visions.pop(oldest).clear()
        kept = {n: made for n, made in self.made_under.items() if made.tenant != oldest}
        self.made_under = kept

    def store_of(self, tenant: str) -> Store | None:
        return self.store.tenant(tenant) if self.store is not None and tenant else self.store

    def refresh(self, tenant: str = "", remembered: dict[str, str] | None = None) -> str:
        """Look whether the model or its settings changed, and return the namespace of a tenant."""
        if self.model.training:
            raise ModelError("the model is in training mode (dropout is random); call model.eval()")
        if self.weights.refresh(remembered):
            self._follow_change()
        if self.weights.state != self._read_at:
            self._read_again()
        now = self._now()
        variant = self._variant(now)
        self._bind(tenant, now, variant)
        return self._namespace(tenant, variant)

    def _bind(self, tenant: str, now: Record, variant: str) -> None:
        """Make vision and engine work under the present settings."""
        weights, code = self.weights, self._processor_code.look()
        provenance, shared = self._provenance(now), not weights.vision_is_private
        self.vision_of(tenant).bind(weights.vision, weights.settings, provenance, shared, code)
        self.visions.move_to_end(tenant)
        self.engine.bind(variant)
        self.finding = self._any_cut.find(now)
        self.rule = replace(self._plain, kernels=self.finding.names)

    def _namespace(self, tenant: str, variant: str) -> str:
        """The name for all that changes bits, with a root in the tree."""
        namespace = digests.digest("namespace", variant, self.rule.record(), tenant)
        if namespace not in self.made_under:
            self.made_under[namespace] = SnapshotOrigin(self.weights.all, tenant)
            self.tree.root(namespace, tenant, self.store_of(tenant), self.weights.is_private)
            for empty in self.tree.drop_empty(namespace):
                self.made_under.pop(empty, None)
        return namespace

    def announce(self) -> None:
        """Look at everything again, for a change that nothing shows."""
        self._processor_code.announce()
        self.weights.announce()
        self._follow_change()
        self.refresh()

    def _follow_change(self) -> None:
        self._compiled = compiled(self.model)
        refuse_shared_scales(self.model)
        if self.engine.look_again():
            self.tree.evict(self.tree.device.nbytes + self.tree.host.nbytes)

    def _variant(self, now: Record) -> str:
        """The digest of the model and its environment, recomputed only after a change."""
        seen = (self.weights.all, self.weights.config, self.weights.code, now)
        if seen != self._made_of[0]:
            self._made_of = (seen, digests.digest("making", *seen))
        return self._made_of[1]

    def _read_again(self) -> None:
        """Read everything again from a changed model, as if it was wrapped now. If that fails,
        calls are refused until the model is as before."""
        if self._read_at is not None:
            refuse_stretching_rope(self.model)
            refuse_experts_without_kernel(self.model)
            type(self.family).__init__(self.family, self.model)
            if Shape.of(self.model) != self.engine.shape:
                raise ModelError(
                    "the layers of the model are of other kinds than when it was wrapped, so "
                    "remembered states no longer fit; wrap the model again"
                )
        self._read_at = self.weights.state

    def elsewhere(self, namespace: str, prompt: Prompt) -> tuple[int, str] | None:
        """How far another namespace of the tenant knows a prompt, and why it is unusable."""
        until, other = self.tree.elsewhere(namespace, prompt)
        made = self.made_under.get(other)
        if not until or made is None:
            return None
        return until, "other settings" if made.weights == self.weights.all else "other weights"

    def _now(self) -> Record:
        """The environment now, in this thread."""
        now = environment_of(self.model, self.weights.dtype)
        return {**now, "compiled": self._compiled}

    def environment(self) -> Record:
        """Everything a snapshot depends on except weights and input, as plain data for a file."""
        return {**self._now(), "rule": self.rule.record(), "config": self.weights.config}

    def _provenance(self, now: Record) -> Record:
        """How features are computed in this environment."""
        processor = getattr(self.processor, "image_processor", None)
        backend = str(getattr(processor, "backend", None) or "tensors")
        return dict(
            now,
            compiled=beside_the_decoder(self.model, now["compiled"]),
            dtype=self.weights.vision_dtype,
            maker=str(now.get("runtime", "torch")).split()[0],
            codec="exact",
            image_backend=f"{backend} ({backend_version(backend)})",
        )

    def forget(self, medium: Medium, tenant: str) -> int:
        """Drop everything in memory about an image; return the bytes freed."""
        freed = self.vision_of(tenant).forget(medium)
        self.forget_said(tenant)
        return freed + self.tree.forget_media(medium.key, tenant)

    def forget_said(self, tenant: str | None) -> None:
        self.engine.answers.clear(tenant)
        if self._renderer is not None:
            self._renderer.encodings.clear(tenant)

    def clear(self, tenant: str | None = None) -> None:
        """Forget everything in memory, of all tenants or one; a running turn does not restore
        it."""
        self.engine.clear(tenant)
        self.forget_said(tenant)
        self.tree.clear(tenant)
        for name, vision in self.visions.items():
            if tenant in (None, name):
                vision.clear()

    def stats(self, tenant: str | None = None) -> Record:
        """Bytes and counts per tier, of all tenants or of one. Callable from any thread without the
        lock: it reads counters in memory and waits for no disk."""
        of = list(self.visions) if tenant is None else [tenant]
        known = [self.visions[name].counts for name in of if name in self.visions]
        counts = {name: sum(one[name] for one in known) for name in COUNTS}
        stats: Record = {"features": {**self.caches.stats(tenant), **counts}}
        if tenant is not None:
            stats["prefix"] = {"bytes": self.tree.bytes_of(tenant), "quota": self._quota}
            return {**stats, "store": _stats_of(self.store_of(tenant))}
        tree = self.tree
        tiers = tree.stats()
        stats["prefix"] = {
            **tiers["memory"],
            "host": tiers["host"],
            "evictions": tree.evictions,
            "demotions": tree.demotions,
            "promotions": tree.promotions,
            "lane_bytes": self.engine.lanes.nbytes + self.engine.decoder.pool_bytes,
        }
        stats["engine"] = {
            "prefill_tokens": self.engine.prefill_tokens,
            "decode_steps": self.engine.decode_steps,
            "exactness": "bits" if self.rule.kernels else "rounding",
            "rounding_because": self.finding.why,
            **vars(self.engine.tally),
            "packed_bytes": self._any_cut.packing.nbytes,
        }
        return {**stats, "store": _stats_of(self.store)}


def _logits_of(model: PreTrainedModel) -> tuple[int, tuple[int, ...]]:
    """How many logits a model gives, and the tokens that end its answers."""
    given = model.generation_config.eos_token_id
    ends = given if isinstance(given, list) else [] if given is None else [given]
    return int(model.config.get_text_config().vocab_size), tuple(ends)


def _stats_of(store: Store | None) -> Record | None:
    return None if store is None else store.stats(_STATS_WAIT)
