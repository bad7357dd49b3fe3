"""Plays a model server with OpenAI's embeddings API: 100 ms for a call, however many inputs, one call at a time.

    python3 server.py [PORT]        8000 unless said otherwise; 0 for any that is free
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CALL_SECONDS = 0.1
DIMENSIONS = 32
gpu = threading.Lock()


def embedding(text):
    """Stands in for a model: numbers that depend on the text, and on nothing else."""
    digest = hashlib.sha256(text.encode()).digest()
    return [(byte - 127.5) / 127.5 for byte in digest[:DIMENSIONS]]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # Headers and body leave together.
    disable_nagle_algorithm = True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/embeddings":
            return self.reply(404, {"error": {"message": "no such path", "type": "invalid_request_error"}})
        given = body["input"]
        texts = [given] if isinstance(given, str) else given
        with gpu:
            time.sleep(CALL_SECONDS)
            data = [
                {"object": "embedding", "index": index, "embedding": embedding(text)}
                for index, text in enumerate(texts)
            ]
        tokens = sum(len(text.split()) for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        self.reply(200, {"object": "list", "data": data, "model": body["model"], "usage": usage})

    def reply(self, status, answer):
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.wfile.flush()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8000), Handler)
    print("listening on http://127.0.0.1:%d" % server.server_port, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
