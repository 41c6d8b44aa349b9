"""The training of the tutorial on disaster recovery: the same script for the scheduler and every worker."""

import os
import sys
from pathlib import Path

import covey

covey.init()  # does not return in the scheduler's process, which therefore does not import the modules below
covey.set_seed(1)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from digits import load  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


class Network(nn.Module):
    def __init__(self, pixels):
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(pixels, 10)
        self.relu = nn.ReLU()
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        x = self.flatten(x)
        return self.relu(self.fc(x))


def create_dataset(batch_size):
    """Return a dataset of all digits. covey.Data selects the samples of this worker by its rank."""
    images, labels = (torch.from_numpy(array) for array in load("train"))
    return covey.Data(torch.utils.data.TensorDataset(images, labels), batch_size)


print(f"rank {covey.get_rank()} of {covey.get_group_size()}", flush=True)

data_set = create_dataset(32)
net = Network(data_set.dataset[0][0].numel())
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
loss_fn = nn.CrossEntropyLoss()
loss_cb = covey.LossMonitor(20)
# Configure the interval at which checkpoints are saved and the maximum number to be saved
ckpt_config = covey.CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=5)
# Configure the checkpoint storage path, and each process uses different paths
ckpoint_cb = covey.ModelCheckpoint(prefix="train", directory="./ckpt_of_rank/" + str(covey.get_rank()), config=ckpt_config)
model = covey.Model(net, loss_fn=loss_fn, optimizer=optimizer)
# 10 epochs of MNIST; the digits that are shipped with covey are fewer and need more epochs
epochs = int(os.getenv("EPOCHS") or ("10" if os.getenv("DATA_PATH") else "600"))
model.train(epochs, data_set, callbacks=[loss_cb, ckpoint_cb])
print("done", flush=True)
