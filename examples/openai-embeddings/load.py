"""So many clients at once, one text each, and how long it takes until all have their own embedding.

    python3 load.py BASE_URL [CLIENTS]        100 clients unless said otherwise
"""

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def ask(base, number):
    body = json.dumps({"model": "words", "input": "text number %d" % number}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base + "/v1/embeddings", body, headers)) as answer:
        return json.load(answer)["data"][0]["embedding"], answer.headers.get("x-ferry-batch-size", "1")


if __name__ == "__main__":
    base = sys.argv[1]
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    started_at = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda number: ask(base, number), range(clients)))
    seconds = time.monotonic() - started_at
    different = len({tuple(embedding) for embedding, _ in answers})
    largest = max(int(size) for _, size in answers)
    print("%d clients, %d embeddings, largest batch %d: %.1f s" % (clients, different, largest, seconds))
