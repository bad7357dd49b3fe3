"""The Python side of a worker: runs the user's batch function in a process of its own.

    python3 -u ferry_worker.py /abs/model.py function_name max_reply_bytes

Started by Ferry (src/workers/backend/python.ts), never imported; the user's file knows nothing of it. Batches come on fd 3
and outputs go on fd 4, so that stdout and stderr stay the user's. A frame on either is u32 length of the payload, u8 kind,
payload; all numbers are little-endian:

    to here      1 call      u32 number, then JSON text: {"inputs": [...]}, perhaps with "parameters": {...}
                10 arrays    u32 number, u32 type, u32 count, u32 bytes of the parameters, count x u32 length of each input,
                             the parameters as JSON, zeros up to a multiple of 8, the numbers of all inputs in this
                             machine's byte order
    from here    2 ready     empty: the file is imported, calls may come
                 3 cannot    UTF-8 text: why the file or the function cannot be used
                 4 outputs   u32 number, u32 count, count x (u8 type, u8 dimensions, u32 length, dimensions x u32), then
                             the outputs one after the other
                 5 rejected  u32 number, UTF-8 text: the function raised this
                 6 unusable  u32 number, UTF-8 text: what it returned is no list of outputs
                 7 rows      u32 number, u32 count, u8 type, u8 dimensions, dimensions x u32 of one row, then count rows
                 9 begun     u32 number, u32 microseconds since the function was called with it

The kind of a call has its highest bit set (ALONE) where no other call was here when it was sent.
A type is 0 for JSON text, 1 for bytes, and from 2 on an index into DTYPES. A reply has the number of its call, and replies
come in the order of their calls. The next call may come before the last is answered. Three threads share the work:

    reader   reads and parses the next call while the function runs
    main     calls the function, never twice at once, since CUDA code, signals and event loops expect the main thread.
             Outputs that it returns are encoded before it is called again: it may reuse their memory.
    sender   when the function returned a callable: calls that, encodes what it returns and sends it, while the main thread
             goes on with the next call

A function that takes less than a millisecond gains nothing from a second thread: after a few such calls the main thread reads
its calls itself, and says `begun` together with the reply of a call that came alone.

Ferry hands over two calls at most, so the function is never called before the outputs of the call before the last are sent,
and two buffers in turn are enough for a callable, too. The end of fd 3 ends the process; the end of fd 5, on which nothing is
ever sent, ends everything it has started. Runs on Python 3.8 and later with the standard library only.
"""

import array
import collections
import importlib.machinery
import importlib.util
import inspect
import json
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback

CALL, READY, CANNOT, OUTPUTS, REJECTED, UNUSABLE, ROWS, BEGUN, ARRAYS = 1, 2, 3, 4, 5, 6, 7, 9, 10
ALONE = 128
JSON_TEXT, BYTES, FIRST_DTYPE = 0, 1, 2
DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64",
)
TYPES = {name: FIRST_DTYPE + place for place, name in enumerate(DTYPES)}
MAX_DIMENSIONS = 32
# Before the outputs of a reply: Ferry ends a worker whose frame is a mebibyte larger than its outputs may be.
MAX_TABLE_BYTES = 1_000_000
TOO_MANY = "the function returned many more outputs than there were inputs"
SOCKET_BYTES = 1 << 20
# In one system call.
MAX_PARTS = 512
# How long other threads wait for one that computes in Python: replies would wait 5 ms by default.
SWITCH_SECONDS = 0.0005
# A function is quick after so many calls that took less, until two in a row take longer.
QUICK_SECONDS, QUICK_CALLS = 0.001, 8
MAX_TEXT_CHARS = 400
CLOSE_SECONDS = 1.0
LIFELINE_FD = 5


class CannotStart(Exception):
    """The user's file or function cannot be used."""


class Refused(Exception):
    """The function cannot be called like this."""


class Unusable(Exception):
    """What the function returned cannot be sent."""


