"""The Python side of a worker: runs the user's batch function in a process of its own.

    python3 -u ferry_worker.py /abs/model.py function_name max_reply_bytes

Started by Ferry (src/backend/python.ts), never imported; the user's file knows nothing of it. Batches come
and go on two pipes of their own, fd 3 in and fd 4 out, so that stdout and stderr stay the user's to print
on. A frame on either pipe:

    u32 LE   length of the payload
    u8       kind
    payload

    to here      1 call      u32 LE number, then JSON text: {"inputs": [...]}, perhaps with "parameters": {...}
    from here    2 ready     empty: the file is imported, calls may come
                 3 cannot    UTF-8 text: why the file or the function cannot be used
                 4 outputs   u32 LE number, u32 LE count, count x u32 LE length, then the JSON texts
                 5 rejected  u32 LE number, UTF-8 text: the function raised this
                 6 unusable  u32 LE number, UTF-8 text: what it returned is no list of JSON values

The number of a reply is the number of its call. One call is answered before the next is read. The end of
fd 3 ends the process; the end of fd 5, on which nothing is ever sent, ends everything it has started. Runs on Python 3.8 and later, standard library only.
"""

import importlib.machinery
import importlib.util
import inspect
import json
import os
import signal
import struct
import sys
import threading
import traceback

CALL, READY, CANNOT, OUTPUTS, REJECTED, UNUSABLE = 1, 2, 3, 4, 5, 6
MAX_TEXT_CHARS = 400
CLOSE_SECONDS = 1.0
LIFELINE_FD = 5


class CannotStart(Exception):
    """The user's file or function cannot be used; the text says what to do."""


class Refused(Exception):
    """The function cannot be called like this; the text says why."""


class Unusable(Exception):
    """What the function returned cannot be sent; the text says why."""


class Pipes:
    """Frames on fd 3 and fd 4."""

    def __init__(self):
        for fd in (3, 4):
            os.set_blocking(fd, True)
            os.set_inheritable(fd, False)
        self._reader = open(3, "rb", buffering=1 << 16)
        self._writer = open(4, "wb", buffering=0)
        self._pid = os.getpid()

    def read_call(self):
        """The number and the JSON text of the next call; None when no more will come."""
        header = self._reader.read(5)
        if len(header) < 5:
            return None
        length, kind = struct.unpack("<IB", header)
        payload = self._reader.read(length)
        if len(payload) < length or kind != CALL:
            return None
        return struct.unpack_from("<I", payload)[0], payload[4:]

    def write(self, kind, payload):
        # A copy of this process that the user's code forked off must never answer.
        if os.getpid() != self._pid:
            os._exit(0)
        frame = memoryview(struct.pack("<IB", len(payload), kind) + payload)
        while frame:
            frame = frame[self._writer.write(frame) :]


class Function:
    """The user's function and how it wants to be called."""

    def __init__(self, function, name):
        self._function = function
        self._name = name
        self._loop = None
        self._takes_parameters, self._needs_parameters = parameters_of(function)

    def call(self, inputs, parameters):
        if parameters and not self._takes_parameters:
            # "$..." is only how a protocol marks its requests, such as {"$tokens": true}.
            if any(not name.startswith("$") for name in parameters):
                raise Refused("%s() takes no parameters" % self._name)
            parameters = {}
        if parameters or self._needs_parameters:
            result = self._function(inputs, parameters=parameters)
        else:
            result = self._function(inputs)
        return self._awaited(result) if inspect.isawaitable(result) else result

    def _awaited(self, result):
        # One loop for the process, because clients and locks made in it belong to it.
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(result)


def parameters_of(function):
    """Whether the function can be given parameters=..., and whether it must be."""
    try:
        accepted = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False, False
    takes, needs = False, False
    for index, parameter in enumerate(accepted):
        if parameter.kind is parameter.VAR_KEYWORD:
            takes = True
        # The first place is taken by the inputs, whatever it is called.
        elif parameter.name == "parameters" and (
            parameter.kind is parameter.KEYWORD_ONLY
            or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index > 0)
        ):
            takes = True
            needs = parameter.default is parameter.empty
    return takes, needs


