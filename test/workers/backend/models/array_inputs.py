def told(inputs, parameters=None):
    return [[one.format, one.tolist(), inputs.flat.format, len(inputs.flat), parameters or {}] for one in inputs]


def doubled(inputs):
    for at in range(len(inputs.flat)):
        inputs.flat[at] *= 2
    return [one.tolist() for one in inputs]


def rows(inputs):
    size = len(inputs[0])
    return inputs.flat.cast("B").cast(inputs.flat.format, (len(inputs), size))
