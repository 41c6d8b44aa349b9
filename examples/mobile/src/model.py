"""LeNet-5 for 62 classes of 32 x 32 colour images (digits and letters), as arrays: a server adds models, it does not run them.

A torch module would do as well: `covey.federated.run(LeNet5())`.
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
    """Fresh weights: normal, with a spread that keeps activations steady; biases are zero."""
    draw = np.random.default_rng(seed)
    model = {}
    for name, shape in SHAPES.items():
        spread = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.0
        model[name] = (spread * draw.standard_normal(shape)).astype(np.float32)
    return model