class Line:
    """Frames on fd 3 and fd 4. Any thread may write; none waits for another that writes."""

    def __init__(self):
        for fd in (3, 4):
            os.set_inheritable(fd, False)
        os.set_blocking(3, True)
        os.set_blocking(4, False)
        enlarge(4)
        self._reader = open(3, "rb", buffering=1 << 16)
        self._outbox = collections.deque()
        self._writing = threading.Lock()
        self._pid = os.getpid()

    def read_call(self):
        """The number of the next call, whether it came alone, and what `parsed` takes; None when no more will come."""
        header = self._reader.read(5)
        if len(header) < 5:
            return None
        length, kind = struct.unpack("<IB", header)
        alone, kind = kind & ALONE != 0, kind & ~ALONE
        if kind == ARRAYS:
            payload = bytearray(length)  # The function may write into its inputs, as into any array.
            if self._reader.readinto(payload) < length:
                return None
            return struct.unpack_from("<I", payload)[0], alone, payload
        payload = self._reader.read(length)
        if len(payload) < length or kind != CALL:
            return None
        return struct.unpack_from("<I", payload)[0], alone, memoryview(payload)[4:]

    def end_copy(self):
        """A copy of this process that the user's code forked off must never answer."""
        if os.getpid() != self._pid:
            os._exit(0)

    def send(self, parts):
        """Writes one frame and waits until all that was to be written is."""
        self._outbox.append(parts)
        self.rest()

    def post(self, parts):
        """Writes one frame as far as that needs no wait. False: there is more, and `rest` must be called."""
        if self._outbox or not self._writing.acquire(False):
            self._outbox.append([b"".join(parts)])
            return self._flush(False)
        try:
            left = write_some(parts)
            if left:
                self._outbox.appendleft([b"".join(left)])
        finally:
            self._writing.release()
        return not self._outbox or self._flush(False)

    def rest(self):
        self._flush(True)

    def _flush(self, wait):
        """Writes what is there; false when that would take a wait and `wait` is false."""
        while self._outbox:
            if not self._writing.acquire(wait):
                return True  # The thread that writes now looks again when it is done.
            try:
                while self._outbox:
                    left = write_some(self._outbox[0])
                    if not left:
                        self._outbox.popleft()
                        continue
                    self._outbox[0] = left
                    if not wait:
                        return False
                    writable = select.poll()
                    writable.register(4, select.POLLOUT)
                    writable.poll()
            finally:
                self._writing.release()
        return True


