"""Refuses missing folders and devices before anything slow is imported.

PyTorch knows more, and is asked later; the checks here need no PyTorch.
"""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import importlib.util
import os
import re
import socket
import sys
from glob import glob
from pathlib import Path

from keepsight.errors import InputError, MissingExtra, StoreError

_DEVICE = re.compile(r"([a-z]+):?(\d*)")
_DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "metal": "mps"}
_ACCELERATORS = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd", "/dev/dri")
# The library for the protocol of an address, and the extra that installs it.
LIBRARIES: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcs")),
    **dict.fromkeys(("sftp", "ssh"), ("paramiko", None)),
    **dict.fromkeys(("abfs", "az"), ("adlfs", None)),
}


def path_text(path: str | os.PathLike[str], what: str = "the path") -> str:
    """The text of a path or an address."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise InputError(f"{what} is {path!r:.80}, expected a path or an address") from None


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with a home folder in the place of `~` or `~name`."""
    try:
        return Path(path_text(path)).expanduser()
    except RuntimeError:
        raise InputError(
            f"{path}: there is no home folder that ~ stands for; write the path in full"
        ) from None


def check_store_folder(address: str | os.PathLike[str]) -> None:
    """Refuse a file in place of a store, or above it."""
    text = os.fspath(address)
    if not text or "://" in text or "\0" in text:
        return
    there = _nearest(expanded(text))
    if there.exists() and not there.is_dir():
        what = "it is a file" if there == expanded(text) else f"{there} is a file"
        raise StoreError(f"{text} cannot be a store: {what}; name a folder, new or old")


def check_new_folder(path: Path) -> None:
    """Refuse an existing path, except an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} is there already; name a new folder, or remove it first")


def check_listen(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before anything slow."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            if os.name == "posix":  # elsewhere two servers could listen
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "something else listens there; choose another --port, or 0 for any free one"
        why = hint if taken else f"{error.strerror or error}"
        raise InputError(f"cannot listen on {host}:{port}: {why}") from None


def check_store_writable(address: str | os.PathLike[str]) -> None:
    """Also refuse a folder that cannot be written, and an address that cannot be opened."""
    text = os.fspath(address)
    library, extra = LIBRARIES.get(text.partition("://")[0], ("", None))
    if library and "://" in text and importlib.util.find_spec(library) is None:
        raise MissingExtra.named(library, extra)
    check_store_folder(text)
    if not text or "://" in text or "\0" in text:
        return
    path = expanded(text)
    there = _nearest(path)
    if (path / "store.json").is_file():
        return  # a store of others may still be readable
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(
            f"{text} cannot be a store: {there} cannot be written by this user; name another "
            "folder, or leave the store out"
        )
    _check_can_hold(there, text)


def _check_can_hold(there: Path, text: str) -> None:
    """Refuse a place where no folder can be created: some, such as /proc, claim to be writable and
    are not."""
    tried = there / f".keepsight-{os.getpid()}"
    try:
        tried.mkdir()
        tried.rmdir()
    except OSError as error:
        raise StoreError(
            f"{text} cannot be a store: nothing can be made in {there} "
            f"({error.strerror or error}); name another folder, or leave the store out"
        ) from None


def _nearest(path: Path) -> Path:
    """The path itself, or its nearest existing parent."""
    return next((p for p in (path, *path.parents) if os.path.lexists(p)), Path())


def check_device(device: str | None) -> None:
    """Refuse a device that neither this PyTorch nor this machine can have."""
    name = check_device_name(device or "")
    if name not in ("cuda", "mps", "xpu"):
        return
    version = importlib.metadata.version("torch")
    if name == "mps":
        there = sys.platform == "darwin"
    else:
        linux = sys.platform == "linux"
        there = not version.endswith("+cpu") and not (linux and not any(map(glob, _ACCELERATORS)))
    if not there:
        raise InputError(
            f"device {device!r}: PyTorch {version} sees none here; leave the device out to run on "
            "the CPU"
        )


def check_device_name(device: str) -> str | None:
    """The kind of a device, if it is known here; a name that is nearly right is refused."""
    found = _DEVICE.fullmatch(device.lower())
    if found is None:
        return None
    name = found[1] if found[1] in _DEVICES else _near_device(found[1])
    near = f"{name}:{found[2]}" if found[2] else name
    if name is not None and device != near:
        raise InputError(f"there is no device {device!r}; did you mean {near!r}?")
    return name


def _near_device(name: str) -> str | None:
    """The device that an unknown name may mean."""
    close = difflib.get_close_matches(name, _DEVICES, 1, 0.7)
    return _OTHER_NAMES.get(name) or next(iter(close), None)
