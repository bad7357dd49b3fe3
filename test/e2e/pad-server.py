"""A server of the Open Inference Protocol whose model needs rectangular input, in the standard library alone.

    python3 pad-server.py PAD_TOKEN [short]

The model `encoder` takes `input_ids` and `attention_mask`, INT64 of shape [rows, length], and `input_lengths`, INT64 of
shape [rows, 1]. It answers with `hidden`, FP32 of shape [rows, length, 2]: each id, and the sum of the ids up to there
that the mask lets through; and with `pooled`, FP32 of shape [rows, 8]: that sum eight times. It refuses what does not
fit together: padding that is not PAD_TOKEN, a mask that is not 0 there, a wrong length. `short`: `hidden` is one too
short. GET /calls says which shapes were sent.
"""

import json
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HEADER = "Inference-Header-Content-Length"
PAD_TOKEN = int(sys.argv[1])
SHORT = len(sys.argv) > 2
WIDTH = 8
gpu = threading.Lock()
calls = []


class Wrong(Exception):
    pass


def read(body, header_length):
    end = len(body) if header_length is None else int(header_length)
    request = json.loads(body[:end])
    tensors = {}
    for tensor in request["inputs"]:
        count = 1
        for dimension in tensor["shape"]:
            count *= dimension
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = tensor["data"]
        else:
            values = struct.unpack(f"<{size // 8}q", body[end : end + size])
            end += size
        if len(values) != count or tensor["datatype"] != "INT64":
            raise Wrong(f"{tensor['name']}: {len(values)} values for {tensor['shape']}")
        tensors[tensor["name"]] = (tensor["shape"], values)
    return request, tensors


def infer(tensors):
    if set(tensors) != {"input_ids", "attention_mask", "input_lengths"}:
        raise Wrong(f"unexpected inputs: {sorted(tensors)}")
    (shape, ids), (mask_shape, mask), (lengths_shape, lengths) = (
        tensors["input_ids"],
        tensors["attention_mask"],
        tensors["input_lengths"],
    )
    rows, length = shape
    if mask_shape != shape or lengths_shape != [rows, 1]:
        raise Wrong("the shapes do not fit together")
    with gpu:
        calls.append(shape)
        time.sleep(0.02)
    hidden, pooled = [], []
    for row in range(rows):
        total = 0
        for at in range(length):
            token, seen = ids[row * length + at], mask[row * length + at]
            if seen != (at < lengths[row]) or (not seen and token != PAD_TOKEN):
                raise Wrong(f"row {row} is padded wrongly at {at}")
            total += token * seen
            if at < length - SHORT:
                hidden += [token, total]
        pooled += [total] * WIDTH
    return [("hidden", [rows, length - SHORT, 2], hidden), ("pooled", [rows, WIDTH], pooled)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(200, {}, json.dumps({"extensions": ["binary_tensor_data"]} if self.path == "/v2" else calls).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            request, tensors = read(body, self.headers.get(HEADER))
            binary = request.get("parameters", {}).get("binary_data_output", False)
            head, raw = {"model_name": "encoder", "outputs": []}, b""
            for name, shape, values in infer(tensors):
                tensor = {"name": name, "datatype": "FP32", "shape": shape}
                if binary:
                    data = struct.pack(f"<{len(values)}f", *values)
                    tensor["parameters"] = {"binary_data_size": len(data)}
                    raw += data
                else:
                    tensor["data"] = values
                head["outputs"].append(tensor)
            text = json.dumps(head).encode()
            self.reply(200, {HEADER: str(len(text))} if binary else {}, text + raw)
        except Wrong as wrong:
            self.reply(400, {}, json.dumps({"error": str(wrong)}).encode())

    def reply(self, status, headers, body):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
