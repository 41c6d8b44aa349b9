"""A Lightning script; the lines added for covey are marked.

covey run -n 4 examples/integrations/lightning_trainer.py     # then covey kill 2: the last line stays the same
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the module digits

import lightning
import torch
from digits import load
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import covey
from covey.integrations.lightning import CoveyStrategy  # added


class Digits(lightning.LightningModule):
    def __init__(self, pixels):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, number):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, number):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    train, test = (TensorDataset(*(torch.from_numpy(array) for array in load(part))) for part in ("train", "test"))
    model = Digits(train[0][0].numel())
    trainer = lightning.Trainer(
        max_epochs=6,
        strategy=CoveyStrategy(),  # added
        gradient_clip_val=1.0,
        callbacks=[EarlyStopping("accuracy", mode="max", patience=6)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True, drop_last=True), DataLoader(test, batch_size=64))
    if covey.get_rank() == 0:
        with torch.no_grad():
            logits = model.eval().net(test.tensors[0])
        right = trainer.callback_metrics["accuracy"]
        loss = nn.functional.cross_entropy(logits, test.tensors[1]).item()
        print(f"test accuracy {right:.3f}, test loss {loss!r}, epoch {trainer.current_epoch}, step {trainer.global_step}")


if __name__ == "__main__":
    main()