def enlarge(fd):
    """So that a reply of 64 embeddings is not written in pieces. Best effort: the system may grant less."""
    try:
        with socket.socket(fileno=os.dup(fd)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    except OSError:
        pass


def write_some(parts):
    """Writes as much as there is room for, and returns what is left."""
    left = parts
    while left:
        try:
            written = os.writev(4, left[:MAX_PARTS])
        except BlockingIOError:
            return left
        place = 0
        while place < len(left) and written >= len(left[place]):
            written -= len(left[place])
            place += 1
        left = left[place:]
        if written:
            left[0] = memoryview(left[0])[written:]
    return left


def frame(kind, number, payload, parts=()):
    """One frame as a list of byte-like parts, the payload first."""
    if len(payload) > MAX_TABLE_BYTES:
        raise Unusable(TOO_MANY)
    length = 4 + len(payload) + sum(map(len, parts))
    return [struct.pack("<IBI", length, kind, number) + payload, *parts]


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


class Arrays(list):
    """The inputs as arrays, one each; `flat` has the numbers of all of them, one behind the other."""

    __slots__ = ("flat",)


def arrays_of(payload):
    kind, count, size = struct.unpack_from("<III", payload, 4)
    lengths = struct.unpack_from("<%dI" % count, payload, 16)
    start = 16 + 4 * count
    parameters = json.loads(str(payload[start : start + size], "utf-8")) if size else {}
    first = (start + size + 7) // 8 * 8
    inputs = Arrays()
    inputs.flat = flat = memoryview(payload)[first:].cast(LETTERS[DTYPES[kind - FIRST_DTYPE]])
    place = 0
    for length in lengths:
        inputs.append(flat[place : place + length])
        place += length
    return inputs, parameters, None


def parsed(text):
    """A call as the reader hands it over: inputs and parameters, or what is wrong with it."""
    try:
        if isinstance(text, bytearray):
            return arrays_of(text)
        call = json.loads(str(text, "utf-8"))
        return call["inputs"], call.get("parameters") or {}, None
    except BaseException as error:
        return None, None, error


def attempt(work, number, max_reply_bytes):
    """The frame that answers with what `work` returns, or that callable itself. Never raises."""
    try:
        result = work()
    except Refused as error:
        return frame(REJECTED, number, encoded(str(error)))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they are this batch's, not ours.
        print_place(error)
        if broken_for_good(error):
            os._exit(1)
        return frame(REJECTED, number, encoded(in_words(error)))
    try:
        return result if is_rest(result) else outputs_frame(result, number, max_reply_bytes)
    except Unusable as error:
        return frame(UNUSABLE, number, encoded(str(error)))
    except BaseException as error:
        return frame(UNUSABLE, number, encoded("the outputs cannot be read: %s" % in_words(error)))


def is_rest(result):
    """Whether the function returned "the rest of the work" and not outputs."""
    return callable(result) and not isinstance(result, (list, tuple, type)) and not hasattr(result, "tolist")


def broken_for_good(error):
    """After such an error every later call in this process fails, whatever its inputs: start anew instead."""
    words = in_words(error)
    return "CUDA error" in words and "out of memory" not in words


def outputs_frame(result, number, max_reply_bytes):
    if not isinstance(result, (list, tuple)):
        block = None if isinstance(result, (str, bytes, bytearray, dict)) else block_of(result)
        if block is not None and len(block.shape) > 1:
            return rows_frame(number, block.shape[0], block.type, block.shape[1:], [block.bytes], max_reply_bytes)
        if hasattr(result, "tolist"):
            result = result.tolist()
        elif block is not None and len(block.shape) == 1:
            result = numbers_of(block)
    if not isinstance(result, (list, tuple)):
        raise Unusable("the function returned %s, not a list" % a_type(result))
    if len(result) > MAX_TABLE_BYTES // 4:
        raise Unusable(TOO_MANY)
    blocks = []
    size = 0
    for index, output in enumerate(result):
        block = None
        if output is not None and not isinstance(output, PLAIN):
            block = block_of(output)
        if block is None or (block.type != BYTES and not block.shape):
            try:
                # Half a surrogate pair, which an input may hold, has no UTF-8; as \ud800 it is what JSON calls it.
                block = Block(JSON_TEXT, (), encode_json(output).encode("utf-8", "backslashreplace"))
            except Exception as error:
                raise Unusable("output %d cannot be written as JSON: %s" % (index, in_words(error)))
        blocks.append(block)
        size += len(block.bytes)
        check_size(size, max_reply_bytes)
    return list_frame(number, blocks, max_reply_bytes)


PLAIN = (str, int, float, dict, list, tuple)


def list_frame(number, blocks, max_reply_bytes):
    """One output per block."""
    kinds = {(block.type, block.shape) for block in blocks}
    parts = [block.bytes for block in blocks]
    if len(kinds) == 1 and blocks[0].type >= FIRST_DTYPE:
        return rows_frame(number, len(blocks), blocks[0].type, blocks[0].shape, parts, max_reply_bytes)
    table = [struct.pack("<I", len(blocks))]
    for kind, shape, data in blocks:
        table.append(ENTRY.pack(kind, len(shape), len(data)))
        if shape:
            table.append(dimensions(shape))
    # Texts are small: one part is written faster than many. The memory of arrays is not copied.
    joined = [b"".join(parts)] if all(kind == JSON_TEXT for kind, _ in kinds) else parts
    return frame(OUTPUTS, number, b"".join(table), joined)


ENTRY = struct.Struct("<BBI")


def rows_frame(number, count, kind, shape, parts, max_reply_bytes):
    check_size(sum(map(len, parts)), max_reply_bytes)
    head = struct.pack("<IBB", count, kind, len(shape)) + dimensions(shape)
    return frame(ROWS, number, head, parts)


def dimensions(shape):
    return struct.pack("<%dI" % len(shape), *shape)


def check_size(size, max_reply_bytes):
    if size > max_reply_bytes:
        raise Unusable("the outputs are larger than maxReplyBytes (%d)" % max_reply_bytes)


# A type, a shape, and the bytes: little-endian, row-major, without gaps.
Block = collections.namedtuple("Block", "type shape bytes")
SIGNED, UNSIGNED = "bhilqn", "BHILQN"
FLOATS = {"e": "float16", "f": "float32", "d": "float64"}
BITS = {1: "8", 2: "16", 4: "32", 8: "64"}


def block_of(value):
    """Bytes, an array or a tensor, of any library, as a block; None for anything else."""
    if isinstance(value, (bytes, bytearray)):
        return Block(BYTES, (), value)
    if getattr(value, "shape", None) == ():
        return None  # A scalar of some library is not meant as bytes.
    view = memory_of(value)
    if view is None:
        view = view_of(on_the_host(value))
    if view is None:
        return None
    letter, swapped = view.format[-1:], view.format[:1] in (">", "!")
    if view.format.lstrip("@=<>!") != letter or len(view.shape) > MAX_DIMENSIONS:
        return None
    if isinstance(value, memoryview) and letter in "Bc" and view.ndim == 1:
        return Block(BYTES, (), flat(view))
    name = dtype_name(letter, view.itemsize)
    if name is None:
        return None
    data = flat(view)
    if view.itemsize > 1 and (swapped or (sys.byteorder == "big" and view.format[:1] != "<")):
        data = byteswapped(data, view.itemsize)
    return Block(TYPES[name], tuple(view.shape), data)


def dtype_name(letter, size):
    if letter in SIGNED:
        return "int" + BITS[size]
    if letter in UNSIGNED:
        return "uint" + BITS[size]
    return "bool" if letter == "?" else FLOATS.get(letter)


def on_the_host(value):
    """Copies tensors from a GPU; bfloat16 and float8, which no other library has, become float32."""
    if is_torch(value):
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype) or "float8" in str(value.dtype):
            value = value.float()
        return value.contiguous().resolve_neg()
    if hasattr(value, "__cuda_array_interface__") and hasattr(value, "get"):  # cupy
        value = value.get()
    name = str(getattr(value, "dtype", ""))
    if ("bfloat16" in name or "float8" in name) and hasattr(value, "astype"):
        value = value.astype("float32")
    return value


