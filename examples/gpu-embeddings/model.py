"""Embeddings by a BERT-shaped encoder in PyTorch: a list of texts (or of token ids) in, one vector each out.

    EMBED_SHAPE    base (default), large, or tiny, which is for trying things out on a CPU
    EMBED_GRAPHS   1: record the GPU's work once per size and replay it (CUDA graphs), instead of starting some 130
                   kernels from Python for each batch; costs memory and the first call of each size
    EMBED_WEIGHTS  a folder with BERT's weights (model.safetensors or pytorch_model.bin) and tokenizer.json;
                   without one the weights are random: good for measuring, not for searching

`embed` does not wait for the GPU. It returns the rest of its work as a function, which Ferry calls for the vectors;
meanwhile it is called with the next batch, so that the GPU always has one to go on with.
"""

import os
import zlib
from array import array
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

# layers, width, heads
SHAPES = {"tiny": (2, 64, 2), "base": (12, 768, 12), "large": (24, 1024, 16)}
VOCABULARY = 30522
MOST_TOKENS = 512
# Sequences of similar length are padded to the same one, so that the GPU meets few shapes.
BUCKETS = (16, 32, 64, 128, 256, 512)
# With graphs the number of sequences is rounded up to a multiple of this, too.
GRAPH_ROWS = 8
CLS, SEP, FIRST_WORD = 101, 102, 1000


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.after_attention = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.after_words = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x, mask):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.after_attention(x + self.mixed(seen.transpose(1, 2).reshape(batch, length, width)))
        return self.after_words(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(MOST_TOKENS, width)
        self.before = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids, lengths):
        """A vector of length 1 for each row of `ids`: the mean over its first `lengths` places; None: over all."""
        x = self.before(self.words(ids) + self.places.weight[: ids.shape[1]])
        if lengths is None:
            for layer in self.layers:
                x = layer(x, None)
            return F.normalize(x.float().mean(1), dim=1)
        there = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        for layer in self.layers:
            x = layer(x, there[:, None, None, :])
        total = (x.float() * there[:, :, None]).sum(1)
        return F.normalize(total / lengths[:, None], dim=1)


def bert_weights(folder, layers):
    """BERT's weights under the names that they have here."""
    file = os.path.join(folder, "model.safetensors")
    if os.path.exists(file):
        from safetensors.torch import load_file

        found = load_file(file)
    else:
        found = torch.load(os.path.join(folder, "pytorch_model.bin"), map_location="cpu", weights_only=True)
    found = {name.removeprefix("bert."): value for name, value in found.items()}
    first = "embeddings."
    named = {
        "words.weight": found[first + "word_embeddings.weight"],
        # Every token is of the first of BERT's two kinds.
        "places.weight": found[first + "position_embeddings.weight"]
        + found[first + "token_type_embeddings.weight"][0],
    }
    for end in ("weight", "bias"):
        named["before." + end] = found[first + "LayerNorm." + end]
        for at in range(layers):
            here, there = "layers.%d." % at, "encoder.layer.%d." % at
            three = [found["%sattention.self.%s.%s" % (there, part, end)] for part in ("query", "key", "value")]
            named[here + "qkv." + end] = torch.cat(three)
            named[here + "mixed." + end] = found[there + "attention.output.dense." + end]
            named[here + "after_attention." + end] = found[there + "attention.output.LayerNorm." + end]
            named[here + "up." + end] = found[there + "intermediate.dense." + end]
            named[here + "down." + end] = found[there + "output.dense." + end]
            named[here + "after_words." + end] = found[there + "output.LayerNorm." + end]
    return named


def hashed(text):
    """Without a tokenizer: every word has a number, and some share one."""
    words = (FIRST_WORD + zlib.crc32(word) % (VOCABULARY - FIRST_WORD) for word in text.lower().encode().split())
    return [CLS, *list(words)[: MOST_TOKENS - 2], SEP]


