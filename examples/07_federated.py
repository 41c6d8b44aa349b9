"""Federated learning: servers aggregate updates, and devices keep their digits local.

bash examples/07_federated.sh              # two servers and eight devices, on this machine
bash examples/08_secure_aggregation.sh     # the same with secure aggregation: servers see no update of a single device

`covey federated up` runs this file in every server. With the servers' addresses as argument it runs the devices.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from digits import load

import covey.federated

DEVICES = 8
STEPS, RATE = 20, 0.1


def scores(weights, images):
    raw = images @ weights["w"] + weights["b"]
    odds = np.exp(raw - raw.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def train(weights, images, labels):
    """Return the weights after a few steps of gradient descent on this device's data."""
    w, b = weights["w"].copy(), weights["b"].copy()
    for _ in range(STEPS):
        wrong = scores({"w": w, "b": b}, images) - np.eye(10, dtype=np.float32)[labels]
        w -= RATE * images.T @ wrong / len(images)
        b -= RATE * wrong.mean(axis=0)
    return {"w": w, "b": b}


def device(servers, number):
    """Run one device with its share of the digits in every iteration. Return the last model that it trained."""
    images, labels = (part[number::DEVICES] for part in load("train"))
    images = images.reshape(len(images), -1)
    with covey.federated.Device(servers, f"device-{number}", data_size=len(images)) as me:
        for task in me.rounds():
            last = train(task.weights, images, labels)
            task.send(last)
    return last


if sys.argv[1:]:
    with ThreadPoolExecutor(DEVICES) as pool:
        models = list(pool.map(lambda number: device(sys.argv[1], number), range(DEVICES)))
    mean = {name: np.mean([model[name] for model in models], axis=0) for name in models[0]}
    images, labels = load("test")
    right = scores(mean, images.reshape(len(images), -1)).argmax(axis=1) == labels
    print(f"test accuracy {right.mean():.3f} after the last iteration of {DEVICES} devices")
else:
    pixels = load("test").images[0].size
    covey.federated.run({"w": np.zeros((pixels, 10), np.float32), "b": np.zeros(10, np.float32)})
