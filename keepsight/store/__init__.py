"""Bytes under a key: a bounded memory, and stores that outlive the process.

`contract` says what a store promises, `disk` keeps it in a folder, `sizes` counts bytes. Nothing
in here knows of images, models or prompts.
"""

from keepsight.store.contract import NOTHING, About, Entry, Store
from keepsight.store.disk import FORMAT, DiskStore
from keepsight.store.sizes import Recent, parse_bytes

__all__ = ["FORMAT", "NOTHING", "About", "DiskStore", "Entry", "Recent", "Store", "parse_bytes"]
