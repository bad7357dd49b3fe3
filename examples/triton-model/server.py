"""A server of the Open Inference Protocol with one toy model, in the standard library alone.

    python3 server.py 8000

The model `mean` takes `pixels`, FP32 of shape [-1, 16], and answers for each row with `mean`, FP32 of shape [-1, 1],
and `label`, BYTES of shape [-1, 1]. It takes 50 ms for any batch of up to 32 rows, one batch at a time, as a GPU
would. It speaks JSON and the binary extension, as NVIDIA Triton does, so that Triton can take its place.
"""

import json
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WIDTH = 16
MAX_ROWS = 32
SECONDS = 0.05
HEADER = "Inference-Header-Content-Length"
gpu = threading.Lock()
METADATA = {
    "name": "mean",
    "versions": ["1"],
    "platform": "toy",
    "inputs": [{"name": "pixels", "datatype": "FP32", "shape": [-1, WIDTH]}],
    "outputs": [
        {"name": "mean", "datatype": "FP32", "shape": [-1, 1]},
        {"name": "label", "datatype": "BYTES", "shape": [-1, 1]},
    ],
}


class Wrong(Exception):
    pass


def infer(values):
    """One row after the other, in one call of the model."""
    with gpu:
        time.sleep(SECONDS)
    rows = [values[at : at + WIDTH] for at in range(0, len(values), WIDTH)]
    means = [sum(row) / WIDTH for row in rows]
    return means, ["bright" if mean > 0.5 else "dark" for mean in means]


def read(body, header_length):
    """The request's JSON, and the numbers of its one tensor."""
    end = len(body) if header_length is None else int(header_length)
    request = json.loads(body[:end])
    tensor = request["inputs"][0]
    if len(request["inputs"]) != 1 or tensor["name"] != "pixels" or tensor["datatype"] != "FP32":
        raise Wrong("the model takes one input, 'pixels', of FP32")
    rows, width = tensor["shape"]
    if width != WIDTH or not 1 <= rows <= MAX_ROWS:
        raise Wrong(f"shape {tensor['shape']} is not [1 to {MAX_ROWS}, {WIDTH}]")
    size = tensor.get("parameters", {}).get("binary_data_size")
    if size is None:
        values = list(flat(tensor["data"]))
    else:
        if size != len(body) - end or size % 4 != 0:
            raise Wrong("binary_data_size is not the number of bytes behind the JSON")
        values = list(struct.unpack(f"<{size // 4}f", body[end:]))
    if len(values) != rows * WIDTH:
        raise Wrong(f"{len(values)} values for shape {tensor['shape']}")
    return request, values


def flat(data):
    for value in data:
        if isinstance(value, list):
            yield from flat(value)
        else:
            yield float(value)


def answer(request, means, labels):
    """The answer's JSON, and the bytes behind it."""
    tensors = {
        "mean": ("FP32", means, struct.pack(f"<{len(means)}f", *means)),
        "label": ("BYTES", labels, b"".join(struct.pack("<I", len(each)) + each.encode() for each in labels)),
    }
    default = request.get("parameters", {}).get("binary_data_output", False)
    outputs, raws = [], []
    for asked in request.get("outputs") or [{"name": name} for name in tensors]:
        datatype, values, raw = tensors[asked["name"]]
        output = {"name": asked["name"], "datatype": datatype, "shape": [len(means), 1]}
        if asked.get("parameters", {}).get("binary_data", default):
            output["parameters"] = {"binary_data_size": len(raw)}
            raws.append(raw)
        else:
            output["data"] = values
        outputs.append(output)
    head = {"model_name": "mean", "model_version": "1", "outputs": outputs}
    if "id" in request:
        head["id"] = request["id"]
    return json.dumps(head).encode(), b"".join(raws)


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v2/models/mean/infer":
            return self.say(404, {"error": f"unknown path {self.path}"})
        try:
            request, values = read(body, self.headers.get(HEADER))
            head, raw = answer(request, *infer(values))
        except (Wrong, ValueError, TypeError, KeyError, IndexError) as error:
            return self.say(400, {"error": str(error)})
        if raw:
            self.send(200, "application/octet-stream", head + raw, {HEADER: str(len(head))})
        else:
            self.send(200, "application/json", head, {})

    def do_GET(self):
        if self.path in ("/v2/health/live", "/v2/health/ready", "/v2/models/mean/ready"):
            self.say(200, {})
        elif self.path == "/v2/models/mean":
            self.say(200, METADATA)
        else:
            self.say(404, {"error": f"unknown path {self.path}"})

    def say(self, status, value):
        self.send(status, "application/json", json.dumps(value).encode(), {})

    def send(self, status, content_type, body, headers):
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    server = ThreadingHTTPServer(("127.0.0.1", port), Server)
    print(f"ready on http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
