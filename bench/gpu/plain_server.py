"""The server that people write first: one request, one call of the model.

    python3 bench/gpu/plain_server.py embed|generate PORT

POST {"input": [...]} → {"output": "<base64>"}. Requests are read by a thread each; the model does one at a time, since
the GPU and the interpreter are one. Prints the same `ready` line as Ferry.
"""

import base64
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["GPU_BENCH_MODEL"] = sys.argv[1]
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import models  # noqa: E402

function = getattr(models, sys.argv[1])
one_at_a_time = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with one_at_a_time:
            row = function(models.Arrays([asked["input"]]))()[0]
        body = b'{"output":"%s"}' % base64.b64encode(row.tobytes())
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.wfile.write(head + body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


server = Server(("127.0.0.1", int(sys.argv[2])), Handler)
print('{"level":"info","msg":"ready"}', file=sys.stderr, flush=True)
server.serve_forever()
