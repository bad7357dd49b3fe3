import no_such_library


def batchstring(inputs):
    return inputs
