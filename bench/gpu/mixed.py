"""The bert-base shape of bench/gpu for inputs of different length, and the best that any composition could make of it.

    mixed(inputs)                              what Ferry calls
    python3 bench/gpu/mixed.py SECONDS FILE    the bound; FILE: the lengths of many inputs, as a JSON list

A batch is padded to its longest input, rounded up to one of WIDTHS, and to a number of rows in ROWS; the GPU's work on each
such shape is recorded at the start (CUDA graphs) and replayed. Padding happens on the GPU, so that Python's share does
not depend on the lengths. An answer begins with the sums over its own tokens (models.py), followed by its vector.

With EMBED_TABLE=FACTOR there is no model and no PyTorch: a batch takes the time that it took on an H200, times FACTOR,
and an answer is the sums alone. For trying things out; FACTOR 1 is the H200's pace, which few machines can load.
"""

import json
import os
import random
import sys
import time
from array import array
from bisect import bisect_left
from operator import mul

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import Arrays, BusyFile  # noqa: E402

FACTOR = float(os.environ.get("EMBED_TABLE", "0"))
WIDTHS = (16, 32, 64, 128, 256, 512)
ROWS = (1, *range(8, 72, 8))
FULL = ROWS[-1]
# In order of arrival a smaller batch is less likely to hold a long input.
IN_ORDER = (8, 16, FULL)


def shape_of(inputs):
    """Rows and padded length of the batch as it is computed."""
    longest = max(map(len, inputs))
    if longest > WIDTHS[-1] or len(inputs) > FULL:
        raise ValueError("a batch has at most %d inputs of at most %d tokens" % (FULL, WIDTHS[-1]))
    return ROWS[bisect_left(ROWS, len(inputs))], WIDTHS[bisect_left(WIDTHS, longest)]


class Table:
    """Batches that take the times measured on one H200 (bf16, CUDA graphs), one behind the other."""

    # Milliseconds: a row for each number of rows, a column for each of WIDTHS.
    MS = {
        1: (0.525, 0.588, 0.599, 0.616, 0.664, 0.791),
        8: (0.563, 0.643, 0.706, 0.853, 1.301, 2.254),
        16: (0.625, 0.750, 0.896, 1.249, 2.119, 4.141),
        32: (0.795, 0.934, 1.291, 2.041, 3.862, 8.056),
        64: (1.063, 1.411, 2.165, 3.718, 7.528, 15.795),
    }
    WEIGHTS = tuple(
        tuple(weight(at) for at in range(512))
        for weight in (lambda at: at + 1, lambda at: at * 37 % 997 + 1, lambda at: at * at % 991 + 1)
    )
    about = {"torch": "none", "device": "times of an H200 x %g" % FACTOR, "recorded_s": 0.0, "difference": None}

    def __init__(self):
        path = os.environ.get("GPU_BUSY_FILE")
        self.busy = BusyFile(path) if path else None
        self._free_at = 0.0

    def __call__(self, inputs):
        rows, width = shape_of(inputs)
        seconds = self.seconds(rows, width)
        self._free_at = done_at = max(self._free_at, time.perf_counter()) + seconds

        def rest():
            sums = array("f")
            for row in inputs:
                sums.extend(sum(map(mul, row, weights)) % (1 << 24) for weights in self.WEIGHTS)
            time.sleep(max(0.0, done_at - time.perf_counter()))
            if self.busy is not None:
                self.busy.add(seconds, rows * width, len(inputs.flat))
            return memoryview(sums).cast("B").cast("f", (len(inputs), 3))

        return rest

    def seconds(self, rows, width):
        known, column = sorted(self.MS), WIDTHS.index(width)
        above = known[bisect_left(known, rows)]
        below = known[max(0, known.index(above) - 1)]
        share = (above - rows) / (above - below) if above > below else 0
        return FACTOR * (self.MS[above][column] * (1 - share) + self.MS[below][column] * share) / 1000


if FACTOR:
    mixed = Table()
    busy = mixed.busy
