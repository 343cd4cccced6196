"""Refuses impossible model names before torch and Transformers are imported.

A name of the form owner/name may be a hub id; whether the Hub can be asked for it is checked at
once.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from keepsight.errors import InputError
from keepsight.system.places import expanded

DEMO_NAMES = ("demo", "demo-hybrid", "demo-smol")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_model(name: str) -> None:
    """Accept demo models, folders with a configuration, and possible hub ids."""
    if name in DEMO_NAMES:
        return
    folder = expanded(name)
    if folder.is_dir():
        if not any(folder.glob("*.json")):
            raise InputError(f"{name}: the folder holds no model: it has no config.json")
        _check_reachable(name)
        return
    if folder.is_file():
        raise InputError(f"{name} is a file; a model is a folder, a hub id, or demo")
    if may_be_hub_id(name):
        _check_reachable(name)
        return
    near = _near(name, folder)
    hint = f"did you mean {near}?" if near else "give demo, a folder, or a hub id (owner/name)"
    raise InputError(f"no model {name!r}: there is no such folder; {hint}")


def may_be_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name, and nothing on the disk has that name."""
    path = name.startswith(("./", "../", "~")) or os.path.lexists(name)
    return not path and _HUB_ID.fullmatch(name) is not None


def _check_reachable(name: str) -> None:
    from keepsight.models import reachable  # start-up time: imports the Hub's client

    reachable.check_folder_sees(name)
    reachable.check_hub(name, None)


def _near(name: str, folder: Path) -> str | None:
    """A demo model, or a folder with a similar name next to the missing one."""
    found = difflib.get_close_matches(name, DEMO_NAMES, n=1, cutoff=0.7)
    if found:
        return found[0]
    try:
        beside = [entry.name for entry in os.scandir(folder.parent) if entry.is_dir()]
    except OSError:
        return None
    close = difflib.get_close_matches(folder.name, beside, n=1, cutoff=0.7)
    return os.path.join(os.path.dirname(name), close[0]) if close else None
