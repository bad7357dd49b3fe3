"""Two functions that take a list and return a list: put your model where these put arithmetic."""

import hashlib
import math

DIMENSIONS = 32


def embed(inputs):
    """One vector per text: each word has a place and a sign, and the whole has length 1."""
    return [vector(text) for text in inputs]


def vector(text):
    numbers = [0.0] * DIMENSIONS
    for word in text.lower().split():
        digest = hashlib.sha256(word.encode()).digest()
        numbers[digest[0] % DIMENSIONS] += 1.0 if digest[1] % 2 else -1.0
    length = math.sqrt(sum(number * number for number in numbers)) or 1.0
    return [number / length for number in numbers]


def complete(inputs, parameters):
    """One completion per prompt: the prompt's own words, backwards."""
    most = parameters.get("max_tokens", 16)
    return [completion(prompt, most) for prompt in inputs]


def completion(prompt, most):
    words = prompt.split()
    told = words[::-1][:most]
    return {
        "text": " " + " ".join(told),
        "finish_reason": "stop" if len(told) == len(words) else "length",
        "prompt_tokens": len(words),
        "completion_tokens": len(told),
    }
