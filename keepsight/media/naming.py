"""Names media: their bytes are hashed, and nothing seen before is decoded.

The digest of a file's bytes leads to the digest of its pixels, and that to the digest of the
tower's input (the key). Both steps are remembered as aliases, so a known image costs one hash.
`look` changes nothing that is remembered, so threads may look at several images at once; `learn`
remembers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

from keepsight.errors import ImageError, KeepsightError, UnsupportedInput
from keepsight.kinds import Clip, Decoded, Options, Processor, Record
from keepsight.media.caches import MediaCaches
from keepsight.media.clips import open_clip
from keepsight.media.medium import PROCESSORS, entry_of, is_entry, is_plain, without_arrays
from keepsight.media.sources import Source, open_source
from keepsight.media.video_files import chooser
from keepsight.models.families import Family, Pixels
from keepsight.models.families.qwen_vl import steps_of, videos_by_step
from keepsight.store import About, Store
from keepsight.system import digests

FILE = "file"  # field of a note for the file name or URL of its picture


@dataclass(frozen=True)
class Inspected:
    """The result of looking at a medium: its entry, and what is new about it."""

    source: Source
    entry: Record
    aliases: tuple[str, ...] = ()  # new names that lead to the entry
    pixels: Pixels | None = None  # if it had to be preprocessed


class Namer:
    """The names of media under one processor, for one tenant."""

    def __init__(
        self,
        family: Family,
        processor: Processor | None,
        options: Options,
        store: Store | None,
        caches: MediaCaches,
        tenant: str = "",
        ttl: float | None = None,
    ) -> None:
        self._family, self._processor, self._options = family, processor, options
        self._store, self._ttl, self._tenant = store, ttl, tenant
        self._aliases, self._downloads = caches.aliases, caches.downloads
        self._fetch = partial(caches.fetch, tenant)
        self._settings: dict[str, str] = {}  # modality -> digest, filled on demand
        self._makers_of: dict[str, str] = {}
        self._shared = True
        self._made_by: Record = {}  # library versions, and replaced code: both change pixels
        self.bound: tuple[object, ...] | None = (
            None  # the processor's settings when they were last digested
        )
        self.preprocessed = 0

    def bind(self, provenance: Record, code: str = "", shared: bool = True) -> None:
        """Read the processor's settings, which may change at any time. `code`: the digest of its
        replaced code. Names that are not `shared` stay in memory."""
        self._shared = shared
        now: tuple[object, ...] | None = None
        if self._processor is not None:
            parts = [getattr(self._processor, name, None) for name in PROCESSORS.values()]
            seen = [(type(part), without_arrays(part)) for part in parts if part is not None]
            now = (seen, self._own_settings(), provenance, code)
        if now != self.bound:
            names = ("transformers", "image_backend", "switches")
            self._made_by = {name: provenance[name] for name in names}
            self._made_by |= {"code": code} if code else {}
            # A new dict: a thread in `look` may still be digesting the earlier settings.
            self._settings, self._makers_of = {}, {}
            self.bound = copy.deepcopy(now)

    def settings(self, modality: str = "image", must: bool = True) -> str:
        """The digest of every setting that changes the processor's output for a medium.

        Empty if there is no processor and none is needed: tensors need none.
        """
        if self._processor is None:
            return ""
        known = self._settings
        if modality not in known:
            part = getattr(self._processor, PROCESSORS[modality], None)
            if part is None or not hasattr(part, "to_dict"):
                if not must:
                    return ""
                other = {"video": ", or give its frames as images (encode: --fps 2)"}
                raise UnsupportedInput(
                    f"the processor has no {PROCESSORS[modality]} (those of Transformers need "
                    f"torchvision), so {modality} cannot be prepared here: install what it "
                    f"needs{other.get(modality, '')}"
                )
            known[modality] = digests.digest(
                "processor settings",
                type(part).__name__,
                {name: value for name, value in part.to_dict().items() if not callable(value)},
                self._own_settings(),
                self._options if modality == "image" else {},
            )
        return known[modality]

    def _own_settings(self) -> Record:
        """Plain settings of the composite processor: some change pixels, some an image's text."""
        own = vars(self._processor).items()
        return {k: v for k, v in own if k != "chat_template" and is_plain(v)}

    def makers(self, modality: str) -> str:
        """Settings and library versions: if both are equal, pixels are equal."""
        known = self._makers_of
        if modality not in known:
            settings = self.settings(modality)
            known[modality] = digests.digest("processing", settings, self._made_by)
        return known[modality]

    # -- looking ---------------------------------------------------------------------------------

    def look(self, image: object, modality: str = "image") -> Inspected:
        """Find or make the entry of a medium in any form. Thread-safe."""
        self._needed_processor()
        makers = self.makers(modality)
        if modality == "image":
            source = open_source(image, self._fetch)
        else:
            source = open_clip(image, modality, self._fetch)
        if source.options:
            makers = digests.digest("processing with options", makers, dict(source.options))
        if source.modality == "video" and videos_by_step(self._family):
            makers = digests.digest("with its steps", makers)  # older notes name none
        name = digests.digest("alias", source.name, makers)
        entry = self._alias(name)
        if entry is not None:
            return Inspected(source, entry)
        decoded = self._decoded(source)
        digest = source.digest(decoded, makers)
        entry = self._alias(digest)  # other bytes may have these pixels
        if entry is not None:
            return Inspected(source, entry, (name,))
        pixels = self.run_processor(decoded, source)
        entry = self.entry_of(pixels, source=digest)
        return Inspected(source, entry, (digest, name), pixels)

    def entry_of(self, pixels: Pixels, **more: object) -> Record:
        """The remembered entry of a medium, with the steps of a video."""
        if pixels.modality == "video" and videos_by_step(self._family):
            more["steps"] = [step.key for step in steps_of(self._family, pixels)]
        return entry_of(pixels, **more)

    def learn(self, looked: Inspected) -> None:
        """Remember what `look` found."""
        for name in looked.aliases:
            self._remember(name, looked.entry, looked.source.file)
        self.preprocessed += looked.pixels is not None
        looked.source.fresh.clear()

    def preprocess(self, source: Source) -> Pixels:
        """The pixels of a known medium again."""
        self.preprocessed += 1
        return self.run_processor(self._decoded(source), source)

    def _decoded(self, source: Source) -> Decoded | Clip:
        """The processor's input; for a video only the frames that it would use."""
        if source.video is None:
            return source.decode()
        return source.video.decode(chooser(self._needed_processor()))

    def _needed_processor(self) -> Processor:
        if self._processor is None:
            raise ImageError("this model was wrapped without a processor: pass tensors to generate")
        return self._processor

    def run_processor(self, decoded: Decoded | Clip, source: Source) -> Pixels:
        """The tower's input."""
        processor = self._needed_processor()
        try:
            if isinstance(decoded, tuple):
                return self._family.preprocess_other(processor, decoded, {}, source.modality)
            options = {**self._options, **dict(source.options)}
            return self._family.preprocess(processor, decoded, options)
        except KeepsightError:
            raise
        except Exception as error:  # processors raise whatever their arithmetic causes
            held = decoded[0] if isinstance(decoded, tuple) else decoded
            size = getattr(held, "shape", None) or getattr(held, "size", None)
            raise ImageError(
                f"{source.label} ({size}): the image processor refused it: {error}"
            ) from error

    # -- aliases ---------------------------------------------------------------------------------

    def _alias(self, digest: str) -> Record | None:
        entry = self._aliases.get(self._tenant, digest)
        if entry is None and self._store is not None:
            entry = self._store.note("alias", digest)
            if entry is not None and not is_entry(entry):
                self._store.reject("alias", digest, "it does not describe an image")
                entry = None
            if entry is not None:
                # The name is for people who list a store; queued writes are not changed.
                entry = {name: value for name, value in entry.items() if name != FILE}
                self._aliases.put(self._tenant, digest, entry)
        return entry

    def _remember(self, digest: str, entry: Record, file: str) -> None:
        self._aliases.put(self._tenant, digest, entry)
        if self._store is not None and self._shared:
            about = About(cost=1.0, media=(entry["key"],), ttl=self._ttl)
            note = {**entry, FILE: file} if file else entry
            self._store.put_note("alias", digest, note, about)

    def forget(self, key: str) -> None:
        """Drop every name that leads to a key, and all downloads, because one may be it."""
        self._aliases.forget(self._tenant, lambda entry: bool(entry["key"] == key))
        self._downloads.clear(self._tenant)

    def clear(self) -> None:
        """Drop every name."""
        self._aliases.clear(self._tenant)
        self._downloads.clear(self._tenant)
