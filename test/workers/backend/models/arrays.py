"""Functions that return bytes, arrays, tensors and callables: with the standard library, and with what looks like more."""

import array
import ctypes
import os
import sys
import threading
import time

FLOATS = array.array("f", range(12))


def shaped(values, *shape):
    """An array of several dimensions, as numpy would hand out its memory."""
    return memoryview(values).cast("B").cast(values.typecode, shape)


class Interface:
    """Knows numpy's array interface and nothing else."""

    def __init__(self, values, typestr, shape, strides=None, at_address=True):
        self._values = values
        address, _ = values.buffer_info()
        data = (address, True) if at_address else None if at_address is None else values
        self.__array_interface__ = {
            "version": 3,
            "typestr": typestr,
            "shape": shape,
            "strides": strides,
            "data": data,
        }


class Converted:
    """Like an array of a library that hands out numpy arrays."""

    def __array__(self):
        return shaped(FLOATS, 2, 6)


class Tensor:
    """Like torch's: on a GPU, of a type that nobody else has, and with gaps, until it is asked not to be."""

    def __init__(self, values, dtype, shape, steps=()):
        self.values, self.dtype, self.shape, self.steps = values, dtype, shape, steps

    def _did(self, step, dtype=None):
        return Tensor(self.values, dtype or self.dtype, self.shape, self.steps + (step,))

    def detach(self):
        return self._did("detach")

    def cpu(self):
        return self._did("cpu")

    def float(self):
        return self._did("float", "torch.float32")

    def contiguous(self):
        return self._did("contiguous")

    def resolve_neg(self):
        return self._did("resolve_neg")

    def element_size(self):
        return self.values.itemsize

    def numel(self):
        return len(self.values)

    def data_ptr(self):
        assert self.steps[:2] == ("detach", "cpu") and self.steps[-2:] == ("contiguous", "resolve_neg"), self.steps
        assert self.dtype != "torch.bfloat16"
        return self.values.buffer_info()[0]

    def tolist(self):
        return list(self.values) if self.shape else self.values[0]


def swapped(values):
    values.byteswap()
    return (ctypes.c_float.__ctype_be__ * len(values)).from_buffer(values)


RETURNS = {
    "block": lambda: shaped(FLOATS, 2, 6),
    "deep block": lambda: shaped(FLOATS, 2, 3, 2),
    "no columns": lambda: Interface(FLOATS, "<f4", (2, 0)),
    "flat": lambda: array.array("d", [0.5, 2]),
    "flat view": lambda: Interface(array.array("h", [1, -2]), "<i2", (2,)),
    "list of arrays": lambda: [array.array("f", [1]), array.array("f", [2])],
    "two types": lambda: [array.array("h", [1, -1]), array.array("Q", [2**64 - 1])],
    "bytes": lambda: [b"\x00\xff", bytearray(b"")],
    "views": lambda: [memoryview(b"ab"), memoryview(b"abcdef")[::2]],
    "mixed": lambda: [{"a": [1]}, shaped(FLOATS, 3, 4)],
    "json and bytes": lambda: ["h\u00e9", b"1"],
    "half pairs": lambda: ["a\ud800\\", {"\udfff": "\u00e9"}],
    "gaps": lambda: [memoryview(FLOATS)[::4], memoryview(FLOATS)[::-1][:2]],
    "big-endian": lambda: [swapped(array.array("f", [1, 2])), Interface(array.array("h", [256]), ">i2", (1,))],
    "ctypes": lambda: [(ctypes.c_bool * 2)(True, False), ((ctypes.c_int8 * 2) * 1)((1, -1))],
    "interface": lambda: Interface(FLOATS, "<f4", (2, 6)),
    "interface of a buffer": lambda: [Interface(FLOATS, "<f4", (12,), None, False)] * 2,
    "interface with strides": lambda: Interface(FLOATS, "<f4", (2, 6), (24, 4)),
    "converted": lambda: Converted(),
    "tensor": lambda: Tensor(FLOATS, "torch.float32", (2, 6)),
    "bfloat16": lambda: Tensor(FLOATS, "torch.bfloat16", (2, 6)),
    "scalars": lambda: [Tensor(array.array("f", [1]), "torch.float32", ()), shaped(array.array("d", [5]))],
    "strings": lambda: [array.array("u", "ab"), 1],
    "has gaps": lambda: Interface(FLOATS, "<f4", (2, 3), (24, 8)),
    "is complex": lambda: Interface(FLOATS, "<c8", (2, 3)),
    "large": lambda: memoryview(bytearray(8000000)).cast("B", (2, 4000000)),
    "large list": lambda: [bytearray(3000000), bytearray(3000000)],
    "claims": lambda: [{"$tensor": "float32"}, 1],
    "far too many": lambda: [1] * 1_500_000,
    "many that are empty": lambda: [Interface(FLOATS, "<f4", (0, *[1] * 31)), 1] * 10_000,
}


