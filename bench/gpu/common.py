"""What the models of bench/gpu need that is not PyTorch's."""

import mmap
import struct
from array import array
from itertools import accumulate, chain


class Arrays(list):
    """Inputs as Ferry hands them over with `inputs: int32`: `flat` has the numbers of all of them."""

    def __init__(self, rows):
        numbers = array("i", chain.from_iterable(rows))
        self.flat = memoryview(numbers)
        ends = list(accumulate(len(row) for row in rows))
        super().__init__(self.flat[start:end] for start, end in zip([0, *ends], ends))


class BusyFile:
    """Totals for card.ts, as float64: seconds in which the GPU had a batch; the cells of those batches (rows x padded
    length), and the tokens in them. Only the models of mixed.py count the last two."""

    def __init__(self, path):
        with open(path, "w+b") as file:
            file.write(bytes(24))
            file.flush()
            self._file = mmap.mmap(file.fileno(), 24)
        self._cells = self._tokens = self.seconds = 0.0

    def add(self, seconds, cells, tokens):
        self.seconds += seconds
        self._cells += cells
        self._tokens += tokens
        self._file[:] = struct.pack("<3d", self.seconds, self._cells, self._tokens)
