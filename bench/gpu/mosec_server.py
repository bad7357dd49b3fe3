"""The function of bench/gpu behind Mosec (https://github.com/mosecorg/mosec).

    python3 bench/gpu/mosec_server.py PORT '{"batch":64,"wait_ms":4,"workers":2,"stages":3}'

POST /inference {"input": [...]} -> {"output": "<base64>"}. Its HTTP server and its batching are Rust; requests are parsed
and answers written by Python processes. workers: processes that call the function, all on the same GPU (`num`). stages: as
many processes that parse before it, and as many that write behind it; 0: those that call the function do it, too.
"""

import json
import os

import peer

# Mosec reads these when it is imported.
os.environ.update(
    MOSEC_PORT=str(peer.PORT), MOSEC_ADDRESS="127.0.0.1", MOSEC_LOG_LEVEL="warning", MOSEC_CAPACITY="4096"
)
import mosec  # noqa: E402


class Reading(mosec.Worker):
    def deserialize(self, data):
        return peer.numbers_of(json.loads(data))

    def forward(self, data):
        return data


class Calling(mosec.Worker):
    def __init__(self):
        super().__init__()
        self._function = peer.load()

    def forward(self, data):
        return peer.rows_of(self._function, data)


class Writing(mosec.Worker):
    def forward(self, data):
        return data

    def serialize(self, data):
        return b'{"output":"%s"}' % peer.base64_of(data)


class Whole(Calling):
    deserialize = Reading.deserialize
    serialize = Writing.serialize


if __name__ == "__main__":
    batch = {"max_batch_size": peer.SETTINGS["batch"], "max_wait_time": peer.SETTINGS["wait_ms"], "timeout": 30}
    stages, workers = peer.SETTINGS["stages"], peer.SETTINGS["workers"]
    server = mosec.Server()
    if stages:
        server.append_worker(Reading, num=stages)
        server.append_worker(Calling, num=workers, **batch)
        server.append_worker(Writing, num=stages)
    else:
        server.append_worker(Whole, num=workers, **batch)
    server.run()
