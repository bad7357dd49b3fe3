"""Batch functions for the tests: what users write, and what can go wrong with it."""

import asyncio
import ctypes
import json
import os
import sys
import time

import neighbour  # A file beside this one, as a user's model would have.


def echo(inputs, parameters=None):
    if "please reject" in inputs:
        raise ValueError("refused:\n  an input")
    if "please crash" in inputs:
        os._exit(3)
    return inputs


def short(inputs):
    return inputs[:-1]


def hang(inputs):
    time.sleep(3600)


def plain(inputs):
    return inputs


def wants_parameters(inputs, parameters):
    return [parameters for _ in inputs]


def any_keywords(inputs, **options):
    return [options for _ in inputs]


def parameters_first(parameters):
    return parameters


async def coroutine(inputs):
    await asyncio.sleep(0)
    return [id(asyncio.get_event_loop()) for _ in inputs]


async def failing_coroutine(inputs):
    await asyncio.sleep(0)
    if inputs[0] == "exit":
        sys.exit(1)
    return inputs


class Scalar:
    """Like a numpy scalar."""

    def item(self):
        return 1.5


class Array:
    """Like an ndarray or a tensor."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


RETURNS = {
    "none": lambda inputs: None,
    "str": lambda inputs: "ab",
    "dict": lambda inputs: {"0": 1, "1": 2},
    "generator": lambda inputs: (one for one in inputs),
    "long": lambda inputs: [1, 2, 3],
    "nan": lambda inputs: [1, {"deep": [float("nan")]}],
    "infinity": lambda inputs: [float("-inf"), 1],
    "bytes": lambda inputs: b"raw",
    "object": lambda inputs: [1, object()],
    "surrogate": lambda inputs: [1, "\ud800"],
    "bad key": lambda inputs: [{(1, 2): 3}, 1],
    "huge": lambda inputs: [1, 10**400],
    "huge inside": lambda inputs: [[[1], {"n": -(10**400)}], 1],
    "two keys": lambda inputs: [1, {1: "a", "1": "b"}],
    "two keys inside": lambda inputs: [[{"a": {None: 1, "null": 2}}], 1],
    "keys": lambda inputs: [{1: 1, 1.5: 2, True: 3, None: 4}, {"1": {"1": 1}}],
    "deep": lambda inputs: [1, nested(65)],
    "too deep": lambda inputs: [1, nested(100000)],
    "large": lambda inputs: ["x" * 3000000, "x" * 3000000],
    "tuple": lambda inputs: (1, 2),
    "array": lambda inputs: Array([[0.5, 1], [2, 3]]),
    "scalars": lambda inputs: [Scalar(), Array([1, Scalar()])],
    "unicode": lambda inputs: ["h\u00e9 \U0001f600 \u2028", 2**63 - 1],
}


def circular():
    loop = []
    loop.append(loop)
    return [loop, 1]


RETURNS["circular"] = lambda inputs: circular()


def returning(inputs):
    return RETURNS[inputs[0]](inputs)


def no_str(*_):
    raise RuntimeError("no text")


RAISES = {
    "value": lambda: int("x"),
    "exit": lambda: sys.exit("bye"),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "memory": lambda: (_ for _ in ()).throw(MemoryError()),
    "odd": lambda: (_ for _ in ()).throw(type("Odd", (Exception,), {"__str__": no_str})()),
    "cancelled": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
}


def raising(inputs):
    if inputs[0] in RAISES:
        RAISES[inputs[0]]()
    return inputs


def dying(inputs):
    if inputs[0] == "exit":
        os._exit(7)
    if inputs[0] == "kill":
        os.kill(os.getpid(), 9)
    if inputs[0] == "segfault":
        ctypes.string_at(0)
    return inputs


def printing(inputs):
    print("from print", *inputs)
    sys.stdout.write("from write\n")
    os.write(1, "from C h\u00e9\n".encode())
    print("to stderr", file=sys.stderr)
    os.write(2, b"to fd 2\n")
    print("lone \ud800")
    print("x" * 20000)
    print("no newline", end="")
    return inputs


def forking(inputs):
    """The copy comes back from the function, too, and must not answer."""
    child = os.fork()
    if child > 0:
        os.waitpid(child, 0)
    return ["%s %s" % (one, "parent" if child else "child") for one in inputs]


def meddling(inputs):
    """Writes on Ferry's own pipe: a frame for a call that nobody made."""
    if inputs[0] == "foreign":
        os.write(4, bytes([5, 0, 0, 0, 5, 99, 0, 0, 0, 65]))
    if inputs[0] == "garbage":
        os.write(4, b"\xff" * 64)
    if inputs[0] == "table":
        os.write(4, bytes([12, 0, 0, 0, 4, 1, 0, 0, 0, 9, 0, 0, 0, 9, 9, 9, 9]))
    time.sleep(3600)


def leaving_children(inputs):
    """Starts a process that holds the pipes, then dies."""
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
    os._exit(1)


def whoami(inputs):
    return [[os.getpid(), neighbour.NAME, __name__, sys.argv, __file__] for _ in inputs]


def telling(inputs):
    """Holds a socket open, so that the test can see when this process is gone."""
    import socket

    line = socket.create_connection(("127.0.0.1", inputs[0]))
    line.sendall(json.dumps(os.getpid()).encode())
    if inputs[1] == "busy":
        time.sleep(3600)
    globals()["_line"] = line
    return inputs


not_a_function = 5


def broken_context(inputs):
    if "assert" in inputs:
        raise RuntimeError("CUDA error: device-side assert triggered")
    return [os.environ.get("CUDA_VISIBLE_DEVICES", "all") for _ in inputs]
