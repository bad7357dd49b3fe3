"""The two models of bench/gpu, as Ferry, the plain server, the peers and the loop without any of them call them.

    embed      examples/gpu-embeddings as it is: a bert-base shape, 128 tokens in, 768 float32 out; some 5 ms a batch
    generate   a gpt2-medium shape, 64 tokens in, 32 generated one by one; some 450 ms a batch

Both put three numbers in front of each row: sums over the tokens that the GPU had in that row, so that whoever sent
them can tell that the answer is its own (requests.ts adds them up in the same way). With GENERATE_STEADY_MS set, nothing
is generated: a batch takes that long, whatever the machine is doing. With GPU_BUSY_FILE set, the time
in which the GPU had a batch is added up there (common.py). mixed.py has a third, for inputs of different length.
"""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/gpu-embeddings"))
import model as embeddings  # noqa: E402
from common import Arrays, BusyFile  # noqa: E402

DEVICE, ON_GPU = embeddings.DEVICE, embeddings.ON_GPU
GENERATED = int(os.environ.get("GENERATE_TOKENS", "32"))
STEADY_SECONDS = float(os.environ.get("GENERATE_STEADY_MS", "0")) / 1000
# layers, width, heads
GPT = {"tiny": (2, 64, 2), "medium": (24, 1024, 16)}[os.environ.get("GENERATE_SHAPE", "medium")]
GPT_VOCABULARY = 50257


def sums(ids):
    """Whole numbers, exact as float32 modulo 2^24. Padding is 0 and adds nothing."""
    at = torch.arange(ids.shape[1], device=ids.device)
    weights = torch.stack([at + 1, at * 37 % 997 + 1, at * at % 991 + 1])
    return ((ids.unsqueeze(1) * weights).sum(2) % (1 << 24)).float()


class Busy:
    """Adds up for how long the GPU had a batch, by events on both sides of each."""

    def __init__(self, path):
        self.file = BusyFile(path)

    def around(self, work, cells, tokens):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        rest = work()
        last.record()

        def counted():
            outputs = rest()
            last.synchronize()
            self.file.add(first.elapsed_time(last) / 1000, cells, tokens)
            return outputs

        return counted


busy = Busy(os.environ["GPU_BUSY_FILE"]) if ON_GPU and "GPU_BUSY_FILE" in os.environ else None


def counted(work, cells=0, tokens=0):
    return work() if busy is None else busy.around(work, cells, tokens)


@torch.inference_mode()
def embed(inputs):
    ids, lengths = embeddings.batch_of(inputs)
    return counted(
        lambda: embeddings.when_done(torch.cat([sums(ids), embeddings.encode(ids, lengths)], 1))
    )


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.before_words = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, keys, values, at):
        batch, new, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, new, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        keys[:, :, at : at + new] = k
        values[:, :, at : at + new] = v
        seen = F.scaled_dot_product_attention(
            q, keys[:, :, : at + new], values[:, :, : at + new], is_causal=new > 1
        )
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, new, width))
        return x + self.down(F.gelu(self.up(self.before_words(x)), approximate="tanh"))


class Generator(nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.heads, self.width = heads, width
        self.words = nn.Embedding(GPT_VOCABULARY, width)
        self.places = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.after = nn.LayerNorm(width)

    def forward(self, ids, count):
        batch, length = ids.shape
        shape = (len(self.blocks), 2, batch, self.heads, length + count, self.width // self.heads)
        kept = torch.empty(shape, device=ids.device, dtype=self.words.weight.dtype)
        new, at, told = ids, 0, []
        for _ in range(count):
            x = self.words(new) + self.places.weight[at : at + new.shape[1]]
            for block, (keys, values) in zip(self.blocks, kept):
                x = block(x, keys, values, at)
            at += new.shape[1]
            new = F.linear(self.after(x[:, -1]), self.words.weight).argmax(1, keepdim=True)
            told.append(new)
        return torch.cat(told, 1)


generator = None


def load_generator():
    global generator
    torch.manual_seed(2)
    generator = Generator(*GPT).eval().requires_grad_(False)
    generator.to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32)


@torch.inference_mode()
def generate(inputs):
    ids = embeddings.to_device(torch.frombuffer(inputs.flat, dtype=torch.int32).view(len(inputs), -1))
    if STEADY_SECONDS:
        time.sleep(STEADY_SECONDS)
        return embeddings.when_done(sums(ids))
    if generator is None:
        load_generator()
    return counted(
        lambda: embeddings.when_done(torch.cat([sums(ids), generator(ids, GENERATED).float()], 1))
    )


MODEL = os.environ.get("GPU_BENCH_MODEL")
if MODEL == "generate":
    for size in (1, 64):
        generate(Arrays([[7] * 64] * size))()
elif MODEL != "mixed":
    for size in (1, 64):
        embed(Arrays([[7] * 128] * size))()
