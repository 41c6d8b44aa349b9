"""Training of a torch module on a device's data.

This is the only module of `covey.federated` that needs torch; it imports torch when `fit` is called.
"""

from __future__ import annotations

from typing import Any

from covey.federated.device.client import Task


def fit(
    task: Task, module: Any, inputs: Any, targets: Any, loss_fn: Any = None, *, held_out: Any = None, seed: int = 0
) -> bool:
    """Train a module with SGD from the task's weights according to its plan, and send it; result and errors as `Task.send`.

    `inputs` and `targets` are tensors with one row per sample; the default loss is cross entropy. The reported loss and
    accuracy are those of the received weights, before training. Accuracy is reported if outputs have two dimensions and targets
    one. `held_out` is a pair like `inputs` and `targets`, on which the module is evaluated if the plan requires it. `seed` and
    the iteration determine the order of samples.
    """
    import torch

    loss_fn = loss_fn or torch.nn.functional.cross_entropy
    names = set(task.weights)
    state = {name: value for name, value in module.state_dict().items() if name not in names}
    state |= {name: torch.from_numpy(value.copy()) for name, value in task.weights.items()}
    module.load_state_dict(state)
    loss, accuracy = _evaluate_module(module, inputs, targets, loss_fn)
    if task.plan.evaluate and held_out is not None:
        held_loss, held_accuracy = _evaluate_module(module, held_out[0], held_out[1], loss_fn)
        task.evaluated(len(held_out[0]), loss=held_loss, accuracy=held_accuracy)
    module.train()
    initial = [parameter.detach().clone() for parameter in module.parameters()]
    proximal_mu = float(task.plan.settings.get("proximal_mu", 0.0))
    optimizer = torch.optim.SGD(module.parameters(), task.plan.lr)
    generator = torch.Generator().manual_seed(seed + task.iteration)
    for _ in range(task.plan.epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(task.plan.mini_batch):
            optimizer.zero_grad()
            step_loss = loss_fn(module(inputs[rows]), targets[rows])
            if proximal_mu:
                pairs = zip(module.parameters(), initial, strict=True)
                step_loss = step_loss + proximal_mu / 2 * sum(((now - before) ** 2).sum() for now, before in pairs)
            step_loss.backward()
            optimizer.step()
    return task.send(module.state_dict(), loss=loss, accuracy=accuracy)


def _evaluate_module(module: Any, inputs: Any, targets: Any, loss_fn: Any) -> tuple[float, float | None]:
    import torch

    module.eval()
    with torch.no_grad():
        outputs = module(inputs)
        is_classification = outputs.ndim == 2 and targets.ndim == 1
        accuracy = float((outputs.argmax(1) == targets).float().mean()) if is_classification else None
        return float(loss_fn(outputs, targets)), accuracy