def load():
    layers, width, heads = SHAPES[os.environ.get("EMBED_SHAPE", "base")]
    torch.manual_seed(1)
    encoder, tokens_of = Encoder(layers, width, heads), hashed
    folder = os.environ.get("EMBED_WEIGHTS")
    if folder:
        from tokenizers import Tokenizer

        encoder.load_state_dict(bert_weights(folder, layers))
        tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        tokenizer.enable_truncation(MOST_TOKENS)
        tokenizer.no_padding()
        tokens_of = lambda text: tokenizer.encode(text).ids
    else:
        print("random weights of the %s shape; EMBED_WEIGHTS names a folder with trained ones" % (width,))
    return encoder.eval().requires_grad_(False), tokens_of


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
encoder, tokens_of = load()
encoder.to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32)


def batch_of(inputs):
    """The ids of all inputs, padded to a common length, and how many each has; None where all are that long."""
    # Token ids with `inputs: int32` lie in one block already.
    block = getattr(inputs, "flat", None)
    rows = inputs if block is not None else [tokens_of(one) if isinstance(one, str) else one for one in inputs]
    lengths = [len(row) for row in rows]
    if max(lengths) > MOST_TOKENS or min(lengths) == 0:
        raise ValueError("an input has from 1 to %d tokens" % MOST_TOKENS)
    if block is None:
        # By way of an array: torch.tensor() looks at lists of lists one number at a time.
        block = array("i", chain.from_iterable(rows))
    numbers = torch.frombuffer(block, dtype=torch.int32)
    # A GPU that is asked for a word it does not have is of no use to anybody any more.
    if numbers.min() < 0 or numbers.max() >= VOCABULARY:
        raise ValueError("a token is a whole number from 0 to %d" % (VOCABULARY - 1))
    width = next(bucket for bucket in BUCKETS if bucket >= max(lengths))
    if min(lengths) == width:
        return to_device(numbers.view(len(rows), width)), None
    ids, start = torch.zeros((len(rows), width), dtype=torch.int32), 0
    for row, length in zip(ids, lengths):
        row[:length] = numbers[start : start + length]
        start += length
    return to_device(ids), to_device(torch.tensor(lengths))


def to_device(tensor):
    return tensor.pin_memory().to(DEVICE, non_blocking=True) if ON_GPU else tensor


def when_done(vectors):
    """The rest of the work: waits for the GPU, and has the vectors as one array."""
    if not ON_GPU:
        return lambda: vectors.numpy()
    arrived = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    arrived.copy_(vectors, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    done.record()

    def rest():
        done.synchronize()
        return arrived.numpy()

    return rest


class Graphs:
    """The encoder's work on each shape, recorded when it is first met. What it reads and writes stays in place."""

    def __init__(self):
        self._recorded = {}

    def __call__(self, ids, lengths):
        rows = -(-len(ids) // GRAPH_ROWS) * GRAPH_ROWS
        key = (rows, ids.shape[1], lengths is None)
        if key not in self._recorded:
            self._recorded[key] = self._record(*key)
        graph, own_ids, own_lengths, vectors = self._recorded[key]
        own_ids[: len(ids)].copy_(ids, non_blocking=True)
        if lengths is not None:
            own_lengths[: len(ids)].copy_(lengths, non_blocking=True)
        graph.replay()
        return vectors[: len(ids)]

    def _record(self, rows, width, whole):
        ids = torch.zeros((rows, width), dtype=torch.long, device=DEVICE)
        lengths = None if whole else torch.ones(rows, dtype=torch.long, device=DEVICE)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                encoder(ids, lengths)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            vectors = encoder(ids, lengths)
        return graph, ids, lengths, vectors


encode = Graphs() if ON_GPU and os.environ.get("EMBED_GRAPHS") == "1" else encoder


@torch.inference_mode()
def embed(inputs):
    return when_done(encode(*batch_of(inputs)))


# The first call compiles and allocates: before the first request, not with it.
for size in (1, 64) if encode is encoder else range(8, 72, 8):
    embed([[CLS] * 126 + [SEP] * 2] * size)()
