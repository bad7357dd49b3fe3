"""What the card can do: full batches one behind the other, without Ferry and without a network.

    python3 bench/gpu/offline.py embed|generate SECONDS SIZE...

Calls the same function as Ferry does and keeps two batches on their way, so that the GPU never waits for Python.
Prints one JSON object: for each size the milliseconds a batch takes and the inputs per second; `alone_ms` is a batch of
one with nothing behind it, as a server has it that makes one call per request.
"""

import json
import os
import random
import sys
import time

name, seconds, sizes = sys.argv[1], float(sys.argv[2]), [int(size) for size in sys.argv[3:]]
os.environ["GPU_BENCH_MODEL"] = name
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import models  # noqa: E402

function = getattr(models, name)
length = 128 if name == "embed" else 64


def batch(size):
    return models.Arrays([[random.randrange(10_000, 30_000) for _ in range(length)] for _ in range(size)])


def pace(size):
    batches = [batch(size) for _ in range(8)]
    for inputs in batches[:3]:
        function(inputs)()
    done, start = 0, time.perf_counter()
    waiting = function(batches[0])
    while time.perf_counter() - start < seconds or done < 3:
        following = function(batches[done % len(batches)])
        waiting()
        waiting = following
        done += 1
    waiting()
    took = (time.perf_counter() - start) / (done + 1)
    return {"size": size, "ms": 1000 * took, "per_second": size / took}


def alone():
    times = []
    while sum(times) < seconds / 2 or len(times) < 3:
        inputs = batch(1)
        start = time.perf_counter()
        function(inputs)()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]


about = {"torch": models.torch.__version__, "device": "cpu"}
if models.ON_GPU:
    about["device"] = models.torch.cuda.get_device_name()
print(json.dumps({**about, "curve": [pace(size) for size in sizes], "alone_ms": alone()}))