def load(path, name):
    """Imports the file as `python model.py` would see it: its folder first on the path."""
    if not os.path.isfile(path):
        raise CannotStart("cannot find %s; check backend.function" % path)
    sys.argv = [path]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(path)] + [folder for folder in sys.path if folder != here]
    stem = os.path.splitext(os.path.basename(path))[0]
    loader = importlib.machinery.SourceFileLoader(stem, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(stem, loader))
    sys.modules[stem] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        print_error(error)
        why = in_words(error)
        raise CannotStart("cannot import %s: %s; it must load with %s" % (path, why, sys.executable))
    function = getattr(module, name, None)
    if function is None:
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        hint = "it has %s" % ", ".join(there) if there else "it has none"
        raise CannotStart('%s has no function "%s" (%s); check backend.function' % (path, name, hint))
    if not callable(function):
        kind = a_type(function)
        raise CannotStart('"%s" in %s is no function but %s; check backend.function' % (name, path, kind))
    return Function(function, name)


def answer(function, text, max_reply_bytes):
    """Runs one call and returns the kind and the payload of its reply. Never raises."""
    try:
        call = json.loads(text)
        result = function.call(call["inputs"], call.get("parameters") or {})
    except Refused as error:
        return REJECTED, encoded(str(error))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they are this batch's, not ours.
        print_place(error)
        if broken_for_good(error):
            os._exit(1)
        return REJECTED, encoded(in_words(error))
    try:
        return OUTPUTS, outputs_payload(result, max_reply_bytes)
    except Unusable as error:
        return UNUSABLE, encoded(str(error))
    except BaseException as error:
        return UNUSABLE, encoded("the outputs cannot be read: %s" % in_words(error))


def broken_for_good(error):
    """After such an error every later call in this process fails, whatever its inputs: start anew instead."""
    words = in_words(error)
    return "CUDA error" in words and "out of memory" not in words


def outputs_payload(result, max_reply_bytes):
    if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise Unusable("the function returned %s, not a list" % a_type(result))
    texts = []
    size = 0
    for index, output in enumerate(result):
        try:
            text = encode_json(output).encode("utf-8")
        except Exception as error:
            raise Unusable("output %d cannot be written as JSON: %s" % (index, in_words(error)))
        texts.append(text)
        size += len(text)
        if size > max_reply_bytes:
            raise Unusable("the outputs are larger than maxReplyBytes (%d)" % max_reply_bytes)
    return struct.pack("<I%dI" % len(texts), len(texts), *map(len, texts)) + b"".join(texts)


def plain(value):
    """Arrays, tensors and their scalars, of whatever library, as plain Python."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError("%s is not a JSON value" % a_type(value))


# NaN and Infinity are refused here: JSON has no such numbers, and readers would take them for null.
encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain
).encode


def a_type(value):
    name = type(value).__name__
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


def in_words(error):
    """TypeName: message, on one line."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = ""
    name = type(error).__name__
    return "%s: %s" % (name, words) if words else name


def encoded(text):
    return text[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace")


def print_error(error):
    try:
        # Without the frame of this file: the user's own code is what can be mended.
        trace = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, trace)
    except Exception:
        pass


def print_place(error):
    """Where it was raised, without its message: that may quote an input, and its caller gets it."""
    try:
        trace = error.__traceback__ and error.__traceback__.tb_next
        name = type(error).__name__
        place = "".join(traceback.format_tb(trace))
        sys.stderr.write("Traceback (most recent call last):\n%s%s: its message is in the answer\n" % (place, name))
        sys.stderr.flush()
    except Exception:
        pass


def die_with_parent():
    """SIGKILL for this process when Ferry dies, also in the middle of a call. Linux only; best effort."""
    try:
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except Exception:
        pass


def guard_group():
    """Leaves a process beside this one that ends the whole group when Ferry is gone, busy or not.

    Forked twice, so that it is nobody's child here and a user's os.wait() never meets it.
    """
    if not hasattr(os, "fork"):
        return
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        os.close(LIFELINE_FD)
        return
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for fd in range(LIFELINE_FD):
        os.close(fd)
    os.read(LIFELINE_FD, 1)
    os.killpg(0, signal.SIGKILL)


def main():
    path, name, max_reply_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    pipes = Pipes()
    guard_group()
    die_with_parent()
    for stream in (sys.stdout, sys.stderr):
        # Whatever the locale says, printing must not be what fails a batch.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        function = load(path, name)
    except CannotStart as error:
        pipes.write(CANNOT, encoded(str(error)))
        pipes.read_call()  # Ferry ends this process once it has read why.
        return
    pipes.write(READY, b"")
    while True:
        call = pipes.read_call()
        if call is None:
            break
        number, text = call
        kind, payload = answer(function, text, max_reply_bytes)
        pipes.write(kind, struct.pack("<I", number) + payload)
    # A thread of the user's that never ends must not keep this process alive.
    last = threading.Timer(CLOSE_SECONDS, os._exit, (0,))
    last.daemon = True
    last.start()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # Ferry is gone, nobody will read another word.
