"""What is launched for study 4, and the bytes that its formulas give."""

from harness.launches import Launch, interleaved

from stretto.parallel.price import LinearLayer, ProcessGrid, price

WIDTH = 256  # of the MLP that three ways train
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREDICTED_FROM = (16, 64)  # batches at which layers are timed
NETWORKS = ("MLP 1024", "small CNN")
IMAGE, AREA, CLASSES, HIDDEN = (3, 128, 128), 4, 1000, 4096  # of AlexNet; AREA: pixels behind its last pooling
SPATIAL_BATCH, BYTES_BATCH = 16, 32
SPATIAL = ((1, 1), (1, 2), (2, 1), (4, 1))  # processes, threads of each
SYNCS = {
    "all-reduce": "all-reduce",
    "bounded-stale": "parameter-server(staleness=4)",
    "local SGD": "local-sgd(every=8)",
}
LINKS = (None, 400, 100, 20)
EVERY = {"local SGD": 8}  # steps between two messages
PARAMETERS = 784 * WIDTH + WIDTH + 7 * (WIDTH * WIDTH + WIDTH) + WIDTH * 10 + 10  # of the MLP


def spatial(processes: int, threads: int = 1) -> Launch:
    """AlexNet on slabs of images; a process of several threads is on no core of its own."""
    name = "spatial" if threads == 1 else f"spatial, {threads} threads"
    return Launch(name, "lecture_parts.tasks:spatial", processes, settings={"threads": threads}, pinned=threads == 1)


def utilisation(network: str) -> Launch:
    """Steps of one process at every batch size."""
    return Launch(f"utilisation, {network}", "lecture_parts.tasks:utilisation", 1, settings={"network": network})


def counted(way: str) -> Launch:
    """The bytes of a step of AlexNet on two processes."""
    return Launch(f"bytes, {way}", "lecture_parts.tasks:sent", 2, settings={"way": way})


def replicas(name: str, link: int | None) -> Launch:
    """Two replicas that agree in one of the ways; each sends as many numbers as there are parameters, now and then."""
    every = EVERY.get(name, 1)
    settings = {"sync": SYNCS[name], "every": every}
    return Launch(name, "lecture_parts.tasks:replicas", 2, link, settings, sent=4 * PARAMETERS / every)


WAYS = ("data", "operator", "operator, automatic")
LAUNCHES = interleaved(
    [
        *(spatial(*place) for place in SPATIAL),
        *(utilisation(network) for network in NETWORKS),
        *(counted(way) for way in WAYS),
        *(replicas(name, link) for link in LINKS for name in SYNCS),
    ]
)


def alexnet_layers() -> list[tuple[LinearLayer, int]]:
    """AlexNet's layers with weights: inputs, outputs and parameters of each, and the groups of its convolution.

    Sizes of images behind convolutions and poolings at 128 x 128: 30, 14, 14, 6, 6, 6, 6, 2.
    """

    def convolution(inputs: int, before: int, outputs: int, after: int, kernel: int, groups: int) -> LinearLayer:
        return LinearLayer(
            inputs * before**2, outputs * after**2, weights=inputs // groups * outputs * kernel**2 + outputs
        )

    def linear(inputs: int, outputs: int) -> LinearLayer:
        return LinearLayer(inputs, outputs, weights=inputs * outputs + outputs)

    return [
        (convolution(3, 128, 96, 30, 11, 1), 1),
        (convolution(96, 14, 256, 14, 5, 2), 2),
        (convolution(256, 6, 384, 6, 3, 1), 1),
        (convolution(384, 6, 384, 6, 3, 2), 2),
        (convolution(384, 6, 256, 6, 3, 2), 2),
        (linear(256 * AREA, HIDDEN), 1),
        (linear(HIDDEN, HIDDEN), 1),
        (linear(HIDDEN, CLASSES), 1),
    ]


def bytes_by_formula(way: str, processes: int = 2) -> float:
    """The bytes that a process sends a step, by the formula of Gholami et al. 2018 (`stretto.parallel.price`).

    Parameters are weights and biases. Replicas also tell each other which parameters have a gradient, a number for each
    tensor, which is added here. A convolution whose groups are as many as the processes takes no sum of its
    input's gradient: each process has the part of its own inputs, which the others only gather, half of the formula's.
    """
    layers = alexnet_layers()
    plain = [layer for layer, _ in layers]
    if way == "data":
        counts = 2 * (processes - 1) / processes * 2 * len(plain)  # a weight and a bias of each layer
        return 4 * (price(ProcessGrid(1, processes), BYTES_BATCH, plain).total.words + counts)
    words = price(ProcessGrid(processes, 1), BYTES_BATCH, plain).total.words
    for layer, groups in layers[1:]:
        if groups == processes:
            words -= BYTES_BATCH * (processes - 1) / processes * layer.inputs
    return 4 * words