def is_torch(value):
    return hasattr(value, "detach") and hasattr(value, "cpu") and hasattr(value, "data_ptr")


LETTERS = dict(zip(DTYPES, "?bBhHiIqQefd"))


class Described:
    """What `block_of` needs of a memoryview, over memory that is described elsewhere."""

    def __init__(self, letter, itemsize, shape, data):
        self.format, self.itemsize, self.shape, self.ndim, self.data = letter, itemsize, shape, len(shape), data


def view_of(value):
    """A memoryview or Described; None for a value whose numbers are not in one place."""
    if is_torch(value):  # Its own way to numpy would need numpy.
        letter = LETTERS.get(str(value.dtype).rpartition(".")[2])
        size, shape = value.element_size(), tuple(value.shape)
        data = memory_at(value.data_ptr(), value.numel() * size, value)
        return None if letter is None else Described(letter, size, shape, data)
    view = memory_of(value)
    interface = None if view is not None else getattr(value, "__array_interface__", None)
    if isinstance(interface, dict):
        return view_of_interface(interface, value)
    if view is None and hasattr(value, "__array__"):
        return memory_of(value.__array__())
    return view


def memory_of(value):
    """Through the buffer protocol, if the value has it."""
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


def memory_at(address, size, owner):
    import ctypes

    memory = (ctypes.c_char * size).from_address(address)
    memory.owner = owner  # Lives as long as the memory is used.
    return memoryview(memory).cast("B")


