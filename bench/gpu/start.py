"""Runs bench/gpu on a machine with a GPU and PyTorch, but without Node and without a network.

    python3 bench/gpu/start.py FILE.tar.xz [options of bench/gpu/run.ts]

FILE is what `node bench/gpu/pack.ts` wrote. It is unpacked into a temporary folder and removed afterwards.
"""

import os
import subprocess
import sys
import tarfile
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
with tempfile.TemporaryDirectory(prefix="ferry-gpu-") as folder:
    with tarfile.open(sys.argv[1]) as kit:
        kit.extractall(folder, filter="tar")
    modules = os.path.join(ROOT, "node_modules")
    linked = not os.path.lexists(modules)
    if linked:
        os.symlink(os.path.join(folder, "node_modules"), modules)
    try:
        run = [os.path.join(folder, "node"), os.path.join(ROOT, "bench/gpu/run.ts"), *sys.argv[2:]]
        sys.exit(subprocess.call([*run, "--python", sys.executable]))
    finally:
        if linked:
            os.unlink(modules)
