"""A process that lacks what Windows lacks, and a network: imports, answers, encodes, keeps and
deletes."""

from __future__ import annotations

from pathlib import Path

from support.hostile import finished, start

RUN = """
import importlib, os, pathlib, pkgutil, socket, sys

def refuse(*arguments, **options):
    raise RuntimeError("importing must not open the network")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
# What they need on this system is theirs.
import fastapi, torch, transformers.masking_utils, transformers.modeling_utils

for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None
for name in ("register_at_fork", "fork", "fchmod", "statvfs", "sched_getaffinity", "O_DIRECTORY",
             "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_PATH"):
    delattr(os, name)
os.supports_dir_fd.clear()
real = os.open


def opened(path, flags, mode=0o777, *, dir_fd=None):
    if dir_fd is not None or os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return real(path, flags, mode)


os.open = opened


def refusing(change):
    # no name of an open file can be changed

    def changed(path, *more, **options):
        there = os.path.realpath(path)
        for handle in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{handle}") == there:
                raise PermissionError(13, "used by another process", path)
        return change(path, *more, **options)

    return changed


os.replace, os.unlink = refusing(os.replace), refusing(os.unlink)
os.remove = os.unlink

import numpy as np
import keepsight as ks

for module in pkgutil.walk_packages(ks.__path__, "keepsight."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert "fcntl" not in str(error), module.name

from keepsight.server.files import Files
from keepsight.server.files import OnDisk

red = np.zeros((64, 64, 3), np.uint8) + np.array([255, 0, 0], np.uint8)
root = pathlib.Path(sys.argv[1])
with ks.load("demo", store=root / "store") as vlm:
    said = vlm.ask(red, "What is it?", max_new_tokens=2).text
    vlm.encode(red).save(root / "red.sight")
    vlm.flush()
with ks.load("demo", store=root / "store") as vlm:
    again = vlm.ask(red, "What is it?", max_new_tokens=2)
    assert again.text == said and again.usage.images_encoded == 0
    assert ks.Package.load(root / "red.sight").feature_id == vlm.encode(red).feature_id
    vlm.runtime.store.clear()
    assert vlm.runtime.store.check() == []
files = Files(1 << 20, 60.0, contents=OnDisk(root / "store"))
sent = files.put("ann", b"abc", "a", "vision", None, None)
assert files.read("ann", sent.id) == b"abc"
print("all of it")
"""


def test_all_works_without_what_windows_lacks(tmp_path: Path) -> None:
    assert finished(start(RUN, tmp_path)).split("\n")[-2:] == ["all of it", ""]
