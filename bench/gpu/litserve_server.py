"""The function of bench/gpu behind LitServe (https://github.com/Lightning-AI/LitServe).

    python3 bench/gpu/litserve_server.py PORT '{"batch":64,"wait_ms":4,"workers":2,"servers":4}'

POST /predict {"input": [...]} -> {"output": "<base64>"}. workers: processes that call the function, all on the same GPU
(`workers_per_device`). servers: processes that take requests (`num_api_servers`). With `fast_queue`, its ZeroMQ transport.
"""

import litserve
import peer


class Embed(litserve.LitAPI):
    def setup(self, device):
        self._function = peer.load()

    def decode_request(self, request):
        return peer.numbers_of(request)

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        return peer.rows_of(self._function, inputs)

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {"output": peer.base64_of(output).decode("ascii")}


if __name__ == "__main__":
    import torch

    settings = peer.SETTINGS
    api = Embed(max_batch_size=settings["batch"], batch_timeout=settings["wait_ms"] / 1000)
    server = litserve.LitServer(
        api,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=1,
        workers_per_device=settings["workers"],
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=peer.PORT,
        num_api_servers=settings["servers"],
        log_level="warning",
        generate_client_file=False,
    )