else:
    import gc

    os.environ["GPU_BENCH_MODEL"] = "mixed"
    import torch

    import models

    embeddings = models.embeddings
    busy = models.busy and models.busy.file

    def padded(numbers, lengths, width):
        """`numbers`: the tokens of all rows one behind the other, and anything after them."""
        at = torch.arange(width, device=numbers.device)
        starts = lengths.cumsum(0) - lengths
        places = (starts[:, None] + at).clamp(max=len(numbers) - 1)
        ids = numbers[places].masked_fill(at >= lengths[:, None], 0)
        return torch.cat([models.sums(ids), embeddings.encoder(ids, lengths)], 1)

    class Recorded:
        """The work on batches of one shape. What it reads and writes stays in place."""

        def __init__(self, rows, width):
            self._width = width
            self._numbers = torch.zeros(rows * width, dtype=torch.int32, device=models.DEVICE)
            self._lengths = torch.ones(rows, dtype=torch.int32, device=models.DEVICE)
            self._graph = None
            if not models.ON_GPU:
                return
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    padded(self._numbers, self._lengths, width)
            torch.cuda.current_stream().wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._answers = padded(self._numbers, self._lengths, width)

        def __call__(self, numbers, lengths):
            self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)
            self._lengths.copy_(lengths, non_blocking=True)
            if self._graph is None:
                return padded(self._numbers, self._lengths, self._width)
            self._graph.replay()
            return self._answers

    @torch.inference_mode()
    def record():
        # Each recording collects garbage first; what is here by now is none.
        gc.freeze()
        return {(rows, width): Recorded(rows, width) for width in WIDTHS for rows in ROWS}

    started = time.perf_counter()
    recorded = record()
    recorded_s = time.perf_counter() - started

    @torch.inference_mode()
    def mixed(inputs):
        rows, width = shape_of(inputs)
        lengths = [len(row) for row in inputs]
        unused = [1] * (rows - len(inputs))
        numbers = embeddings.to_device(torch.frombuffer(inputs.flat, dtype=torch.int32))
        lengths = embeddings.to_device(torch.tensor(lengths + unused, dtype=torch.int32))
        return models.counted(
            lambda: embeddings.when_done(recorded[rows, width](numbers, lengths)[: len(inputs)]),
            rows * width,
            len(inputs.flat),
        )

    for rows, width in recorded if models.ON_GPU else ():
        mixed(Arrays([[7] * width] * rows))()


def row_of(length):
    return random.choices(range(10_000, 30_000), k=length)


def pace(batches, seconds):
    """Whole passes over the batches, two on their way."""
    for inputs in batches[:3]:
        mixed(inputs)()
    passes, waiting = 0, None
    start, busy_before = time.perf_counter(), busy.seconds if busy else 0
    while passes == 0 or time.perf_counter() - start < seconds:
        for inputs in batches:
            following = mixed(inputs)
            if waiting is not None:
                waiting()
            waiting = following
        passes += 1
    waiting()
    took_all = time.perf_counter() - start
    took = took_all / passes
    cells = sum(rows * width for rows, width in map(shape_of, batches))
    return {
        "per_second": sum(map(len, batches)) / took,
        "ms": 1000 * took / len(batches),
        "padding": cells / sum(len(inputs.flat) for inputs in batches),
        "busy": (busy.seconds - busy_before) / took_all if busy else None,
    }


def difference():
    """Between an input's vector alone and among longer ones, the largest of any number: what precision makes of it."""
    rows = [row_of(length) for length in (6, 16, 17, 50, 100, 200, 400, 512)]
    together = mixed(Arrays(rows))().tolist()
    alone = [mixed(Arrays([row]))().tolist()[0] for row in rows]
    if any(one[:3] != other[:3] for one, other in zip(together, alone)):
        raise SystemExit("the sums over an input's tokens depend on its neighbours")
    return max(abs(a - b) for one, other in zip(together, alone) for a, b in zip(one[3:], other[3:]))


def about():
    if FACTOR:
        return mixed.about
    device = torch.cuda.get_device_name() if models.ON_GPU else "cpu"
    return {"torch": torch.__version__, "device": device, "recorded_s": recorded_s, "difference": difference()}


def main():
    seconds = float(sys.argv[1])
    with open(sys.argv[2], encoding="utf-8") as file:
        lengths = json.load(file)
    random.seed(1)

    def batches(lengths, size=FULL):
        return [Arrays([row_of(length) for length in lengths[at : at + size]]) for at in range(0, len(lengths), size)]

    best = batches(sorted(lengths))
    # Python prepares the next batch while the GPU works: among long batches there is time for it, behind short ones less.
    random.shuffle(best)
    some = lengths[: len(lengths) // 4]
    paces = {
        "sorted": pace(best, seconds),
        "in_order": [{"size": size, **pace(batches(some, size), seconds / 2)} for size in IN_ORDER],
    }
    print(json.dumps({**about(), **paces, "tokens": sum(lengths) / len(lengths)}))


if __name__ == "__main__":
    main()