def view_of_interface(interface, owner):
    """As numpy describes it in "The array interface protocol"; None for what has gaps or another type."""
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    order, itemsize = typestr[0], int(typestr[2:]) if typestr[2:].isdigit() else 0
    kind = {"b": "bool", "i": "int", "u": "uint", "f": "float"}.get(typestr[1], "")
    letter = LETTERS.get(kind if kind == "bool" else "%s%d" % (kind, 8 * itemsize))
    strides = interface.get("strides")
    if letter is None or not (strides is None or is_dense(strides, shape, itemsize)):
        return None
    size = itemsize
    for dimension in shape:
        size *= dimension
    data = interface.get("data")
    if isinstance(data, tuple):
        data = memory_at(data[0], size, owner)
    start = interface.get("offset", 0)
    data = memoryview(owner if data is None else data).cast("B")[start : start + size]
    mark = order if order in "<>" else ""
    return Described(mark + letter, itemsize, shape, data) if len(data) == size else None


def is_dense(strides, shape, itemsize):
    for stride, dimension in zip(reversed(strides), reversed(shape)):
        if dimension != 1 and stride != itemsize:
            return False
        itemsize *= dimension
    return True


def flat(view):
    """Its bytes, without a copy where they are contiguous."""
    if isinstance(view, Described):
        return view.data
    if view.nbytes == 0:
        return b""
    try:
        return view.cast("B") if view.c_contiguous else view.tobytes()
    except (TypeError, ValueError):
        return view.tobytes()  # A format that cannot be cast in this Python, such as "e" or "<f".


def byteswapped(data, itemsize):
    swap = array.array({2: "H", 4: "I", 8: "Q"}[itemsize], bytes(data))
    swap.byteswap()
    return swap.tobytes()


def numbers_of(block):
    letter = LETTERS[DTYPES[block.type - FIRST_DTYPE]]
    return list(struct.unpack("<%d%s" % (block.shape[0], letter), block.bytes))


def plain(value):
    """Arrays, tensors and their scalars, of any library, as plain Python."""
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


def users_part(trace):
    """Without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def print_error(error):
    try:
        traceback.print_exception(type(error), error, users_part(error.__traceback__))
    except Exception:
        pass


def print_place(error):
    """Without the message, which may quote an input and goes to the caller."""
    try:
        name = type(error).__name__
        place = "".join(traceback.format_tb(users_part(error.__traceback__)))
        sys.stderr.write("Traceback (most recent call last):\n%s%s: its message is in the answer\n" % (place, name))
        sys.stderr.flush()
    except Exception:
        pass


def guard_group():
    """Starts a process that ends the whole group when Ferry is gone, busy or not.

    Forked twice, so that a user's os.wait() never sees it.
    """
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


class Sender:
    """The thread that runs the callables of calls, and writes what could not be written at once."""

    def __init__(self, line, max_reply_bytes):
        self._line = line
        self._max_reply_bytes = max_reply_bytes
        self._replies = queue.SimpleQueue()
        # Only the main thread counts up, and only this one down.
        self._given, self._done = 0, 0
        self._thread = threading.Thread(target=self._run, name="ferry-sender", daemon=True)
        self._thread.start()

    @property
    def idle(self):
        return self._given == self._done

    def give(self, number, reply):
        """`reply`: a callable, a frame, or None for what the line has left."""
        self._given += 1
        self._replies.put((number, reply))

    def end(self):
        """Returns when all is sent."""
        self._replies.put((0, self))
        self._thread.join()

    def _run(self):
        with ending_with_ferry():
            while True:
                number, reply = self._replies.get()
                if reply is self:
                    return
                if callable(reply):
                    reply = attempt(reply, number, self._max_reply_bytes)
                    self._line.end_copy()
                    if callable(reply):
                        words = encoded("the function's callable returned %s, not a list" % a_type(reply))
                        reply = frame(UNUSABLE, number, words)
                if reply is None:
                    self._line.rest()
                else:
                    self._line.send(reply)
                self._done += 1
                del reply  # It holds the user's memory.


class ending_with_ferry:
    """An error of this file's own ends the process; silently when Ferry is gone."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, ConnectionError):
            os._exit(0)
        if error is not None and threading.current_thread() is not threading.main_thread():
            traceback.print_exception(kind, error, trace)
            os._exit(1)


