"""A script for MindSpore 2.10 that does not use covey, in the style of MindSpore's tutorial on dynamic clusters.

covey run -n 3 --framework mindspore examples/integrations/mindspore_script.py
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the module digits

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from digits import load
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

EPOCHS = 3

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
init()
ms.set_seed(1)


class Network(nn.Cell):
    def __init__(self, pixels):
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(pixels, 10, weight_init="normal", bias_init="zeros")

    def construct(self, x):
        return self.fc(self.flatten(x))


def create_dataset(batch_size):
    pairs = [(image, np.array(label, np.int32)) for image, label in zip(*load("train"), strict=True)]
    dataset = ds.GeneratorDataset(pairs, ["image", "label"], num_shards=get_group_size(), shard_id=get_rank())
    return dataset.batch(batch_size, drop_remainder=True)


data_set = create_dataset(32)
test_images, test_labels = load("test")
net = Network(test_images[0].size)
loss_fn = nn.CrossEntropyLoss()
optimizer = nn.SGD(net.trainable_params(), 5e-2)


def forward_fn(data, label):
    logits = net(data)
    return loss_fn(logits, label), logits


grad_fn = ms.value_and_grad(forward_fn, None, net.trainable_params(), has_aux=True)
grad_reducer = nn.DistributedGradReducer(optimizer.parameters)

for epoch in range(EPOCHS):
    for data, label in data_set:
        (loss, _), grads = grad_fn(data, label)
        optimizer(grad_reducer(grads))
    print(f"rank {get_rank()} of {get_group_size()}: epoch {epoch}, loss {float(loss):.4f}", flush=True)

logits = net(ms.Tensor(test_images))
right = (logits.asnumpy().argmax(1) == test_labels).mean()
test_loss = loss_fn(logits, ms.Tensor(test_labels, ms.int32))
print(f"test accuracy {right:.3f}, test loss {float(test_loss)!r}")
