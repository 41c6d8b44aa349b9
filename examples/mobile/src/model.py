"""LeNet-5 for 62 classes of 32 x 32 colour images (digits and letters), as arrays: a server aggregates models without running
them.

A torch module is possible as well: `covey.federated.run(LeNet5())`.
"""

import numpy as np

SHAPES = {
    "conv1.weight": (6, 3, 5, 5),
    "conv1.bias": (6,),
    "conv2.weight": (16, 6, 5, 5),
    "conv2.bias": (16,),
    "fc1.weight": (120, 400),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (62, 84),
    "fc3.bias": (62,),
}


def lenet5(seed=1):
    """Return initial weights: normally distributed (He initialization); biases are zero."""
    draw = np.random.default_rng(seed)
    model = {}
    for name, shape in SHAPES.items():
        spread = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.0
        model[name] = (spread * draw.standard_normal(shape)).astype(np.float32)
    return model