def returning(inputs):
    return RETURNS[inputs[0]]()


def later(inputs):
    return RETURNS[inputs[0]]



def failing_later(inputs):
    """What a callable can do wrong."""

    def rest():
        if inputs[0] == "raise":
            raise ValueError("too late")
        if inputs[0] == "exit":
            sys.exit("bye")
        if inputs[0] == "none":
            return None
        if inputs[0] == "again":
            return rest
        if inputs[0] == "die":
            os._exit(5)
        if inputs[0] == "hang":
            time.sleep(3600)
        if inputs[0] == "fork":
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            return ["parent" if child else "child" for _ in inputs]
        if inputs[0] == "where":
            return [threading.current_thread() is threading.main_thread() for _ in inputs]
        return inputs

    return rest


def only_main(inputs):
    return [threading.current_thread() is threading.main_thread() for _ in inputs]


gate = threading.Event()


def overlapping(inputs):
    """The first call's callable can end only when the second call's function is called."""
    if inputs[0] == "second":
        gate.set()
        return ["second"]

    def rest():
        if not gate.wait(60):
            raise RuntimeError("the next call was not begun")
        return ["first"]

    return rest


def now_and_later(inputs):
    return inputs if inputs[0].startswith("now") else lambda: inputs


reused = array.array("f", [0] * (2 * 20000))


def reusing(inputs):
    """One buffer for all calls, as a function may have it that returns values."""
    for place in range(len(reused)):
        reused[place] = inputs[0]
    return shaped(reused, 2, 20000)


in_turn = [array.array("f", [0] * (2 * 20000)) for _ in range(2)]
calls = 0


def reusing_in_turn(inputs):
    """Two buffers in turn, as is enough for one that returns callables."""
    global calls
    calls += 1
    buffer = in_turn[calls % 2]
    for place in range(len(buffer)):
        buffer[place] = inputs[0]
    return lambda: shaped(buffer, 2, 20000)


running = 0


def alone(inputs):
    """Fails when it is called while it runs."""
    global running
    running += 1
    if running != 1:
        raise RuntimeError("called twice at once")
    time.sleep(0.002)
    running -= 1
    return inputs


def numpy_there(inputs):
    try:
        import numpy

        numbers = numpy.arange(12, dtype="float32").reshape(2, 6)
        found = {
            "block": numbers,
            "transposed": numpy.arange(12, dtype="float32").reshape(6, 2).T,
            "big-endian": numbers.astype(">f4"),
            "half": numbers.astype("float16"),
            "flat": numbers[:, 0],
            "strings": numpy.array(["a", "b"]),
            "rows": list(numbers),
            "scalars": [numpy.float32(1), numpy.int64(2)],
            "date": [numpy.datetime64("2020-01-01"), 1],
            "dates": numpy.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]"),
        }
        return found[inputs[0]]
    except ImportError:
        return ["no numpy"] * 2
