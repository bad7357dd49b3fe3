"""Runs a command of a checkout on a machine without Node and without a network.

    python3 bench/kit/start.py FILE.tar.xz COMMAND [ARGUMENT...]

FILE is what `node bench/kit/pack.ts` wrote. It becomes the checkout's node_modules, unless it did so already, and its
programs (node; redis-server and redis-cli if they were packed) come first in COMMAND's PATH:

    python3 bench/kit/start.py kit.tar.xz node bench/scaleout.ts --cores 16
    python3 bench/kit/start.py kit.tar.xz node bench/gpu/run.ts
"""

import hashlib
import os
import sys
import tarfile
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
MODULES = os.path.join(ROOT, "node_modules")
MARK = os.path.join(MODULES, ".kit")


def unpack(path):
    """Puts the archive where node_modules belongs, whole or not at all."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if os.path.lexists(MODULES):
        if not os.path.exists(MARK):
            sys.exit(f"{MODULES} is not from a kit: remove it, or use the Node that it belongs to")
        with open(MARK, encoding="utf-8") as mark:
            if mark.read() == digest:
                return
    with tempfile.TemporaryDirectory(prefix=".ferry-kit-", dir=ROOT) as folder:
        with tarfile.open(path) as kit:
            kit.extractall(folder, filter="tar")
        unpacked = os.path.join(folder, "node_modules")
        with open(os.path.join(unpacked, ".kit"), "w", encoding="utf-8") as mark:
            mark.write(digest)
        if os.path.lexists(MODULES):
            os.rename(MODULES, os.path.join(folder, "old"))
        os.rename(unpacked, MODULES)


if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
unpack(sys.argv[1])
environment = dict(os.environ)
environment["PATH"] = os.path.join(MODULES, ".bin") + os.pathsep + environment.get("PATH", os.defpath)
sys.stdout.flush()
os.execvpe(sys.argv[2], sys.argv[2:], environment)
