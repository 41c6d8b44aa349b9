"""A torch module as a device's model: one call trains it on what this device has and sends the result.

The only place in this room that needs torch, and only when it is called.
"""

from __future__ import annotations

from typing import Any

from covey.federated.device.client import Task


def fit(
    task: Task, module: Any, inputs: Any, targets: Any, loss_fn: Any = None, *, held_out: Any = None, seed: int = 0
) -> bool:
    """Train a module from the task's weights as its plan says, and send it; False if the round closed before.

    `inputs` and `targets` are tensors with one row per sample; the loss is cross entropy unless another is given. The loss and
    accuracy told are those of the weights the device was given, before it trained: together they judge the model. `held_out` is
    a pair like `inputs` and `targets` that is not trained on: where the plan asks for it, the weights are evaluated on it too.
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
    began = [parameter.detach().clone() for parameter in module.parameters()]
    pull = float(task.plan.settings.get("proximal_mu", 0.0))
    optimizer = torch.optim.SGD(module.parameters(), task.plan.lr)
    draw = torch.Generator().manual_seed(seed + task.iteration)
    for _ in range(task.plan.epochs):
        for rows in torch.randperm(len(inputs), generator=draw).split(task.plan.mini_batch):
            optimizer.zero_grad()
            step_loss = loss_fn(module(inputs[rows]), targets[rows])
            if pull:
                apart = zip(module.parameters(), began, strict=True)
                step_loss = step_loss + pull / 2 * sum(((now - then) ** 2).sum() for now, then in apart)
            step_loss.backward()
            optimizer.step()
    return task.send(module.state_dict(), loss=loss, accuracy=accuracy)


def _evaluate_module(module: Any, inputs: Any, targets: Any, loss_fn: Any) -> tuple[float, float | None]:
    import torch

    module.eval()
    with torch.no_grad():
        guessed = module(inputs)
        fits = guessed.ndim == 2 and targets.ndim == 1
        accuracy = float((guessed.argmax(1) == targets).float().mean()) if fits else None
        return float(loss_fn(guessed, targets)), accuracy
