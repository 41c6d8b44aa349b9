"""A script for Hugging Face Accelerate; the changed lines are marked.

covey run -n 4 examples/integrations/accelerate_script.py     # then covey kill 2: the last line stays the same
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the module digits

import torch
from digits import load
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from covey.integrations.accelerate import Accelerator  # was: from accelerate


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    accelerator = Accelerator(epochs=6, gradient_accumulation_steps=2)  # epochs was in range(...)
    train, test = (TensorDataset(*(torch.from_numpy(array) for array in load(part))) for part in ("train", "test"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(train[0][0].numel(), 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for epoch in accelerator.epochs():  # was: range(6)
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss, "mean").item()
        accelerator.print(f"epoch {epoch}  loss {mean:.4f}")

    if accelerator.is_main_process:
        with torch.no_grad():
            logits = model.eval()(test.tensors[0])
        right = (logits.argmax(1) == test.tensors[1]).float().mean()
        print(f"test accuracy {right:.3f}, test loss {nn.functional.cross_entropy(logits, test.tensors[1]).item()!r}")


if __name__ == "__main__":
    main()