class Calls:
    """A thread reads and parses the next call while the function runs, so that its inputs are ready.

    Not where the function returns callables: it does not wait for its GPU then, and two threads that want the interpreter
    slow each other down. Nor where the function is `quick`: then the main thread reads, and the other is parked.
    """

    def __init__(self, line):
        self.parse_ahead = True
        self.quick = False
        self._line = line
        self._come = queue.SimpleQueue()
        self._parked = False
        self._unpark = threading.Semaphore(0)
        threading.Thread(target=self._read, name="ferry-reader", daemon=True).start()

    def next(self):
        """Number, whether it came alone, inputs, parameters, and what is wrong with them; None when no more will come."""
        if self._parked and not self.quick:
            self._parked = False
            self._unpark.release()
        if self._parked:
            call, known = self._call(), None
        else:
            call, known, self._parked = self._come.get()
        if call is None:
            return None
        number, alone, text = call
        return (number, alone, *(known or parsed(text)))

    def _call(self):
        try:
            return self._line.read_call()
        except OSError:
            return None

    def _read(self):
        call = ()
        while call is not None:
            call = self._call()
            parks = self.quick
            self._come.put((call, parsed(call[2]) if call and self.parse_ahead else None, parks))
            if parks:
                self._unpark.acquire()


def answer_calls(line, function, max_reply_bytes):
    calls = Calls(line)
    sender = Sender(line, max_reply_bytes)
    quick_calls = 0
    while True:
        call = calls.next()
        if call is None:
            break
        number, alone, inputs, parameters, flaw = call
        with_reply = calls.quick and alone and sender.idle
        if not with_reply and not line.post(begun(number, 0)):
            sender.give(number, None)
        started = time.perf_counter()
        reply = attempt(lambda: called(function, inputs, parameters, flaw), number, max_reply_bytes)
        seconds = time.perf_counter() - started
        line.end_copy()
        later = callable(reply)
        calls.parse_ahead = not later
        is_quick = seconds < QUICK_SECONDS and not later
        quick_calls = min(quick_calls + 1, 2 * QUICK_CALLS) if is_quick else max(0, quick_calls - QUICK_CALLS)
        calls.quick = quick_calls >= QUICK_CALLS
        if with_reply:
            told = begun(number, seconds)
            if not later:
                reply = told + reply
            elif not line.post(told):
                sender.give(number, None)
        if later:
            sender.give(number, reply)
        elif not sender.idle:
            # Replies keep their order, and the user's memory is the user's again.
            sender.give(number, [b"".join(reply)])
        elif not line.post(reply):
            sender.give(number, None)
        del call, inputs, reply
    sender.end()


def begun(number, seconds):
    return frame(BEGUN, number, struct.pack("<I", min(int(seconds * 1e6), 0xFFFFFFFF)))


def called(function, inputs, parameters, flaw):
    if flaw is not None:
        raise flaw
    return function.call(inputs, parameters)


def main():
    path, name, max_reply_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.setswitchinterval(SWITCH_SECONDS)
    line = Line()
    guard_group()
    for stream in (sys.stdout, sys.stderr):
        # Whatever the locale says, printing must not be what fails a batch.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        function = load(path, name)
    except CannotStart as error:
        words = encoded(str(error))
        line.send([struct.pack("<IB", len(words), CANNOT) + words])
        line.read_call()  # Ferry ends this process once it has read why.
        return
    line.send([struct.pack("<IB", 0, READY)])
    answer_calls(line, function, max_reply_bytes)
    # A thread of the user's that never ends must not keep this process alive.
    last = threading.Timer(CLOSE_SECONDS, os._exit, (0,))
    last.daemon = True
    last.start()


if __name__ == "__main__":
    with ending_with_ferry():
        main()
